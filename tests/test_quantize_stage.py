"""The stage around the libraries: rows, drafts, dtype rule, refusals that come before any work."""

from __future__ import annotations

import json
import math

import pytest
from quantize_fixtures import make_model, make_rows, method, runtime

from pipeline.quantizers import QuantizationError, Quantized, Solved
from pipeline.quantizers.error import round_to_nearest, undo_scales
from pipeline.quantizers.export import half_scales
from pipeline.quantizers.plan import Plan
from pipeline.stages import quantize as stage

PLAN = Plan(family="llama", shapes={"model.layers.0.a": (32, 64)}, ignored={}, vocab_size=128)


def run(folder, chosen=None, **paths):
    given = {"model": folder / "m", "calibration": folder / "c", "out": folder / "out", **paths}
    return stage.run(chosen or method(), runtime(), key="x", **given)


def no_library(monkeypatch):
    def refuse(job):
        pytest.fail("the library was started")

    monkeypatch.setattr(stage.adapter("llmcompressor"), "quantize", refuse)


def test_rows_come_back_in_order_and_empty_ones_are_left_out(tmp_path):
    import pandas as pd

    table = pd.DataFrame({"row": [2, 0, 1], "document": list("abc"), "input_ids": [[7, 8], [1], []]})
    table.to_parquet(tmp_path / "rows.parquet")
    assert stage.read_rows(tmp_path / "rows.parquet", PLAN) == [[1], [7, 8]]


@pytest.mark.parametrize(
    ("lengths", "vocab_size", "words"),
    [((0, 0), 128, "no calibration row"), ((64,), 400, "beyond the model's vocabulary of 128")],
)
def test_rows_that_cannot_calibrate_are_refused(tmp_path, lengths, vocab_size, words):
    make_rows(tmp_path, lengths, vocab_size)
    with pytest.raises(QuantizationError, match=words):
        stage.read_rows(tmp_path / "rows.parquet", PLAN)


def test_a_missing_file_of_rows_says_how_to_make_it(tmp_path):
    with pytest.raises(QuantizationError, match=r"rows\.parquet: not found; run"):
        stage.read_rows(tmp_path / "rows.parquet", PLAN)


def test_few_tokens_warn(capsys):
    assert stage.warnings(PLAN, [[1] * 64]) == []
    assert "63 calibration tokens are fewer than the 64 inputs" in stage.warnings(PLAN, [[1] * 63])[0]
    assert capsys.readouterr().err.startswith("warning: 63")


@pytest.mark.parametrize("place", ["weight", "input"])
def test_a_model_that_is_not_finite_is_refused_with_the_layers_name(tmp_path, monkeypatch, place):
    import torch

    no_library(monkeypatch)
    model = make_model(tmp_path / "m")
    with torch.no_grad():
        if place == "weight":
            model.model.layers[1].mlp.up_proj.weight[3, 4] = math.nan
        else:
            model.model.layers[1].input_layernorm.weight[0] = math.inf
    model.save_pretrained(tmp_path / "m")
    make_rows(tmp_path / "c")
    named = "mlp.up_proj: its weight" if place == "weight" else "self_attn.q_proj: its calibration inputs"
    with pytest.raises(QuantizationError, match=rf"^model\.layers\.1\.{named} contains? NaN"):
        run(tmp_path)
    assert not (tmp_path / "out").exists()


def test_only_rounding_everywhere_fails_and_dead_inputs_count_as_a_fallback():
    def solved(**fields):
        return Quantized(
            tensors={}, config={}, rows=1, tokens=1, versions={}, solved={"model.layers.0.a": Solved(**fields)}
        )

    stage.refuse_fallbacks(solved(dead_columns=63), PLAN)
    for fields, reason in (
        ({"fallback": "singular Hessian"}, "singular Hessian"),
        ({"unscaled": True}, "no scale to fold"),
        ({"dead_columns": 64}, "all calibration inputs are zero"),
    ):
        with pytest.raises(QuantizationError, match=rf"model\.layers\.0\.a .*\({reason}\)"):
            stage.refuse_fallbacks(solved(**fields), PLAN)


@pytest.mark.parametrize(
    ("flags", "device", "dtype", "changes", "expected"),
    [
        ({"avx2"}, "cpu", "bfloat16", {}, "float32"),
        ({"avx512_bf16"}, "cpu", "bfloat16", {}, "bfloat16"),
        ({"avx512_bf16"}, "cpu", "float16", {}, "float32"),
        (set(), "cuda", "bfloat16", {}, "bfloat16"),
        (set(), "cuda:1", "float16", {}, "float16"),
        (set(), "cuda", "bfloat16", {"backend": "auto_gptq", "bits": 8}, "float32"),
    ],
)
def test_arithmetic_dtype(monkeypatch, flags, device, dtype, changes, expected):
    monkeypatch.setattr(stage, "cpu_flags", lambda: flags)
    assert stage.arithmetic_dtype(runtime(device=device, dtype=dtype), method(**changes))[0] == expected


def test_an_ngram_draft_passes_through(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "draft.json").write_text('{"kind": "ngram", "ngram_max": 3}')
    assert run(tmp_path)["weight_bytes"] == 0
    assert json.loads((tmp_path / "out" / "draft.json").read_text()) == {"kind": "ngram", "ngram_max": 3}
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["draft.json"]


def test_a_self_draft_needs_and_quantizes_the_target(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "draft.json").write_text('{"kind": "self"}')
    make_model(tmp_path / "t")
    make_rows(tmp_path / "c")
    with pytest.raises(QuantizationError, match="give target=PATH"):
        run(tmp_path)
    metrics = run(tmp_path, target=tmp_path / "t")
    assert metrics["modules"] == 14
    assert json.loads((tmp_path / "out" / "draft.json").read_text()) == {"kind": "self"}
    assert {p.name for p in (tmp_path / "out").iterdir()} >= {"config.json", "model.safetensors", "recipe.json"}
    assert not (tmp_path / "out" / "scratch").exists()


def test_undo_scales_is_the_inverse_of_folding():
    """Fold random factors in [0.5, 2] as AWQ does, and see that the output of the pair of layers stays."""
    import torch

    torch.manual_seed(0)
    x_TK, up_NK, down_MN = torch.randn(5, 6), torch.randn(4, 6), torch.randn(3, 4)
    s_K, s_N = torch.rand(6) * 1.5 + 0.5, torch.rand(4) * 1.5 + 0.5
    folded = {"up": up_NK * s_K / s_N[:, None], "down": down_MN * s_N}
    quantized = Quantized(
        tensors={},
        config={},
        solved={},
        rows=1,
        tokens=1,
        versions={},
        scales_in={"up": s_K, "down": s_N},
        scales_out={"up": s_N},
    )
    torch.testing.assert_close(
        (x_TK / s_K) @ folded["up"].T @ folded["down"].T, x_TK @ up_NK.T @ down_MN.T, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(undo_scales("up", folded["up"], quantized), up_NK)
    torch.testing.assert_close(undo_scales("down", folded["down"], quantized), down_MN)


@pytest.mark.parametrize("symmetric", [True, False])
def test_rounding_to_nearest_is_within_half_a_step_and_keeps_what_is_on_the_grid(symmetric):
    import torch

    torch.manual_seed(0)
    w_NK = torch.randn(3, 32)
    w_NK[1] = 0
    rounded_NK = round_to_nearest(w_NK, 4, 16, symmetric)
    for n in range(3):
        for g in range(2):
            group = w_NK[n, 16 * g : 16 * g + 16].double()
            low, high = min(group.min().item(), 0), max(group.max().item(), 0)
            step = 2 * max(-low, high) / 15 if symmetric else (high - low) / 15
            wrong = (rounded_NK[n, 16 * g : 16 * g + 16].double() - group).abs().max().item()
            assert wrong <= step * (1 if symmetric else 0.5001) + 1e-6
    if not symmetric:
        torch.testing.assert_close(round_to_nearest(rounded_NK, 4, 16, symmetric), rounded_NK)


def test_worse_than_rounding_in_most_modules_fails():
    """autoawq on a CPU once was 4 times worse, with a perplexity of five millions, and nothing crashed."""

    def line(ratio):
        return {"layer": 3, "module": f"m{ratio}", "error": 0.1 * ratio, "nearest_error": 0.1}

    stage.refuse_worse_than_nearest([line(0.6), line(1.1), line(9.0)])
    with pytest.raises(QuantizationError, match=r"^layer 3\.m9\.0: error 9\.0 times"):
        stage.refuse_worse_than_nearest([line(0.6), line(4.0), line(9.0)])


def test_scales_are_float16_unless_one_would_vanish():
    import torch

    assert half_scales(torch.tensor([[0.01, 2.0]])).dtype == torch.float16
    assert half_scales(torch.tensor([[0.01, 1e-7]])).dtype == torch.bfloat16
    assert half_scales(torch.tensor([[0.01, 1e6]])).dtype == torch.bfloat16
