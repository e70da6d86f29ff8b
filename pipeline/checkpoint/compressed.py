"""compressed-tensors checkpoints, format pack-quantized (llmcompressor): P.weight_packed, P.weight_scale,
P.weight_shape, with P.weight_zero_point (asymmetric, packed along N) and P.weight_g_idx (act-order, older versions).

Legend: N output channels, K input channels, G groups. Stored integers are signed plus 2^(bits-1), so codes and zero
points are unsigned as in the other formats; symmetric layers have zero 2^(bits-1).
"""

from __future__ import annotations

import re
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
    unpack_words,
    words_for,
)

FORMAT = "pack-quantized"


class CompressedReader:
    """Reads the packed layers of one folder. Raises CheckpointError for what it cannot read right."""

    format = "compressed-tensors"
    suffixes = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "bias")

    def __init__(self, settings: dict[str, Any], tensors: TensorFiles) -> None:
        self.tensors = tensors
        groups = as_object(settings, "config_groups")
        self.groups: dict[str, dict[str, Any]] = {name: as_object(groups, name) for name in groups}
        for group, scheme in self.groups.items():
            key = f"quantization_config.config_groups.{group}"
            layout = scheme.get("format") or settings.get("format")
            if layout != FORMAT:
                raise CheckpointError(f"{key}.format: {layout!r} is not read; export as {FORMAT}")
            for part in ("input_activations", "output_activations"):
                if scheme.get(part):
                    raise CheckpointError(f"{key}.{part}: quantized activations are not read; export weights only")
            _check_weights(f"{key}.weights", as_object(scheme, "weights"))
            _check_targets(f"{key}.targets", scheme.get("targets"))
        if settings.get("kv_cache_scheme"):
            raise CheckpointError("quantization_config.kv_cache_scheme: a quantized cache is not read; export without")
        self.names = tensors.layers("weight_packed")

    def shape(self, name: str) -> tuple[int, int]:
        """(N, K) as stored beside the words (a tensor of two numbers)."""
        stored = self.tensors.part(name, "weight_shape", INDICES, 1).tolist()
        if len(stored) != 2 or min(stored) < 1:
            raise CheckpointError(f"{name}.weight_shape: {stored} is not [N, K]; export again")
        return int(stored[0]), int(stored[1])

    def read(self, name: str) -> PackedLinear:
        N, K = self.shape(name)
        weights = self._weights(name)
        bits: int = weights["num_bits"]
        grouped: int = weights["group_size"] if weights["strategy"] == "group" else -1
        group_size, groups = groups_of(K, grouped)
        words_NW = self.tensors.part(name, "weight_packed", WORDS)
        check_shape(f"{name}.weight_packed", words_NW.shape, (N, words_for(K, bits)))
        scales_NG = self.tensors.part(name, "weight_scale", SCALES)
        check_shape(f"{name}.weight_scale", scales_NG.shape, (N, groups))
        has_index = f"{name}.weight_g_idx" in self.tensors
        index_K = self.tensors.part(name, "weight_g_idx", INDICES, 1) if has_index else None
        return PackedLinear(
            codes_NK=unpack_words(words_NW, bits, K),
            scales_NG=scales_NG,
            zeros_NG=self._zeros(name, N, groups, weights),
            group_index_K=checked_group_index(f"{name}.weight_g_idx", index_K, K, groups, group_size),
            bits=bits,
            group_size=group_size,
            bias_N=checked_bias(self.tensors, name, N),
        )

    def _zeros(self, name: str, N: int, groups: int, weights: dict[str, Any]) -> torch.Tensor:
        bits: int = weights["num_bits"]
        if weights.get("symmetric", True):
            return torch.full((N, groups), 2 ** (bits - 1), dtype=torch.uint8)
        words_WG = self.tensors.part(name, "weight_zero_point", WORDS)
        check_shape(f"{name}.weight_zero_point", words_WG.shape, (words_for(N, bits), groups))
        return unpack_words(words_WG.t(), bits, N).t().contiguous()

    def _weights(self, name: str) -> dict[str, Any]:
        """Weight settings of the one config group whose targets match a layer."""
        found = [s["weights"] for s in self.groups.values() if any(_matches(t, name) for t in s["targets"])]
        if len(found) != 1:
            raise CheckpointError(f"{name}: packed, but {len(found)} config_groups target it; one is due")
        return found[0]


def _check_weights(key: str, weights: dict[str, Any]) -> None:
    bits = weights.get("num_bits")
    if weights.get("type", "int") != "int" or type(bits) is not int or not 1 <= bits <= 8:
        raise CheckpointError(f"{key}: {weights.get('type')} of {bits} bits is not read; integers of 1 to 8 bits are")
    if weights.get("strategy") not in ("group", "channel"):
        raise CheckpointError(f"{key}.strategy: {weights.get('strategy')!r} is not read; group and channel are")
    if weights["strategy"] == "group":
        checked_group_size(weights.get("group_size"))


def _check_targets(key: str, targets: Any) -> None:
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        raise CheckpointError(f"{key}: not a list of layer names or patterns; export the checkpoint again")
    for target in targets:
        try:
            re.compile(target.removeprefix("re:"))
        except (re.error, RecursionError, OverflowError) as e:
            raise CheckpointError(f"{key}: {target!r} is no regular expression ({e}); correct it") from None


def _matches(target: str, name: str) -> bool:
    """compressed-tensors' targets: a class (packed layers are Linear), a module name or, after `re:`, a pattern."""
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return target in ("Linear", name)
