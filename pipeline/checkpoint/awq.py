"""AWQ checkpoints in the GEMM layout (autoawq): P.qweight, P.qzeros, P.scales; 4 bits.

Legend: N output channels, K input channels, G groups, W 32-bit words of 8 codes along N.
"""

from __future__ import annotations

from typing import Any

import torch

from pipeline.checkpoint.files import SCALES, WORDS, CheckpointError, TensorFiles
from pipeline.checkpoint.packed import (
    PackedLinear,
    check_shape,
    checked_bias,
    checked_group_size,
    groups_of,
    pack_words,
    unpack_words,
)

BITS = 4
NIBBLE_OF_COLUMN = [0, 4, 1, 5, 2, 6, 3, 7]  # column j of 8 lies in this nibble of its word
COLUMN_OF_NIBBLE = [0, 2, 4, 6, 1, 3, 5, 7]


def pack_awq(codes_RN: torch.Tensor) -> torch.Tensor:
    """words_RW, int32: rows of codes in AWQ's interleaved order (N a multiple of 8)."""
    R, N = codes_RN.shape
    return pack_words(codes_RN.view(R, N // 8, 8)[:, :, COLUMN_OF_NIBBLE].reshape(R, N), BITS)


def unpack_awq(words_RW: torch.Tensor) -> torch.Tensor:
    """codes_RN, uint8. Inverse of `pack_awq`."""
    R, W = words_RW.shape
    return unpack_words(words_RW, BITS, 8 * W).view(R, W, 8)[:, :, NIBBLE_OF_COLUMN].reshape(R, 8 * W)


class AwqReader:
    """Reads the packed layers of one AWQ folder. Raises CheckpointError for what it cannot read right."""

    format = "awq"
    suffixes = ("qweight", "qzeros", "scales", "bias")

    def __init__(self, settings: dict[str, Any], tensors: TensorFiles) -> None:
        self.tensors = tensors
        bits = settings.get("bits", settings.get("w_bit"))
        version = str(settings.get("version", "gemm")).lower()
        if version != "gemm":
            raise CheckpointError(f"quantization_config.version: {version!r} is not read; export with version GEMM")
        if bits != BITS:
            raise CheckpointError(f"quantization_config.bits: {bits!r}, but AWQ GEMM has {BITS}")
        self.group_size = checked_group_size(settings.get("group_size", settings.get("q_group_size")))
        self.symmetric = settings.get("zero_point") is False
        self.names = tensors.layers("qweight")

    def shape(self, name: str) -> tuple[int, int]:
        """(N, K) from the headers."""
        K, words = self.tensors.header(name, "qweight", WORDS).shape
        return 8 * words, K

    def read(self, name: str) -> PackedLinear:
        N, K = self.shape(name)
        group_size, groups = groups_of(K, self.group_size)
        scales_GN = self.tensors.part(name, "scales", SCALES)
        check_shape(f"{name}.scales", scales_GN.shape, (groups, N))
        if self.symmetric and f"{name}.qzeros" not in self.tensors:
            zeros_GN = torch.full((groups, N), 2 ** (BITS - 1), dtype=torch.uint8)
        else:
            zeros_GN = unpack_awq(self.tensors.part(name, "qzeros", WORDS))
            check_shape(f"{name}.qzeros", zeros_GN.shape, (groups, N))
        return PackedLinear(
            codes_NK=unpack_awq(self.tensors.part(name, "qweight", WORDS)).t().contiguous(),
            scales_NG=scales_GN.t().contiguous(),
            zeros_NG=zeros_GN.t().contiguous(),
            group_index_K=None,
            bits=BITS,
            group_size=group_size,
            bias_N=checked_bias(self.tensors, name, N),
        )
