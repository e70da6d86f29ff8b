"""What forwards cost and how fast memory is read: the terms of the predicted speedup and of the ceilings."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pipeline.engine.cache import StaticCache
from pipeline.engine.decoder import Decoder
from pipeline.engine.generate import one_round
from pipeline.engine.lean import LeanDecoder
from pipeline.engine.propose import ModelProposer, Proposer
from pipeline.engine.sample import GREEDY, Sampling
from pipeline.measure.blocks import order_of
from pipeline.measure.speculation import AGAIN
from pipeline.measure.statistics import median

if TYPE_CHECKING:
    from pipeline.engine.hf_cache import Cache

# well beyond any cache, so that memory is read; on a GPU large enough to hide the start of a kernel
BANDWIDTH_BYTES = {"cpu": 2**29, "cuda": 2**32}
BANDWIDTH_REPEATS = 7


class CostCurve:
    """Target forwards over n = 1..max_tokens tokens; with a proposer a draft step after one of them, a draft step after
    another, and whole rounds of no and of `draft_len` drafted tokens. All after the same context: `context_ids` without
    its last `max_tokens`, which are the ones fed. Timed when asked, in turns, so that repeats can stand among the
    answers whose speed they are to explain: what slows a machine slows short and long forwards differently.
    """

    def __init__(
        self,
        target: Decoder,
        proposer: Proposer | None,
        context_ids: list[int],
        max_tokens: int,
        draft_len: int,
        sampling: Sampling,
    ) -> None:
        self.proposer, self.draft_len = proposer, draft_len
        self.prefix, fed = context_ids[:-max_tokens], context_ids[-max_tokens:]
        cache = _filled(target, self.prefix, max_tokens)
        self.steps = {str(n): _timed_forward(target, cache, fed[:n]) for n in range(1, max_tokens + 1)}
        if proposer is not None:
            self.steps |= _timed_draft(proposer, self.prefix, fed, max_tokens)
        if proposer is not None and draft_len:
            committed = [*self.prefix, fed[0]]
            self.steps["plain round"] = _timed_round(target, None, committed, 0, sampling)
            self.steps["round"] = _timed_round(target, proposer, committed, draft_len, sampling)
        self.seconds: dict[str, list[float]] = {name: [] for name in self.steps}
        self._read()
        for step in self.steps.values():
            step()  # warm-up with the same shapes

    def _read(self) -> None:
        if self.proposer is not None:
            self.proposer.start(self.prefix, len(self.prefix) + self.draft_len + 2)

    def repeat(self, times: int) -> None:
        """Time every step `times` more. The proposer reads another prompt for it."""
        self._read()
        done = len(self.seconds["1"])
        for i in range(done, done + times):
            for name in order_of(list(self.steps), i):
                self.seconds[name].append(self.steps[name]())

    @property
    def overhead_s(self) -> float:
        """What a round of `draft_len` drafted tokens takes beyond its forwards, less the same of a plain round, paired
        within the repeats; one length stands for all, because it is the bookkeeping of a round and not of a token. 0
        without rounds of both kinds.
        """
        if "round" not in self.steps:
            return 0.0
        names = ("round", "draft", "further draft", str(self.draft_len + 1), "plain round", "1")
        return median(
            [
                r - (d + (self.draft_len - 1) * f + check) - (plain - one)
                for r, d, f, check, plain, one in zip(*(self.seconds[n] for n in names), strict=True)
            ]
        )

    def as_json(self) -> dict[str, Any]:
        """Medians over all repeats, ms. A negative overhead is noise and counts as none; it is kept as measured too."""
        one_s = self.seconds["1"]
        # each as the median of its ratios to the step beside it: a machine whose speed drifts slows both alike
        ms = {
            name: 1e3 * median(one_s) * median([t / one for t, one in zip(s, one_s, strict=True)])
            for name, s in self.seconds.items()
            if not name.endswith("round")
        }
        return {
            "draft_step_ms": ms.pop("draft", None),
            "further_draft_step_ms": ms.pop("further draft", None),
            "target_step_ms": ms,
            "overhead_ms": 1e3 * max(0.0, self.overhead_s),
            "overhead_measured_ms": 1e3 * self.overhead_s,
            "context_tokens": len(self.prefix),
            "repeats": len(one_s),
        }


def draft_cost_ratios(
    target: Decoder, proposer: Proposer, context_ids: list[int], draft_len: int, repeats: int
) -> tuple[float, float]:
    """The first draft step of a round and a further one over a target step at one token, medians of pairs timed beside
    each other after `context_ids` but its last token (a lookup's: that of `draft_len` tokens, shared out)."""
    prefix, fed = context_ids[:-1], context_ids[-1:]
    steps = {"target": _timed_forward(target, _filled(target, prefix, 1), fed)}
    seconds = interleaved(steps | _timed_draft(proposer, prefix, fed, draft_len), repeats)
    first, further = (
        median([d / t for d, t in zip(seconds[name], seconds["target"], strict=True)])
        for name in ("draft", "further draft")
    )
    return first, further


# per repeat, in seconds: a target forward over n tokens of each sequence (n), over one token again (AGAIN), one draft
# step of all (0)
BatchSeconds = list[dict[int, float]]


def batch_seconds(
    target: Decoder,
    proposer: Proposer,
    context_ids: list[int],
    batch_sizes: Sequence[int],
    draft_lens: Sequence[int],
    repeats: int,
) -> dict[int, BatchSeconds] | str:
    """What a step costs when B sequences share it: for each B the repeats of n = 1 (and of its control, AGAIN), of
    n = K + 1 and of a draft step.

    All sequences stand after the same context. Interleaved within a batch size. A sentence instead where it cannot be
    had: batches run in the engine `lean` only.
    """
    if not isinstance(target, LeanDecoder):
        return "batches are measured in the engine lean only"
    if not (isinstance(proposer, ModelProposer) and isinstance(proposer.decoder, LeanDecoder)):
        return "batches are measured with a draft model in the engine lean only"
    counts = sorted({1, *(k + 1 for k in draft_lens)})
    draft, largest = proposer.decoder, max(batch_sizes)
    of_target = _filled_batch(target, context_ids, max(counts), largest)
    of_draft = _filled_batch(draft, context_ids, 1, largest)
    found = {}
    for batch in batch_sizes:
        steps = {str(n): _timed_batch(target, of_target, batch, context_ids[-n:]) for n in counts}
        steps["0"] = _timed_batch(draft, of_draft, batch, context_ids[-1:])
        steps[str(AGAIN)] = _timed_batch(target, of_target, batch, context_ids[-1:])
        seconds = interleaved(steps, repeats)
        found[batch] = [{int(name): s[i] for name, s in seconds.items()} for i in range(repeats)]
    return found


def _filled_batch(decoder: LeanDecoder, context_ids: list[int], room: int, batch: int) -> StaticCache:
    """A cache in which `batch` sequences have read `context_ids`, with room for `room` more tokens."""
    cache = decoder.new_cache(len(context_ids) + room, batch)
    decoder.read_prompt(decoder.known(context_ids), cache, 0)
    for buffer in (*cache.keys, *cache.values):
        buffer[1:] = buffer[:1]
    cache.lengths = [len(context_ids)] * batch
    return cache


def _timed_batch(decoder: LeanDecoder, cache: StaticCache, batch: int, fed: list[int]) -> Callable[[], float]:
    ids_BT, rows = _ids(decoder, fed).repeat(batch, 1), cache.rows(0, batch)
    lengths = list(rows.lengths)
    return _timed(lambda: decoder.forward_rows(ids_BT, rows).argmax(-1).tolist(), lambda: rows.rollback_rows(lengths))


def interleaved(steps: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """What every step says that it took, `repeats` times in changing order, after one warm-up of each."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for i in range(repeats):
        for name in order_of(list(steps), i):
            seconds[name].append(steps[name]())
    return seconds


def _ids(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    return torch.tensor(decoder.known(ids), device=decoder.device)


def _filled(decoder: Decoder, prefix: list[int], room: int) -> Cache:
    """A cache that has read `prefix`, with room for `room` more tokens."""
    cache = decoder.new_cache(len(prefix) + room)
    if prefix:
        decoder.prefill(_ids(decoder, prefix), cache)
    return cache


def _timed_forward(decoder: Decoder, cache: Cache, fed: list[int]) -> Callable[[], float]:
    """A function that times one forward over `fed`, with its choice read back as in a real round."""
    fed_T, length = _ids(decoder, fed), cache.length
    return _timed(lambda: decoder.forward(fed_T, cache).argmax(-1).tolist(), lambda: cache.rollback(length))


def _timed_round(
    target: Decoder, proposer: Proposer | None, committed: list[int], k: int, sampling: Sampling
) -> Callable[[], float]:
    """A function that times one whole round after `committed`, all but the last of which the proposer has read, as
    `generate` runs it."""
    cache = _filled(target, committed[:-1], k + 2)
    generator = None if sampling.greedy else torch.Generator(target.device).manual_seed(0)
    return _timed(
        lambda: one_round(target, cache, committed, proposer, k, sampling, generator),
        lambda: cache.rollback(len(committed) - 1),
    )


def _timed_draft(proposer: Proposer, prefix: list[int], fed: list[int], k: int) -> dict[str, Callable[[], float]]:
    """Functions that time one step of a draft model after `prefix`: after whatever ran before ("draft"), and after a
    step of its own ("further draft"), when a small draft lies in the cache. Of a lookup both are k tokens, shared out.
    """
    if not isinstance(proposer, ModelProposer):
        propose = _timed(lambda: proposer.propose([*prefix, *fed], k, GREEDY, None), lambda: None)
        return dict.fromkeys(("draft", "further draft"), lambda: propose() / k)
    cache = _filled(proposer.decoder, prefix, 1)
    step = _timed_forward(proposer.decoder, cache, fed[:1])

    def further() -> float:
        step()
        return step()

    return {"draft": step, "further draft": further}


def _timed(run: Callable[[], object], undo: Callable[[], object]) -> Callable[[], float]:
    """A function that says how many seconds `run` took, and undoes it for the next time."""

    def step() -> float:
        started = time.perf_counter()
        run()
        seconds = time.perf_counter() - started
        undo()
        return seconds

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
