"""The sweep over draft lengths for one loaded target: replayed acceptance, cost curves, interleaved timing, grades."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.config import Speculate
from pipeline.measure.answers import Acceptance, Answer, decode_total
from pipeline.measure.blocks import Block, Blocks, ProcessMeter, nvidia_state, run_blocks
from pipeline.measure.setup import Ask, Prompt, PromptSet
from pipeline.measure.speculation import Costs, batch_point, curve_point, replay_all
from pipeline.measure.statistics import Interval, Total, median_interval, paired_ratio, precise_enough
from pipeline.measure.verdict import Judgement, LogitGaps, Lossless, grade_lossless
from pipeline.progress import bar

if TYPE_CHECKING:
    from pipeline.engine.generate import Reading
    from pipeline.engine.replay import KeptAt
    from pipeline.measure.arm import Arm
    from pipeline.measure.costs import CostCurve

EXACTLY_ONE = Interval(1.0, 1.0, 1.0)


@dataclass
class Traced:
    """A plain answer and, where there is a draft, what that would have kept of it."""

    answer: Answer
    hits: list[bool] | None
    kept_at: KeptAt | None


@dataclass
class DraftSweep:
    """`traced`: the plain answer to each prompt, filled by `trace`; empty when sampling."""

    arm: Arm
    prompts: PromptSet
    settings: Speculate
    seed: int
    traced: list[Traced] = field(default_factory=list)

    def ask(self, draft_len: int) -> Ask:
        return Ask(draft_len, self.settings.max_new_tokens, ignore_end=False, sampling=self.settings.sampling)

    def answer(self, prompt: Prompt, draft_len: int, reading: Reading | None = None) -> Answer:
        return Answer.of(prompt, draft_len, asdict(self.arm.generate(prompt.ids, self.ask(draft_len), reading)))

    def trace(self) -> None:
        """Plain answers, and one teacher-forced pass of the draft over each."""
        with bar("answers of the target", len(self.prompts.all), "prompt") as shown:
            for prompt in self.prompts.all:
                answer = self.answer(prompt, 0)
                hits = self.arm.hits(prompt.ids, answer.ids) if self.arm.draft else None
                kept_at = self.arm.kept_at(prompt.ids, answer.ids, hits) if self.arm.proposer else None
                self.traced.append(Traced(answer, hits, kept_at))
                shown.update()

    def curve(self, draft_lens: Sequence[int], costs: Costs, category: str | None) -> list[dict[str, Any]]:
        """Every K, replayed from the plain answers (of one category, or None for all)."""
        chosen = [t for t in self.traced if category is None or t.answer.prompt.category == category]
        answers = [(len(t.answer.ids), t.kept_at or _nothing) for t in chosen]
        return [curve_point(counts, k, costs) for k, counts in replay_all(answers, draft_lens).items()]

    def time_costs(self, max_draft_len: int) -> CostCurve:
        """Cost curves after the longest prompt, and what a speculative round takes beyond its forwards."""
        context = self.prompts.longest.ids
        needed = max_draft_len + 2  # what is fed, and one token before it; a short prompt is repeated
        context = (context * (1 + needed // len(context)))[: max(len(context), needed)]
        timed = max(k for k in self.settings.timed_draft_lens if k <= max_draft_len)
        settings = self.settings
        return self.arm.cost_curve(context, max_draft_len + 1, timed, settings.cost_repeats, settings.sampling)

    def batches(self, curve: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | str:
        """The K that pays at each batch size, after the longest prompt; a sentence where it cannot be told."""
        emitted = {p["draft_len"]: p["mean_emitted_per_round"] for p in curve if p["measured"]}
        lens = [k for k, tau in emitted.items() if k and tau is not None]
        seconds = self.arm.batch_seconds(
            self.prompts.longest.ids, self.settings.batch_sizes, lens, self.settings.cost_repeats
        )
        if isinstance(seconds, str):
            return seconds
        return [batch_point(b, s, {k: emitted[k] for k in lens}, self.seed) for b, s in seconds.items()]

    def time(self, draft_lens: Sequence[int], costs: CostCurve) -> Blocks:
        """Time every K in interleaved blocks, each over the prompts of its turn, which are read once for all K.

        The parts of a round are timed again in each turn, into `costs`, beside the answers that they explain.
        """
        timing = self.settings.timing
        readings: dict[str, Reading] = {}

        def read(prompt: Prompt) -> Reading:
            if prompt.id not in readings:
                readings.clear()
                costs.repeat(1)
                readings[prompt.id] = self.arm.read(prompt.ids, [self.ask(k) for k in draft_lens])
            return readings[prompt.id]

        def timed(draft_len: int) -> Callable[[int, int], list[Answer]]:
            def answers(index: int, turn: int) -> list[Answer]:
                prompt = self.prompts.block(index, timing.block_prompts_per_category)[turn]
                return [self.answer(prompt, draft_len, read(prompt))]

            return answers

        def precise(blocks: list[Block]) -> bool:
            totals = totals_of(blocks)
            ratios = [paired_ratio(totals, [str(k)], ["0"], self.seed) for k in draft_lens if k]
            return precise_enough(ratios, timing.precision)

        for k in draft_lens:  # warm-up with the same shapes; what it returns is not used
            self.answer(self.prompts.all[0], k, read(self.prompts.all[0]))
        readings.clear()
        return run_blocks(
            {str(k): timed(k) for k in draft_lens},
            turns=len(self.prompts.block(0, timing.block_prompts_per_category)),
            join=lambda parts: [answer for part in parts for answer in part],
            timing=timing,
            meter=ProcessMeter(lambda: [], lambda: nvidia_state([]) if self.arm.meter.cuda else None),
            precise=precise,
        )

    def measured(self, blocks: Blocks, draft_len: int, weights_dtype: str) -> dict[str, Any]:
        """The `measured` part of a point of the curve."""
        totals = totals_of(blocks.kept)
        rates = [t[str(draft_len)].rate for t in totals]
        answers = answers_of(blocks, draft_len)
        counts = Acceptance.of(answers, draft_len)
        speedup = paired_ratio(totals, [str(draft_len)], ["0"], self.seed) if draft_len else EXACTLY_ONE
        return {
            "decode_tok_per_s": asdict(median_interval(rates, self.seed)),
            "tpot_ms": asdict(median_interval([1e3 / r for r in rates], self.seed)),
            "speedup": asdict(speedup),
            "acceptance_rate": counts.acceptance_rate,
            "drafted_per_round": counts.drafted_per_round,
            "lossless": asdict(self._lossless(answers, weights_dtype)) if self.traced else None,
        }

    def _lossless(self, answers: Sequence[Answer], weights_dtype: str) -> Lossless:
        plain = {t.answer.prompt.id: t.answer for t in self.traced}
        distinct = {(a.prompt.id, tuple(a.ids)): (a.prompt.id, plain[a.prompt.id].ids, a.ids) for a in answers}

        def gaps_at(prompt: str, position: int, other_token: int) -> LogitGaps:
            reference = plain[prompt]
            return self.arm.gaps(reference.prompt.ids, reference.ids[:position], reference.ids[position], other_token)

        return grade_lossless(list(distinct.values()), gaps_at, self.settings.lossless_gap, weights_dtype)


def _nothing(position: int, k: int) -> tuple[int, int]:
    return 0, 0


def totals_of(blocks: Sequence[Block]) -> list[dict[str, Total]]:
    return [{name: decode_total(answers) for name, answers in b.samples.items()} for b in blocks]


def answers_of(blocks: Blocks, draft_len: int) -> list[Answer]:
    return [a for b in blocks.kept for a in b.samples[str(draft_len)]]


def judge(settings: Speculate, curve: Sequence[dict[str, Any]], best: int, blocks: Blocks) -> Judgement:
    """VOID with a broken K or a knob that did not act; UNDECIDED where the choice rests on wide intervals."""
    judgement = Judgement()
    timing = settings.timing
    if blocks.reason is not None:
        judgement.note(blocks.reason)
    if len(blocks.kept) < timing.min_blocks:
        asked = f"{timing.min_blocks} asked"
        judgement.add("UNDECIDED", f"{len(blocks.kept)} blocks fitted in the time budget, {asked}")
    for k, found in ((p["draft_len"], p["measured"]) for p in curve if p["measured"] and p["draft_len"]):
        if found["lossless"] and found["lossless"]["grade"] == "broken":
            judgement.add("VOID", f"K = {k} is not lossless")
        if not found["drafted_per_round"]:
            judgement.note(f"K = {k}: nothing was ever drafted")
        speedup = Interval(**found["speedup"])
        open_question = k == best or (best == 0 and not speedup.high < 1)
        if open_question and not speedup.relative_half_width <= timing.precision:
            wide = f"+-{100 * speedup.relative_half_width:.1f} %, asked +-{100 * timing.precision:g} %"
            judgement.add("UNDECIDED", f"K = {k}: the interval of its speedup is {wide}")
    return judgement
