"""Tiny models and the quantized folders made of them by plain rounding, with packers written as slow loops.

Legend: N output channels, K input channels, G groups.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # autoawq's order_map: nibble i of a word holds this column


def tiny(kind: str, tie: bool = False, **changes: Any) -> Any:
    """A random causal LM: Llama, Qwen2, Mistral, Qwen3 (SHAPE) or GPT2; every bias and norm away from its default."""
    shape = {**SHAPE, **({"head_dim": 16} if kind == "Qwen3" else {}), "tie_word_embeddings": tie, **changes}
    if kind == "GPT2":
        shape = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64, **changes}
    config = getattr(transformers, f"{kind}Config")(**shape, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Edit the tensors of model.safetensors in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def pack_bits(codes: list[int], bits: int) -> list[int]:
    """Signed 32-bit words of a gapless little-endian bit stream, through one big integer."""
    stream = sum(code << (i * bits) for i, code in enumerate(codes))
    words = -(-len(codes) * bits // 32)
    unsigned = [(stream >> (32 * w)) & 0xFFFFFFFF for w in range(words)]
    return [w - 2**32 if w >= 2**31 else w for w in unsigned]


def packed_rows(codes_RC: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.tensor([pack_bits(row, bits) for row in codes_RC.tolist()], dtype=torch.int32)


@dataclass
class Rounded:
    """A weight rounded to the nearest point of its grid, and that point."""

    codes_NK: torch.Tensor
    scales_NG: torch.Tensor
    zeros_NG: torch.Tensor
    weight_NK: torch.Tensor


def rounded(weight_NK: torch.Tensor, bits: int, group_K: torch.Tensor, sym: bool) -> Rounded:
    """Min-max rounding, group by group, column by column, in float16 scales."""
    top = 2**bits - 1
    N = len(weight_NK)
    groups = int(group_K.max()) + 1
    scales_NG, zeros_NG = torch.empty(N, groups), torch.empty(N, groups)
    for g in range(groups):
        part = weight_NK[:, group_K == g]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if sym:
            high = torch.maximum(high, -low)
            low = -high
        scales_NG[:, g] = ((high - low) / top).half().float()
        zeros_NG[:, g] = (top + 1) // 2 if sym else (-low / scales_NG[:, g]).round().clamp(0, top)
    scale_NK, zero_NK = scales_NG[:, group_K], zeros_NG[:, group_K]
    codes_NK = (weight_NK / scale_NK + zero_NK).round().clamp(0, top)
    return Rounded(codes_NK.int(), scales_NG.half(), zeros_NG.int(), (codes_NK - zero_NK) * scale_NK)


def gptq_tensors(r: Rounded, bits: int, group_K: torch.Tensor, stored_minus: int) -> dict[str, torch.Tensor]:
    """auto-gptq's names; zeros stored less `stored_minus` (v1: 1, v2: 0), modulo 2^bits."""
    zeros_NG = (r.zeros_NG - stored_minus) % 2**bits
    return {
        "qweight": packed_rows(r.codes_NK, bits).t(),
        "qzeros": packed_rows(zeros_NG.t(), bits),
        "scales": r.scales_NG.t(),
        "g_idx": group_K.int(),
    }


def awq_tensors(r: Rounded) -> dict[str, torch.Tensor]:
    def packed(codes_RN: torch.Tensor) -> torch.Tensor:
        order = [8 * word + column for word in range(codes_RN.shape[1] // 8) for column in AWQ_COLUMNS]
        return packed_rows(codes_RN[:, order], 4)

    return {"qweight": packed(r.codes_NK.t()), "qzeros": packed(r.zeros_NG.t()), "scales": r.scales_NG.t()}


def compressed_tensors(r: Rounded, bits: int, sym: bool) -> dict[str, torch.Tensor]:
    tensors = {
        "weight_packed": packed_rows(r.codes_NK, bits),
        "weight_scale": r.scales_NG,
        "weight_shape": torch.tensor(r.codes_NK.shape),
    }
    return tensors if sym else {**tensors, "weight_zero_point": packed_rows(r.zeros_NG.t(), bits).t()}


def quantized(
    model: Any, folder: Path, method: str, *, bits: int = 4, group_size: int = 32, sym: bool = False, act_order=False
) -> dict[str, torch.Tensor]:
    """Save `model` with its decoder's linear layers rounded, in a format's form; and round `model` itself.

    `method`: gptq, gptq_v2, awq or compressed-tensors. Returns the expected weights by layer.
    """
    saved(model, folder)
    packed: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "lm_head" not in n}
    for i, (name, layer) in enumerate(layers.items()):
        K = layer.in_features
        group_K = torch.arange(K) // (K if group_size == -1 else group_size)
        if act_order:
            group_K = group_K[torch.randperm(K, generator=torch.Generator().manual_seed(i))]
        r = rounded(layer.weight.data, bits, group_K, sym)
        expected[name] = layer.weight.data = r.weight_NK
        if method == "awq":
            parts = awq_tensors(r)
        elif method == "compressed-tensors":
            parts = compressed_tensors(r, bits, sym)
            parts |= {"weight_g_idx": group_K.int()} if act_order else {}
        else:
            parts = gptq_tensors(r, bits, group_K, 1 if method == "gptq" else 0)
        packed |= {f"{name}.{suffix}": tensor for suffix, tensor in parts.items()}
    rewrite(folder, lambda t: ([t.pop(f"{n}.weight") for n in layers], t.update(packed)))
    edit_config(folder, lambda c: c.update(quantization_config=settings(method, bits, group_size, sym, act_order)))
    return expected


def settings(method: str, bits: int, group_size: int, sym: bool, act_order: bool) -> dict[str, Any]:
    """quantization_config as the libraries write it."""
    if method == "awq":
        return {"quant_method": "awq", "bits": bits, "group_size": group_size, "zero_point": True, "version": "gemm"}
    if method != "compressed-tensors":
        plain = {"bits": bits, "group_size": group_size, "sym": sym, "desc_act": act_order}
        return {"quant_method": "gptq", "checkpoint_format": method, **plain}
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": sym,
        "strategy": "channel" if group_size == -1 else "group",
        "group_size": None if group_size == -1 else group_size,
        "actorder": "group" if act_order else None,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": "pack-quantized"}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
