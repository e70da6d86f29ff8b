"""Rounds of greedy speculative decoding for any draft length, replayed from one trace of the target's own answer.

While every drafted token is right, the draft's context is the target's answer. So one teacher-forced pass of the draft
over that answer tells, for each position, whether it would have been kept, and thereby every round for every K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

# (position of the next token to produce, K) -> (drafted, accepted if the answer went on for ever)
KeptAt = Callable[[int, int], tuple[int, int]]


@dataclass(frozen=True)
class Replay:
    """Counts over all rounds; `kept_at_position[j]`: rounds in which drafted position j (from 0) was kept."""

    draft_len: int
    rounds: int
    drafted: int
    accepted: int
    kept_at_position: tuple[int, ...]

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted; None when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def accept_marginal(self) -> list[float]:
        return [kept / self.rounds for kept in self.kept_at_position] if self.rounds else []

    @property
    def accept_conditional(self) -> list[float | None]:
        """marginal[j] / marginal[j-1]; None where position j-1 was never kept."""
        before = [self.rounds, *self.kept_at_position]
        return [kept / b if b else None for kept, b in zip(self.kept_at_position, before, strict=False)]

    @property
    def mean_emitted_per_round(self) -> float | None:
        """tau: accepted tokens a round and the target's own one (Leviathan et al. 2023, section 3.1)."""
        return 1 + self.accepted / self.rounds if self.rounds else None


def kept_from_hits(hits: list[bool]) -> KeptAt:
    """`hits[t]`: the draft's choice for answer position t, given the answer before it, equals the answer's token."""

    def kept_at(position: int, k: int) -> tuple[int, int]:
        accepted = 0
        while accepted < k and position + accepted < len(hits) and hits[position + accepted]:
            accepted += 1
        return k, accepted

    return kept_at


def replay(answers: Iterable[tuple[int, KeptAt]], draft_len: int) -> Replay:
    """Replay rounds over answers, each given as (number of tokens, kept_at). The first token is the prompt's own.

    Tokens drafted beyond the end of an answer count as drafted and not as accepted, as in `generate`.
    """
    rounds = drafted = accepted = 0
    kept_at_position = [0] * draft_len
    for tokens, kept_at in answers:
        position = 1
        while position < tokens:
            proposed, kept = kept_at(position, draft_len)
            kept = min(kept, tokens - position)
            rounds, drafted, accepted = rounds + 1, drafted + proposed, accepted + kept
            for j in range(kept):
                kept_at_position[j] += 1
            position += kept + 1
    return Replay(draft_len, rounds, drafted, accepted, tuple(kept_at_position))
