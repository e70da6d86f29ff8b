"""auto-gptq and autoawq for real, in their own environment, on tiny models."""

from __future__ import annotations

import copy
import json

import pytest
from quantize_fixtures import TOKENIZER_FILES, edit_config, make_model, make_rows, method, runtime

from pipeline.provenance import tree_sha256
from pipeline.quantizers import QuantizationError, archived
from pipeline.quantizers.error import round_to_nearest
from pipeline.stages import quantize as stage

pytestmark = [pytest.mark.quantizers, pytest.mark.slow]
GPTQ = {"backend": "auto_gptq", "true_sequential": True}
AWQ = {"method": "awq", "backend": "autoawq"}


@pytest.fixture(autouse=True, scope="module")
def environment():
    try:
        archived.python()
    except QuantizationError as e:
        pytest.skip(str(e))


def run(folder, out="out", **changes):
    return stage.run(
        method(**changes), runtime(), key="x", model=folder / "m", calibration=folder / "c", out=folder / out
    )


def tensors_of(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """Qwen2 in bfloat16 with biases of 5 and a tied head, and a rope theta unlike any default."""
    import torch

    folder = tmp_path_factory.mktemp("qwen")
    rope = {"rope_theta": 500.0, "rope_type": "default"}
    model = make_model(folder / "m", "qwen2", tie_word_embeddings=True, rope_parameters=rope)
    model.to(torch.bfloat16).save_pretrained(folder / "m")
    make_rows(folder / "c")
    return folder, model


@pytest.fixture(scope="module")
def gptq(qwen):
    return run(qwen[0], "gptq", **GPTQ, ignore=["layers.1.mlp.up_proj"])


@pytest.fixture(scope="module")
def awq(qwen):
    return run(qwen[0], "awq", **AWQ, ignore=["layers.1.mlp.up_proj", "layers.1.self_attn.q_proj"])


def check_file(folder, model, metrics):
    """What every archived run owes: codes, and otherwise the original's names, dtypes, biases and tokenizer."""
    import torch

    tensors, original = tensors_of(folder), model.state_dict()
    assert "lm_head.weight" not in tensors
    assert {n for n in tensors if n.endswith(".bias")} == {n for n in original if n.endswith(".bias")}
    for name, tensor in tensors.items():
        kind = name.rpartition(".")[2]
        if name in original:
            assert tensor.dtype == torch.bfloat16, name
        else:
            assert tensor.dtype == (torch.float16 if kind == "scales" else torch.int32), name
    assert torch.equal(tensors["model.embed_tokens.weight"], original["model.embed_tokens.weight"])
    for name, text in TOKENIZER_FILES.items():
        assert (folder / name).read_bytes() == text.encode()
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["rope_parameters"]["rope_theta"] == 500.0
    assert metrics["weight_bytes"] == sum(t.nbytes for t in tensors.values())
    assert all(0 < line["error"] < 0.25 for line in metrics["layers"])


def test_gptq_file_and_table(qwen, gptq):
    folder, model = qwen
    check_file(folder / "gptq", model, gptq)
    assert (gptq["rows"], gptq["tokens"], gptq["modules"]) == (8, 8 * 48, 13)
    assert all(line["library_error"] > 0 and line["time_s"] > 0 for line in gptq["layers"])
    assert "model.layers.1.mlp.up_proj.weight" in tensors_of(folder / "gptq")
    settings = json.loads((folder / "gptq" / "config.json").read_text())["quantization_config"]
    assert settings["dynamic"] == {r"-:^model\.layers\.1\.mlp\.up_proj$": {}}


def test_gptq_agrees_with_the_other_library(qwen, gptq):
    """Two independent implementations of one algorithm: the errors of layer 0 differ by rounding of scales only."""
    other = run(qwen[0], "other")
    for line, theirs in zip(gptq["layers"][:3], other["layers"][:3], strict=True):
        assert line["module"] == theirs["module"]
        assert line["error"] == pytest.approx(theirs["error"], rel=0.05)


def test_awq_file_and_table(qwen, awq):
    folder, model = qwen
    check_file(folder / "awq", model, awq)
    assert (awq["rows"], awq["tokens"], awq["modules"]) == (8, 8 * 48, 12)
    assert {line["module"] for line in awq["layers"] if line["unscaled"]} == {"self_attn.o_proj"}
    # The search starts from rounding to nearest: on the CPU autoawq leaves its first scale in the weights (see runner).
    assert all(line["error"] < 1.2 * line["nearest_error"] for line in awq["layers"])
    settings = json.loads((folder / "awq" / "config.json").read_text())["quantization_config"]
    assert settings["modules_to_not_convert"] == ["model.layers.1.mlp.up_proj", "model.layers.1.self_attn.q_proj"]


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_the_written_model_computes_what_the_original_does(qwen, gptq, awq, name):
    """Scales folded into norms, biases and neighbours, including modules left alone: as close as plain rounding."""
    import torch

    from pipeline.checkpoint.load import load_decoder

    folder, model = qwen
    ids = torch.arange(40)
    with torch.inference_mode():
        theirs = model.float()(ids[None]).logits[0]
        decoder = load_decoder(
            folder / name, device="cpu", dtype=torch.float32, pack_head=False, trust_remote_code=False
        )
        ours = decoder.forward(ids, decoder.new_cache(40))
        nearest = copy.deepcopy(model)
        for n in gptq["matched_modules"]:
            linear = nearest.get_submodule(n)
            linear.weight.copy_(round_to_nearest(linear.weight, 4, 16, False))
        rounded = nearest(ids[None]).logits[0]
    assert float((ours - theirs).norm()) < 1.2 * float((rounded - theirs).norm()) < 0.5 * float(theirs.norm())


def test_the_same_inputs_give_the_same_bytes(qwen, gptq):
    again = run(qwen[0], "again", **GPTQ, ignore=["layers.1.mlp.up_proj"])
    assert again["checkpoint_sha256"] == gptq["checkpoint_sha256"] == tree_sha256(qwen[0] / "again")


def test_act_order_and_groups_without_negative_weights(tmp_path):
    """zero = 0 cannot be stored (zero - 1 is): such groups must not spill over their neighbours' zero points."""
    import torch

    model = make_model(tmp_path / "m")
    with torch.no_grad():
        weight_NK = model.model.layers[0].mlp.down_proj.weight
        weight_NK[5].abs_().add_(0.1)
    model.save_pretrained(tmp_path / "m")
    make_rows(tmp_path / "c")
    metrics = run(tmp_path, **GPTQ, desc_act=True)
    down = next(line for line in metrics["layers"] if (line["layer"], line["module"]) == (0, "mlp.down_proj"))
    assert down["weight_error"] < 0.2
    index_K = tensors_of(tmp_path / "out")["model.layers.0.mlp.down_proj.g_idx"]
    assert sorted(index_K.tolist()) == [k // 16 for k in range(128)]
    assert index_K.tolist() != sorted(index_K.tolist())


def test_rows_of_any_length_all_count(tmp_path):
    """autoawq by itself skips rows over its limit and the remainder of the joined stream."""
    make_model(tmp_path / "m")
    make_rows(tmp_path / "c", (60, 40, 8, 5))
    metrics = run(tmp_path, **AWQ)
    assert (metrics["tokens_given"], metrics["tokens"]) == (113, 112)


def test_a_config_that_old_transformers_misreads_is_caught(tmp_path, monkeypatch):
    """Without the rewritten config, 4.51 takes theta = 10,000 without a word; the probe sees it."""
    make_model(tmp_path / "m", rope_parameters={"rope_theta": 500.0, "rope_type": "default"})
    make_rows(tmp_path / "c")
    monkeypatch.setattr(archived, "legacy_config", lambda config: config)
    with pytest.raises(QuantizationError, match="computes other logits"):
        run(tmp_path, **GPTQ)


def test_a_family_the_library_does_not_know_is_refused(tmp_path):
    make_model(tmp_path / "m", "qwen3", head_dim=16)
    edit_config(tmp_path / "m")
    make_rows(tmp_path / "c")
    with pytest.raises(QuantizationError, match=r"qwen3: not among the model types checked with auto_gptq"):
        run(tmp_path, **GPTQ)
