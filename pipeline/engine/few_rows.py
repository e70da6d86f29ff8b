"""Linear layers on the C++ kernels of kernels/few_rows.cpp.

Legend: M rows (tokens), N output channels, K input channels, G groups of K, W words of 4 codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from pipeline.engine import native
from pipeline.engine.linear import FullLinear, Int8Linear, PackedWeight

BLOCK = 64  # codes that the kernels for codes read at once
INPUT_MULTIPLE = 16  # weights that bf16_linear reads at once


def pack_nibbles(codes_NK: torch.Tensor) -> torch.Tensor:
    """4-bit codes -> int16 [N, K / 4]: of each 64 codes, nibble j of word i is code 16 j + i."""
    N, K = codes_NK.shape
    words = torch.zeros(N, K // BLOCK, 16, dtype=torch.int16)
    for j, part in enumerate(codes_NK.view(N, K // BLOCK, 4, 16).to(torch.int16).unbind(2)):
        words |= part << 4 * j
    return words.view(N, K // 4)


def unpack_nibbles(words_NW: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_nibbles`: uint8 [N, K]."""
    N = len(words_NW)
    blocks = words_NW.view(N, -1, 16)
    return torch.stack([(blocks >> 4 * j & 15).to(torch.uint8) for j in range(4)], 2).view(N, -1)


class FewRowsLinear(FullLinear):
    """A bfloat16 weight_NK read once for all rows, with products and sums in float32."""

    def native(self, x_MK: torch.Tensor) -> torch.Tensor:
        y_MN: torch.Tensor = torch.ops.few_rows.bf16_linear(x_MK, self.weight)
        return y_MN


class FewRowsInt8Linear(Int8Linear):
    """8-bit codes read once for all rows; x in 16-bit fixed point, one step for each 64 of it."""

    def native(self, x_MK: torch.Tensor) -> torch.Tensor:
        y_MN: torch.Tensor = torch.ops.few_rows.int8_linear(x_MK, self.codes_NK, self.scale_N)
        return y_MN


class FewRowsInt4Linear(PackedWeight):
    """4-bit codes in contiguous groups; w = (code - zero) * scale without rounding scale or zero.

    x is taken in 16-bit fixed point, one step (the group's largest value / 32767) a group.
    """

    codes_NW: torch.Tensor
    scales_NG: torch.Tensor
    zeros_NG: torch.Tensor
    output_dims: ClassVar[Mapping[str, int]] = {"codes_NW": 0, "scales_NG": 0, "zeros_NG": 0}

    def __init__(
        self, codes_NK: torch.Tensor, scales_NG: torch.Tensor, zeros_NG: torch.Tensor, bias_N: torch.Tensor | None
    ) -> None:
        super().__init__(codes_NK.shape[0], codes_NK.shape[1], bias_N)
        self.group_size = codes_NK.shape[1] // scales_NG.shape[1]
        self.register_buffer("codes_NW", pack_nibbles(codes_NK))
        self.register_buffer("scales_NG", scales_NG.to(torch.float16).contiguous())
        self.register_buffer("zeros_NG", zeros_NG.to(torch.uint8).contiguous())

    def native(self, x_MK: torch.Tensor) -> torch.Tensor:
        y_MN: torch.Tensor = torch.ops.few_rows.int4_linear(x_MK, self.codes_NW, self.scales_NG, self.zeros_NG)
        return y_MN

    def tile(self, start: int, stop: int) -> torch.Tensor:
        codes_NGg = unpack_nibbles(self.codes_NW[start:stop]).view(stop - start, -1, self.group_size)
        zeros_NG1, scales_NG1 = (t[start:stop, :, None].float() for t in (self.zeros_NG, self.scales_NG))
        return ((codes_NGg.float() - zeros_NG1) * scales_NG1).flatten(1)


def takes_full(K: int, dtype: torch.dtype, device: str) -> bool:
    """Whether a weight of K columns can be a FewRowsLinear here."""
    return device == "cpu" and dtype == torch.bfloat16 and K % INPUT_MULTIPLE == 0 and native.refusal() is None


def takes_int8(K: int, dtype: torch.dtype, device: str) -> bool:
    """Whether a head of K columns can be a FewRowsInt8Linear here."""
    floats = dtype in (torch.bfloat16, torch.float32)
    return device == "cpu" and floats and K % BLOCK == 0 and native.refusal() is None


def takes_int4(
    bits: int,
    K: int,
    group_size: int,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    dtype: torch.dtype,
    device: str,
) -> bool:
    """Whether codes can be a FewRowsInt4Linear here: bytes as zeros, float16 scales, groups of 64s that fill a row."""
    fits = bits == 4 and K % group_size == 0 and group_size % BLOCK == 0
    whole = not zeros.is_floating_point() or bool((zeros == zeros.round()).all() and (zeros >= 0).all())
    floats = dtype in (torch.bfloat16, torch.float32)
    halves = bool((scales.to(torch.float16).float() == scales.float()).all())
    return device == "cpu" and fits and whole and floats and halves and native.refusal() is None
