"""One loop for plain and speculative decoding, with exact accounting.

The prompt's forwards, the draft's included, give the first token (`ttft_s`); several answers to the prompt can share
them (`Reading`). Each round after it drafts up to `draft_len` tokens (0 = plain decoding), verifies them in one target
forward over the last committed token and the drafted ones, and keeps the accepted prefix and one token of the target's
own. Legend: K drafted, M = K + 1 verified positions, V vocabulary.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pipeline.engine.accept import accept_greedy, accept_sampled
from pipeline.engine.cache import ContextFull
from pipeline.engine.decoder import Decoder
from pipeline.engine.propose import Proposer
from pipeline.engine.sample import Sampling, distribution, draw

if TYPE_CHECKING:
    from pipeline.engine.hf_cache import Cache


@dataclass(frozen=True)
class Round:
    """drafted: tokens proposed; accepted: those of them that stand in the answer."""

    drafted: int
    accepted: int


@dataclass
class Reading:
    """A prompt in the caches of target and proposer, and the logits_1V after it: where answers to it start, one after
    the other. `seconds`: what reading took. Good until the proposer starts another prompt."""

    prompt_ids: list[int]
    cache: Cache
    logits_1V: torch.Tensor
    seconds: float


@dataclass
class Generation:
    """`ids`: the new tokens, an end token included. `stop`: end | length | context (no room for another token).
    `ttft_s`: of the reading that the answer starts from, and the choice of its first token.

    Identity: len(ids) = 1 + sum(accepted) + len(rounds) - cut, where the 1 is the prompt's own token and `cut` is 1
    when the last round ended inside its drafted tokens, so that its own token was not added, and 0 otherwise.
    """

    ids: list[int]
    rounds: list[Round] = field(default_factory=list)
    cut: int = 0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    stop: str = "length"


def read(target: Decoder, prompt_ids: list[int], room: int, proposer: Proposer | None) -> Reading:
    """`prompt_ids` read by the target and, where it has a model, the proposer, with room for `room` more positions.

    Raises ContextFull when the prompt leaves no room for one token, ValueError when it is empty.
    """
    if not prompt_ids:
        raise ValueError("the prompt is empty; give at least one token")
    if len(prompt_ids) >= target.max_positions:
        raise ContextFull(
            f"a prompt of {len(prompt_ids)} tokens leaves no room in a context of {target.max_positions}; shorten it"
        )
    capacity = min(len(prompt_ids) + room, target.max_positions)
    cache = target.new_cache(capacity)
    started = time.perf_counter()
    if proposer is not None:
        proposer.start(prompt_ids, capacity)
    logits_1V = target.prefill(torch.tensor(prompt_ids, device=target.device), cache)
    int(logits_1V.argmax(-1))  # a GPU has read the prompt only now
    return Reading(prompt_ids, cache, logits_1V, time.perf_counter() - started)


def generate(
    target: Decoder,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    end_ids: frozenset[int],
    proposer: Proposer | None,
    draft_len: int,
    sampling: Sampling,
    generator: torch.Generator | None,
    ignore_end: bool,
    reading: Reading | None = None,
) -> Generation:
    """Continue `prompt_ids` by at most `max_new_tokens`. `generator` lives on the target's device (None if greedy).

    `reading`: of this prompt, with `room_for` these tokens and by this proposer; None reads it here. Near the context's
    limit of target or draft, fewer tokens are drafted, and plain steps end the answer. Raises what `read` raises.
    """
    assert (draft_len == 0) == (proposer is None)
    stop_ids = frozenset() if ignore_end else end_ids
    room = room_for(max_new_tokens, draft_len)
    if reading is None:
        reading = read(target, prompt_ids, room, proposer)
    cache, logits_1V = reading.cache, reading.logits_1V
    assert reading.prompt_ids == prompt_ids and cache.capacity >= min(len(prompt_ids) + room, target.max_positions)
    cache.rollback(len(prompt_ids))
    started = time.perf_counter()
    first_1 = logits_1V.argmax(-1) if sampling.greedy else draw(distribution(logits_1V, sampling), generator)
    committed = [*prompt_ids, int(first_1)]
    now = time.perf_counter()
    out = Generation(ids=[], ttft_s=reading.seconds + now - started)
    if committed[-1] in stop_ids:
        out.stop = "end"
    while out.stop != "end" and len(committed) - len(prompt_ids) < max_new_tokens:
        if cache.length == cache.capacity:
            out.stop = "context"
            break
        k = 0
        if proposer is not None:
            k = min(draft_len, cache.capacity - cache.length - 1, proposer.room(len(committed)))
        emitted, drafted, accepted = one_round(target, cache, committed, proposer, k, sampling, generator)
        room = max_new_tokens - (len(committed) - len(prompt_ids))
        kept = _cut(emitted, stop_ids, room)
        if kept[-1] in stop_ids:
            out.stop = "end"
        out.rounds.append(Round(drafted, min(accepted, len(kept))))
        out.cut = 1 if len(kept) <= accepted else 0
        committed += kept
        cache.rollback(len(committed) - 1)
    out.decode_s = time.perf_counter() - now
    out.ids = committed[len(prompt_ids) :]
    assert len(out.ids) == 1 + sum(r.accepted for r in out.rounds) + len(out.rounds) - out.cut
    return out


@torch.inference_mode()
def logits_along(decoder: Decoder, prompt_ids: list[int], answer_ids: list[int]) -> torch.Tensor:
    """logits_TV after the prompt and after each token of the answer (T = 1 + its length), read as in `generate`."""
    cache = decoder.new_cache(len(prompt_ids) + len(answer_ids))
    parts = [decoder.prefill(torch.tensor(prompt_ids, device=decoder.device), cache)]
    if answer_ids:
        parts.append(decoder.forward(torch.tensor(answer_ids, device=decoder.device), cache))
    return torch.cat(parts)


def room_for(max_new_tokens: int, draft_len: int) -> int:
    """Positions beyond the prompt that an answer may touch."""
    return max_new_tokens + draft_len + 1


def one_round(
    target: Decoder,
    cache: Cache,
    committed: list[int],
    proposer: Proposer | None,
    k: int,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> tuple[list[int], int, int]:
    """(tokens emitted before any cut, drafted, accepted). The caller rolls the target's cache back to what it keeps."""
    last_1 = torch.tensor(committed[-1:], device=target.device)
    if proposer is None or k <= 0:
        logits_1V = target.forward(last_1, cache)
        token_1 = logits_1V.argmax(-1) if sampling.greedy else draw(distribution(logits_1V, sampling), generator)
        return [int(token_1)], 0, 0
    proposal = proposer.propose(committed, k, sampling, generator)
    drafted_K = proposal.ids_K.to(target.device)
    logits_MV = target.forward(torch.cat([last_1, drafted_K]), cache)
    if sampling.greedy:
        # one transfer a round: the target's choices and the drafted tokens together
        both = torch.cat([logits_MV.argmax(-1), drafted_K]).tolist()
        choices, drafted = both[: len(drafted_K) + 1], both[len(drafted_K) + 1 :]
        accepted, token = accept_greedy(drafted, choices)
    else:
        assert proposal.probs_KV is not None
        uniforms_K = torch.rand(len(drafted_K), device=target.device, generator=generator)
        probs_MV = distribution(logits_MV, sampling)
        accepted, token = accept_sampled(
            drafted_K, proposal.probs_KV.to(target.device), probs_MV, uniforms_K, generator
        )
        drafted = drafted_K.tolist()
    return [*drafted[:accepted], token], len(drafted), accepted


def _cut(emitted: list[int], stop_ids: frozenset[int], room: int) -> list[int]:
    """Up to and including the first end token, and at most `room` tokens."""
    for i, token in enumerate(emitted[:room]):
        if token in stop_ids:
            return emitted[: i + 1]
    return emitted[:room]
