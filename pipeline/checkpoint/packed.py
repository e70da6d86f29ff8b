"""Packed integer weights: one form for every format, the bit streams they are stored as, and their floats.

Legend: N output channels, K input channels, G groups of input channels; R rows, C codes, W 32-bit words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeline.checkpoint.files import CheckpointError, TensorFiles


@dataclass(frozen=True)
class PackedLinear:
    """A quantized linear layer: w_NK = (codes - zeros) * scales, with the zero and scale of column k's group.

    codes_NK and zeros_NG are uint8 below 2^bits, scales_NG float16, bfloat16 or float32. Column k is in group
    k // group_size, or group_index_K[k] (int64) where the columns were quantized in another order (act-order).
    """

    codes_NK: torch.Tensor
    scales_NG: torch.Tensor
    zeros_NG: torch.Tensor
    group_index_K: torch.Tensor | None
    bits: int
    group_size: int
    bias_N: torch.Tensor | None


def dequantize(linear: PackedLinear) -> torch.Tensor:
    """weight_NK in float32: the slow, obvious reference for every kernel."""
    K = linear.codes_NK.shape[1]
    group_K = linear.group_index_K if linear.group_index_K is not None else torch.arange(K) // linear.group_size
    steps_NK = linear.codes_NK.float() - linear.zeros_NG.float()[:, group_K]
    return steps_NK * linear.scales_NG.float()[:, group_K]


def pack_words(codes_RC: torch.Tensor, bits: int) -> torch.Tensor:
    """words_RW, int32: code c of a row at bits c * bits and up of its stream, without gaps (3-bit codes cross words).

    This one layout serves GPTQ at 2, 3, 4 and 8 bits, compressed-tensors at 1 to 8, and, reordered, AWQ.
    """
    rows, count = codes_RC.shape
    byte_C, shift_C = _positions(count, bits)
    stream = torch.zeros(rows, 4 * words_for(count, bits) + 1, dtype=torch.uint8)
    stream.index_add_(1, byte_C, codes_RC << shift_C)
    crossing = shift_C + bits > 8
    stream.index_add_(1, byte_C[crossing] + 1, codes_RC[:, crossing] >> (8 - shift_C[crossing]))
    return stream[:, :-1].reshape(-1).view(torch.int32).view(rows, -1)


def unpack_words(words_RW: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """codes_RC, uint8: the first `count` codes of each row's stream. Inverse of `pack_words`."""
    byte_C, shift_C = _positions(count, bits)
    stream = words_RW.reshape(-1).view(torch.uint8).view(len(words_RW), -1)
    codes_RC = stream[:, byte_C] >> shift_C
    crossing = (shift_C + bits > 8).nonzero()[:, 0]
    if len(crossing):
        codes_RC[:, crossing] |= stream[:, byte_C[crossing] + 1] << (8 - shift_C[crossing])
    return codes_RC & (2**bits - 1)


def words_for(count: int, bits: int) -> int:
    """32-bit words of a stream of `count` codes."""
    return -(-count * bits // 32)


def _positions(count: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First byte of each code in its stream, and the bit it begins at (uint8, for in-byte shifts)."""
    start_C = torch.arange(count) * bits
    return start_C // 8, (start_C % 8).to(torch.uint8)


def checked_group_index(
    name: str, index_K: torch.Tensor | None, K: int, groups: int, group_size: int
) -> torch.Tensor | None:
    """A stored group index as int64, or None when there is none or it is k // group_size.

    Raises CheckpointError when it is unset (-1), out of range, or does not fill every group with `group_size` columns
    (the last may be short): one wrong entry gives a weight another group's scale, and nothing would crash.
    """
    if index_K is None:
        return None
    check_shape(name, index_K.shape, (K,))
    index_K = index_K.long()
    plain_K = torch.arange(len(index_K)) // group_size
    if torch.equal(index_K, plain_K):
        return None
    way_out = "export the checkpoint again"
    if (index_K == -1).all():
        raise CheckpointError(f"{name}: group index was never set (all -1); {way_out}")
    outside = ((index_K < 0) | (index_K >= groups)).nonzero()
    if len(outside):
        k = int(outside[0])
        raise CheckpointError(f"{name}: group index[{k}] = {int(index_K[k])}, outside 0..{groups - 1}; {way_out}")
    counts_G, due_G = (torch.bincount(i, minlength=groups) for i in (index_K, plain_K))
    if not torch.equal(counts_G, due_G):
        g = int((counts_G != due_G).nonzero()[0])
        raise CheckpointError(
            f"{name}: group index is corrupt, group {g} has {int(counts_G[g])} columns where {int(due_G[g])} are due; "
            f"{way_out}"
        )
    return index_K


def checked_bias(tensors: TensorFiles, layer: str, N: int) -> torch.Tensor | None:
    bias_N = tensors.optional(layer, "bias")
    if bias_N is not None:
        check_shape(f"{layer}.bias", bias_N.shape, (N,))
    return bias_N


def check_shape(name: str, found: tuple[int, ...] | torch.Size, due: tuple[int, ...]) -> None:
    """Raises CheckpointError when a stored tensor has not the shape that the others and the settings imply."""
    if tuple(found) != due:
        raise CheckpointError(
            f"{name}: shape {list(found)}, but {list(due)} follows from the other tensors and quantization_config; "
            f"check bits and group_size, or export again"
        )


def checked_group_size(group_size: object) -> int:
    """A setting's group size: positive, or -1 for the whole row. Raises CheckpointError."""
    if not isinstance(group_size, int) or isinstance(group_size, bool) or group_size < -1 or group_size == 0:
        raise CheckpointError(f"quantization_config.group_size: {group_size!r} is neither positive nor -1; correct it")
    return group_size


def groups_of(K: int, group_size: int) -> tuple[int, int]:
    """(weights a group, groups a row) for a setting that may be -1; the last group may be short."""
    whole = K if group_size == -1 else group_size
    return whole, -(-K // whole)
