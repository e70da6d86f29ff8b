"""GPTQ, AWQ and compressed-tensors folders, packed by slow loops, come back as the weights that were packed."""

import itertools
import json

import pytest
import torch
from checkpoint_fixtures import Rounded, awq_tensors, edit_config, gptq_tensors, quantized, rewrite, tiny
from safetensors.torch import load_file, save_file

from pipeline.checkpoint.awq import AwqReader
from pipeline.checkpoint.files import CheckpointError, TensorFiles
from pipeline.checkpoint.gptq import GptqReader
from pipeline.checkpoint.packed import dequantize
from pipeline.checkpoint.read import read

LAYER = "model.layers.0.mlp.down_proj"  # K = 96: a short last group of 64


def weights_of(folder):
    checkpoint = read(folder)
    return {n: dequantize(linear) for n, linear in checkpoint.linears.items()}, checkpoint


def check(folder, expected):
    found, checkpoint = weights_of(folder)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    return checkpoint


GPTQ_CASES = [
    *itertools.product(["gptq", "gptq_v2"], [2, 3, 4, 8], [32], [True, False], [False]),
    *itertools.product(["gptq"], [4], [-1, 16, 64], [False], [False]),
    *itertools.product(["gptq", "gptq_v2"], [3, 4], [32], [False], [True]),
]


@pytest.mark.parametrize(("label", "bits", "group_size", "sym", "act_order"), GPTQ_CASES)
def test_gptq_reads_what_was_packed(tmp_path, label, bits, group_size, sym, act_order):
    model = tiny("Llama", num_hidden_layers=1)
    expected = quantized(model, tmp_path, label, bits=bits, group_size=group_size, sym=sym, act_order=act_order)
    checkpoint = check(tmp_path, expected)
    assert checkpoint.format == label
    assert (checkpoint.linears[LAYER].group_index_K is not None) == act_order


@pytest.mark.parametrize("group_size", [16, 32, 64, -1])
def test_awq_reads_what_was_packed(tmp_path, group_size):
    check(tmp_path, quantized(tiny("Qwen2", num_hidden_layers=1), tmp_path, "awq", group_size=group_size))


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize(
    ("group_size", "sym", "act_order"),
    [(32, True, False), (32, False, False), (32, False, True), (-1, True, False), (-1, False, False)],
)
def test_compressed_tensors_reads_what_was_packed(tmp_path, bits, group_size, sym, act_order):
    arguments = {"bits": bits, "group_size": group_size, "sym": sym, "act_order": act_order}
    check(tmp_path, quantized(tiny("Qwen2", num_hidden_layers=1), tmp_path, "compressed-tensors", **arguments))


@pytest.mark.parametrize("sym", [True, False])
def test_dequantize_equals_compressed_tensors_own_decompress(tmp_path, sym):
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(num_bits=4, symmetric=sym, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    generator = torch.Generator().manual_seed(1)
    weight_NK = torch.randn(40, 96, generator=generator)
    scale_NG = torch.rand(40, 3, generator=generator) * 0.1 + 0.2
    zero_NG = torch.randint(-8, 8, (40, 3), generator=generator, dtype=torch.int8) * (not sym)
    state = {"weight": weight_NK, "weight_scale": scale_NG, "weight_zero_point": zero_NG}
    compressed = PackedQuantizationCompressor.compress(state, scheme)
    theirs = PackedQuantizationCompressor.decompress(compressed, scheme)["weight"]
    quantized(tiny("Llama", num_hidden_layers=1), tmp_path, "compressed-tensors", sym=sym)
    rewrite(tmp_path, lambda t: t.update({f"{LAYER}.{k}": v for k, v in compressed.items()}))
    assert torch.equal(dequantize(read(tmp_path).linears[LAYER]), theirs)


def every_zero(bits: int) -> Rounded:
    """A layer whose zero points are 0 .. 2^bits - 1 in turn, with every code beside each of them."""
    levels = 2**bits
    N, K = 2 * levels, 32 * 2
    zeros_NG = (torch.arange(N)[:, None] + torch.arange(2)) % levels
    codes_NK = ((torch.arange(N)[:, None] + torch.arange(K)) % levels).int()
    scales_NG = torch.full((N, 2), 0.5, dtype=torch.float16)
    weight_NK = (codes_NK - zeros_NG.repeat_interleave(32, 1)) * 0.5
    return Rounded(codes_NK, scales_NG, zeros_NG.int(), weight_NK)


def test_all_16_zero_points_survive_in_every_format(tmp_path):
    r = every_zero(4)
    group_K = torch.arange(64) // 32
    settings = {"bits": 4, "group_size": 32, "sym": False}
    for label, minus in (("gptq", 1), ("gptq_v2", 0)):
        parts = {f"x.{k}": v.contiguous() for k, v in gptq_tensors(r, 4, group_K, minus).items()}
        save_file(parts, tmp_path / "model.safetensors")
        linear = GptqReader({**settings, "checkpoint_format": label}, TensorFiles(tmp_path)).read("x")
        assert torch.equal(linear.zeros_NG.int(), r.zeros_NG), label
        assert torch.equal(dequantize(linear), r.weight_NK)
    save_file({f"x.{k}": v.contiguous() for k, v in awq_tensors(r).items()}, tmp_path / "model.safetensors")
    linear = AwqReader({"bits": 4, "group_size": 32}, TensorFiles(tmp_path)).read("x")
    assert torch.equal(linear.zeros_NG.int(), r.zeros_NG)
    assert torch.equal(dequantize(linear), r.weight_NK)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptqmodels_borrowing_subtraction_is_undone(tmp_path, bits):
    r = every_zero(bits)
    parts = gptq_tensors(r, bits, torch.arange(64) // 32, 0)
    ones = sum(1 << i for i in range(0, 32, bits))
    borrowed = (parts["qzeros"].long() - ones + 2**31) % 2**32 - 2**31
    parts["qzeros"] = borrowed.int()
    save_file({f"x.{k}": v.contiguous() for k, v in parts.items()}, tmp_path / "model.safetensors")
    settings = {"bits": bits, "group_size": 32, "sym": False, "meta": {"quantizer": ["gptqmodel:1.4.0"]}}
    assert torch.equal(GptqReader(settings, TensorFiles(tmp_path)).read("x").zeros_NG.int(), r.zeros_NG)


@pytest.mark.parametrize(("contents", "label"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq"), ("gptq", None)])
def test_wrong_or_absent_label_of_symmetric_codes_still_reads_right(tmp_path, contents, label):
    expected = quantized(tiny("Llama", num_hidden_layers=1), tmp_path, contents, sym=True)
    edit_config(tmp_path, lambda c: c["quantization_config"].update(checkpoint_format=label))
    assert check(tmp_path, expected).format == contents


@pytest.mark.parametrize(("contents", "label"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
def test_wrong_label_of_asymmetric_codes_is_refused(tmp_path, contents, label):
    quantized(tiny("Llama"), tmp_path, contents, sym=False)
    edit_config(tmp_path, lambda c: c["quantization_config"].update(checkpoint_format=label))
    with pytest.raises(CheckpointError, match=f"checkpoint_format: {label}, but .* set it to {contents}"):
        read(tmp_path)


def test_label_that_contradicts_the_tool_is_refused(tmp_path):
    quantized(tiny("Llama", num_hidden_layers=1), tmp_path, "gptq_v2", sym=False)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file), file, {"format": "pt", "auto_gptq_version": "0.7.1"})
    with pytest.raises(CheckpointError, match="auto-gptq wrote the file and writes v1"):
        read(tmp_path)


def test_symmetric_flag_on_asymmetric_codes_is_refused(tmp_path):
    quantized(tiny("Llama", num_hidden_layers=1), tmp_path, "gptq", sym=False)
    edit_config(tmp_path, lambda c: c["quantization_config"].update(sym=True))
    with pytest.raises(CheckpointError, match="sym: true, but stored zero points"):
        read(tmp_path)


@pytest.mark.parametrize(("method", "index"), [("gptq", "g_idx"), ("compressed-tensors", "weight_g_idx")])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda i: i.fill_(-1), "never set"),
        (lambda i: i.__setitem__(5, 99), r"\[5\] = 99, outside"),
        (lambda i: i.__setitem__(5, (i[5] + 1) % 3), "corrupt"),
    ],
)
def test_corrupted_group_index_is_refused_with_the_layers_name(tmp_path, method, index, change, says):
    quantized(tiny("Llama", num_hidden_layers=1), tmp_path, method, act_order=True)
    rewrite(tmp_path, lambda t: change(t[f"{LAYER}.{index}"]))
    with pytest.raises(CheckpointError, match=f"{LAYER}.{index}: .*{says}"):
        read(tmp_path).linears[LAYER]


@pytest.mark.parametrize(
    ("method", "suffix"),
    [
        ("gptq", "scales"),
        ("gptq", "qzeros"),
        ("awq", "qzeros"),
        ("awq", "scales"),
        ("compressed-tensors", "weight_scale"),
    ],
)
def test_missing_or_misshapen_part_of_a_layer(tmp_path, method, suffix):
    name = f"{LAYER}.{suffix}"
    quantized(tiny("Llama", num_hidden_layers=1), tmp_path, method)
    rewrite(tmp_path, lambda t: t.update({name: t[name][:1]}))
    with pytest.raises(CheckpointError, match=rf"{name}: shape"):
        read(tmp_path).linears[LAYER]
    rewrite(tmp_path, lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=f"{name}: missing"):
        read(tmp_path).linears[LAYER]


def test_bits_that_are_not_the_files(tmp_path):
    quantized(tiny("Llama", num_hidden_layers=1), tmp_path, "gptq", bits=8)
    edit_config(tmp_path, lambda c: c["quantization_config"].update(bits=4))
    with pytest.raises(CheckpointError, match="check bits and group_size"):
        read(tmp_path).linears[LAYER]


@pytest.mark.parametrize(
    ("method", "change", "says"),
    [
        ("gptq", {"checkpoint_format": "marlin"}, "kernel's layout"),
        ("gptq", {"is_marlin_format": True}, "kernel's layout"),
        ("gptq", {"bits": 5}, "bits: 5 is not one of"),
        ("gptq", {"group_size": 0}, "group_size: 0"),
        ("gptq", {"dynamic": {"+:lm": {"bits": 8}}}, "differ by layer"),
        ("awq", {"version": "gemv"}, "'gemv' is not read"),
        ("awq", {"bits": 8}, "AWQ GEMM has 4"),
        ("compressed-tensors", {"config_groups": {}}, "0 config_groups target it"),
        ("compressed-tensors", {"kv_cache_scheme": {"num_bits": 8}}, "quantized cache"),
    ],
)
def test_settings_that_are_not_supported_are_named(tmp_path, method, change, says):
    quantized(tiny("Llama", num_hidden_layers=1), tmp_path, method)
    edit_config(tmp_path, lambda c: c["quantization_config"].update(change))
    with pytest.raises(CheckpointError, match=says):
        read(tmp_path).linears[LAYER]


def test_settings_in_their_own_file(tmp_path):
    expected = quantized(tiny("Llama", num_hidden_layers=1), tmp_path, "gptq", sym=True)

    def move(config):
        settings = config.pop("quantization_config")
        del settings["quant_method"]
        (tmp_path / "quantize_config.json").write_text(json.dumps(settings))

    edit_config(tmp_path, move)
    check(tmp_path, expected)
    (tmp_path / "quantize_config.json").unlink()
    with pytest.raises(CheckpointError, match="no quantization_config"):
        read(tmp_path)


def test_bits_per_weight_comes_from_the_file(tmp_path):
    quantized(tiny("Llama", num_hidden_layers=1), tmp_path, "awq", group_size=32)
    checkpoint = read(tmp_path)
    packed = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96  # q o, k v, gate up down
    plain = 2 * 128 * 64 + 3 * 64  # embedding and head, norms; float32
    nbytes = packed / 2 + packed / 32 * (2 + 0.5) + 4 * plain
    assert checkpoint.weight_bytes == nbytes
    assert checkpoint.bits_per_weight == pytest.approx(8 * nbytes / (packed + plain))
