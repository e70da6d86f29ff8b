"""What is quantized and what is refused, before any weight is read."""

from __future__ import annotations

import pytest
from quantize_fixtures import edit_config, make_model, method

from pipeline import config
from pipeline.config import ConfigError
from pipeline.quantizers import QuantizationError, adapter, archived
from pipeline.quantizers.plan import make_plan, match


def plan_of(folder, **changes):
    chosen = method(**changes)
    return make_plan(folder, chosen, "quantize.x", adapter(chosen.backend))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make_model(folder)
    return folder


def test_plan_lists_the_linear_modules_of_the_layers_and_not_the_head(llama):
    plan = plan_of(llama)
    assert len(plan.shapes) == 14
    assert plan.shapes["model.layers.1.mlp.down_proj"] == (64, 128)
    assert plan.shapes["model.layers.0.self_attn.k_proj"] == (32, 64)
    assert "lm_head" not in plan.shapes


def test_ignore_matches_whole_name_parts():
    names = ["m.layers.1.o_proj", "m.layers.10.o_proj", "m.layers.1.q_proj", "lm_head"]
    assert match("layers.1", names, "s") == ["m.layers.1.o_proj", "m.layers.1.q_proj"]
    assert match("o_proj", names, "s") == ["m.layers.1.o_proj", "m.layers.10.o_proj"]
    assert match(r"layers\.\d+\.o_proj|lm_head", names, "s") == [names[0], names[1], "lm_head"]


def test_ignored_modules_are_listed_and_left_out(llama):
    plan = plan_of(llama, ignore=["layers.1", "lm_head"])
    assert len(plan.ignored["layers.1"]) == 7
    assert plan.ignored["lm_head"] == ["lm_head"]
    assert all(name.startswith("model.layers.0.") for name in plan.shapes)


@pytest.mark.parametrize(
    ("ignore", "words"),
    [
        (["lm_hed"], ["quantize.x.ignore", "lm_hed", "o_proj"]),
        (["layers.(1"], ["quantize.x.ignore", "layers.(1", "regular expression"]),
        (["layers"], ["quantize.x.ignore", "nothing to quantize"]),
    ],
)
def test_bad_ignore_patterns_are_refused(llama, ignore, words):
    with pytest.raises(QuantizationError) as e:
        plan_of(llama, ignore=ignore)
    assert all(word in str(e.value) for word in words)


@pytest.mark.parametrize(("group_size", "intermediate"), [(64, 96), (128, 128)])
def test_a_group_that_does_not_divide_a_layer_is_refused_with_its_name(tmp_path, group_size, intermediate):
    make_model(tmp_path, intermediate_size=intermediate)
    with pytest.raises(QuantizationError, match=r"group_size: \d+ does not divide model\.layers\.0\.(mlp|self_attn)"):
        plan_of(tmp_path, group_size=group_size)


def test_the_offending_layer_may_be_ignored(tmp_path):
    make_model(tmp_path, intermediate_size=96)
    assert len(plan_of(tmp_path, group_size=64, ignore=["down_proj"]).shapes) == 12


def test_gpt2_and_offset_norms_are_refused_by_name(tmp_path):
    make_model(tmp_path / "gpt2", "gpt2", n_embd=64, n_layer=2, n_head=4, vocab_size=128)
    make_model(tmp_path / "gemma", "gemma", head_dim=16)
    with pytest.raises(QuantizationError, match=r"gpt2: its Conv1D"):
        plan_of(tmp_path / "gpt2")
    with pytest.raises(QuantizationError, match=r"gemma: not among"):
        plan_of(tmp_path / "gemma", method="awq")


def test_a_quantized_checkpoint_is_refused(tmp_path):
    make_model(tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 16})
    with pytest.raises(QuantizationError, match="already quantized"):
        plan_of(tmp_path)


def test_a_missing_model_says_so(tmp_path):
    with pytest.raises(QuantizationError, match=r"none: no config\.json there; run `dvc repro`"):
        plan_of(tmp_path / "none")


@pytest.mark.parametrize("backend", ["auto_gptq", "autoawq"])
def test_widths_that_archived_packing_would_cut_off_are_refused(tmp_path, monkeypatch, backend):
    monkeypatch.setattr(archived, "python", lambda: None)
    make_model(tmp_path, num_key_value_heads=1)  # 16 key and value outputs
    with pytest.raises(QuantizationError, match=r"layers\.0\.self_attn\.k_proj: 16 outputs are not a multiple of 32"):
        plan_of(tmp_path, backend=backend, method="gptq" if backend == "auto_gptq" else "awq")


def test_autoawq_clip_needs_whole_batches_of_outputs(llama, monkeypatch):
    monkeypatch.setattr(archived, "python", lambda: None)
    with pytest.raises(QuantizationError, match=r"x\.clip: .*k_proj has 32"):
        plan_of(llama, backend="autoawq", method="awq", clip=True)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"backend": "autoawq"}, "backend"),
        ({"backend": "auto_gptq", "bits": 5}, "bits"),
        ({"backend": "auto_gptq", "damp_percent": 1.0}, "damp_percent"),
        ({"true_sequential": True}, "true_sequential"),
        ({"method": "awq", "clip": True}, "clip"),
        ({"method": "awq", "backend": "autoawq", "bits": 8}, "bits"),
        ({"method": "awq", "backend": "autoawq", "group_size": -1}, "group_size"),
        ({"method": "awq", "backend": "autoawq", "zero_point": False}, "zero_point"),
    ],
)
def test_settings_a_backend_cannot_act_on_are_refused_by_name(changes, key):
    with pytest.raises(ConfigError, match=rf"^quantize\.x\.{key}: "):
        config._check_quantize("quantize.x", method(**changes))


@pytest.mark.parametrize("changes", [{"clip": True}, {"method": "awq", "true_sequential": True, "desc_act": True}])
def test_keys_of_the_other_method_are_not_consulted(changes):
    config._check_quantize("quantize.x", method(**changes))
