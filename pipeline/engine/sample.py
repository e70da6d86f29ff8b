"""From logits to the distribution that is drawn from, tested against and taken the residual of: one function for all.

Legend: T positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """temperature 0 = greedy; top_k None = all tokens; top_p 1 = all tokens."""

    temperature: float
    top_k: int | None
    top_p: float

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


GREEDY = Sampling(temperature=0.0, top_k=None, top_p=1.0)


def distribution(logits_TV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """probs_TV in float32 after temperature, top-k, then top-p (nucleus: the smallest set with mass >= top_p).

    Greedy gives all mass to the first maximum. Ties at the k-th logit are all kept.
    """
    logits_TV = logits_TV.float()
    if sampling.greedy:
        return torch.nn.functional.one_hot(logits_TV.argmax(-1), logits_TV.shape[-1]).float()
    logits_TV = logits_TV / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits_TV.shape[-1]:
        kth_T1 = logits_TV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_TV = logits_TV.masked_fill(logits_TV < kth_T1, float("-inf"))
    probs_TV = logits_TV.softmax(-1)
    if sampling.top_p < 1:
        sorted_TV, order_TV = torch.sort(probs_TV, dim=-1, descending=True, stable=True)
        outside_TV = sorted_TV.cumsum(-1) - sorted_TV >= sampling.top_p
        probs_TV = probs_TV.masked_fill(outside_TV.scatter(-1, order_TV, outside_TV), 0.0)
        probs_TV = probs_TV / probs_TV.sum(-1, keepdim=True)
    return probs_TV


def draw(probs_TV: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """One token a row, ids_T, on the device of `probs_TV`."""
    return torch.multinomial(probs_TV, 1, generator=generator)[:, 0]
