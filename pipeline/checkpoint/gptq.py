"""GPTQ checkpoints (auto-gptq, GPTQModel, optimum): P.qweight, P.qzeros, P.scales, P.g_idx.

Legend: N output channels, K input channels, G groups, W 32-bit words.

Two dialects carry nearly the same label: v1 (`checkpoint_format: gptq`, or none) stores zero - 1, v2 (`gptq_v2`) stores
zero. Read under the wrong one, every weight shifts by one scale and nothing crashes. The rule here:
- symmetric codes have one legal zero, 2^(bits-1): whichever dialect stores it throughout is the dialect, whatever the
  label says; any other content contradicts `sym` and is refused;
- asymmetric codes follow the label, unless the tool that wrote the file (auto-gptq writes v1 only) or the weights
  contradict it: real weights have a mean near zero, so when (up to 4 bits) the labelled reading moves the mean by most
  of a step and the other one does not, the label is refused.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from pipeline.checkpoint.files import INDICES, SCALES, WORDS, CheckpointError, TensorFiles, as_object
from pipeline.checkpoint.packed import (
    PackedLinear,
    check_shape,
    checked_bias,
    checked_group_index,
    checked_group_size,
    groups_of,
    pack_words,
    unpack_words,
    words_for,
)

BITS = (2, 3, 4, 8)
DIALECTS = ("gptq", "gptq_v2")
EVIDENCE_LAYERS = 4  # layers whose weights are asked about the label: the mean of one is already sharp
CLEAR_STEP, NO_STEP = 0.75, 0.25  # mean offset, in steps, that says "shifted" and "not shifted"
SURE = 0.1  # largest standard error of that mean, in steps; not asked at 8 bits, where a mean near zero is many steps


class GptqReader:
    """Reads the packed layers of one GPTQ folder. Raises CheckpointError for what it cannot read right."""

    suffixes = ("qweight", "qzeros", "scales", "g_idx", "bias")

    def __init__(self, settings: dict[str, Any], tensors: TensorFiles) -> None:
        self.tensors = tensors
        label = "marlin" if settings.get("is_marlin_format") else settings.get("checkpoint_format") or "gptq"
        if label not in DIALECTS:
            raise CheckpointError(f"checkpoint_format: {label!r} is a kernel's layout; export as gptq or gptq_v2")
        self.bits: int = settings.get("bits", 0)
        if type(self.bits) is not int or self.bits not in BITS:
            raise CheckpointError(f"quantization_config.bits: {self.bits!r} is not one of {BITS}; export again")
        if any(not pattern.startswith("-:") for pattern in as_object(settings, "dynamic")):  # "-:" = left unpacked
            raise CheckpointError("quantization_config.dynamic: settings that differ by layer are not read")
        self.group_size = checked_group_size(settings.get("group_size"))
        self.names = tensors.layers("qweight")
        self.by_gptqmodel = "gptqmodel" in str(as_object(settings, "meta").get("quantizer")).lower()
        symmetric = self._symmetric_format(settings.get("sym"))
        self.format = symmetric or label
        if symmetric is None:
            self._check_label()

    def shape(self, name: str) -> tuple[int, int]:
        """(N, K) from the headers."""
        words, N = self.tensors.header(name, "qweight", WORDS).shape
        return N, words * 32 // self.bits

    def read(self, name: str) -> PackedLinear:
        N, K = self.shape(name)
        group_size, groups = groups_of(K, self.group_size)
        scales_GN = self.tensors.part(name, "scales", SCALES)
        check_shape(f"{name}.scales", scales_GN.shape, (groups, N))
        zeros_GN = self._zeros(name)
        check_shape(f"{name}.qzeros", zeros_GN.shape, (groups, N))
        has_index = f"{name}.g_idx" in self.tensors
        index_K = self.tensors.part(name, "g_idx", INDICES, 1) if has_index else None
        return PackedLinear(
            codes_NK=self._codes(name),
            scales_NG=scales_GN.t().contiguous(),
            zeros_NG=zeros_GN.t().contiguous(),
            group_index_K=checked_group_index(f"{name}.g_idx", index_K, K, groups, group_size),
            bits=self.bits,
            group_size=group_size,
            bias_N=checked_bias(self.tensors, name, N),
        )

    def _codes(self, name: str) -> torch.Tensor:
        return unpack_words(self.tensors.part(name, "qweight", WORDS).t(), self.bits, self.shape(name)[1])

    def _zeros(self, name: str) -> torch.Tensor:
        """zeros_GN in the file's dialect."""
        words_GW = self.tensors.part(name, "qzeros", WORDS)
        if self.format == "gptq_v2":
            return self._unpacked_zeros(words_GW, name)
        if not self.by_gptqmodel:
            return (self._unpacked_zeros(words_GW, name) + 1) & (2**self.bits - 1)
        # GPTQModel took 1 from every code by one subtraction a word, so that a zero borrows from its neighbour.
        if self.bits == 3:
            raise CheckpointError(
                f"{name}.qzeros: 3-bit zeros as GPTQModel turns them into v1 are not read; use gptq_v2"
            )
        ones_W = pack_words(torch.ones(1, 32 // self.bits, dtype=torch.uint8), self.bits)
        return self._unpacked_zeros(words_GW + ones_W, name)

    def _unpacked_zeros(self, words_GW: torch.Tensor, name: str) -> torch.Tensor:
        N, _ = self.shape(name)
        check_shape(f"{name}.qzeros", words_GW.shape, (len(words_GW), words_for(N, self.bits)))
        return unpack_words(words_GW, self.bits, N)

    def _symmetric_format(self, sym: bool | None) -> str | None:
        """The dialect that symmetric zeros give away; None when the codes may be asymmetric."""
        if sym is False:
            return None
        stored = [self._unpacked_zeros(self.tensors.part(n, "qzeros", WORDS), n).unique() for n in self.names]
        values = sorted({int(z) for zeros in stored for z in zeros.tolist()})
        middle = 2 ** (self.bits - 1)
        by_value = {middle - 1: "gptq", middle: "gptq_v2"}
        if len(values) == 1 and values[0] in by_value:
            return by_value[values[0]]
        if sym:
            raise CheckpointError(
                f"quantization_config.sym: true, but stored zero points {values} are not all {middle - 1} (v1) or "
                f"{middle} (v2); set sym to false if the codes are asymmetric"
            )
        return None

    def _check_label(self) -> None:
        """Refuse a label that the tool or the weights contradict (asymmetric codes)."""
        if self.format == "gptq_v2" and "auto_gptq_version" in self.tensors.metadata:
            raise CheckpointError(
                "checkpoint_format: gptq_v2, but auto-gptq wrote the file and writes v1; set it to gptq"
            )
        if self.bits > 4 or not self.names:
            return
        offset, error = self._mean_offset()
        other, other_offset = ("gptq_v2", offset + 1) if self.format == "gptq" else ("gptq", offset - 1)
        if error < SURE and abs(offset) > CLEAR_STEP and abs(other_offset) < NO_STEP:
            raise CheckpointError(
                f"checkpoint_format: {self.format}, but so read the weights are off by {offset:+.2f} steps on average "
                f"and as {other} by {other_offset:+.2f}; set it to {other}"
            )

    def _mean_offset(self) -> tuple[float, float]:
        """Mean of code - zero over the first layers, as labelled, and its standard error."""
        count, total, squares = 0, 0.0, 0.0
        for name in self.names[:EVIDENCE_LAYERS]:
            codes_NK = self._codes(name).float()
            mean = float(codes_NK.mean())
            count += codes_NK.numel()
            total += codes_NK.numel() * (mean - float(self._zeros(name).float().mean()))
            squares += float((codes_NK - mean).square().sum())
        return total / count, math.sqrt(squares) / count
