"""The arithmetic of a sweep over draft lengths: costs, predicted speedups, the best K. No model, no clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.engine.replay import KeptAt, Replay, replay
from pipeline.measure.answers import Acceptance
from pipeline.measure.statistics import Interval, claimable, differs_from_one, median, median_interval

AGAIN = -1  # beside the numbers of tokens of a step: the one over a single token once more, as a control


@dataclass(frozen=True)
class Costs:
    """Times of the parts of a round; `target_step_ms[n]`: one target forward over n tokens. No draft: draft null.

    The first draft step of a round finds in the cache what the target left there, a further one what the draft did.
    """

    draft_step_ms: float | None
    further_draft_step_ms: float | None
    target_step_ms: dict[int, float]
    overhead_ms: float
    context_tokens: int

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Costs:
        """The inverse of `as_json`; what that derives is derived again."""
        steps = {int(n): ms for n, ms in data["target_step_ms"].items()}
        drafts = data["draft_step_ms"], data["further_draft_step_ms"]
        return Costs(*drafts, steps, data["overhead_ms"], data["context_tokens"])

    def cost_ratio(self, draft_len: int) -> float | None:
        """c: a draft step of a round of `draft_len` > 0, on average, in steps of the target."""
        if self.draft_step_ms is None or self.further_draft_step_ms is None:
            return None
        drafting = self.draft_step_ms + (draft_len - 1) * self.further_draft_step_ms
        return drafting / draft_len / self.target_step_ms[1]

    @property
    def verify_cost(self) -> dict[int, float]:
        return {n: ms / self.target_step_ms[1] for n, ms in self.target_step_ms.items()}

    def predicted_speedup(self, mean_emitted_per_round: float | None, draft_len: int) -> float | None:
        """tau / (K c + v(K + 1) + overhead) (Leviathan et al. 2023, theorem 3.8, with a verification that costs)."""
        if draft_len == 0:
            return 1.0
        cost = self.round_cost(draft_len)
        return None if mean_emitted_per_round is None or cost is None else mean_emitted_per_round / cost

    def round_cost(self, draft_len: int) -> float | None:
        """K c + v(K + 1) + overhead: a round in steps of the target; None without a draft that has a cost."""
        cost_ratio = self.cost_ratio(draft_len)
        if cost_ratio is None:
            return None
        overhead = self.overhead_ms / self.target_step_ms[1]
        return draft_len * cost_ratio + self.verify_cost[draft_len + 1] + overhead

    def break_even_acceptance(self, draft_len: int) -> float | None:
        """The acceptance rate at which a round pays for itself: tau = 1 + K rate equals its cost. Above 1: never."""
        cost = self.round_cost(draft_len) if draft_len else None
        return None if cost is None else (cost - 1) / draft_len

    def as_json(self) -> dict[str, Any]:
        return {
            "draft_step_ms": self.draft_step_ms,
            "further_draft_step_ms": self.further_draft_step_ms,
            "target_step_ms": {str(n): ms for n, ms in self.target_step_ms.items()},
            "cost_ratio": self.cost_ratio(1),
            "verify_cost": {str(n): v for n, v in self.verify_cost.items()},
            "overhead_ms": self.overhead_ms,
            "context_tokens": self.context_tokens,
        }


def replay_all(answers: Sequence[tuple[int, KeptAt]], draft_lens: Sequence[int]) -> dict[int, Replay]:
    """Rounds of every K over answers given as (number of tokens, kept_at). tau = 1 + sum of marginals is asserted."""
    found = {k: replay(answers, k) for k in draft_lens}
    for r in found.values():
        tau = r.mean_emitted_per_round
        assert tau is None or abs(tau - 1 - sum(r.accept_marginal)) < 1e-9
    return found


def curve_point(counts: Replay | Acceptance, draft_len: int, costs: Costs) -> dict[str, Any]:
    """One K of the curve, without its measured part."""
    tau = counts.mean_emitted_per_round
    return {
        "draft_len": draft_len,
        "rounds": counts.rounds,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "acceptance_rate": counts.acceptance_rate,
        "accept_marginal": counts.accept_marginal,
        "accept_conditional": counts.accept_conditional,
        "mean_emitted_per_round": tau,
        "cost_ratio": costs.cost_ratio(draft_len) if draft_len else None,
        "predicted_speedup": costs.predicted_speedup(tau, draft_len),
        "break_even_acceptance": costs.break_even_acceptance(draft_len),
        "measured": None,
    }


def batch_point(
    batch: int, seconds: Sequence[Mapping[int, float]], emitted: Mapping[int, float], seed: int
) -> dict[str, Any]:
    """What each K gains when `batch` sequences are decoded together, and the K to use there.

    seconds[repeat][n]: a target step over n tokens of each sequence; [0]: one draft step; [AGAIN]: the step over one
    token once more, the control. Every sequence keeps its own number of tokens (`emitted[K]` a round, tau), so gain =
    tau t(1) / (K d + t(K + 1)), paired within the repeats. A gain within the control's interval is none.
    """
    floor = median_interval([s[1] / s[AGAIN] for s in seconds], seed)
    gains = {0: Interval(1.0, 1.0, 1.0)}
    for k, tau in emitted.items():
        gains[k] = median_interval([tau * s[1] / (k * s[0] + s[k + 1]) for s in seconds], seed)
    best, reason = best_measured({k: g for k, g in gains.items() if not k or differs_from_one(g, claimable(floor))})
    return {
        "batch": batch,
        "noise_floor": asdict(floor),
        "plain_tok_per_s": batch / median([s[1] for s in seconds]),
        "gains": {str(k): asdict(gain) for k, gain in gains.items() if k},
        "draft_len": best,
        "reason": reason,
    }


def best_predicted(curve: Sequence[Mapping[str, Any]]) -> int:
    """K of the highest predicted speedup; the smaller of equals."""
    known = [p for p in curve if p["predicted_speedup"] is not None]
    return int(min(known, key=lambda p: (-p["predicted_speedup"], p["draft_len"]))["draft_len"]) if known else 0


def best_measured(speedups: Mapping[int, Interval]) -> tuple[int, str]:
    """(K, reason): the smallest K whose interval overlaps that of the fastest. 0 is a possible answer.

    `speedups` holds every timed K, with exactly 1 for K = 0.
    """
    known = {k: s for k, s in speedups.items() if not math.isnan(s.value)}
    fastest = max(sorted(known), key=lambda k: known[k].value)
    best = min(k for k, s in known.items() if s.overlaps(known[fastest]))
    top = f"K = {fastest} was the fastest, at {known[fastest].value:.2f} times plain decoding"
    if best == fastest:
        return best, top if fastest else "no timed K was faster than plain decoding"
    less = "plain decoding" if best == 0 else f"K = {best}"
    return best, f"{top}, but its interval overlaps that of {less}, which is simpler"
