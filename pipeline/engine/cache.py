"""Key/value cache of fixed capacity, written in place and rolled back by position.

Legend: B sequences, H key/value heads, D head size.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import torch


class ContextFull(ValueError):
    """More tokens than the cache or the model's context can hold."""


class StaticCache:
    """Keys and values of B sequences, allocated once: per layer [B, H, capacity, D], beside the rotary tables of these
    positions, [capacity, D / 2]. `lengths` counts each sequence's committed positions; `length` and `rollback` serve a
    batch of one, as those of `hf_cache.Cache`. One from a `CachePool` may have more `positions` than its `capacity`.
    """

    pooled = False

    def __init__(
        self, layers: int, shape: tuple[int, int, int, int], dtype: torch.dtype, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        batch, _, self.capacity, _ = shape
        self.cos_PD, self.sin_PD = cos, sin
        self.keys = [torch.zeros(shape, dtype=dtype, device=cos.device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=cos.device) for _ in range(layers)]
        self.lengths = [0] * batch
        self.whole: StaticCache | None = None

    @property
    def length(self) -> int:
        assert len(self.lengths) == 1
        return self.lengths[0]

    @property
    def positions(self) -> int:
        return self.keys[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Of `capacity` positions."""
        return sum(t.nbytes for t in (*self.keys, *self.values)) // self.positions * self.capacity

    def rollback(self, length: int) -> None:
        """Keep the first `length` positions. The buffers stay; later writes overwrite what is beyond."""
        self.rollback_rows([length])

    def rollback_rows(self, lengths: list[int]) -> None:
        assert all(0 <= new <= old for new, old in zip(lengths, self.lengths, strict=True)), f"{lengths} {self.lengths}"
        self.lengths = list(lengths)

    def rows(self, begin: int, end: int) -> StaticCache:
        """A view of some of the sequences as a cache of its own; their new lengths are the caller's to keep."""
        some = copy.copy(self)
        some.whole = self  # the buffers of a pooled one are taken again when nobody holds it
        some.keys, some.values = [k[begin:end] for k in self.keys], [v[begin:end] for v in self.values]
        some.lengths = self.lengths[begin:end]
        return some


class CachePool:
    """Caches whose buffers are used again when nobody holds them, since compiled steps are bound to their addresses.

    `make(positions)` makes an empty one. Positions are rounded up to multiples of `STEP`: each is a shape of its own.
    """

    STEP = 256

    def __init__(self, make: Callable[[int], StaticCache], most_positions: int) -> None:
        self.make, self.most_positions = make, most_positions
        self.free: dict[int, list[StaticCache]] = {}

    def lease(self, capacity: int) -> StaticCache:
        """An empty cache of `capacity`, which the pool takes back when the last reference to it goes."""
        positions = min(-(-capacity // self.STEP) * self.STEP, self.most_positions)
        free = self.free.setdefault(positions, [])
        whole = free.pop() if free else self.make(positions)
        leased = copy.copy(whole)  # the same tensors, not views: what is known of them stays known
        leased.capacity, leased.lengths, leased.pooled = capacity, [0], True
        weakref.finalize(leased, free.append, whole).atexit = False
        return leased
