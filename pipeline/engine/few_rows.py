"""Linear layers on the C++ kernels of kernels/few_rows.cpp and, from many rows on, kernels/many_rows.cpp.

Legend: M rows (tokens), N output channels, K input channels, G groups of K, P panels of L output channels (the last one
filled up with zeros): the kernels for codes make L outputs at once, as many as floats fit in the CPU's vectors.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from pipeline.engine import native
from pipeline.engine.linear import CLEAR_WIN, FullLinear, Int8Linear, PackedWeight, shortest_s

WORD = 8  # columns of codes that a kernel reads at once
BLOCK = 64  # columns of x with a step of their own beside 8-bit codes
INPUT_MULTIPLE = 32  # weights that bf16_linear reads at once with the longest vectors
LARGEST_GROUP = 4096  # its sum is an integer of 32 bits
MANY_ROWS = 32  # of x beside 4-bit codes: from here on unpacking them once for all rows is the faster way
TIMED_MNK = 256, 576, 1536  # the product that chooses between many_rows and torch's GEMM
PROMPT_ROWS = (32, 64, 128, 256)  # of a prompt, at which bfloat16 products are tried


@functools.cache
def lanes() -> int:
    """Outputs of a panel on this CPU, L."""
    assert native.refusal() is None
    return int(torch.ops.few_rows.lanes())


def panels(t_N: torch.Tensor) -> torch.Tensor:
    """[N, ...] -> [P, L, ...]"""
    short = -len(t_N) % lanes()
    filled = torch.cat([t_N, t_N.new_zeros(short, *t_N.shape[1:])]) if short else t_N
    return filled.view(-1, lanes(), *t_N.shape[1:])


def pack_nibbles(codes_NK: torch.Tensor) -> torch.Tensor:
    """4-bit codes -> int16 [P, K L / 4]: of 8 columns, nibble j of word 2 r + h is column 2 j + h of output r."""
    PLKjh = panels(codes_NK).view(-1, lanes(), codes_NK.shape[1] // WORD, 4, 2)
    words = torch.zeros(len(PLKjh), PLKjh.shape[2], lanes(), 2, dtype=torch.int16)
    for j in range(4):
        words |= PLKjh[:, :, :, j].transpose(1, 2).to(torch.int16) << 4 * j
    return words.view(len(words), -1)


def unpack_nibbles(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_nibbles`: uint8 [P L, K]."""
    PKrh = words.view(len(words), -1, lanes(), 2)
    PKrjh = torch.stack([(PKrh >> 4 * j & 15).to(torch.uint8) for j in range(4)], 3)
    return PKrjh.transpose(1, 2).reshape(len(words) * lanes(), -1)


class FewRowsLinear(FullLinear):
    """A bfloat16 weight_NK read once for all rows, with products and sums in float32."""

    @property
    def kernel_tensors(self) -> tuple[torch.Tensor, None, None]:
        return self.weight, None, None

    def native(self, x_MK: torch.Tensor) -> torch.Tensor:
        y_MN: torch.Tensor = torch.ops.few_rows.bf16_linear(x_MK, self.weight)
        return y_MN

    @property
    def dense_by(self) -> str:
        return ", many_rows" if beats_torch() else ""

    def dense(self, x_MK: torch.Tensor) -> torch.Tensor:
        return _many_rows(x_MK, self.weight) if beats_torch() else super().dense(x_MK)

    def prompt_rows(self, x_MK: torch.Tensor) -> torch.Tensor:
        """With x and y rounded to bfloat16 where this CPU multiplies that clearly faster."""
        fewest = bfloat16_from_rows()
        if fewest is None or len(x_MK) < fewest:
            return self.rows(x_MK)
        y_MN = super().native(x_MK)
        return y_MN if self.bias is None else y_MN + self.bias.to(y_MN.dtype)

    @property
    def kernel(self) -> str:
        fewest = bfloat16_from_rows()
        return super().kernel + ("" if fewest is None else f", prompts in bfloat16 from {fewest} rows")


class FewRowsInt8Linear(Int8Linear):
    """8-bit codes read once for all rows; x in 16-bit fixed point, one step for each 64 of it."""

    # codes [P, L K]: of 2 columns, all outputs of the panel; scale [P, L]

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        super().__init__(weight_NK, bias_N)
        codes_PLKh = panels(self.codes).view(-1, lanes(), self.in_features // 2, 2)
        self.codes = codes_PLKh.transpose(1, 2).reshape(len(codes_PLKh), -1)
        self.scale = panels(self.scale)

    def native(self, x_MK: torch.Tensor) -> torch.Tensor:
        y_MN: torch.Tensor = torch.ops.few_rows.int8_linear(x_MK, self.codes, self.scale, self.out_features)
        return y_MN

    def tile(self, start: int, stop: int) -> torch.Tensor:
        part = slice(start // lanes(), -(-stop // lanes()))
        codes_PLKh, scale_PL = _by_output(self.codes[part]), self.scale[part]
        return (codes_PLKh.flatten(2).float() * scale_PL.unsqueeze(-1)).flatten(0, 1)[: stop - start]

    @staticmethod
    def lookup(codes: torch.Tensor, scale: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        p, r = ids // lanes(), ids % lanes()
        return _by_output(codes)[p, r].flatten(-2).float() * scale[p, r].unsqueeze(-1)


def _by_output(codes: torch.Tensor) -> torch.Tensor:
    """8-bit codes in panels as [P, L, K / 2, 2]: a view."""
    return codes.view(len(codes), -1, lanes(), 2).transpose(1, 2)


class FewRowsInt4Linear(PackedWeight):
    """4-bit codes in contiguous groups; w = (code - zero) * scale without rounding scale or zero.

    x is taken in 16-bit fixed point, one step (the group's largest value / 32767) a group.
    """

    codes: torch.Tensor  # [P, K L / 4] as pack_nibbles leaves them
    scales: torch.Tensor  # [P, G, L] float16
    zeros: torch.Tensor  # [P, G, L] uint8
    output_dims: ClassVar[Mapping[str, int]] = {"codes": 0, "scales": 0, "zeros": 0}

    def __init__(
        self, codes_NK: torch.Tensor, scales_NG: torch.Tensor, zeros_NG: torch.Tensor, bias_N: torch.Tensor | None
    ) -> None:
        super().__init__(codes_NK.shape[0], codes_NK.shape[1], bias_N)
        self.group_size = codes_NK.shape[1] // scales_NG.shape[1]
        self.register_buffer("codes", pack_nibbles(codes_NK))
        self.register_buffer("scales", panels(scales_NG.to(torch.float16)).transpose(1, 2).contiguous())
        self.register_buffer("zeros", panels(zeros_NG.to(torch.uint8)).transpose(1, 2).contiguous())

    @property
    def joins(self) -> bool:
        return self.out_features % lanes() == 0

    @property
    def kernel_tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.codes, self.scales, self.zeros

    def native(self, x_MK: torch.Tensor) -> torch.Tensor:
        many = len(x_MK) >= MANY_ROWS and self.group_size <= torch.ops.many_rows.depth()  # the same sums to the bit
        op = torch.ops.many_rows if many else torch.ops.few_rows
        y_MN: torch.Tensor = op.int4_linear(x_MK, self.codes, self.scales, self.zeros, self.out_features)
        return y_MN

    def tile(self, start: int, stop: int) -> torch.Tensor:
        part = slice(start // lanes(), -(-stop // lanes()))
        codes_NGg = unpack_nibbles(self.codes[part]).unflatten(1, (-1, self.group_size))
        zeros, scales = (t[part].transpose(1, 2).flatten(0, 1).float().unsqueeze(-1) for t in (self.zeros, self.scales))
        return ((codes_NGg.float() - zeros) * scales).flatten(1)[: stop - start]


def _many_rows(x_MK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    y_MN: torch.Tensor = torch.ops.many_rows.bf16_linear(x_MK, weight_NK)
    return y_MN


@functools.cache
def beats_torch() -> bool:
    """Whether many_rows multiplies a prompt by bfloat16 weights faster than torch's GEMM: measured once a machine."""
    M, N, K = TIMED_MNK
    x_MK, weight = torch.ones(M, K), nn.Parameter(torch.ones(N, K, dtype=torch.bfloat16), requires_grad=False)

    def measure() -> bool:
        ours, torchs = shortest_s([lambda x_MK: _many_rows(x_MK, weight), FullLinear(weight, None).dense], x_MK)
        return ours < torchs

    return bool(native.remembered(f"many_rows beats torch's GEMM, {M} rows of {K} to {N}", measure))


@functools.cache
def bfloat16_from_rows() -> int | None:
    """From how many rows torch's GEMM of bfloat16 by bfloat16 clearly beats many_rows: measured once a machine."""
    _, N, K = TIMED_MNK
    weight = nn.Parameter(torch.ones(N, K, dtype=torch.bfloat16), requires_grad=False)
    rounded, ours = FullLinear(weight, None), FewRowsLinear(weight, None)

    def measure() -> int | None:
        for M in PROMPT_ROWS:
            rounded_s, own_s = shortest_s([rounded.native, ours.dense], torch.ones(M, K))
            if rounded_s < CLEAR_WIN * own_s:
                return M
        return None

    found: int | None = native.remembered(f"bfloat16 products beat float32's from rows, {K} to {N}", measure)
    return found


def takes_full(K: int, dtype: torch.dtype, device: str) -> bool:
    """Whether a weight of K columns can be a FewRowsLinear here."""
    return device == "cpu" and dtype == torch.bfloat16 and K % INPUT_MULTIPLE == 0 and native.refusal() is None


def takes_int8(K: int, dtype: torch.dtype, device: str) -> bool:
    """Whether a weight of K columns can be a FewRowsInt8Linear here."""
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
    """Whether codes can be a FewRowsInt4Linear here: bytes as zeros, float16 scales, groups of 8s that fill a row."""
    fits = bits == 4 and K % group_size == 0 and group_size % WORD == 0 and group_size <= LARGEST_GROUP
    whole = not zeros.is_floating_point() or bool((zeros == zeros.round()).all() and (zeros >= 0).all())
    floats = dtype in (torch.bfloat16, torch.float32)
    halves = bool((scales.to(torch.float16).float() == scales.float()).all())
    return device == "cpu" and fits and whole and floats and halves and native.refusal() is None
