"""Answers of a model and what is counted from them: produced tokens from ids, never from text; totals over totals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.measure.setup import Prompt
from pipeline.measure.statistics import Total, median


@dataclass(frozen=True)
class Answer:
    """One generation: `rounds` are (drafted, accepted) pairs; `decode_s` is the time of all tokens but the first."""

    prompt: Prompt
    draft_len: int
    ids: list[int]
    rounds: list[tuple[int, int]]
    ttft_s: float
    decode_s: float
    stop: str

    @staticmethod
    def of(prompt: Prompt, draft_len: int, generation: Mapping[str, Any]) -> Answer:
        """From a Generation as plain data."""
        rounds = [(r["drafted"], r["accepted"]) for r in generation["rounds"]]
        g = generation
        return Answer(prompt, draft_len, g["ids"], rounds, g["ttft_s"], g["decode_s"], g["stop"])

    def row(self) -> dict[str, Any]:
        """Flat, for result files."""
        return {
            "prompt": self.prompt.id,
            "category": self.prompt.category,
            "draft_len": self.draft_len,
            "new_tokens": len(self.ids),
            "rounds": len(self.rounds),
            "drafted": sum(d for d, _ in self.rounds),
            "accepted": sum(a for _, a in self.rounds),
            "ttft_s": self.ttft_s,
            "decode_s": self.decode_s,
            "stop": self.stop,
        }


def decode_total(answers: Iterable[Answer]) -> Total:
    """Tokens after the first, and their time."""
    chosen = list(answers)
    return Total(sum(len(a.ids) - 1 for a in chosen), sum(a.decode_s for a in chosen))


def ttft_ms(answers: Iterable[Answer]) -> float:
    return 1e3 * median([a.ttft_s for a in answers])


@dataclass(frozen=True)
class Acceptance:
    """Totals over rounds; rates are None where there is nothing to divide by."""

    rounds: int
    drafted: int
    accepted: int
    accept_marginal: list[float]

    @staticmethod
    def of(answers: Sequence[Answer], draft_len: int) -> Acceptance:
        rounds = [r for a in answers for r in a.rounds]
        marginal = [sum(accepted > j for _, accepted in rounds) / len(rounds) for j in range(draft_len) if rounds]
        found = Acceptance(len(rounds), sum(d for d, _ in rounds), sum(a for _, a in rounds), marginal)
        tau = found.mean_emitted_per_round
        assert tau is None or abs(tau - 1 - sum(marginal)) < 1e-9
        return found

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def accept_conditional(self) -> list[float | None]:
        before = [1.0, *self.accept_marginal]
        return [m / b if b else None for m, b in zip(self.accept_marginal, before, strict=False)]

    @property
    def mean_emitted_per_round(self) -> float | None:
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def drafted_per_round(self) -> float | None:
        return self.drafted / self.rounds if self.rounds else None
