"""The matrix {full precision, GPTQ, AWQ} x {plain, speculative}: its rows, their runs in blocks, and what they show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import mean
from typing import Any

from pipeline.config import Benchmark
from pipeline.measure import guards
from pipeline.measure.answers import Acceptance, Answer, decode_total, ttft_ms
from pipeline.measure.blocks import Blocks
from pipeline.measure.setup import DraftSpec
from pipeline.measure.statistics import Interval, Total, differs_from_one, median_interval, paired_ratio
from pipeline.measure.verdict import Judgement, LogitGaps, Lossless, degeneration, grade_lossless, unequal_setups

TARGETS = ("base", "gptq", "awq")
CONTROL = "base_control"
NATURAL, FORCED = "natural", "forced"
PROTOCOLS = {
    NATURAL: "real prompts, the answer ends at an end token or at max_new_tokens; for speculation, plain rows too",
    FORCED: "forced_new_tokens each, end token ignored; for precision, plain rows only",
}


@dataclass
class Row:
    """One configuration; `draft` None: plain. `void`: why it cannot run at all. `judgement` collects the rest."""

    name: str
    target: str
    draft: DraftSpec | None
    draft_len: int
    void: str | None
    judgement: Judgement = field(default_factory=Judgement)

    @property
    def speculative(self) -> bool:
        return self.name != self.target and self.name != CONTROL


@dataclass
class Sample:
    """One arm in one block: answers by protocol, and what its process says of itself afterwards."""

    answers: dict[str, list[Answer]]
    readback: dict[str, Any]
    ledger: dict[str, Any]
    read_bytes: dict[str, int]


def joined(turns: Sequence[Sample]) -> Sample:
    """The turns of a block as one sample; what the process says of itself is what it said last."""
    answers = {p: [a for turn in turns for a in turn.answers[p]] for p in turns[0].answers}
    return replace(turns[-1], answers=answers)


@dataclass
class Matrix:
    """The blocks of one run and everything that is derived from them."""

    rows: dict[str, Row]
    blocks: Blocks
    settings: Benchmark
    seed: int

    def samples(self, name: str) -> list[Sample]:
        return [b.samples[name] for b in self.blocks.kept]

    def answers(self, name: str, protocol: str) -> list[Answer]:
        return [a for s in self.samples(name) for a in s.answers[protocol]]

    def prompts(self, name: str) -> list[list[tuple[str, list[int]]]]:
        """Id and token ids of each prompt, block by block."""
        return [[(a.prompt.id, a.prompt.ids) for a in s.answers[NATURAL]] for s in self.samples(name)]

    def totals(self, protocol: str, category: str | None) -> list[dict[str, Total]]:
        return totals_of([b.samples for b in self.blocks.kept], protocol, category)

    def ratio(self, over: Sequence[str], under: Sequence[str], protocol: str, category: str | None) -> Interval | None:
        """Paired within blocks; None when one of the arms did not run."""
        if any(self.rows[name].void for name in [*over, *under]):
            return None
        return paired_ratio(self.totals(protocol, category), over, under, self.seed)

    def speedup(self, name: str, protocol: str, category: str | None) -> Interval | None:
        return Interval(1.0, 1.0, 1.0) if name == "base" else self.ratio([name], ["base"], protocol, category)

    def over_plain(self, name: str, category: str | None) -> Interval | None:
        """What speculation alone gains: against plain decoding of the same target. None for plain rows."""
        row = self.rows[name]
        return self.ratio([name], [row.target], NATURAL, category) if row.speculative else None

    def noise_floor(self, category: str | None) -> Interval | None:
        return self.ratio([CONTROL], ["base"], NATURAL, category)

    def interaction(self, target: str, base: str) -> Interval | None:
        """speedup(quantized + speculative) / (speedup(quantized) x speedup(speculative)), block by block.

        `base` or its second copy, the control: what one says and the other does not is noise.
        """
        return self.ratio([f"{target}_spec", base], [target, "base_spec"], NATURAL, None)

    def first_s(self, name: str) -> list[float]:
        """Block by block: mean time to the first token over its prompts."""
        return [mean([a.ttft_s for a in s.answers[NATURAL]]) for s in self.samples(name)]

    def answer_s(self, name: str) -> list[float]:
        """Block by block: time of an answer of `max_new_tokens`, its first token included."""
        rates = [t[name].rate for t in self.totals(NATURAL, None)]
        more = self.settings.max_new_tokens - 1
        return [first + more / rate for first, rate in zip(self.first_s(name), rates, strict=True)]

    def latency(self, name: str) -> dict[str, Interval | None]:
        """Of an answer (`answer_s`) and of its first token, each beside `base`'s of the same block; above 1 = faster.

        `answer_over_plain`: against plain decoding of the same target; None for plain rows.
        """
        row = self.rows[name]
        faster = lambda under, times: median_interval(  # noqa: E731
            [b / a for a, b in zip(times(name), times(under), strict=True)], self.seed
        )
        return {
            "answer_ms": median_interval([1e3 * s for s in self.answer_s(name)], self.seed),
            "answer_speedup": faster("base", self.answer_s),
            "answer_over_plain": faster(row.target, self.answer_s) if row.speculative else None,
            "ttft_speedup": faster("base", self.first_s),
        }

    def speeds(self, name: str, protocol: str) -> dict[str, Interval]:
        rates = [t[name].rate for t in self.totals(protocol, None)]
        return {
            "tpot_ms": median_interval([1e3 / r for r in rates], self.seed),
            "decode_tok_per_s": median_interval(rates, self.seed),
        }

    def bandwidth_bytes_per_s(self) -> Interval:
        """What a sum over a large tensor read, turn by turn between the timed answers."""
        return median_interval([r for b in self.blocks.kept for r in b.readings], self.seed)

    def ceiling(self, name: str) -> dict[str, float | None]:
        """Bytes that one token must read over the bandwidth of this run, and the share of it that was reached.

        A speculative round reads the draft K times and the target once, for tau tokens; caches at their mean length.
        """
        row, answers, read = self.rows[name], self.answers(name, NATURAL), self.samples(name)[-1].read_bytes
        context = sum(len(a.prompt.ids) + len(a.ids) / 2 for a in answers) / len(answers)
        target = read["target_weights"] + context * read["target_cache_per_token"]
        draft = read["draft_weights"] + context * read["draft_cache_per_token"]
        tau = Acceptance.of(answers, row.draft_len).mean_emitted_per_round
        if tau is None:
            return {"read_bytes_per_token": None, "ceiling_tok_per_s": None, "ceiling_share": None}
        per_token = (target + row.draft_len * draft) / tau
        ceiling = self.bandwidth_bytes_per_s().value / per_token
        reached = self.speeds(name, NATURAL)["decode_tok_per_s"].value
        return {
            "read_bytes_per_token": per_token,
            "ceiling_tok_per_s": ceiling,
            "ceiling_share": reached / ceiling,
        }

    def by_category(self, name: str) -> dict[str, dict[str, Any]]:
        found = {}
        for category in sorted({a.prompt.category for a in self.answers(name, NATURAL)}):
            answers = [a for a in self.answers(name, NATURAL) if a.prompt.category == category]
            counts = Acceptance.of(answers, self.rows[name].draft_len)
            rates = [t[name].rate for t in self.totals(NATURAL, category)]
            found[category] = {
                "decode_tok_per_s": median_interval(rates, self.seed),
                "speedup": self.speedup(name, NATURAL, category),
                "over_plain": self.over_plain(name, category),
                "acceptance_rate": counts.acceptance_rate,
                "mean_emitted_per_round": counts.mean_emitted_per_round if self.rows[name].speculative else None,
            }
        return found

    def lossless(self, name: str, gaps_at: Any, tolerance: float) -> Lossless:
        """Grade a speculative arm against the plain arm of its target, on the same prompts in the same blocks."""
        row = self.rows[name]
        plain = {a.prompt.id: a.ids for a in self.answers(row.target, NATURAL)}
        answers = {(a.prompt.id, tuple(a.ids)): a for a in self.answers(name, NATURAL)}
        pairs = [(a.prompt.id, plain[a.prompt.id], a.ids) for a in answers.values()]
        dtype = self.samples(name)[-1].readback["target"]["weights_dtype"]

        def gaps(prompt: str, position: int, other_token: int) -> LogitGaps:
            prompt_ids = next(a.prompt.ids for a in answers.values() if a.prompt.id == prompt)
            return gaps_at(row.target, prompt_ids, plain[prompt][:position], plain[prompt][position], other_token)

        return grade_lossless(pairs, gaps, tolerance, dtype)


def totals_of(samples: Sequence[Mapping[str, Sample]], protocol: str, category: str | None) -> list[dict[str, Total]]:
    """Per block and arm: tokens and seconds of the answers of one protocol (and one category, or None for all)."""
    return [
        {
            name: decode_total(a for a in s.answers[protocol] if category in (None, a.prompt.category))
            for name, s in block.items()
            if protocol in s.answers
        }
        for block in samples
    ]


def row_metrics(matrix: Matrix, name: str, texts: Sequence[str], graded: Lossless | None) -> dict[str, Any]:
    """The entry of one arm in the metrics, verdict included. `texts`: its distinct answers, decoded."""
    row, settings = matrix.rows[name], matrix.settings
    last = matrix.samples(name)[-1]
    answers = matrix.answers(name, NATURAL)
    counts = Acceptance.of(answers, row.draft_len)
    forced = None
    if not row.speculative:
        forced = {**matrix.speeds(name, FORCED), "speedup": matrix.speedup(name, FORCED, None)}
    degenerate = degeneration([list(ids) for ids in distinct(answers)], texts)
    speedup = matrix.speedup(name, NATURAL, None)
    judge(
        matrix, row, speedup, forced, degenerate.beyond(settings.max_loop_share, settings.max_compression_ratio), graded
    )
    draft_readback = last.readback["draft"]
    return {
        "target": row.target,
        "draft": {"kind": row.draft.kind, "precision": draft_readback["precision"]} if row.draft else None,
        "draft_len": row.draft_len,
        "protocol": NATURAL,
        "readback": last.readback["target"],
        "draft_readback": draft_readback,
        "memory": last.ledger,
        "ttft_ms": median_interval([ttft_ms(s.answers[NATURAL]) for s in matrix.samples(name)], matrix.seed),
        **matrix.speeds(name, NATURAL),
        "forced": forced,
        "speedup": speedup,
        "over_plain": matrix.over_plain(name, None),
        **matrix.latency(name),
        "by_category": matrix.by_category(name),
        "acceptance_rate": counts.acceptance_rate,
        "mean_emitted_per_round": counts.mean_emitted_per_round if row.speculative else None,
        **matrix.ceiling(name),
        "lossless": asdict(graded) if graded else {"grade": None, "first_divergence": None},
        "degenerate": asdict(degenerate),
        "verdict": row.judgement.verdict,
        "reasons": row.judgement.reasons,
    }


def void_metrics(row: Row) -> dict[str, Any]:
    """A row that could not run: every figure null, with the reason."""
    assert row.void is not None
    measured = (
        "draft", "readback", "draft_readback", "ttft_ms", "tpot_ms", "decode_tok_per_s", "forced", "speedup",
        "over_plain", "answer_ms", "answer_speedup", "answer_over_plain", "ttft_speedup", "acceptance_rate",
        "mean_emitted_per_round", "read_bytes_per_token", "ceiling_tok_per_s", "ceiling_share",
    )  # fmt: skip
    ledger = ("weight_bytes", "draft_weight_bytes", "peak_memory_bytes", "peak_load_memory_bytes", "workspace_bytes")
    return {
        "target": row.target,
        "draft_len": row.draft_len,
        "protocol": NATURAL,
        **dict.fromkeys(measured),
        "memory": {
            **dict.fromkeys(ledger),
            "cache_bytes_per_token": None,
            "draft_cache_bytes_per_token": None,
            "longest_context_tokens": {},
            "null_reasons": dict.fromkeys([*ledger, "longest_context_tokens"], row.void),
        },
        "by_category": {},
        "lossless": {"grade": None, "first_divergence": None},
        "degenerate": {"loop_share": None, "compression_ratio": None},
        "verdict": "VOID",
        "reasons": [row.void],
    }


def distinct(answers: Sequence[Answer]) -> list[tuple[int, ...]]:
    """Each answer once: a prompt that had several turns does not count several times."""
    return list(dict.fromkeys(tuple(a.ids) for a in answers))


def judge(
    matrix: Matrix,
    row: Row,
    speedup: Interval | None,
    forced: Mapping[str, Any] | None,
    degenerate: str | None,
    graded: Lossless | None,
) -> None:
    """Add to the row's judgement what its runs show."""
    judgement, timing = row.judgement, matrix.settings.timing
    if degenerate is not None:
        judgement.add("VOID", degenerate)
    if graded is not None and graded.grade == "broken":
        where = graded.first_divergence
        assert where is not None
        judgement.add("VOID", f"broken: leaves plain decoding at token {where.position} of prompt {where.prompt}")
    for doubt in knobs_that_did_not_act(matrix, row):
        judgement.add("VOID", doubt)
    if (other_prompts := guards.equal_prompts(matrix.prompts("base"), matrix.prompts(row.name))) is not None:
        judgement.add("NOT COMPARABLE", other_prompts)
    base = matrix.samples("base")[-1].readback["target"]
    for line in unequal_setups(base, matrix.samples(row.name)[-1].readback["target"]):
        judgement.add("NOT COMPARABLE", line)
    if matrix.blocks.reason is not None:
        judgement.note(matrix.blocks.reason)
    if row.name == "base":
        if distinct(matrix.answers("base", NATURAL)) != distinct(matrix.answers(CONTROL, NATURAL)):
            judgement.note("base does not repeat itself: its second copy gave other tokens")
        return
    if len(matrix.blocks.kept) < timing.min_blocks:
        judgement.add("UNDECIDED", f"{len(matrix.blocks.kept)} blocks in the time budget, {timing.min_blocks} asked")
    for protocol, ratio in ((NATURAL, speedup), (FORCED, forced["speedup"] if forced else None)):
        if ratio is not None and not ratio.relative_half_width <= timing.precision:
            wide = f"+-{100 * ratio.relative_half_width:.1f} %, asked +-{100 * timing.precision:g} %"
            judgement.add("UNDECIDED", f"{protocol} speedup: interval {wide}")
    if speedup is not None and not differs_from_one(speedup, matrix.noise_floor(None)):
        judgement.note("its speed does not differ from base's beyond the noise floor")


def knobs_that_did_not_act(matrix: Matrix, row: Row) -> list[str]:
    """Draft length and forced length, by what the arm did."""
    rounds = [r for a in matrix.answers(row.name, NATURAL) for r in a.rounds]
    found = [guards.draft_len(row.draft_len, rounds, row.draft is not None and row.draft.kind == "ngram")]
    if not row.speculative:
        lengths = [len(a.ids) for a in matrix.answers(row.name, FORCED)]
        found.append(guards.forced_length(matrix.settings.forced_new_tokens, lengths))
    return [doubt for doubt in found if doubt is not None]


def ratios_to_base(samples: Sequence[Mapping[str, Sample]], seed: int) -> list[Interval]:
    """The ratios against base whose widths decide whether more blocks are run."""
    ratios = []
    for protocol in (NATURAL, FORCED):
        totals = totals_of(samples, protocol, None)
        ratios += [paired_ratio(totals, [name], ["base"], seed) for name in totals[0] if name != "base"]
    return ratios
