"""Which row to deploy: a pure function of the rows, the constraints of conf/report and the noise floor.

A row qualifies when its verdict is OK and it meets every constraint. The best gain of the objective over base wins;
a row that cannot be told from it (interval or noise floor) is a tie, and a tie goes to plain decoding, then to fewer
bytes of weights, then to the lower perplexity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.config import Report
from pipeline.measure.statistics import Interval, claimable, differs_from_one
from pipeline.reporting.numbers import EXACTLY_ONE, fixed, interval, number, over, size
from pipeline.reporting.rows import Row

TIE_BREAKS = ("it needs a draft", "it holds more bytes of weights", "its perplexity is no lower")


@dataclass(frozen=True)
class Recommendation:
    """`choice` is None when nothing qualifies. `failures`: what each row that does not qualify fell short of."""

    choice: str | None
    objective: str
    gains: dict[str, Interval]
    reasons: tuple[str, ...]
    alternative: str | None
    alternative_reason: str
    failures: dict[str, tuple[str, ...]]
    ties: tuple[str, ...]
    pareto_front: tuple[str, ...]


def recommend(
    rows: dict[str, Row], limits: Report, noise_floor: Interval | None, answer_floor: Interval | None
) -> Recommendation:
    """`rows` holds `base`. The A/A control's ratios: `noise_floor` of decode speed, `answer_floor` of latency."""
    speed_floor = claimable(noise_floor)
    floor = {"memory": None, "latency": claimable(answer_floor), "throughput": speed_floor}[limits.objective]
    gains = {name: g for name, row in rows.items() if (g := gain(row, rows["base"], limits))}
    failures = {name: f for name, row in rows.items() if (f := failed(row, rows["base"], limits, name in gains))}
    able = sorted((n for n in rows if n not in failures), key=lambda n: -gains[n].value)
    front = pareto_front(rows, speed_floor)
    if not able:
        return Recommendation(None, limits.objective, gains, (), None, "", failures, (), front)
    ties = [n for n in able if not distinguishable(gains[able[0]], gains[n], floor)]
    choice = min(ties, key=lambda n: preference(rows[n]))
    alternative = next((n for n in [*able, *sorted(failures, key=lambda n: -_value(gains, n))] if n != choice), None)
    why_not = _why_not(alternative, choice, rows, gains, failures, ties)
    return Recommendation(
        choice, limits.objective, gains, _reasons(choice, gains, ties, able), alternative, why_not,
        failures, tuple(n for n in ties if n != choice), front,
    )  # fmt: skip


def gain(row: Row, base: Row, limits: Report) -> Interval | None:
    """The objective as a ratio over base, above 1 = better; None when it was not measured.

    latency: time of one answer (prefill and decode); throughput: decode speed of one stream; memory: weights held.
    """
    if limits.objective == "memory":
        ratio = base.resident_bytes / row.resident_bytes if base.resident_bytes and row.resident_bytes else None
        return None if ratio is None else Interval(ratio, ratio, ratio)
    if row.name == base.name:
        return EXACTLY_ONE
    return row.speedup if limits.objective == "throughput" else row.answer_speedup


def failed(row: Row, base: Row, limits: Report, has_gain: bool) -> tuple[str, ...]:
    """Everything that keeps a row from being recommended, each with its value and its limit."""
    why = []
    if row.verdict != "OK":
        why.append(row.verdict)
    if not has_gain:
        why.append(f"its {limits.objective} was not measured")
    if limits.max_memory_bytes is not None:
        why += _above(row.peak_memory_bytes, limits.max_memory_bytes, "peak memory", size)
    if limits.max_ppl_increase_pct is not None:
        increase = row.ppl_increase_pct.value if row.ppl_increase_pct else None
        why += _above(increase, limits.max_ppl_increase_pct, "perplexity increase", lambda x: f"{number(x)} %")
    if limits.max_accuracy_drop_points is not None:
        drop = accuracy_drop_points(row, base)
        why += _above(drop, limits.max_accuracy_drop_points, "accuracy drop", lambda x: f"{fixed(x, 1)} points")
    if limits.min_decode_tok_per_s is not None:
        speed = row.decode_tok_per_s.value if row.decode_tok_per_s else None
        if speed is None or speed < limits.min_decode_tok_per_s:
            shown = number(speed, "not measured")
            why.append(f"decoding at {shown} tok/s is below the limit of {number(limits.min_decode_tok_per_s)}")
    return tuple(why)


def accuracy_drop_points(row: Row, base: Row) -> float | None:
    if row.target == base.target:
        return 0.0
    return None if row.accuracy is None or base.accuracy is None else 100 * (base.accuracy - row.accuracy)


def _above(value: float | None, limit: float, what: str, show: object) -> list[str]:
    assert callable(show)
    if value is None:
        return [f"{what} was not measured, so the limit of {show(limit)} cannot be checked"]
    return [f"{what} of {show(value)} is above the limit of {show(limit)}"] if value > limit else []


def distinguishable(a: Interval, b: Interval, floor: Interval | None) -> bool:
    """Whether a is greater than b beyond the noise floor; no floor = exact values, such as bytes."""
    return a.value > b.value and differs_from_one(over(a, b), floor)


def preference(row: Row) -> tuple[bool, float, float]:
    """Order among rows that tie: plain first, then fewer bytes, then lower perplexity."""
    return (
        row.speculative,
        math.inf if row.resident_bytes is None else row.resident_bytes,
        math.inf if row.token_ppl is None else row.token_ppl,
    )


def pareto_front(rows: dict[str, Row], floor: Interval) -> tuple[str, ...]:
    """OK rows to which no other OK row is equal or better in speed, weights held and perplexity, better in one."""
    known = [
        r for r in rows.values() if r.verdict == "OK" and r.speedup and r.resident_bytes and r.token_ppl is not None
    ]
    return tuple(b.name for b in known if not any(_dominates(a, b, floor) for a in known if a is not b))


def _dominates(a: Row, b: Row, floor: Interval) -> bool:
    assert a.speedup and b.speedup and a.resident_bytes and b.resident_bytes
    assert a.token_ppl is not None and b.token_ppl is not None
    if distinguishable(b.speedup, a.speedup, floor):
        return False
    if a.resident_bytes > b.resident_bytes or a.token_ppl > b.token_ppl:
        return False
    faster = distinguishable(a.speedup, b.speedup, floor)
    return faster or a.resident_bytes < b.resident_bytes or a.token_ppl < b.token_ppl


def _value(gains: dict[str, Interval], name: str) -> float:
    return gains[name].value if name in gains else -math.inf


def _reasons(choice: str, gains: dict[str, Interval], ties: list[str], able: list[str]) -> tuple[str, ...]:
    others = [n for n in able if n not in ties]
    why = []
    if others:
        why.append(f"better than {', '.join(f'`{n}`' for n in others)} beyond the noise floor")
    if len(ties) > 1:
        tied = ", ".join(f"`{n}`" for n in ties if n != choice)
        why.append(f"not distinguishable from {tied}; a tie goes to plain decoding, then to fewer bytes of weights")
    if not others and len(ties) == 1:
        why.append("the only row that qualifies")
    return tuple(why)


def _why_not(
    name: str | None, choice: str, rows: dict[str, Row], gains: dict[str, Interval],
    failures: dict[str, tuple[str, ...]], ties: list[str],
) -> str:  # fmt: skip
    if name is None:
        return ""
    if name in failures:
        return "; ".join(failures[name])
    if name in ties:
        return f"not distinguishable in the objective, and {TIE_BREAKS[_decided_by(rows[name], rows[choice])]}"
    return f"{interval(over(gains[name], gains[choice]))} of its gain"


def _decided_by(loser: Row, winner: Row) -> int:
    """Index of the first tie-break that tells the two rows apart; the last when none does."""
    pairs = zip(preference(loser), preference(winner), strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(TIE_BREAKS) - 1)
