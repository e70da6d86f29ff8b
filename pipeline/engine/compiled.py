"""Decoding steps as compiled graphs, for devices that run a kernel in less time than Python takes to start it.

`torch.compile` traces a step, from token ids to logits, for one token and once more for any other number of them; its
mode `reduce-overhead` records what that starts on a GPU as one CUDA graph for each number of tokens. A shape is taken
only when its logits are those of the step that it was made from; when anything fails, steps are started kernel by
kernel and `describe` says why. Legend: B sequences, T tokens of each, V vocabulary.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
from torch import nn

from pipeline.engine import native
from pipeline.engine.cache import StaticCache

MOST_TOKENS = 32  # of one forward: more are bound by arithmetic, not by starting kernels
RUNS = 3  # the first one compiles, the second records the CUDA graph, the third replays it
# largest difference between logits, of the largest one: fused kernels round between operations less often
AGREEMENT = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
GRAPHS = 64  # that one function may be compiled to: target and draft, lengths of the cache, numbers of tokens

Step = Callable[[torch.Tensor, torch.Tensor, StaticCache, bool], torch.Tensor]


def refusal(device: torch.device) -> str | None:
    """Why nothing is compiled for this device; None when it is tried."""
    import torch._dynamo
    from torch.utils._triton import has_triton

    if torch._dynamo.config.disable:
        return "TORCH_COMPILE_DISABLE is set"
    if device.type == "cpu":
        return native.refusal()
    return None if has_triton() else "no Triton for this GPU"


def graphs_compiled() -> int:
    """By torch.compile, in this process so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else utils.counters["stats"]["unique_graphs"]


class CompiledSteps:
    """`step(ids_BT, start_B, cache, last_only)` -> logits_BTV (logits_B1V with `last_only`), compiled.

    Takes caches of a `cache.CachePool` only, filled by `cache_from`.
    """

    def __init__(self, step: Step, module: nn.Module) -> None:
        self.step = step
        self.device = next(module.parameters()).device
        self.reason = refusal(self.device)
        self.uses: set[tuple[int, int, bool]] = set()  # tokens, address of the cache, last_only
        self.worst = 0.0  # difference of compiled logits, of the largest one
        if self.reason is None:
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(native.folders()[-1] / "inductor"))
            torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
            _fix(*module.parameters(), *module.buffers())
            self.compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)

    def cache_from(self, make: Callable[[int], StaticCache]) -> Callable[[int], StaticCache]:
        """`make` for a pool: with buffers whose addresses are known not to change."""

        def fixed(positions: int) -> StaticCache:
            with torch.inference_mode(False):  # a tensor made inside and one made outside are two graphs
                cache = make(positions)
            if self.reason is None:
                _fix(*cache.keys, *cache.values, cache.cos_PD, cache.sin_PD)
            return cache

        return fixed

    def takes(self, tokens: int, cache: StaticCache) -> bool:
        return self.reason is None and tokens <= MOST_TOKENS and cache.pooled

    def __call__(
        self, ids_BT: torch.Tensor, start_B: torch.Tensor, cache: StaticCache, last_only: bool
    ) -> torch.Tensor:
        use = (ids_BT.shape[1], cache.keys[0].data_ptr(), last_only)
        if use not in self.uses:
            return self._made(use, ids_BT, start_B, cache, last_only)
        return self._run(ids_BT, start_B, cache, last_only)

    def _run(self, ids_BT: torch.Tensor, start_B: torch.Tensor, cache: StaticCache, last_only: bool) -> torch.Tensor:
        logits_BTV: torch.Tensor = self.compiled(ids_BT, start_B, cache, last_only)
        return logits_BTV.clone()  # a CUDA graph writes the next step's to the same place

    def _made(
        self,
        use: tuple[int, int, bool],
        ids_BT: torch.Tensor,
        start_B: torch.Tensor,
        cache: StaticCache,
        last_only: bool,
    ) -> torch.Tensor:
        """The step as it is, after which the compiled one is known to agree with it, or `reason` why it is not taken.
        Each run writes the same keys and values to the same positions."""
        expected_BTV = self.step(ids_BT, start_B, cache, last_only)
        try:
            for _ in range(RUNS):
                got_BTV = self._run(ids_BT, start_B, cache, last_only)
        except torch.OutOfMemoryError:
            raise
        except Exception as e:  # a compiler can fail in as many ways as there are machines
            self.reason = f"compiling failed ({type(e).__name__}: {str(e).strip().splitlines()[0][:200]})"
            return self.step(ids_BT, start_B, cache, last_only)
        off = float((got_BTV - expected_BTV).abs().max() / expected_BTV.abs().max())
        if not off <= AGREEMENT[expected_BTV.dtype]:
            self.reason = f"the compiled step's logits for {use[0]} tokens are {off:.1g} of the largest off"
            return self.step(ids_BT, start_B, cache, last_only)
        self.worst = max(self.worst, off)
        self.uses.add(use)
        return expected_BTV

    @property
    def made(self) -> int:
        """Grows whenever something is compiled or recorded: no time is kept of such a step."""
        return len(self.uses) + graphs_compiled()

    def describe(self) -> str:
        if self.reason is not None:
            return f"kernel by kernel: {self.reason}"
        counts = ", ".join(str(tokens) for tokens in sorted({tokens for tokens, _, _ in self.uses})) or "none yet"
        recorded = self.device.type == "cuda" and not _skips()
        return f"torch.compile{', CUDA graphs' if recorded else ''} (tokens: {counts}; logits within {self.worst:.1g})"


def _fix(*tensors: torch.Tensor) -> None:
    """A CUDA graph reads them where they are; others it copies before every replay."""
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor)


def _skips() -> int:
    """Graphs that could not be recorded."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else utils.counters["inductor"]["cudagraph_skips"]
