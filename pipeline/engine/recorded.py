"""Steps of few tokens as recordings: on a GPU such a step is hundreds of small kernels, and starting them one by one
takes longer than running them (CUDA graphs).

A recording reads and writes the same memory whenever it is replayed. So tokens and positions are copied into buffers of
its own, its logits are copied out, and caches that nobody holds any more are used again. Legend: B sequences, T new
tokens of each, V vocabulary.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pipeline.engine.cache import StaticCache

Run = Callable[[], torch.Tensor]
Forward = Callable[[torch.Tensor, torch.Tensor, StaticCache], torch.Tensor]  # ids_BT, start_B -> logits_BTV
MAX_ROWS = 64  # B T of a recording; kernels for more run long enough to hide how they are started
MAX_TOKENS = 16  # T of a recording; more are a prompt, and every prompt is of another length
CAPACITY_STEP = 256  # positions; so that answers of different length share a cache
TOLERANCE = 0.02  # of the largest logit: kernels may choose another order of sums, not another result


def cuda_recorder(device: torch.device) -> Callable[[Run], Run]:
    """Records what runs on `device`; all recordings share their memory, for logits are copied out."""
    pool = torch.cuda.graph_pool_handle()

    def record(run: Run) -> Run:
        with torch.cuda.device(device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                run()  # libraries take their workspaces outside of the recording
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                out = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay

    return record


@dataclass
class Step:
    ids_BT: torch.Tensor
    start_B: torch.Tensor
    replay: Run


class RecordedSteps:
    """`forward` by recordings, one for each cache and shape, made when it is first asked for.

    Where one cannot be made, or gives other logits than `forward`, `refusal` says so and `forward` serves from then on.
    """

    def __init__(self, forward: Forward, record: Callable[[Run], Run]) -> None:
        self.forward, self.record = forward, record
        self.steps: dict[tuple[int, ...], Step] = {}
        self.refusal: str | None = None

    @staticmethod
    def takes(ids_BT: torch.Tensor) -> bool:
        return ids_BT.shape[1] <= MAX_TOKENS and ids_BT.numel() <= MAX_ROWS

    def __call__(self, ids_BT: torch.Tensor, cache: StaticCache) -> torch.Tensor:
        """logits_BTV; the caller counts the new positions."""
        start_B = torch.tensor(cache.lengths, device=ids_BT.device)
        if self.refusal is not None:
            return self.forward(ids_BT, start_B, cache)
        key = (cache.keys[0].data_ptr(), *ids_BT.shape)
        if key not in self.steps:
            return self._first(key, ids_BT, start_B, cache)
        step = self.steps[key]
        step.ids_BT.copy_(ids_BT)
        step.start_B.copy_(start_B)
        return step.replay().clone()

    def _first(
        self, key: tuple[int, ...], ids_BT: torch.Tensor, start_B: torch.Tensor, cache: StaticCache
    ) -> torch.Tensor:
        expected = self.forward(ids_BT, start_B, cache)
        own = copy.copy(cache)  # the recording keeps the buffers, not the handle that says whether they are free
        own.whole = None
        ids, start = ids_BT.clone(), start_B.clone()
        try:
            step = Step(ids, start, self.record(lambda: self.forward(ids, start, own)))
            off = float((step.replay() - expected).abs().max())
        except RuntimeError as e:
            self.refusal = f"steps cannot be recorded here: {' '.join(str(e).split())[:200]}"
            return expected
        if not off <= TOLERANCE * float(expected.abs().max()):
            self.refusal = (
                f"a recorded step of {ids_BT.numel()} tokens gave logits {off:.3g} away from the computed ones"
            )
            return expected
        self.steps[key] = step
        return expected


class CachePool:
    """Caches of one decoder, given out again when they are no longer held: recordings are bound to their memory."""

    def __init__(self, allocate: Callable[[int, int], StaticCache], max_positions: int) -> None:
        self.allocate, self.max_positions = allocate, max_positions
        self.free: list[StaticCache] = []

    def take(self, capacity: int, batch: int) -> StaticCache:
        """Empty, of at least `capacity` positions."""
        fitting = [c for c in self.free if len(c.lengths) == batch and c.capacity >= capacity]
        if fitting:
            cache = min(fitting, key=lambda c: c.capacity)
            self.free.remove(cache)
            for buffer in (*cache.keys, *cache.values):
                buffer.zero_()  # what is masked counts as 0 times what stands there, and that may be no number
        else:
            rounded = -(-capacity // CAPACITY_STEP) * CAPACITY_STEP
            cache = self.allocate(min(rounded, self.max_positions), batch)
        handle = copy.copy(cache)
        handle.lengths = [0] * batch
        weakref.finalize(handle, self.free.append, cache)
        return handle
