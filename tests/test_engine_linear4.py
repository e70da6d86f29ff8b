"""Every linear layer equals dequantize-then-matmul within the rounding it states. M rows, N out, K in, G groups."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.engine import linear as linear_module
from pipeline.engine.linear import DequantLinear, FullLinear, Int8Linear, measure_dense_from
from pipeline.engine.linear4 import Int4Linear, cpu_block_rows, int4_refusal, kernel_group, quantized_linear

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}  # half an ulp, relative


def layer(N, K, group, bits=4, act_order=False, bias=False):
    generator = torch.Generator().manual_seed(N + K + group)
    groups = -(-K // group)
    codes_NK = torch.randint(0, 2**bits, (N, K), generator=generator, dtype=torch.uint8)
    zeros_NG = torch.randint(0, 2**bits, (N, groups), generator=generator, dtype=torch.uint8)
    scales_NG = (torch.rand(N, groups, generator=generator) * 0.02 + 0.001).half()
    index_K = torch.arange(K) // group
    if act_order:
        index_K = index_K[torch.randperm(K, generator=generator)]
    bias_N = torch.randn(N, generator=generator) if bias else None
    return codes_NK, scales_NG, zeros_NG, index_K if act_order else None, bits, group, bias_N


def reference(x_MK, codes_NK, scales_NG, zeros_NG, index_K, group, bias_N, dtype, kernel):
    """(y_MN, bound_MN) in float64: the exact product and how far rounding may take a kernel of `dtype` from it."""
    K = codes_NK.shape[1]
    index_K = index_K if index_K is not None else torch.arange(K) // group
    scale, zero = scales_NG.double()[:, index_K], zeros_NG.double()[:, index_K]
    x = x_MK.double()
    weight = (codes_NK.double() - zero) * scale
    bias = bias_N.to(dtype).double() if bias_N is not None else torch.zeros(len(codes_NK)).double()
    y = x @ weight.t()
    u = UNIT[dtype]
    # (code - 8) * scale + (8 - zero) * scale, scale and offset each rounded by half an ulp
    affine = ((codes_NK.double() - 8).abs() + (8 - zero).abs()) * scale if kernel == "Int4Linear" else weight * 0
    magnitude = x.abs() @ (affine + weight.abs()).t()
    inputs = u * (x.abs() @ affine.t())
    sums = (K + 8) * UNIT[torch.float32] * magnitude  # float32 accumulation
    before_output = inputs + sums
    output = 2 * u * (y.abs() + bias.abs() + before_output)  # rounded once, and once more with a bias
    return y + bias, before_output + output


@pytest.mark.parametrize("dense_from", [None, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("M", [1, 2, 17])
@pytest.mark.parametrize("N", [64, 101])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_within_the_derived_bound(M, N, group, dtype, dense_from):
    parts = layer(N, 256, group, bias=True)
    linear = quantized_linear(*parts, dtype, "cpu", False)
    assert isinstance(linear, Int4Linear) and linear.kernel.startswith("Int4Linear")
    linear.dense_from_rows = dense_from
    x_MK = torch.randn(M, 256, generator=torch.Generator().manual_seed(M)).to(dtype)
    y, bound = reference(x_MK, *parts[:4], group, parts[6], dtype, "Int4Linear")
    got = linear(x_MK)
    assert got.dtype == dtype and got.shape == (M, N)
    assert ((got.double() - y).abs() <= bound).all()
    wrong = reference(x_MK, parts[0], parts[1], parts[2] + 1, None, group, parts[6], dtype, "Int4Linear")[0]
    assert ((got.double() - wrong).abs() > bound).any(), "the bound would not notice zeros that are one off"


@pytest.mark.parametrize(
    ("K", "group", "kernel"),
    [(96, 64, 32), (576, 128, 64), (576, 576, 64), (512, 512, 256), (64, 16, None), (80, 80, None)],
)
def test_groups_are_split_to_what_the_kernel_takes(K, group, kernel):
    assert kernel_group(K, group) == kernel
    parts = layer(32, K, group)
    linear = quantized_linear(*parts, torch.float32, "cpu", False)
    assert isinstance(linear, Int4Linear if kernel else DequantLinear)
    x_MK = torch.randn(3, K)
    y, bound = reference(x_MK, *parts[:4], group, None, torch.float32, type(linear).__name__)
    assert ((linear(x_MK).double() - y).abs() <= bound).all()


@pytest.mark.parametrize("group", [16, 32])
def test_act_order_permutes_the_input(group):
    parts = layer(48, 128, group, act_order=True)
    linear = quantized_linear(*parts, torch.float32, "cpu", False)
    x_MK = torch.randn(5, 128)
    y, bound = reference(x_MK, *parts[:4], group, None, torch.float32, type(linear).__name__)
    assert ((linear(x_MK).double() - y).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("bits", "K"), [(2, 64), (3, 65), (4, 65), (8, 64)])
def test_dequant_linear_any_width_and_odd_shapes(bits, K, dtype):
    parts = layer(33, K, 16, bits=bits, bias=True)
    linear = quantized_linear(*parts, dtype, "cpu", False)
    assert linear.kernel.startswith(f"DequantLinear ({bits}-bit: no kernel for")
    assert linear.packed.numel() == 33 * ((K + 1) // 2 if bits <= 4 else K)
    x_MK = torch.randn(4, K).to(dtype)
    y, bound = reference(x_MK, *parts[:4], 16, parts[6], dtype, "DequantLinear")
    assert ((linear(x_MK).double() - y).abs() <= bound).all()


def test_tiles_put_together_are_the_whole_weight(monkeypatch):
    monkeypatch.setattr(linear_module, "TILE_WEIGHTS", 64 * 256)  # 64 rows at a time
    parts = layer(201, 256, 64)
    weight = torch.nn.Parameter(torch.randn(201, 256), requires_grad=False)
    layers = [
        quantized_linear(*parts, torch.float32, "cpu", False),
        quantized_linear(*layer(201, 256, 16), torch.float32, "cpu", False),
        FullLinear(weight, None),
        Int8Linear(weight, None),
    ]
    x_MK = torch.randn(7, 256)
    for linear in layers:
        whole_NK = torch.cat([linear.tile(s, min(s + 64, 201)) for s in range(0, 201, 64)])
        assert torch.allclose(linear.dense(x_MK), x_MK @ whole_NK.t(), rtol=1e-5, atol=1e-5)
        assert torch.allclose(linear.native(x_MK), linear.dense(x_MK), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int8_rounds_by_half_a_step(dtype):
    weight_NK = torch.randn(65, 96).to(dtype)
    weight_NK[3] = 0
    x_MK = torch.randn(2, 96).to(dtype)
    linear = Int8Linear(weight_NK, None)
    u = UNIT[dtype]
    step_N = weight_NK.double().abs().amax(1) / 127
    error_N = step_N / 2 + 128 * u * step_N  # half a step; the last code short of 127.5 when the scale rounds down
    y = x_MK.double() @ weight_NK.double().t()
    bound = x_MK.double().abs().sum(1, keepdim=True) * (error_N * (1 + u) + 97 * 2**-24) + 2 * u * y.abs() + 1e-6
    assert ((linear(x_MK).double() - y).abs() <= bound * (1 + u)).all()
    assert linear.codes.dtype == torch.int8 and not linear.codes[3].any()


def test_full_linear_shares_its_weight_and_keeps_leading_shape():
    weight = torch.nn.Parameter(torch.randn(10, 8), requires_grad=False)
    linear = FullLinear(weight, torch.ones(10))
    assert linear.weight is weight
    assert linear(torch.zeros(2, 3, 8)).tolist() == torch.ones(2, 3, 10).tolist()


def test_dense_switch_acts_from_the_given_row_on(monkeypatch):
    linear = FullLinear(torch.nn.Parameter(torch.randn(8, 8), requires_grad=False), None)
    calls = []
    monkeypatch.setattr(linear, "dense", lambda x: calls.append(len(x)) or x)
    linear.dense_from_rows = 4
    for rows in (1, 3, 4, 9):
        linear(torch.zeros(rows, 8))
    assert calls == [4, 9]


@pytest.mark.parametrize(("native_ms", "dense_ms", "due"), [(1, 2, None), (2, 1, 2), (1, 0.95, None)])
def test_measured_switch_is_the_first_clear_win(monkeypatch, native_ms, dense_ms, due):
    linear = FullLinear(torch.nn.Parameter(torch.randn(8, 8), requires_grad=False), None)
    now = [0.0]

    def takes(ms):
        return lambda x: now.__setitem__(0, now[0] + ms)

    monkeypatch.setattr(linear_module.time, "thread_time", lambda: now[0])
    monkeypatch.setattr(linear, "native", takes(native_ms))
    monkeypatch.setattr(linear, "dense", takes(dense_ms))
    assert measure_dense_from(linear, torch.float32) == due


def test_refusals_say_why():
    assert "width" in int4_refusal(3, 64, 32, torch.bfloat16, "cpu")
    assert "groups of 16 in 64" in int4_refusal(4, 64, 16, torch.bfloat16, "cpu")
    assert int4_refusal(4, 64, 32, torch.bfloat16, "cpu") is None
    assert "float32 on CUDA" in int4_refusal(4, 64, 32, torch.float32, "cuda")
    assert "no kernel on mps" in int4_refusal(4, 64, 32, torch.bfloat16, "mps")


@pytest.mark.slow  # an interpreter that imports torch
def test_without_vector_instructions_the_native_kernel_stays():
    code = (
        "import torch; from pipeline.engine.linear4 import *\n"
        "c = torch.randint(0, 16, (64, 64), dtype=torch.uint8)\n"
        "scales, zeros = torch.ones(64, 2), torch.full((64, 2), 8)\n"
        "l = quantized_linear(c, scales, zeros, None, 4, 32, None, torch.float32, 'cpu', False)\n"
        "x = torch.randn(2, 64); print(cpu_block_rows(), l.tiled, (l(x) - x @ (c.float() - 8).t()).abs().max() < 1e-3)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default"},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    rows, tiled, right = ran.stdout.split()
    assert (rows, tiled, right) in {("None", "False", "tensor(True)"), ("32", "True", "tensor(True)")}
    assert cpu_block_rows() in (None, 32, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 2, 17])
@pytest.mark.parametrize("N", [64, 101])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_on_cuda_within_the_derived_bound(M, N, group):
    parts = layer(N, 256, group)
    linear = quantized_linear(*parts, torch.bfloat16, "cuda", False)
    assert isinstance(linear, Int4Linear)
    x_MK = torch.randn(M, 256).bfloat16()
    y, bound = reference(x_MK, *parts[:4], group, None, torch.bfloat16, "Int4Linear")
    extra = UNIT[torch.bfloat16] * (x_MK.double().abs() @ linear_weight(parts).abs().t())  # weights made bfloat16
    assert ((linear(x_MK.cuda()).cpu().double() - y).abs() <= bound + extra).all()


def linear_weight(parts):
    codes_NK, scales_NG, zeros_NG, _, _, group, _ = parts
    return (codes_NK.double() - zeros_NG.repeat_interleave(group, 1)) * scales_NG.double().repeat_interleave(group, 1)
