"""4-bit linear layers on torch's own int4 kernels, or why a layer cannot have them.

Legend: M rows (tokens), N output channels, K input channels, G groups of K, B rows of a block of torch's CPU layout,
n blocks, b = B / 2.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F

from pipeline.engine.few_rows import FewRowsInt4Linear, takes_int4
from pipeline.engine.linear import DequantLinear, PackedWeight

INT4_GROUPS = (256, 128, 64, 32)  # groups torch's int4 kernels take
INT4_ZERO = 8  # their codes count from here
ROW_BLOCK = 64  # N is padded to this: a multiple of every kernel's block


class Int4Linear(PackedWeight):
    """4-bit codes in torch's own int4 kernel; w = (code - 8) * scale + (8 - zero) * scale.

    Takes what `int4_refusal` has nothing against, contiguous groups only (see `quantized_linear` for act-order). A
    group the kernel lacks is split into equal smaller ones with the same scale, N is padded with rows of zeros, and
    scale and offset are rounded to `dtype`: the only differences from the dequantized weight.
    """

    packed: torch.Tensor
    scales_and_zeros: torch.Tensor
    output_dims: ClassVar[Mapping[str, int]] = {"packed": 0, "scales_and_zeros": 1}

    def __init__(
        self,
        codes_NK: torch.Tensor,
        scales_NG: torch.Tensor,
        zeros_NG: torch.Tensor,
        group_size: int,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        N, K = codes_NK.shape
        refusal = int4_refusal(4, K, group_size, dtype, device)
        kernel_size = kernel_group(K, group_size)
        assert refusal is None and kernel_size is not None, refusal
        super().__init__(N, K, bias)
        self.group_size = kernel_size
        group_of_part = torch.arange(K // self.group_size) * self.group_size // group_size
        scales_GN, zeros_GN = (t.float()[:, group_of_part].t() for t in (scales_NG, zeros_NG))
        affine_GN2 = torch.stack([scales_GN, (INT4_ZERO - zeros_GN) * scales_GN], -1).to(dtype)
        spare = -N % ROW_BLOCK
        affine_GN2 = F.pad(affine_GN2, (0, 0, 0, spare))
        codes_NK = F.pad(codes_NK, (0, 0, 0, spare))
        self.register_buffer("scales_and_zeros", affine_GN2.contiguous().to(device))
        self.register_buffer("packed", _packed_int4(codes_NK, device))

    def native(self, x_MK: torch.Tensor) -> torch.Tensor:
        aten = torch.ops.aten
        op = aten._weight_int4pack_mm_for_cpu if x_MK.device.type == "cpu" else aten._weight_int4pack_mm
        x_MK = x_MK.contiguous()
        y_MN: torch.Tensor = op(
            x_MK.to(self.scales_and_zeros.dtype), self.packed, self.group_size, self.scales_and_zeros
        )
        return y_MN[:, : self.out_features].to(x_MK.dtype)

    @property
    def joins(self) -> bool:
        return self.out_features % ROW_BLOCK == 0

    @property
    def tiled(self) -> bool:
        return self.packed.device.type == "cpu" and cpu_block_rows() is not None

    def tile(self, start: int, stop: int) -> torch.Tensor:
        """Reads the CPU layout back: a block of B rows is, for each k, B/2 bytes of (row, row + B/2)."""
        B, K, g = cpu_block_rows(), self.in_features, self.group_size
        assert B is not None, "see `tiled`"
        end = -(-stop // B) * B
        bytes_nbK = self.packed.view(-1, K, B // 2)[start // B : end // B].transpose(1, 2).contiguous()
        weight_NK = torch.empty(end - start, K)
        halves_nbK = weight_NK.view(-1, 2, B // 2, K).unbind(1)
        halves_nbK[0].copy_(bytes_nbK & 15)
        halves_nbK[1].copy_(bytes_nbK >> 4)
        scale_NG, offset_NG = self.scales_and_zeros[:, start:end].float().transpose(0, 1).unbind(-1)
        offset_NG = offset_NG - INT4_ZERO * scale_NG
        weight_NK.view(-1, K // g, g).mul_(scale_NG[..., None]).add_(offset_NG[..., None])
        return weight_NK[: stop - start]


def quantized_linear(
    codes_NK: torch.Tensor,
    scales_NG: torch.Tensor,
    zeros_NG: torch.Tensor,
    group_index_K: torch.Tensor | None,
    bits: int,
    group_size: int,
    bias_N: torch.Tensor | None,
    dtype: torch.dtype,
    device: str,
    few_rows: bool,
) -> PackedWeight:
    """A layer that computes w = (code - zero) * scale up to rounding: by a kernel where there is one, else dense.

    With `few_rows` FewRowsInt4Linear where it takes the layer, otherwise torch's Int4Linear, otherwise DequantLinear.
    Act-order is undone by permuting columns into contiguous groups, and the input with them on each forward.
    """
    K = codes_NK.shape[1]
    few_rows = few_rows and takes_int4(bits, K, group_size, scales_NG, zeros_NG, dtype, device)
    refusal = None if few_rows else int4_refusal(bits, K, group_size, dtype, device)
    bias_N = bias_N.to(device, dtype) if bias_N is not None else None
    if refusal is not None:
        index_K = group_index_K if group_index_K is not None else torch.arange(K) // group_size
        codes_NK, scales_NG, zeros_NG, index_K = (t.to(device) for t in (codes_NK, scales_NG, zeros_NG, index_K))
        return DequantLinear(codes_NK, scales_NG, zeros_NG, index_K, bits, bias_N, refusal)
    order_K = None
    if group_index_K is not None:
        order_K = torch.argsort(group_index_K, stable=True)
        codes_NK = codes_NK[:, order_K]
    linear: PackedWeight
    if few_rows:
        linear = FewRowsInt4Linear(codes_NK, scales_NG, zeros_NG, bias_N)
    else:
        linear = Int4Linear(codes_NK, scales_NG, zeros_NG, group_size, bias_N, dtype, device)
    linear.input_order_K = order_K.to(device) if order_K is not None else None
    return linear


def kernel_group(K: int, group_size: int) -> int | None:
    """The largest group torch's kernels take that divides both a row and the groups of `group_size` in it."""
    return next((g for g in INT4_GROUPS if K % g == 0 and group_size % g == 0), None)


def int4_refusal(bits: int, K: int, group_size: int, dtype: torch.dtype, device: str) -> str | None:
    """Why torch's int4 kernel cannot take a layer; None when it can."""
    if bits != 4:
        return "no kernel for this width"
    if kernel_group(K, group_size) is None:
        return f"no kernel for groups of {group_size} in {K} columns"
    if torch.device(device).type == "cpu":
        return None
    if torch.device(device).type != "cuda":
        return f"no kernel on {device}"
    if dtype != torch.bfloat16:
        return f"no kernel for {str(dtype).removeprefix('torch.')} on CUDA"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the kernel needs compute capability 8.0"
    return None


def _packed_int4(codes_NK: torch.Tensor, device: str) -> torch.Tensor:
    """Codes in the layout of the device's kernel."""
    if torch.device(device).type == "cpu":
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_NK.int(), 1)
    pairs_NK = (codes_NK[:, ::2] << 4 | codes_NK[:, 1::2]).to(device)
    inner_tiles = next(t for t in (8, 4, 2) if codes_NK.shape[1] % (16 * t) == 0)
    return torch.ops.aten._convert_weight_to_int4pack(pairs_NK, inner_tiles)


@functools.cache
def cpu_block_rows() -> int | None:
    """B of torch's CPU layout on this machine (it depends on the vector width), found by packing row numbers.

    None when a block is not, column by column, the nibbles of (row, row + B/2): then no tile can be read back.
    """
    row = torch.arange(ROW_BLOCK)
    digits_NK = torch.stack([row % 16, row // 16], 1).int()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(digits_NK, 1).flatten()
    for B in (64, 32):
        digits = packed.view(64 // B, 2, B // 2)
        digits = torch.cat([digits & 15, digits >> 4], -1).long()
        if torch.equal((16 * digits[:, 1] + digits[:, 0]).flatten(), row):
            return B
    return None
