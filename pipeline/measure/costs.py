"""What forwards cost and how fast memory is read: the terms of the predicted speedup and of the ceilings."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from pipeline.engine.decoder import Decoder
from pipeline.engine.propose import Proposer
from pipeline.engine.sample import GREEDY
from pipeline.measure.blocks import order_of
from pipeline.measure.statistics import median

# well beyond any cache, so that memory is read; on a GPU large enough to hide the start of a kernel
BANDWIDTH_BYTES = {"cpu": 2**29, "cuda": 2**32}
BANDWIDTH_REPEATS = 7


def step_costs(
    target: Decoder, draft: Decoder | Proposer | None, context_ids: list[int], max_tokens: int, repeats: int
) -> dict[str, Any]:
    """Medians in ms of target forwards over n = 1..max_tokens tokens and of one draft step (null without a draft).

    All come after the same context: `context_ids` without its last `max_tokens`, which are the ones fed. Interleaved,
    after a warm-up with the same shapes.
    """
    prefix, fed = context_ids[:-max_tokens], context_ids[-max_tokens:]
    steps = {str(n): _timed_forward(target, prefix, fed[:n]) for n in range(1, max_tokens + 1)}
    if isinstance(draft, Decoder):
        steps["draft"] = _timed_forward(draft, prefix, fed[:1])
    elif draft is not None:
        steps["draft"] = _timed_proposal(draft, context_ids, max_tokens)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for i in range(repeats):
        for name in order_of(list(steps), i):
            seconds[name].append(steps[name]())
    ms = {name: 1e3 * median(s) for name, s in seconds.items()}
    draft_ms = ms.pop("draft", None)
    return {"draft_step_ms": draft_ms, "target_step_ms": ms, "context_tokens": len(prefix)}


def _timed_forward(decoder: Decoder, prefix: list[int], fed: list[int]) -> Callable[[], float]:
    """A function that times one forward over `fed` after `prefix`, with its choice read back as in a real round."""
    known = [i if i < decoder.vocab_size else 0 for i in [*prefix, *fed]]
    ids_T = torch.tensor(known, device=decoder.device)
    cache = decoder.new_cache(len(prefix) + len(fed))
    if prefix:
        decoder.forward(ids_T[: len(prefix)], cache, last_only=True)
    fed_T = ids_T[len(prefix) :]

    def step() -> float:
        started = time.perf_counter()
        decoder.forward(fed_T, cache).argmax(-1).tolist()
        seconds = time.perf_counter() - started
        cache.rollback(len(prefix))
        return seconds

    return step


def _timed_proposal(proposer: Proposer, context_ids: list[int], k: int) -> Callable[[], float]:
    def step() -> float:
        started = time.perf_counter()
        proposer.propose(context_ids, k, GREEDY, None)
        return (time.perf_counter() - started) / k

    return step


def read_bandwidth_bytes_per_s(device: str) -> float:
    """Bytes a second that a sum over a large tensor reads on `device`: the roof beside which decoding is shown."""
    size_bytes = BANDWIDTH_BYTES[torch.device(device).type]
    numbers = torch.ones(size_bytes // 4, dtype=torch.float32, device=device)
    seconds = []
    for _ in range(BANDWIDTH_REPEATS):
        started = time.perf_counter()
        float(numbers.sum())
        seconds.append(time.perf_counter() - started)
    return size_bytes / median(seconds)
