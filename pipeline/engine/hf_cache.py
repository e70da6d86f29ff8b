"""Key/value cache of fixed capacity for transformers' modules (engine `hf`), rolled back by position.

Legend: B batch (1), H key/value heads, T new tokens, S committed + new tokens, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin


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
