"""Adapters, one a quantization library. Each turns a `Job` into a `Quantized`; none knows where files belong.

An adapter is a module with `FAMILIES` (model types whose equations it was checked with), `check(plan, method, name)`
(limits of its packing, before any work) and `quantize(job) -> Quantized`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pipeline.config import QuantizeMethod

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.quantizers.plan import Plan


class QuantizationError(ValueError):
    """The model, the settings or the calibration rows do not allow this: one line with the layer and the way out."""


@dataclass(kw_only=True)
class Job:
    """What to quantize, with what, and how. `dtype` is that of the arithmetic, not of the result.

    `probe_logits_TV` are the full-precision logits of the second half of `probe_ids`.
    """

    model: Path
    plan: Plan
    rows: list[list[int]]
    method: QuantizeMethod
    device: str
    dtype: str
    threads: int
    seed: int
    scratch: Path
    probe_ids: list[int]
    probe_logits_TV: Tensor


@dataclass(kw_only=True)
class Solved:
    """What a library reported of one module.

    `library_error`: its own number (auto_gptq and llmcompressor GPTQ: the solver's loss; AWQ: mean squared error of
    the best scale, shared by the modules that scale covers), or None. `fallback`: why this module was rounded to
    nearest though the method was asked for, or None. `unscaled`: AWQ found no layer to fold a scale into.
    """

    library_error: float | None = None
    time_s: float | None = None
    dead_columns: int = 0
    fallback: str | None = None
    unscaled: bool = False


@dataclass(kw_only=True)
class Quantized:
    """Raw tensors by name, as the library lays them out, and its `quantization_config`.

    `scales_in[module]` [K] multiplied the module's columns and `scales_out[module]` [N] divided its rows before
    rounding (AWQ folds them into neighbours): without undoing them weights cannot be compared with the original's.
    """

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    solved: dict[str, Solved]
    rows: int
    tokens: int
    versions: dict[str, str]
    scales_in: dict[str, Tensor] = field(default_factory=dict)
    scales_out: dict[str, Tensor] = field(default_factory=dict)


def adapter(backend: str) -> ModuleType:
    return importlib.import_module(f"pipeline.quantizers.{backend}")
