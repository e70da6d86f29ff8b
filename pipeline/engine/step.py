"""What a decoding step does between its linear layers, in torch: on a GPU, and as the reference for kernels/step.cpp,
which has the same functions (torch.ops.step) on a CPU.

Legend: B sequences, T tokens of each, M = B T rows, D features of a row or of a head, H query heads, G key/value heads,
S positions of the cache, P positions of the rotary tables.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from pipeline.engine import native


def operations(device: torch.device, head_dim: int, widths: tuple[int, ...], cache: torch.dtype) -> Any:
    """The kernels where they apply (`widths`: of the rows of norms and gates), else the functions of this file."""
    if device.type != "cpu":
        return STATIC
    sizes = head_dim % 16 == 0 and all(w % 16 == 0 for w in widths) and cache in (torch.float32, torch.bfloat16)
    return torch.ops.step if sizes and native.refusal() is None else TORCH


def rms_norm(x_MD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    wide_MD = x_MD.float()
    return weight_D * (wide_MD * torch.rsqrt(wide_MD.pow(2).mean(-1, keepdim=True) + eps)).to(x_MD.dtype)


def add_norm(x_MD: torch.Tensor, y_MD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """x += y in place; returns x's root-mean-square norm (arXiv:1910.07467) times the weight."""
    return rms_norm(x_MD.add_(y_MD), weight_D, eps)


def silu_mul(gate_up_M2D: torch.Tensor) -> torch.Tensor:
    gate_MD, up_MD = gate_up_M2D.chunk(2, -1)
    return F.silu(gate_MD) * up_MD


def attention(
    qkv: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    eps: float,
    cos_PD: torch.Tensor,
    sin_PD: torch.Tensor,
    start_B: torch.Tensor,
    keys_BGSD: torch.Tensor,
    values_BGSD: torch.Tensor,
    window: int,
) -> torch.Tensor:
    """Causal attention of M new rows of q, k, v side by side, [M, (H + 2 G) D], after writing their keys and values.

    Row b of the cache takes them at `start_B[b]` and following; `window` > 0 looks back so many positions only. Tables
    have D / 2 columns. Returns [M, H D]. Shapes are static: all S positions under a mask.
    """
    B, G, S, D = keys_BGSD.shape
    T = len(qkv) // B
    H = qkv.shape[1] // D - 2 * G
    q_BTHD, k_BTGD, v_BTGD = qkv.view(B, T, H + 2 * G, D).split([H, G, G], 2)
    if q_norm_D is not None and k_norm_D is not None:
        q_BTHD, k_BTGD = rms_norm(q_BTHD, q_norm_D, eps), rms_norm(k_BTGD, k_norm_D, eps)
    position_BT = start_B[:, None] + torch.arange(T, device=qkv.device)
    cos, sin = cos_PD[position_BT][:, :, None].to(qkv.dtype), sin_PD[position_BT][:, :, None].to(qkv.dtype)
    q_BTHD, k_BTGD = rotate(q_BTHD, cos, sin), rotate(k_BTGD, cos, sin)
    row_B1 = torch.arange(B, device=qkv.device)[:, None]
    keys_BGSD[row_B1, :, position_BT] = k_BTGD.to(keys_BGSD.dtype)
    values_BGSD[row_B1, :, position_BT] = v_BTGD.to(values_BGSD.dtype)
    position_S = torch.arange(S, device=qkv.device)
    seen_BTS = position_S <= position_BT[..., None]
    if window:
        seen_BTS &= position_S > position_BT[..., None] - window
    mixed_BHTD = F.scaled_dot_product_attention(
        q_BTHD.transpose(1, 2),
        keys_BGSD.to(qkv.dtype),
        values_BGSD.to(qkv.dtype),
        attn_mask=seen_BTS[:, None],
        enable_gqa=H != G,
    )
    return mixed_BHTD.transpose(1, 2).reshape(B * T, H * D)


def attention_to_what_is_there(
    qkv: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    eps: float,
    cos_PD: torch.Tensor,
    sin_PD: torch.Tensor,
    start_B: torch.Tensor,
    keys_BGSD: torch.Tensor,
    values_BGSD: torch.Tensor,
    window: int,
) -> torch.Tensor:
    """`attention` over the written positions only: what is free in a cache does not decide how sums are rounded."""
    S = int(start_B.max()) + len(qkv) // len(keys_BGSD)
    written = keys_BGSD[:, :, :S], values_BGSD[:, :, :S]
    return attention(qkv, q_norm_D, k_norm_D, eps, cos_PD, sin_PD, start_B, *written, window)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding (arXiv:2104.09864) of pairs (d, d + D / 2), as transformers' Llama."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


TORCH = SimpleNamespace(add_norm=add_norm, silu_mul=silu_mul, attention=attention_to_what_is_there)
STATIC = SimpleNamespace(add_norm=add_norm, silu_mul=silu_mul, attention=attention)  # for graphs, which know no values
