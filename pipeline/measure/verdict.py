"""May a row be shown, compared, recommended? Degenerate text, the lossless grade and the four verdicts."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["OK", "UNDECIDED", "VOID", "NOT COMPARABLE"]
Grade = Literal["exact", "numeric", "broken"]
SEVERITY: tuple[Verdict, ...] = ("OK", "UNDECIDED", "NOT COMPARABLE", "VOID")
LOOP_TOKENS = 4
# entries of a readback that must be equal for speeds to be compared; weights' dtype and kernels are what is compared
COMPARED = ("engine", "activations_dtype", "threads", "device")


class BrokenOutput(ValueError):
    """Speculative decoding changed the answer where the target left no doubt."""


@dataclass(frozen=True)
class Divergence:
    """First differing answer position of a prompt; `top2_gap`: the target's two best logits there, apart."""

    prompt: str
    position: int
    top2_gap: float


@dataclass(frozen=True)
class Lossless:
    """`first_divergence` is that of the gravest prompt; `compared`: answers looked at."""

    grade: Grade
    first_divergence: Divergence | None
    compared: int


@dataclass(frozen=True)
class LogitGaps:
    """At one position of the target: best minus second-best logit, and how far below the best a token lies."""

    top2: float
    plain_token: float
    other_token: float


def grade_lossless(
    pairs: Sequence[tuple[str, list[int], list[int]]],
    gaps_at: Callable[[str, int, int], LogitGaps],
    tolerance: float,
    weights_dtype: str,
) -> Lossless:
    """Compare (prompt, plain ids, speculative ids) of the same target in the same engine.

    exact: all equal. numeric: at each first difference both tokens lie less than `tolerance` below the target's best
    logit. broken: anything else, a missing or superfluous token, and any difference at all in float32.
    `gaps_at(prompt, position, other token)` asks the target, after the plain answer up to that position.
    """
    worst: Divergence | None = None
    grade: Grade = "exact"
    for prompt, plain, other in pairs:
        position = first_difference(plain, other)
        if position is None:
            continue
        if position == min(len(plain), len(other)):
            divergence, tied = Divergence(prompt, position, float("inf")), False
        else:
            gaps = gaps_at(prompt, position, other[position])
            divergence = Divergence(prompt, position, gaps.top2)
            tied = max(gaps.top2, gaps.plain_token, gaps.other_token) < tolerance and weights_dtype != "float32"
        if not tied and grade != "broken":
            grade, worst = "broken", divergence
        elif grade == "exact":
            grade, worst = "numeric", divergence
    return Lossless(grade, worst, len(pairs))


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first difference, the shorter length if one is a prefix of the other, None if they are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


@dataclass(frozen=True)
class Degeneration:
    """`loop_share`: 4-grams that stood in the same answer before / all; `compression_ratio`: bytes / zlib bytes."""

    loop_share: float | None
    compression_ratio: float | None

    def beyond(self, max_loop_share: float, max_compression_ratio: float) -> str | None:
        """One line naming the figure and its limit, or None."""
        if self.loop_share is not None and self.loop_share > max_loop_share:
            return f"degenerate text: {self.loop_share:.2f} of 4-grams repeat, limit {max_loop_share:g}"
        if self.compression_ratio is not None and self.compression_ratio > max_compression_ratio:
            return f"degenerate text: compresses {self.compression_ratio:.1f} times, limit {max_compression_ratio:g}"
        return None


def degeneration(answers: Sequence[list[int]], texts: Sequence[str]) -> Degeneration:
    """Over distinct answers, totals over totals, so that no short answer decides; None when all are too short."""
    grams = repeated = 0
    for ids in answers:
        all_grams = [tuple(ids[i : i + LOOP_TOKENS]) for i in range(len(ids) - LOOP_TOKENS + 1)]
        grams += len(all_grams)
        repeated += len(all_grams) - len(set(all_grams))
    raw = sum(len(t.encode()) for t in texts)
    packed = sum(len(zlib.compress(t.encode(), 9)) for t in texts if t)
    return Degeneration(repeated / grams if grams else None, raw / packed if packed else None)


@dataclass
class Judgement:
    """A verdict that only gets worse, with the reason of each step."""

    verdict: Verdict = "OK"
    reasons: list[str] = field(default_factory=list)

    def add(self, verdict: Verdict, reason: str) -> None:
        self.verdict = max(self.verdict, verdict, key=SEVERITY.index)
        self.note(reason)

    def note(self, reason: str) -> None:
        """Something to know that does not touch the verdict."""
        if reason not in self.reasons:
            self.reasons.append(reason)


def unequal_setups(reference: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Lines for each entry of two readbacks that makes their speeds incomparable."""
    return [
        f"{name.replace('_', ' ')}: {other.get(name)} here, {reference.get(name)} in base"
        for name in COMPARED
        if reference.get(name) != other.get(name)
    ]
