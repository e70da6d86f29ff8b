"""Key/value cache of fixed capacity, written in place and rolled back by position.

Legend: B batch (1), H key/value heads, T new tokens, S committed + new tokens, D head size.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin


class ContextFull(ValueError):
    """More tokens than the cache or the model's context can hold."""


class RollbackLayer(CacheLayerMixin):
    """One layer: buffers [B, H, capacity, D], allocated at the first write; `length` positions are committed."""

    is_sliding = False
    is_croppable = True

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        b, h, _, d = key_states.shape
        self.keys = key_states.new_zeros(b, h, self.capacity, d)
        self.values = value_states.new_zeros(b, h, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values [B, H, T, D]; returns views [B, H, S, D] of everything committed and new."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        end = self.length + key_states.shape[-2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity


class Cache:
    """The cache of one sequence. `length` counts committed positions; `rollback` forgets the later ones."""

    def __init__(self, layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.layers = [RollbackLayer(capacity) for _ in range(layers)]
        self.as_transformers = TransformersCache(layers=list(self.layers))

    @property
    def length(self) -> int:
        return self.layers[0].length

    @property
    def nbytes(self) -> int:
        """Bytes of the allocated buffers; 0 before the first write."""
        return sum(t.nbytes for layer in self.layers for t in (layer.keys, layer.values) if t is not None)

    def rollback(self, length: int) -> None:
        """Keep the first `length` positions. The buffers stay; later writes overwrite what is beyond."""
        assert 0 <= length <= self.length, f"rollback to {length} of {self.length}"
        for layer in self.layers:
            layer.length = length


class StaticCache:
    """Keys and values of B sequences, allocated once: per layer [B, H, capacity, D], beside the rotary tables of these
    positions, [capacity, D / 2]. `lengths` counts each sequence's committed positions; `length` and `rollback` serve a
    batch of one, as those of `Cache`.
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
