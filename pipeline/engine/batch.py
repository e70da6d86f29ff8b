"""Greedy decoding of several sequences at once, plain and speculative: what a batch gains and what it takes away.

A batch shares each reading of the weights, which is what speculation lives on too, so the best draft length falls as
the batch grows. Every row has its own length: positions come from the cache, nothing is padded. Legend: B sequences,
K drafted tokens, V vocabulary.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from pipeline.engine.accept import accept_greedy
from pipeline.engine.cache import StaticCache
from pipeline.engine.lean import LeanDecoder


@dataclass
class BatchGeneration:
    """`ids[b]`: new tokens of sequence b, exactly as many as asked for; `rounds`: target forwards after the prompts;
    `drafted`, `accepted`: tokens over all sequences and rounds."""

    ids: list[list[int]]
    rounds: int
    drafted: int
    accepted: int
    ttft_s: float
    decode_s: float


@torch.inference_mode()
def generate_batch(
    target: LeanDecoder, prompts: list[list[int]], *, max_new_tokens: int, draft: LeanDecoder | None, draft_len: int
) -> BatchGeneration:
    """Continue every prompt by `max_new_tokens`, end tokens ignored. A sequence that is done is carried to the end.

    Raises ContextFull when prompt, answer and one round do not fit in the context of target or draft.
    """
    assert (draft is None) == (draft_len == 0) and all(prompts)
    capacity = max(map(len, prompts)) + max_new_tokens + draft_len + 1
    cache = target.new_cache(capacity, len(prompts))
    draft_cache = draft.new_cache(capacity, len(prompts)) if draft is not None else None
    started = time.perf_counter()
    first = _read_prompts(target, prompts, cache)
    if draft is not None and draft_cache is not None:
        _read_prompts(draft, prompts, draft_cache)
    now = time.perf_counter()
    committed = [[*prompt, token] for prompt, token in zip(prompts, first, strict=True)]
    ends = [len(prompt) + max_new_tokens for prompt in prompts]
    out = BatchGeneration([], 0, 0, 0, now - started, 0.0)
    while any(len(own) < end for own, end in zip(committed, ends, strict=True)):
        last_B1 = torch.tensor([own[-1:] for own in committed], device=target.device)
        drafted_BK = last_B1[:, :0]
        if draft is not None and draft_cache is not None:
            drafted_BK = _draft(draft, committed, draft_cache, draft_len).to(target.device)
        choices = target.forward_rows(torch.cat([last_B1, drafted_BK], 1), cache).argmax(-1)
        out.rounds += 1
        for own, end, proposed, chosen in zip(committed, ends, drafted_BK.tolist(), choices.tolist(), strict=True):
            room = end - len(own)
            accepted, token = accept_greedy(proposed, chosen)
            out.drafted += draft_len if room else 0
            out.accepted += min(accepted, room)
            own += [*proposed[:accepted], token][:room]
        cache.rollback_rows([len(own) - 1 for own in committed])
    out.decode_s = time.perf_counter() - now
    out.ids = [own[len(prompt) :] for own, prompt in zip(committed, prompts, strict=True)]
    return out


def _read_prompts(model: LeanDecoder, prompts: list[list[int]], cache: StaticCache) -> list[int]:
    """Each into its own row; returns the greedy token after each."""
    first = []
    for b, prompt in enumerate(prompts):
        hidden_TD = model.read_prompt(model.known(prompt), cache, b)
        first.append(int(model.module.head.rows(hidden_TD[-1:]).argmax(-1)))
    return first


def _draft(draft: LeanDecoder, committed: list[list[int]], cache: StaticCache, k: int) -> torch.Tensor:
    """drafted_BK. After a round in which all was kept two tokens are new to the draft, else one: two are fed always."""
    cache.lengths = [min(length, len(own) - 2) for length, own in zip(cache.lengths, committed, strict=True)]
    fed_BT = torch.tensor([own[-2:] for own in committed], device=draft.device)
    drafted = []
    for _ in range(k):
        columns_B = draft.forward_rows(fed_BT, cache, last_only=True)[:, 0].argmax(-1)
        fed_BT = (columns_B if draft.vocab_ids_U is None else draft.vocab_ids_U[columns_B])[:, None]
        drafted.append(fed_BT)
    return torch.cat(drafted, 1)
