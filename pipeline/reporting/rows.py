"""The six rows of the matrix: what was measured of each configuration, in one flat form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.measure.statistics import Interval
from pipeline.measure.verdict import Judgement
from pipeline.reporting import checks
from pipeline.reporting.numbers import change_pct, interval_of, is_finite, number
from pipeline.reporting.records import TARGETS, Records

RATIOS = ("speedup", "over_plain", "answer_speedup", "answer_over_plain", "ttft_speedup")
SPEEDS = ("ttft_ms", "tpot_ms", "decode_tok_per_s", "answer_ms", *RATIOS)
# a VOID row's speeds say nothing; those of a row measured under other conditions enter no ratio
HIDDEN = {"VOID": SPEEDS, "NOT COMPARABLE": RATIOS}
ARMS = tuple(arm for target in TARGETS for arm in (target, f"{target}_spec"))


@dataclass(frozen=True)
class Row:
    """One configuration. Quality is that of the target model: drafts never score.

    `speedup`: over `base`; `over_plain`: of a speculative row over plain decoding of its own target. `answer_...`: of
    the time of a whole answer, its first token included; `ttft_speedup`: of that first token's.
    """

    name: str
    target: str
    speculative: bool
    draft_len: int
    verdict: str
    reasons: tuple[str, ...]
    weight_bytes: int | None
    draft_weight_bytes: int | None
    peak_memory_bytes: int | None
    ttft_ms: Interval | None
    tpot_ms: Interval | None
    decode_tok_per_s: Interval | None
    speedup: Interval | None
    over_plain: Interval | None
    answer_ms: Interval | None
    answer_speedup: Interval | None
    answer_over_plain: Interval | None
    ttft_speedup: Interval | None
    acceptance_rate: float | None
    lossless: str | None
    token_ppl: float | None
    delta_log_ppl: Interval | None
    accuracy: float | None
    accuracy_stderr: float | None
    kl_nats_mean: float | None
    top1_agreement: float | None
    null_reasons: dict[str, str]

    @property
    def resident_bytes(self) -> int | None:
        """Weights that must be held: the target's and the draft's."""
        return None if self.weight_bytes is None else self.weight_bytes + (self.draft_weight_bytes or 0)

    @property
    def ppl_increase_pct(self) -> Interval | None:
        return None if self.delta_log_ppl is None else change_pct(self.delta_log_ppl)

    def why_null(self, name: str) -> str:
        return self.null_reasons.get(name, "not measured")


def build(records: Records) -> dict[str, Row]:
    """The rows by name, in the order of ARMS."""
    arms = records.metrics("benchmark")["arms"]
    evaluated, speculated = records.per_target("evaluate"), records.per_target("speculate")
    rows = {}
    for name in ARMS:
        target = name.removesuffix("_spec")
        speculation = speculated[target] if name != target else None
        judgement = judge(arms[name], evaluated, target, speculation)
        checks.judge(records, name, arms[name], judgement)
        rows[name] = _row(name, arms[name], evaluated, target, judgement)
    return rows


def _row(name: str, arm: dict[str, Any], evaluated: dict[str, Any], target: str, judgement: Judgement) -> Row:
    memory, quality = arm["memory"], evaluated[target]
    against = quality.get("against_base") or {}
    speculative = name.endswith("_spec")
    speeds = {n: interval_of(arm[n]) for n in SPEEDS}
    hidden = HIDDEN.get(judgement.verdict, ())
    return Row(
        name=name,
        target=target,
        speculative=speculative,
        draft_len=arm["draft_len"],
        verdict=judgement.verdict,
        reasons=tuple(judgement.reasons),
        weight_bytes=memory["weight_bytes"],
        draft_weight_bytes=memory["draft_weight_bytes"],
        peak_memory_bytes=memory["peak_memory_bytes"],
        **{n: None if n in hidden else iv for n, iv in speeds.items()},
        acceptance_rate=_finite(arm["acceptance_rate"]) if speculative else None,
        lossless=arm["lossless"]["grade"] if speculative else None,
        token_ppl=_finite(quality["token_ppl"]["value"]),
        delta_log_ppl=Interval(0.0, 0.0, 0.0) if target == "base" else interval_of(against.get("delta_log_ppl")),
        accuracy=_finite(quality["acc_last_word"]),
        accuracy_stderr=_finite(quality["acc_last_word_stderr"]),
        kl_nats_mean=_finite(against.get("kl_nats_mean")),
        top1_agreement=_finite(against.get("top1_agreement")),
        null_reasons={**memory["null_reasons"], **dict.fromkeys(hidden, f"row is {judgement.verdict}")},
    )


def judge(arm: dict[str, Any], evaluated: dict[str, Any], target: str, speculation: dict[str, Any] | None) -> Judgement:
    """The gravest of: the benchmark's verdict, unequal evaluation inputs, a speculation sweep that is VOID."""
    judgement = Judgement(arm["verdict"], list(arm["reasons"]))
    for name in ("task_hash", "bos"):
        if evaluated[target].get(name) != evaluated["base"].get(name):
            judgement.add("NOT COMPARABLE", f"evaluation's {name.replace('_', ' ')} differs from base's")
    if speculation is not None and speculation["verdict"] == "VOID":
        for reason in speculation["reasons"]:
            judgement.add("VOID", reason)
    if (where := divergence(arm["lossless"])) is not None:
        judgement.note(where)
    return judgement


def divergence(lossless: dict[str, Any] | None) -> str | None:
    """Where answers that are not `exact` first leave plain decoding, and how near a tie that was; None if nowhere."""
    where = (lossless or {}).get("first_divergence")
    if lossless is None or where is None:
        return None
    gap = where["top2_gap"]
    near = f"the target's two best logits are {number(gap)} apart" if is_finite(gap) else "one of the answers ends"
    place = f"token {where['position']} of prompt {where['prompt']}"
    return f"{lossless['grade']}: answers first leave plain decoding at {place}, where {near}"


def _finite(value: Any) -> Any:
    return value if is_finite(value) else None
