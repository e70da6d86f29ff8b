"""Checkpoint folders: damaged, contradictory, unsafe. Met by `fetch_target` or, packed ones, by `evaluate`."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch

from bad_input.world import Plant, Row, bytes_of, each, edit, header, put, remove, tensors, write

WEIGHTS = "source/model.safetensors"
LAYER = "model.layers.0.mlp.down_proj"
NORM = "model.norm.weight"
AGAIN = "again"


def full(name: str, plant: Plant, names: str, way_out: str = AGAIN) -> Row:
    return Row(f"full: {name}", "fetch_target", plant, names, way_out)


def packed(kind: str, name: str, plant: Plant, names: str, way_out: str = AGAIN) -> Row:
    return Row(f"{kind}: {name}", f"evaluate@base checkpoint={kind}", plant, names, way_out)


def setting(kind: str, change: dict[str, Any], names: str, way_out: str) -> Row:
    plant = edit(f"{kind}/config.json", lambda c: c["quantization_config"].update(change))
    return packed(kind, str(change)[:60], plant, names, way_out)


def group(change: dict[str, Any], names: str, way_out: str) -> Row:
    """A setting of the compressed-tensors config group."""
    plant = edit("packed/config.json", lambda c: c["quantization_config"]["config_groups"]["group_0"].update(change))
    return packed("packed", str(change)[:60], plant, names, way_out)


def part(
    suffix: str, change: Callable[[torch.Tensor], torch.Tensor | None]
) -> Callable[[dict[str, torch.Tensor]], None]:
    """Replace (or drop) one tensor of one layer."""

    def spoil(found: dict[str, torch.Tensor]) -> None:
        made = change(found.pop(f"{LAYER}.{suffix}"))
        if made is not None:
            found[f"{LAYER}.{suffix}"] = made

    return spoil


def sized(count: int) -> Callable[[bytes], bytes]:
    return lambda raw: struct.pack("<Q", count) + raw[8:]


def ten_gigabytes(head: dict[str, Any]) -> None:
    head["model.norm.weight"]["shape"] = [5 * 2**30]


def infinite_one(raw: bytes) -> bytes:
    """A 1.0 of a norm, whose exponent is one bit from infinity's."""
    last = raw.index(struct.pack("<f", 1.0) * 64) + 3
    return raw[:last] + bytes([raw[last] ^ 0x40]) + raw[last + 1 :]


def without_end(raw: bytes) -> bytes:
    return raw[:-64]


ROWS = [
    full("empty file", write(WEIGHTS, b""), r"model\.safetensors: not a whole"),
    full("text", write(WEIGHTS, "version https://git-lfs.github.com/spec/v1\n"), r"model\.safetensors: not a whole"),
    full("truncated", bytes_of(WEIGHTS, without_end), r"model\.safetensors: not a whole"),
    full("header size of 2^63", bytes_of(WEIGHTS, sized(2**63)), r"model\.safetensors: not a whole"),
    full("header size of 3", bytes_of(WEIGHTS, sized(3)), r"model\.safetensors: not a whole"),
    full(
        "header: one bit flipped",
        bytes_of(WEIGHTS, lambda raw: raw[:8] + bytes([raw[8] ^ 4]) + raw[9:]),
        r"model\.safetensors: not a whole",
    ),
    full(
        "header: not UTF-8", bytes_of(WEIGHTS, lambda raw: raw[:10] + b"\xff" + raw[11:]), r"safetensors: not a whole"
    ),
    full("a tensor that claims 10 GB", header(WEIGHTS, ten_gigabytes), r"model\.safetensors: not a whole"),
    full(
        "offsets beyond the file",
        header(WEIGHTS, lambda h: h["model.norm.weight"].update(data_offsets=[0, 2**40])),
        r"model\.safetensors: not a whole",
    ),
    full(
        "offsets that overlap",
        header(WEIGHTS, lambda h: h["model.norm.weight"].update(data_offsets=[0, 256])),
        r"model\.safetensors: not a whole",
    ),
    full(
        "a dtype that is none",
        header(WEIGHTS, lambda h: h["model.norm.weight"].update(dtype="I128")),
        r"model\.safetensors: not a whole",
    ),
    full("no tensor at all", tensors("source", lambda t: t.clear()), "hold no tensor"),
    full("a pickle by the name of safetensors", write(WEIGHTS, b"\x80\x04\x95\x10\0\0\0\0\0\0\0."), r"not a whole"),
    full(
        "two files and no index",
        each(put("model.path", "sharded"), remove("sharded/model.safetensors.index.json")),
        "2 safetensors files and no index",
        "keep one, or add the index",
    ),
    full(
        "an index that is no JSON",
        each(put("model.path", "sharded"), write("sharded/model.safetensors.index.json", "{")),
        r"index\.json: not readable JSON",
    ),
    full(
        "an index without a map",
        each(put("model.path", "sharded"), write("sharded/model.safetensors.index.json", "{}")),
        r"index\.json: no weight_map",
    ),
    full(
        "a shard by an absolute path",
        each(
            put("model.path", "sharded"),
            edit(
                "sharded/model.safetensors.index.json",
                lambda i: i["weight_map"].update({"model.norm.weight": "/etc/passwd"}),
            ),
        ),
        "'/etc/passwd', outside",
        "plain file",
    ),
    full(
        "a shard that is a number",
        each(
            put("model.path", "sharded"),
            edit("sharded/model.safetensors.index.json", lambda i: i["weight_map"].update({"model.norm.weight": 2})),
        ),
        "model.norm.weight lies in 2",
        "plain file names",
    ),
    full(
        "a tensor that its shard lacks",
        each(
            put("model.path", "sharded"),
            edit(
                "sharded/model.safetensors.index.json",
                lambda i: i["weight_map"].update({"ghost": "model-00001-of-00002.safetensors"}),
            ),
        ),
        "lacks ghost",
    ),
    full(
        "a shard that is cut",
        each(put("model.path", "sharded"), bytes_of("sharded/model-00001-of-00002.safetensors", without_end)),
        r"model-00001.*not a whole",
    ),
    full(
        "a tensor of another shape than config.json says",
        tensors("source", lambda t: t.update({NORM: t[NORM][:-1].clone()})),
        rf"model\.safetensors: {NORM}: shape \[63\], but config\.json implies \[64\]",
    ),
    full(
        "config.json of a wider model",
        edit("source/config.json", lambda c: c.update(intermediate_size=256)),
        r"mlp\.gate_proj\.weight: shape \[128, 64\], but config\.json implies \[256, 64\]",
    ),
    full(
        "config.json of a shallower model",
        edit("source/config.json", lambda c: c.update(num_hidden_layers=1)),
        r"model\.layers\.1\.\S+: in the file, but",
        r"check config\.json",
    ),
    full(
        "config.json of a billion layers",
        edit("source/config.json", lambda c: c.update(num_hidden_layers=10**9)),
        r"config\.json: num_hidden_layers: 1000000000, but 20 tensors are there",
        "correct it",
    ),
    full(
        "a tensor missing",
        tensors("source", part("weight", lambda t: None)),
        rf"{LAYER}\.weight: not in the file",
    ),
    full(
        "no head, and not tied",
        edit("source/config.json", lambda c: c.update(tie_word_embeddings=False)),
        r"lm_head\.weight: not in the file",
        "set tie_word_embeddings to true",
    ),
    full(
        "NaN",
        tensors("source", lambda t: t[f"{LAYER}.weight"][3, 4:6].fill_(float("nan"))),
        rf"model\.safetensors: {LAYER}\.weight holds 2 NaN or infinite values",
    ),
    full(
        "data: one bit flipped",
        bytes_of(WEIGHTS, infinite_one),
        r"model\.safetensors: model\.\S*norm\.weight holds 1 NaN or infinite values",
    ),
    Row(
        "full: NaN weights met by a quantizer",
        "quantize@gptq model=model",
        each(
            put("quantize.gptq.backend", "llmcompressor"),
            put("quantize.gptq.true_sequential", False),
            tensors("model", lambda t: t["model.layers.0.self_attn.q_proj.weight"].fill_(float("nan"))),
        ),
        r"model\.layers\.0\.self_attn",
        "check the model's file",
    ),
    setting("gptq", {"quant_method": "fp8"}, "quant_method 'fp8' is not read", "known: gptq, awq, compressed-tensors"),
    setting("gptq", {"quant_method": ["gptq"]}, "quant_method", "known: gptq"),
    setting("gptq", {"bits": 5}, r"quantization_config\.bits: 5", "export again"),
    setting("gptq", {"bits": 4.0}, r"quantization_config\.bits: 4\.0", "export again"),
    setting("gptq", {"bits": 8}, rf"{LAYER[:15]}.*", "check bits and group_size"),
    setting("gptq", {"group_size": 0}, r"quantization_config\.group_size: 0", "correct it"),
    setting("gptq", {"group_size": True}, r"quantization_config\.group_size: True", "correct it"),
    setting("gptq", {"group_size": "128"}, r"quantization_config\.group_size: '128'", "correct it"),
    setting("gptq", {"sym": True}, r"quantization_config\.sym: true", "set sym to false"),
    setting("gptq", {"checkpoint_format": "gptq_v2"}, "checkpoint_format: gptq_v2", "set it to gptq"),
    setting("gptq", {"checkpoint_format": "marlin"}, "'marlin' is a kernel's layout", "export as gptq"),
    setting("gptq", {"dynamic": {"+:layers.0": {"bits": 8}}}, r"quantization_config\.dynamic", "not read"),
    setting("gptq", {"dynamic": [1]}, r"quantization_config\.dynamic: holds list", AGAIN),
    setting("gptq", {"meta": "tool"}, r"quantization_config\.meta: holds str", AGAIN),
    packed(
        "gptq",
        "settings removed",
        edit("gptq/config.json", lambda c: c.pop("quantization_config") and None),
        "is packed, but config.json has no quantization_config",
        "add it",
    ),
    packed(
        "gptq",
        "settings of another format",
        edit(
            "gptq/config.json",
            lambda c: c["quantization_config"].update(quant_method="compressed-tensors", config_groups={}),
        ),
        "no layer of that format",
        "file",
    ),
    packed(
        "gptq",
        "words in floating point",
        tensors("gptq", part("qweight", lambda t: t.float())),
        f"{LAYER}.qweight: F32",
    ),
    packed(
        "gptq", "words in three dimensions", tensors("gptq", part("qweight", lambda t: t[None])), f"{LAYER}.qweight"
    ),
    packed("gptq", "zeros missing", tensors("gptq", part("qzeros", lambda t: None)), f"{LAYER}.qzeros: missing"),
    packed(
        "gptq", "zeros of too few groups", tensors("gptq", part("qzeros", lambda t: t[:1])), f"{LAYER}.qzeros: shape"
    ),
    packed("gptq", "words cut short", tensors("gptq", part("qweight", lambda t: t[:4])), f"{LAYER}"),
    setting("awq", {"bits": 8}, r"quantization_config\.bits: 8", "AWQ GEMM has 4"),
    setting("awq", {"version": "gemv"}, r"quantization_config\.version: 'gemv'", "export with version GEMM"),
    setting("awq", {"group_size": -2}, r"quantization_config\.group_size: -2", "correct it"),
    packed("awq", "words in one dimension", tensors("awq", part("qweight", lambda t: t.flatten())), f"{LAYER}.qweight"),
    setting("packed", {"kv_cache_scheme": {"num_bits": 8}}, r"quantization_config\.kv_cache_scheme", "export without"),
    setting("packed", {"config_groups": [1]}, r"quantization_config\.config_groups: holds list", AGAIN),
    group({"format": "marlin-24"}, r"config_groups\.group_0\.format: 'marlin-24'", "export as pack-quantized"),
    group({"weights": None}, r"config_groups\.group_0\.weights", "integers of 1 to 8 bits are"),
    group({"input_activations": {"num_bits": 8}}, r"group_0\.input_activations", "export weights only"),
    group({"targets": ["re:("]}, r"group_0\.targets: 're:\(' is no regular", "correct it"),
    group({"targets": "Linear"}, r"group_0\.targets: not a list", AGAIN),
    packed(
        "packed",
        "a shape of three numbers",
        tensors("packed", part("weight_shape", lambda t: torch.cat([t, t[:1]]))),
        f"{LAYER}.weight_shape",
    ),
    packed(
        "packed", "a shape below zero", tensors("packed", part("weight_shape", lambda t: -t)), f"{LAYER}.weight_shape"
    ),
    packed(
        "packed",
        "a shape in floating point",
        tensors("packed", part("weight_shape", lambda t: t.float())),
        f"{LAYER}.weight_shape: F32",
    ),
    packed(
        "packed",
        "no settings file",
        remove("packed/config.json"),
        r"packed/config\.json: not found",
        "point at a folder",
    ),
]
