"""The error of each quantized module, defined alike for every backend and measured on the written file.

    error(m) = ||X_m (W' - W)^T||_F / ||X_m W^T||_F

X_m are the inputs of module m in the full-precision model over the first calibration rows, W its original weight and
W' the weight dequantized from the file with AWQ's folded scales undone: the relative error of the module's output when
everything before it is exact. `weight_error` is the same without X. `nearest_error` is the error of plain rounding to
nearest on a grid of the same bits and groups: what the method has to beat, and the proof that its library worked.

Shapes: T tokens, K in_features, N out_features, G groups a row, S group size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoint.files import TensorFiles
from pipeline.checkpoint.packed import dequantize
from pipeline.checkpoint.read import read
from pipeline.config import QuantizeMethod
from pipeline.quantizers import QuantizationError, Quantized
from pipeline.quantizers.plan import LAYER, Plan

DEFINITION = (
    "relative output error of a module on original inputs: ||X(W'-W)^T|| / ||X W^T||, W' dequantized from the file"
)


def reference(
    model: Path, plan: Plan, rows: list[list[int]], probe_ids: list[int], device: str, dtype: str
) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs X_TK of each module of the full-precision model over `rows`, and the logits_TV of the probe's second half.

    Raises QuantizationError naming the first module whose weight or input is not finite.
    """
    from transformers import AutoModelForCausalLM

    module: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), local_files_only=True)
    module.eval().to(device)
    with torch.inference_mode():
        logits_1TV = module(torch.tensor([probe_ids], device=device), use_cache=False).logits
    seen: dict[str, list[Tensor]] = {name: [] for name in plan.shapes}
    for name in plan.shapes:
        linear = module.get_submodule(name)
        if not torch.isfinite(linear.weight).all():
            raise QuantizationError(f"{name}: its weight contains NaN or infinity; check the model's file")
        linear.register_forward_pre_hook(_collector(name, seen[name]))
    with torch.inference_mode():
        for row in rows:
            module(torch.tensor([row], device=device), use_cache=False)
    return {name: torch.cat(parts) for name, parts in seen.items()}, logits_1TV[0, len(probe_ids) // 2 :].float().cpu()


def _collector(name: str, parts: list[Tensor]) -> Callable[[Any, tuple[Any, ...]], None]:
    def collect(_module: Any, args: tuple[Any, ...]) -> None:
        x_TK = args[0].detach().flatten(0, -2)
        if not bool(x_TK.isfinite().all()):
            raise QuantizationError(
                f"{name}: its calibration inputs contain NaN or infinity; check the model's weights"
            )
        parts.append(x_TK.cpu())

    return collect


def module_table(
    inputs: dict[str, Tensor], quantized: Quantized, written: Path, model: Path, method: QuantizeMethod
) -> list[dict[str, Any]]:
    """One row a module, in the model's order: errors, time, dead columns and fallbacks.

    `written` is the quantized checkpoint's folder and `model` the original's. Raises QuantizationError naming the first
    module whose error is not finite.
    """
    symmetric = method.sym if method.method == "gptq" else not method.zero_point
    original, checkpoint = TensorFiles(model), read(written)
    rows = []
    for name, x_TK in inputs.items():
        solved = quantized.solved[name]
        place = LAYER.match(name)
        assert place is not None, name
        weight_NK = original[f"{name}.weight"].float()
        difference_NK = undo_scales(name, dequantize(checkpoint.linears[name]), quantized) - weight_NK
        nearest_NK = round_to_nearest(weight_NK, method.bits, method.group_size, symmetric) - weight_NK
        output_TN = x_TK.float() @ weight_NK.T
        rows.append(
            {
                "layer": int(place["index"]),
                "module": place["module"],
                "error": _relative(name, x_TK.float() @ difference_NK.T, output_TN),
                "nearest_error": _relative(name, x_TK.float() @ nearest_NK.T, output_TN),
                "weight_error": _relative(name, difference_NK, weight_NK),
                "library_error": solved.library_error,
                "time_s": solved.time_s,
                "dead_columns": solved.dead_columns,
                "fallback": solved.fallback,
                "unscaled": solved.unscaled,
            }
        )
    return rows


def undo_scales(name: str, weight_NK: Tensor, quantized: Quantized) -> Tensor:
    """The weight as it acts in the original basis: rows times their out-scale, columns divided by their in-scale."""
    weight_NK = weight_NK.float()
    if name in quantized.scales_in:
        weight_NK = weight_NK / quantized.scales_in[name].float().flatten()
    if name in quantized.scales_out:
        weight_NK = weight_NK * quantized.scales_out[name].float().flatten()[:, None]
    return weight_NK


def round_to_nearest(weight_NK: Tensor, bits: int, group_size: int, symmetric: bool) -> Tensor:
    """Each group on the grid that its smallest and largest weight (symmetric: its largest magnitude) span."""
    w_NGS = weight_NK.unflatten(1, (-1, weight_NK.shape[1] if group_size == -1 else group_size))
    low_NG1, high_NG1 = w_NGS.amin(-1, keepdim=True).clamp(max=0), w_NGS.amax(-1, keepdim=True).clamp(min=0)
    if symmetric:
        high_NG1 = high_NG1.maximum(-low_NG1)
        low_NG1 = -high_NG1
    scale_NG1 = ((high_NG1 - low_NG1) / (2**bits - 1)).clamp(min=torch.finfo(torch.float32).tiny)
    zero_NG1 = (-low_NG1 / scale_NG1).round()
    codes_NGS = (w_NGS / scale_NG1 + zero_NG1).round().clamp(0, 2**bits - 1)
    return ((codes_NGS - zero_NG1) * scale_NG1).flatten(1)


def _relative(name: str, difference: Tensor, whole: Tensor) -> float | None:
    """None where the whole is zero: no output to be wrong about."""
    norm = whole.norm().item()
    ratio = difference.norm().item() / norm if norm else 0.0
    if not math.isfinite(ratio):
        raise QuantizationError(f"{name}: its error is not finite; check the model's weights and the settings")
    return ratio if norm else None
