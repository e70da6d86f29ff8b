"""From a library's raw tensors to a public checkpoint: one safetensors file, the original's config and tokenizer.

What was not quantized keeps its bytes, dtype and name; a head tied to the embedding is stored once.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import provenance
from pipeline.checkpoint.files import TensorFiles
from pipeline.quantizers import QuantizationError, Quantized
from pipeline.quantizers.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

PACKED = ("qweight", "qzeros", "g_idx", "weight_packed", "weight_shape", "weight_zero_point")
SCALES = ("scales", "weight_scale")
COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "draft.json",
)


def write_checkpoint(quantized: Quantized, plan: Plan, model: Path, out: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files, byte for byte, to the folder `out`."""
    from safetensors.torch import save_file

    original = TensorFiles(model)
    tensors = {n: stored(n, t, plan, original) for n, t in quantized.tensors.items() if wanted(n, t, plan, original)}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise QuantizationError(f"{name}: NaN or infinity after quantization; check the model and the settings")
    save_file(dict(sorted(tensors.items())), out / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = provenance.read_json(model / "config.json")
    config["quantization_config"] = quantized.config
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for pattern in COPIED:
        for path in sorted(model.glob(pattern)):
            shutil.copyfile(path, out / path.name)


def wanted(name: str, tensor: Tensor, plan: Plan, original: TensorFiles) -> bool:
    """False for what the library added: a second copy of a tied head, and zero biases where the original has none."""
    module, _, kind = name.rpartition(".")
    if module in plan.shapes and kind != "bias":
        return True
    if name in original:
        return True
    if kind == "bias":
        assert not tensor.any(), name
    else:
        assert bool((tensor == original["model.embed_tokens.weight"].to(tensor.dtype)).all()), name
    return False


def stored(name: str, tensor: Tensor, plan: Plan, original: TensorFiles) -> Tensor:
    """The tensor in the dtype it is stored in: codes as they are, scales as the format wants, the rest as before."""
    module, _, kind = name.rpartition(".")
    if module in plan.shapes and kind in PACKED:
        return tensor.contiguous()
    if kind == "scales":
        return half_scales(tensor)
    if kind == "weight_scale":
        return tensor.to(original[f"{module}.weight"].dtype).contiguous()
    return tensor.to(original[name].dtype).contiguous()


def half_scales(scales_GN: Tensor) -> Tensor:
    """float16, which the GPTQ and AWQ formats use (11 bits), unless a scale lies outside its normal range."""
    import torch

    tiny = torch.finfo(torch.float16).tiny
    fits = bool(((scales_GN.abs() >= tiny) & (scales_GN.abs() <= torch.finfo(torch.float16).max)).all())
    return scales_GN.to(torch.float16 if fits or scales_GN.dtype == torch.float16 else torch.bfloat16).contiguous()
