"""A causal language model as the generate loop sees it: new tokens in, logits out, a cache that rolls back.

Legend: T tokens, V vocabulary. Batch is 1.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipeline.engine.cache import ContextFull
from pipeline.engine.linear import Int8Embedding

if TYPE_CHECKING:
    from pipeline.engine.hf_cache import Cache


class Decoder:
    """Wraps a transformers causal LM whose linear layers may be ours (engine `hf`)."""

    engine = "hf"
    engine_reason: str | None = None  # why not `lean`

    def __init__(self, module: nn.Module, max_positions: int) -> None:
        self.module = module.eval().requires_grad_(False)
        self.max_positions = max_positions
        self.config: Any = module.config
        embedding: Any = module.get_input_embeddings()  # type: ignore[operator]
        table: torch.Tensor = embedding.codes if isinstance(embedding, Int8Embedding) else embedding.weight
        self.device: torch.device = table.device
        self.dtype: torch.dtype = embedding.dtype if isinstance(embedding, Int8Embedding) else table.dtype
        self.vocab_size: int = embedding.num_embeddings
        self.activations = self.dtype
        self.vocab_ids_U: torch.Tensor | None = None  # the ids of the logits' columns, where the head is cut down to U

    def new_cache(self, capacity: int) -> Cache:
        """An empty cache for `capacity` tokens. Raises ContextFull when the model's context is shorter."""
        from pipeline.engine.hf_cache import Cache

        self.refuse_capacity(capacity)
        return Cache(self.config.get_text_config().num_hidden_layers, capacity)

    def known(self, ids: list[int]) -> list[int]:
        """`ids` with any other in the place of those beyond this table (the padding of a larger vocabulary): they have
        no embedding here, and a draft loses some acceptance by it, nothing else."""
        return [i if i < self.vocab_size else 0 for i in ids]

    def refuse_capacity(self, capacity: int) -> None:
        if capacity > self.max_positions:
            raise ContextFull(
                f"{capacity} tokens do not fit in the model's context of {self.max_positions}; "
                f"shorten the prompt or the answer"
            )

    @torch.inference_mode()
    def forward(self, ids_T: torch.Tensor, cache: Cache, last_only: bool = False) -> torch.Tensor:
        """Append T tokens at `cache.length`; returns logits_TV (logits_1V with `last_only`).

        Raises ContextFull, with the cache unchanged, when they do not fit.
        """
        if cache.length + len(ids_T) > cache.capacity:
            raise ContextFull(f"{cache.length} + {len(ids_T)} tokens do not fit in a cache of {cache.capacity}")
        out = self.module(
            input_ids=ids_T[None],
            past_key_values=cache.as_transformers,
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
        )
        logits_TV: torch.Tensor = out.logits[0]
        self.activations = logits_TV.dtype
        return logits_TV

    def prefill(self, ids_T: torch.Tensor, cache: Cache) -> torch.Tensor:
        """`forward` over a prompt; returns logits_1V. The engine `lean` may round more here than in decoding."""
        return self.forward(ids_T, cache, last_only=True)

    @property
    def made(self) -> int:
        """Grows when a forward was compiled, so that its time says nothing."""
        return 0

    def describe(self) -> dict[str, Any]:
        """What really runs, read back from the loaded objects."""
        linears = [m for m in self.module.modules() if isinstance(m, nn.Linear) or hasattr(m, "kernel")]
        kernels = Counter(str(getattr(m, "kernel", type(m).__name__)) for m in linears)
        return {
            "engine": self.engine,
            "engine_reason": self.engine_reason,
            "architecture": type(self.module).__name__,
            "weights_dtype": str(self.dtype).removeprefix("torch."),
            "activations_dtype": str(self.activations).removeprefix("torch."),
            "kernels": dict(sorted(kernels.items())),
            "threads": torch.get_num_threads(),
            "device": str(self.device),
        }

    def cache_bytes_per_token(self) -> int:
        """Bytes that one position takes in all layers, measured on a one-token cache."""
        cache = self.new_cache(1)
        self.forward(torch.zeros(1, dtype=torch.long, device=self.device), cache)
        return cache.nbytes
