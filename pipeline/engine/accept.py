"""Acceptance of drafted tokens: pure functions, randomness passed in.

Legend: K drafted tokens, V vocabulary of the target; the target scores K + 1 positions.
"""

from __future__ import annotations

import torch


def accept_greedy(drafted: list[int], target_argmax: list[int]) -> tuple[int, int]:
    """(accepted, next token): the longest prefix that equals the target's own choices, then the target's choice.

    `target_argmax` has one entry more than `drafted`: the correction after a rejection or the bonus token.
    """
    assert len(target_argmax) == len(drafted) + 1
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == target_argmax[accepted]:
        accepted += 1
    return accepted, target_argmax[accepted]


def accept_sampled(
    drafted_K: torch.Tensor,
    draft_probs_KV: torch.Tensor,
    target_probs_MV: torch.Tensor,
    uniforms_K: torch.Tensor,
    generator: torch.Generator | None,
) -> tuple[int, int]:
    """Speculative sampling (Leviathan et al. 2023, section 2.3 and appendix A.1): output follows the target exactly.

    Token j is kept when uniform < p(token) / q(token); after the first rejection the next token is drawn from
    norm(max(0, p - q)), and after K acceptances from p at position K. `draft_probs_KV` must be the distribution that
    the drafted tokens were really drawn from (for a deterministic draft: all mass on its token); `target_probs_MV`
    has M = K + 1 rows. Returns (accepted, next token).
    """
    assert len(target_probs_MV) == len(drafted_K) + 1
    p_K = target_probs_MV[:-1].gather(1, drafted_K[:, None])[:, 0]
    q_K = draft_probs_KV.gather(1, drafted_K[:, None])[:, 0]
    # u * q < p also decides q = 0 (never drawn, but representable) without dividing
    rejected = (uniforms_K * q_K >= p_K).nonzero()
    accepted = int(rejected[0]) if len(rejected) else len(drafted_K)
    probs_V = target_probs_MV[accepted]
    if accepted < len(drafted_K):
        residual_V = (probs_V - draft_probs_KV[accepted]).clamp_min(0)
        # p == q up to rounding leaves no residual, although nothing should have been rejected: p itself is right
        probs_V = residual_V / residual_V.sum() if residual_V.sum() > 0 else probs_V
    return accepted, int(torch.multinomial(probs_V, 1, generator=generator))
