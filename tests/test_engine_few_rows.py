"""The C++ kernels against float64 products, within the rounding of float32 sums and of the output's dtype."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.checkpoint.load import dense_from_of, load_decoder
from pipeline.engine import few_rows, native
from pipeline.engine.few_rows import (
    FewRowsInt4Linear,
    FewRowsInt8Linear,
    FewRowsLinear,
    pack_nibbles,
    unpack_nibbles,
)
from pipeline.engine.linear import Int8Linear, joined
from pipeline.engine.linear4 import Int4Linear, quantized_linear

pytestmark = pytest.mark.usefixtures("two_threads")
UNIT = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}  # half an ulp, relative

needs_kernels = pytest.mark.skipif(native.refusal() is not None, reason=f"no kernels here: {native.refusal()}")


def within(y_MN, x_MK, weight_NK, dtype):
    """Every output within K float32 roundings of the exact product, and one rounding to `dtype`."""
    exact = x_MK.double() @ weight_NK.double().t()
    sums = (x_MK.shape[1] + 4) * UNIT[torch.float32] * (x_MK.double().abs() @ weight_NK.double().abs().t())
    return ((y_MN.double() - exact).abs() <= sums + UNIT[dtype] * (exact.abs() + sums)).all()


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("M", [*range(1, 10), 17])
@pytest.mark.parametrize(("N", "K"), [(64, 576), (101, 96), (1, 32), (333, 1536)])
def test_bf16_weights(M, N, K, dtype):
    generator = torch.Generator().manual_seed(M * N)
    weight_NK = torch.randn(N, K, generator=generator).bfloat16()
    x_MK = torch.randn(M, K, generator=generator).to(dtype)
    y_MN = FewRowsLinear(torch.nn.Parameter(weight_NK, requires_grad=False), None)(x_MK)
    assert y_MN.dtype == dtype and within(y_MN, x_MK, weight_NK, dtype)
    assert not within(y_MN, x_MK, weight_NK.roll(1, 1), dtype), "the bound would not notice shifted columns"


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("M", [1, 6, 32, 245, 489])
@pytest.mark.parametrize(("N", "K"), [(64, 576), (101, 96), (1, 32), (33, 1536)])
def test_bf16_weights_for_many_rows(M, N, K, dtype, monkeypatch):
    monkeypatch.setattr(few_rows, "beats_torch", lambda: True)
    generator = torch.Generator().manual_seed(M * N)
    weight_NK = torch.randn(N, K, generator=generator).bfloat16()
    x_MK = torch.randn(M, K, generator=generator).to(dtype)
    linear = FewRowsLinear(torch.nn.Parameter(weight_NK, requires_grad=False), None)
    y_MN = linear.dense(x_MK)
    assert y_MN.dtype == dtype and within(y_MN, x_MK, weight_NK, dtype)
    assert not within(y_MN, x_MK, weight_NK.roll(1, 1), dtype), "the bound would not notice shifted columns"
    assert torch.equal(linear.dense(x_MK[-1:]), y_MN[-1:]), "a row alone has other bits"


@needs_kernels
@pytest.mark.parametrize("bias", [False, True])
def test_a_prompt_is_rounded_to_bfloat16_from_the_measured_rows_on(bias, monkeypatch):
    monkeypatch.setattr(few_rows, "bfloat16_from_rows", lambda: 32)
    generator = torch.Generator().manual_seed(0)
    weight_NK, x_MK = (torch.randn(n, 576, generator=generator) for n in (64, 32))
    weight = torch.nn.Parameter(weight_NK.bfloat16(), requires_grad=False)
    linear = FewRowsLinear(weight, torch.randn(64, generator=generator) if bias else None)
    y_MN = linear.prompt_rows(x_MK) - (linear.bias if bias else 0)
    assert y_MN.dtype == torch.float32 and within(y_MN, x_MK.bfloat16(), weight, torch.bfloat16)
    assert not within(y_MN, x_MK, weight, torch.float32), "nothing was rounded"
    assert torch.equal(linear.prompt_rows(x_MK[:31]), linear.rows(x_MK[:31]))
    assert linear.kernel == "FewRowsLinear, prompts in bfloat16 from 32 rows"
    monkeypatch.setattr(few_rows, "bfloat16_from_rows", lambda: None)
    assert torch.equal(linear.prompt_rows(x_MK), linear.rows(x_MK)) and linear.kernel == "FewRowsLinear"


def fixed_point_slack(x_MK, weight_NK, group):
    """Each x is off by half a step of its group (largest / 32767) and a float32 rounding of the division."""
    step_MG = x_MK.double().abs().view(len(x_MK), -1, group).amax(-1) / 32767
    weight_NG = weight_NK.double().abs().view(len(weight_NK), -1, group).sum(-1)
    return (0.5 + 2.0**-8) * step_MG @ weight_NG.t()


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("M", [*range(1, 10), 17, 35, 250])
@pytest.mark.parametrize(("N", "K", "group"), [(64, 576, 64), (101, 1536, 128), (7, 512, 512), (30, 96, 8)])
def test_int4_weights(M, N, K, group, dtype):
    generator = torch.Generator().manual_seed(M * N)
    codes_NK = torch.randint(0, 16, (N, K), generator=generator, dtype=torch.uint8)
    zeros_NG = torch.randint(0, 17, (N, K // group), generator=generator, dtype=torch.uint8)  # a v1 file can say 16
    scales_NG = (torch.rand(N, K // group, generator=generator) * 0.02).half()
    x_MK = torch.randn(M, K, generator=generator).to(dtype)
    linear = FewRowsInt4Linear(codes_NK, scales_NG, zeros_NG, None)
    steps_NGg = codes_NK.view(N, -1, group).double() - zeros_NG[..., None].double()
    weight_NK = (steps_NGg * scales_NG[..., None].double()).view(N, K)
    exact = x_MK.double() @ weight_NK.t()
    sums = (K + 4) * UNIT[torch.float32] * (x_MK.double().abs() @ weight_NK.abs().t())
    sums = sums + fixed_point_slack(x_MK, weight_NK, group)
    bound = sums + UNIT[dtype] * (exact.abs() + sums)
    assert ((linear(x_MK).double() - exact).abs() <= bound).all()
    linear.dense_from_rows = 1
    assert ((linear(x_MK).double() - exact).abs() <= bound).all()
    off_by_one = exact - x_MK.double() @ scales_NG.double().repeat_interleave(group, 1).t()
    assert ((linear(x_MK).double() - off_by_one).abs() > bound).any(), "the bound would not notice zeros one off"


@needs_kernels
@pytest.mark.parametrize("M", [1, 3, 9])
def test_int8_weights(M):
    generator = torch.Generator().manual_seed(M)
    x_MK = torch.randn(M, 192, generator=generator) * torch.logspace(-3, 3, 192)  # outliers in some groups
    full_NK = torch.randn(101, 192, generator=generator)
    linear, plain = FewRowsInt8Linear(full_NK, None), Int8Linear(full_NK, None)
    weight_NK = plain.codes.double() * plain.scale[:, None].double()
    exact = x_MK.double() @ weight_NK.t()
    sums = (192 + 4) * UNIT[torch.float32] * (x_MK.double().abs() @ weight_NK.abs().t())
    assert ((linear(x_MK).double() - exact).abs() <= sums + fixed_point_slack(x_MK, weight_NK, 64)).all()
    ids = torch.tensor([[0, 100], [7, 8]])
    assert torch.equal(linear.lookup(linear.codes, linear.scale, ids), weight_NK.float()[ids])
    assert torch.equal(linear.tile(64, 101), weight_NK.float()[64:])


@needs_kernels
@pytest.mark.parametrize("kind", ["bf16", "int4", "int8"])
def test_a_token_among_others_gets_the_bits_it_gets_alone(kind):
    generator = torch.Generator().manual_seed(0)
    x_MK, weight_NK = torch.randn(70, 576, generator=generator), torch.randn(200, 576, generator=generator)
    codes = torch.randint(0, 16, (200, 576), generator=generator, dtype=torch.uint8)
    linear = {
        "bf16": lambda: FewRowsLinear(torch.nn.Parameter(weight_NK.bfloat16(), requires_grad=False), None),
        "int4": lambda: FewRowsInt4Linear(codes, torch.rand(200, 9).half(), torch.full((200, 9), 7), None),
        "int8": lambda: FewRowsInt8Linear(weight_NK, None),
    }[kind]()
    alone = torch.cat([linear(x_MK[m : m + 1]) for m in range(70)])
    for M in (*range(1, 18), 31, 32, 33, 70):
        assert torch.equal(linear(x_MK[:M]), alone[:M])


@needs_kernels
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_one(bad):
    x_MK = torch.ones(2, 64)
    x_MK[1, 5] = bad
    for linear in (
        FewRowsInt4Linear(torch.ones(8, 64, dtype=torch.uint8), torch.ones(8, 1), torch.zeros(8, 1), None),
        FewRowsInt8Linear(torch.ones(8, 64), None),
    ):
        y_MN = linear(x_MK)
        assert y_MN[0].isfinite().all() and not y_MN[1].isfinite().any()


@needs_kernels
@pytest.mark.parametrize("code", [0, 15])
def test_the_largest_group_does_not_overflow(code):
    """Sums of 4096 products of the largest code and the largest x: 2^31 is 7 % above."""
    codes, zeros = torch.full((8, 4096), code, dtype=torch.uint8), torch.full((8, 1), 15 - code)
    linear = FewRowsInt4Linear(codes, torch.ones(8, 1), zeros, None)
    expected = 4096.0 * (2 * code - 15)
    for M in (2, few_rows.MANY_ROWS):  # unpacked for many rows, so large a group would not fit
        torch.testing.assert_close(linear(torch.ones(M, 4096)), torch.full((M, 8), expected), rtol=1e-6, atol=0)


@needs_kernels
@pytest.mark.parametrize("N", [16, 12])
def test_layers_of_whole_panels_join(N):
    codes = torch.randint(0, 16, (2, N, 64), dtype=torch.uint8)
    parts = [FewRowsInt4Linear(c, torch.rand(N, 2), torch.full((N, 2), 7), None) for c in codes]
    whole, x_MK = joined(parts), torch.randn(3, 64)
    assert (whole is None) == (N == 12)
    if whole is not None:
        assert torch.equal(whole(x_MK), torch.cat([part(x_MK) for part in parts], 1))


@needs_kernels
@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_nibbles_round_trip(N, blocks, seed):
    codes_NK = torch.randint(0, 16, (N, 8 * blocks), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes_NK))[:N], codes_NK)


@needs_kernels
def test_which_layers_are_taken():
    codes, zeros = torch.zeros(8, 192, dtype=torch.uint8), torch.zeros(8, 3)

    def kind(zeros, group, bits=4, scale=1.0):
        scales = torch.full((8, 192 // group), scale)
        parts = (codes, scales, zeros[:, : 192 // group], None, bits, group, None, torch.float32, "cpu")
        return type(quantized_linear(*parts, True))

    assert kind(zeros, 64) is FewRowsInt4Linear
    assert kind(zeros, 64, scale=1 + 2.0**-20) is Int4Linear, "a scale that float16 would round"
    assert kind(zeros + 0.5, 64) is Int4Linear, "a zero between two codes is not a byte"
    assert kind(torch.zeros(8, 24), 8) is FewRowsInt4Linear
    assert kind(torch.zeros(8, 16), 12) is not FewRowsInt4Linear
    assert not few_rows.takes_int4(4, 8192, 8192, torch.ones(8, 1), torch.zeros(8, 1), torch.float32, "cpu")
    assert not few_rows.takes_full(40, torch.bfloat16, "cpu")
    assert not few_rows.takes_full(64, torch.float32, "cpu")
    assert not few_rows.takes_full(64, torch.bfloat16, "cuda")


@needs_kernels
def test_classes_given_are_classes_used(make_decoder, tmp_path):
    make_decoder(1).module.bfloat16().save_pretrained(tmp_path)
    options = {"device": "cpu", "dtype": torch.bfloat16, "pack_head": False, "trust_remote_code": False}
    ids_T = torch.arange(6)
    logits = []
    for classes in ({"FullLinear": None}, {"FewRowsLinear": None}):
        decoder = load_decoder(tmp_path, dense_from=classes, **options)
        assert dense_from_of(decoder) == classes
        assert [name.split(",")[0] for name in decoder.describe()["kernels"]] == list(classes)
        logits.append(decoder.forward(ids_T, decoder.new_cache(6)).float())
    torch.testing.assert_close(*logits, rtol=0.05, atol=0.05)


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("level", ["default", "avx2"])
def test_the_kernels_for_shorter_vectors(level):
    """What a CPU without AVX-512, or without AVX2, runs: torch can be told to take this one for such."""
    if torch.backends.cpu.get_cpu_capability().lower() == level:
        pytest.skip(f"this CPU's own: {level}")
    files = [str(Path(__file__).with_name(f"test_engine_{name}.py")) for name in ("few_rows", "lean")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *files]
    done = subprocess.run(command, env=os.environ | {"ATEN_CPU_CAPABILITY": level}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_without_a_compiler_torch_serves_and_says_why(tmp_path):
    code = "from pipeline.engine import native; print(native.refusal())"
    environment = {"PATH": "/nowhere", "CXX": "no-such-compiler", "KERNELS_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "no C++ compiler"


def test_a_failing_compiler_leaves_nothing_behind(tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    compiler.chmod(0o755)
    folder = tmp_path / "kernels"
    code = "from pipeline.engine import native; print(native.refusal())"
    environment = {"PATH": "/usr/bin:/bin", "CXX": str(compiler), "KERNELS_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "compiling the kernels failed: broken"
    assert list(folder.iterdir()) == []
