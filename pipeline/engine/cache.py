"""Key/value cache of fixed capacity, written in place and rolled back by position.

Legend: B sequences, H key/value heads, D head size.
"""

from __future__ import annotations

import copy

import torch


class ContextFull(ValueError):
    """More tokens than the cache or the model's context can hold."""


class StaticCache:
    """Keys and values of B sequences, allocated once: per layer [B, H, capacity, D], beside the rotary tables of these
    positions, [capacity, D / 2]. `lengths` counts each sequence's committed positions; `length` and `rollback` serve a
    batch of one, as those of `hf_cache.Cache`.
    """

    def __init__(
        self, layers: int, shape: tuple[int, int, int, int], dtype: torch.dtype, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        batch, _, self.capacity, _ = shape
        self.cos_PD, self.sin_PD = cos, sin
        self.keys = [torch.zeros(shape, dtype=dtype, device=cos.device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=cos.device) for _ in range(layers)]
        self.lengths = [0] * batch

    @property
    def length(self) -> int:
        assert len(self.lengths) == 1
        return self.lengths[0]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def rollback(self, length: int) -> None:
        """Keep the first `length` positions. The buffers stay; later writes overwrite what is beyond."""
        self.rollback_rows([length])

    def rollback_rows(self, lengths: list[int]) -> None:
        assert all(0 <= new <= old for new, old in zip(lengths, self.lengths, strict=True)), f"{lengths} {self.lengths}"
        self.lengths = list(lengths)

    def rows(self, begin: int, end: int) -> StaticCache:
        """A view of some of the sequences as a cache of its own; their new lengths are the caller's to keep."""
        some = copy.copy(self)
        some.keys, some.values = [k[begin:end] for k in self.keys], [v[begin:end] for v in self.values]
        some.lengths = self.lengths[begin:end]
        return some
