"""Linear layers that say which kernel runs: full precision, 8 bits, codes made dense on the fly (int4: `linear4`).

Legend: M rows (tokens), N output channels, K input channels, G groups of K.

Every class has two ways to compute y = x w^T + b: its native kernel, and, from `dense_from_rows` rows on, a plain GEMM,
by default on tiles of its weight (on a CPU in float32: kernels for few rows are bound by memory, and many CPUs multiply
bfloat16 slowly). Which one wins where is measured when a model is loaded (`measure_dense_from`) or given.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

ROW_CANDIDATES = (2, 4, 8, 16, 32, 64, 128, 256)
FEW_ROWS = (1, 4)  # what decoding and verifying a draft ask for
TIMING_REPEATS = 5
CLEAR_WIN = 0.9  # of the native time
BEYOND_CACHE = 2**26  # bytes: of the last-level cache one core sees no more
TILE_WEIGHTS = 2**20  # weights made dense at a time: 4 MiB of float32
HEAD_ROWS = 4096  # rows of a head rounded at a time: in float32 it would be the largest tensor of all


class PackedWeight(nn.Module):
    """A linear layer whose weight may be read in tiles. Not made directly: see the subclasses.

    `forward` takes x of shape (..., K) and returns (..., N) in x's dtype.
    """

    bias: torch.Tensor | None
    input_order_K: torch.Tensor | None  # act-order: columns of x in the order of the weight's
    # tensor -> its dimension of output channels, where several layers can be one
    output_dims: ClassVar[Mapping[str, int]] = {}

    def __init__(self, out_features: int, in_features: int, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = out_features, in_features
        self.dense_from_rows: int | None = None
        self.register_buffer("bias", bias)
        self.register_buffer("input_order_K", None)

    def settle(self) -> None:
        """Puts the tensors where Python finds them at once: nn.Module takes 2 us for each, a tenth of a small model's
        step."""
        self.__dict__.update({**self._parameters, **self._buffers})

    def _apply(self, *args: Any, **options: Any) -> PackedWeight:
        super()._apply(*args, **options)  # type: ignore[no-untyped-call]
        if "bias" in self.__dict__:
            self.settle()
        return self

    @property
    def kernel(self) -> str:
        """The class and what decides its speed, for result files."""
        switch = f" (dense from {self.dense_from_rows} rows{self.dense_by})" if self.dense_from_rows is not None else ""
        return f"{type(self).__name__}{switch}"

    @property
    def dense_by(self) -> str:
        """What else than torch's GEMM `dense` runs, for `kernel`."""
        return ""

    @property
    def tiled(self) -> bool:
        """Whether `tile`, and so `dense`, works here."""
        return True

    @property
    def joins(self) -> bool:
        """Whether the tensors of `output_dims` hold exactly `out_features` outputs."""
        return True

    @property
    def device(self) -> torch.device:
        return next(t for t in (*self.parameters(), *self.buffers())).device

    @property
    def kernel_tensors(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None] | None:
        """Weight, scales and zeros as kernels/layers.cpp takes them; None where it has no kernel for this class."""
        return None

    def native(self, x_MK: torch.Tensor) -> torch.Tensor:
        """y_MN without bias."""
        raise NotImplementedError

    def tile(self, start: int, stop: int) -> torch.Tensor:
        """Rows start..stop of the weight, float32; `start` is a multiple of 64."""
        raise NotImplementedError

    def dense(self, x_MK: torch.Tensor) -> torch.Tensor:
        """y_MN without bias, tile by tile. On a CPU in float32; elsewhere in x's dtype."""
        compute = torch.float32 if x_MK.device.type == "cpu" else x_MK.dtype
        rows = max(64, TILE_WEIGHTS // self.in_features // 64 * 64)
        y_MN = x_MK.new_empty(len(x_MK), self.out_features)
        wide_MK = x_MK.to(compute)
        for start in range(0, self.out_features, rows):
            stop = min(start + rows, self.out_features)
            y_MN[:, start:stop] = F.linear(wide_MK, self.tile(start, stop).to(compute))
        return y_MN

    def rows(self, x_MK: torch.Tensor) -> torch.Tensor:
        """y_MN of contiguous x_MK, bias included: `forward` without its reshaping."""
        if self.input_order_K is not None:
            x_MK = x_MK[:, self.input_order_K]
        many = self.dense_from_rows is not None and len(x_MK) >= self.dense_from_rows
        y_MN = self.dense(x_MK) if many else self.native(x_MK)
        return y_MN if self.bias is None else y_MN + self.bias.to(y_MN.dtype)

    def prompt_rows(self, x_MK: torch.Tensor) -> torch.Tensor:
        """As `rows` for the tokens of a prompt, which nothing is verified against: some classes round x for it."""
        return self.rows(x_MK)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y_MN = self.rows(x.reshape(-1, self.in_features).contiguous())
        return y_MN.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.kernel}"


class FullLinear(PackedWeight):
    """A full-precision weight_NK, shared with whoever else holds it (tied heads)."""

    output_dims: ClassVar[Mapping[str, int]] = {"weight": 0}

    def __init__(self, weight_NK: nn.Parameter, bias_N: torch.Tensor | None) -> None:
        super().__init__(weight_NK.shape[0], weight_NK.shape[1], bias_N)
        self.weight = weight_NK

    def native(self, x_MK: torch.Tensor) -> torch.Tensor:
        return F.linear(x_MK.to(self.weight.dtype), self.weight).to(x_MK.dtype)

    def tile(self, start: int, stop: int) -> torch.Tensor:
        return self.weight[start:stop].float()


class Int8Linear(PackedWeight):
    """A weight rounded to 8 bits with one scale a row, symmetric, by torch's int8 op: for heads and embeddings."""

    codes: torch.Tensor  # [N, K]
    scale: torch.Tensor  # [N]

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        super().__init__(weight_NK.shape[0], weight_NK.shape[1], bias_N)
        scale_N = (weight_NK.abs().amax(1).float() / 127).clamp(min=torch.finfo(torch.float32).tiny)
        codes_NK = torch.empty(weight_NK.shape, dtype=torch.int8, device=weight_NK.device)
        for start in range(0, len(codes_NK), HEAD_ROWS):
            rows = slice(start, start + HEAD_ROWS)
            steps = weight_NK[rows].float() / scale_N[rows, None]
            codes_NK[rows] = steps.round().clamp(-127, 127).to(torch.int8)
        self.register_buffer("codes", codes_NK)
        self.register_buffer("scale", scale_N)

    def native(self, x_MK: torch.Tensor) -> torch.Tensor:
        return torch._weight_int8pack_mm(x_MK, self.codes, self.scale.to(x_MK.dtype))

    def tile(self, start: int, stop: int) -> torch.Tensor:
        return self.codes[start:stop].float() * self.scale[start:stop, None]

    @staticmethod
    def lookup(codes: torch.Tensor, scale: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight by number, float32 of shape (*ids.shape, K)."""
        return codes[ids].float() * scale[ids].unsqueeze(-1)


class Int8Embedding(nn.Module):
    """The rows of an Int8Linear's weight by id, as a table of `dtype`: the two share their codes."""

    codes: torch.Tensor
    scale: torch.Tensor

    def __init__(self, table: Int8Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.dtype = table.out_features, table.in_features, dtype
        self.register_buffer("codes", table.codes)
        self.register_buffer("scale", table.scale)
        self.lookup = table.lookup

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Vectors of shape (*ids.shape, D)."""
        return self.lookup(self.codes, self.scale, ids).to(self.dtype)


class DequantLinear(PackedWeight):
    """Codes of any width and group, made dense on every forward; `reason` says why no fast kernel takes them.

    Memory: half a byte a weight up to 4 bits, a byte above, and one dense tile while it runs. Time: more than full
    precision takes.
    """

    packed: torch.Tensor
    scales_NG: torch.Tensor
    zeros_NG: torch.Tensor
    group_index_K: torch.Tensor

    def __init__(
        self,
        codes_NK: torch.Tensor,
        scales_NG: torch.Tensor,
        zeros_NG: torch.Tensor,
        group_index_K: torch.Tensor,
        bits: int,
        bias_N: torch.Tensor | None,
        reason: str,
    ) -> None:
        super().__init__(codes_NK.shape[0], codes_NK.shape[1], bias_N)
        self.bits, self.reason = bits, reason
        self.half_K = -(-codes_NK.shape[1] // 2) if bits <= 4 else None  # column k shares a byte with k + half
        if self.half_K is not None:
            low, high = codes_NK[:, : self.half_K], codes_NK[:, self.half_K :]
            codes_NK = low | F.pad(high, (0, self.half_K - high.shape[1])) << 4
        self.register_buffer("packed", codes_NK.contiguous())
        self.register_buffer("scales_NG", scales_NG)
        self.register_buffer("zeros_NG", zeros_NG)
        self.register_buffer("group_index_K", group_index_K)

    def native(self, x_MK: torch.Tensor) -> torch.Tensor:
        return self.dense(x_MK)

    def tile(self, start: int, stop: int) -> torch.Tensor:
        codes = self.packed[start:stop]
        if self.half_K is not None:
            codes = torch.cat([codes & 15, codes >> 4], 1)[:, : self.in_features]
        zeros, scales = (t[start:stop].float()[:, self.group_index_K] for t in (self.zeros_NG, self.scales_NG))
        return (codes.float() - zeros).mul_(scales)

    @property
    def kernel(self) -> str:
        return f"{type(self).__name__} ({self.bits}-bit: {self.reason})"


def joined(parts: list[PackedWeight]) -> PackedWeight | None:
    """One layer whose outputs are those of `parts` in order; None where their layouts differ or cannot be joined."""
    first = parts[0]
    kinds = {(type(p), p.in_features, getattr(p, "group_size", None)) for p in parts}
    if len(kinds) > 1 or not first.output_dims or not all(p.joins and p.input_order_K is None for p in parts):
        return None
    whole = copy.copy(first)
    whole._parameters, whole._buffers = dict(first._parameters), dict(first._buffers)
    whole.out_features = sum(p.out_features for p in parts)
    for name, dim in first.output_dims.items():
        tensor = torch.cat([getattr(p, name).detach() for p in parts], dim)
        if name in whole._parameters:
            whole._parameters[name] = nn.Parameter(tensor, requires_grad=False)
        else:
            whole._buffers[name] = tensor
    if any(p.bias is not None for p in parts):
        some = next(p.bias for p in parts if p.bias is not None)
        zeros = [some.new_zeros(p.out_features) if p.bias is None else p.bias for p in parts]
        whole._buffers["bias"] = torch.cat(zeros)
    return whole


def measure_dense_from(linear: PackedWeight, dtype: torch.dtype) -> int | None:
    """Rows from which `dense` beats `native` on this machine, for one representative layer; None = never.

    The smallest candidate that wins clearly, by the shortest of a few runs. On a CPU that multiplies `dtype` natively
    and on a GPU the native path stays.
    """
    if linear.device.type != "cpu" or not linear.tiled or isinstance(linear, DequantLinear):
        return None
    for rows in ROW_CANDIDATES:
        x_MK = torch.ones(rows, linear.in_features, dtype=dtype)
        dense_s, native_s = shortest_s([linear.dense, linear.native], x_MK)
        if dense_s < CLEAR_WIN * native_s:
            return rows
    return None


def clearly_faster(one: PackedWeight, other: PackedWeight, dtype: torch.dtype) -> bool:
    """Whether `one` beats `other`, the same layer by another kernel, for one row and for a few together.

    As in a model, weights come from memory: copies of the layer in turns, more than a cache holds.
    """
    spent = [0.0, 0.0]
    rivals = [_from_memory(one), _from_memory(other)]
    for rows in FEW_ROWS:
        x_MK = torch.ones(rows, one.in_features, dtype=dtype)
        spent = [a + b for a, b in zip(spent, shortest_s(rivals, x_MK), strict=True)]
    return spent[0] < CLEAR_WIN * spent[1]


def _from_memory(layer: PackedWeight) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    size = sum(t.nbytes for t in (*layer.parameters(), *layer.buffers()))
    copies = [copy.deepcopy(layer) for _ in range(-(-BEYOND_CACHE // size))]
    for each in copies:
        each.settle()
    return lambda x_MK: [each.native(x_MK) for each in copies]


def shortest_s(computes: Sequence[Callable[[torch.Tensor], object]], x_MK: torch.Tensor) -> list[float]:
    """CPU seconds of each, on one thread and in turns: another program on the machine then decides nothing."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    elapsed: list[list[float]] = [[] for _ in computes]
    try:
        for _ in range(TIMING_REPEATS):
            for own, compute in zip(elapsed, computes, strict=True):
                started = time.thread_time()
                compute(x_MK)
                own.append(time.thread_time() - started)
    finally:
        torch.set_num_threads(threads)
    return [min(own) for own in elapsed]
