"""llmcompressor through the stage, on tiny models: what is in the file, and that the table tells the truth about it."""

from __future__ import annotations

import json

import pytest
from quantize_fixtures import TOKENIZER_FILES, make_model, make_rows, method, runtime

from pipeline.provenance import tree_sha256
from pipeline.quantizers import QuantizationError
from pipeline.stages import quantize as stage


def run(folder, chosen, out="out"):
    return stage.run(chosen, runtime(), key="x", model=folder / "m", calibration=folder / "c", out=folder / out)


@pytest.fixture(scope="module")
def qwen_gptq(tmp_path_factory):
    """Qwen2 (biases of 5, a head of its own), layer 1's o_proj left alone."""
    folder = tmp_path_factory.mktemp("qwen")
    model = make_model(folder / "m", "qwen2", tie_word_embeddings=False)
    make_rows(folder / "c")
    return folder, model, run(folder, method(ignore=["layers.1.self_attn.o_proj"]))


@pytest.fixture(scope="module")
def llama_awq(tmp_path_factory):
    """Llama with a tied head and as many key as query heads, so that every module gets a scale; 8 bits."""
    folder = tmp_path_factory.mktemp("llama")
    model = make_model(folder / "m", num_key_value_heads=4, tie_word_embeddings=True)
    make_rows(folder / "c", (48, 40, 8, 48))
    return folder, model, run(folder, method(method="awq", bits=8))


def tensors_of(folder):
    from safetensors.torch import load_file

    (path,) = folder.glob("*.safetensors")
    return load_file(path)


def test_the_file_holds_the_original_but_for_the_quantized_modules(qwen_gptq):
    import torch

    folder, model, metrics = qwen_gptq
    written, original = tensors_of(folder / "out"), model.state_dict()
    assert metrics["modules"] == 13
    assert metrics["ignored_modules"] == {"layers.1.self_attn.o_proj": ["model.layers.1.self_attn.o_proj"]}
    unpacked = {n for n in original if n.removesuffix(".weight") not in metrics["matched_modules"]}
    assert unpacked - set(written) == set()
    for name in unpacked:  # embedding, head, norms, biases and the ignored module
        assert torch.equal(written[name], original[name]), name
    assert {n for n in written if n.endswith(".bias")} == {n for n in original if n.endswith(".bias")}


def test_transformers_reads_the_same_model_as_the_table_describes(qwen_gptq):
    """The error of each module, anew: with transformers' own dequantized weights and loops in float64."""
    import torch
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    folder, model, metrics = qwen_gptq
    theirs = AutoModelForCausalLM.from_pretrained(
        folder / "out", quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    rows = stage.read_rows(folder / "c" / "rows.parquet", stage.make_plan(folder / "m", method(), "s", _adapter()))
    seen = {}
    for name in metrics["matched_modules"]:
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: seen.setdefault(name, []).append(args[0][0].double())
        )
    with torch.no_grad():
        for row in rows[:2]:
            model(torch.tensor([row]))
    for name, line in zip(metrics["matched_modules"], metrics["layers"], strict=True):
        assert name == f"model.layers.{line['layer']}.{line['module']}"
        w, w_q = (m.get_submodule(name).weight.detach().double() for m in (model, theirs))
        wrong = sum(float(((x @ w_q.T - x @ w.T) ** 2).sum()) for x in seen[name])
        whole = sum(float(((x @ w.T) ** 2).sum()) for x in seen[name])
        assert line["error"] == pytest.approx((wrong / whole) ** 0.5, rel=1e-3)
        assert 0 < line["error"] < 0.2
        assert line["library_error"] > 0 and line["fallback"] is None


def _adapter():
    from pipeline.quantizers import adapter

    return adapter("llmcompressor")


def test_config_and_tokenizer_are_the_originals(qwen_gptq):
    folder, _, _ = qwen_gptq
    ours = json.loads((folder / "out" / "config.json").read_text())
    settings = ours.pop("quantization_config")
    assert ours == json.loads((folder / "m" / "config.json").read_text())
    assert settings["format"] == "pack-quantized"
    assert "model.layers.1.self_attn.o_proj" in settings["ignore"]
    for name, text in TOKENIZER_FILES.items():
        assert (folder / "out" / name).read_bytes() == text.encode()


def test_sizes_come_from_the_file(qwen_gptq):
    folder, _, metrics = qwen_gptq
    tensors = tensors_of(folder / "out")
    assert metrics["weight_bytes"] == sum(t.nbytes for t in tensors.values())
    # 4-bit codes; a group of 16 shares a float32 scale and a 4-bit zero; the shape (two int64) and float32 biases
    weights = sum(n * k for n, k in _shapes(folder))
    extra = 16 * metrics["modules"] + sum(t.nbytes for n, t in tensors.items() if n.endswith(".bias"))
    assert metrics["packed_bits_per_weight"] == pytest.approx(4 + (32 + 4) / 16 + 8 * extra / weights)


def _shapes(folder):
    return stage.make_plan(folder / "m", method(ignore=["layers.1.self_attn.o_proj"]), "s", _adapter()).shapes.values()


def test_all_rows_count_and_the_same_inputs_give_the_same_bytes(qwen_gptq):
    folder, _, metrics = qwen_gptq
    assert (metrics["rows"], metrics["tokens"]) == (8, 8 * 48)
    again = run(folder, method(ignore=["layers.1.self_attn.o_proj"]), "again")
    assert again["checkpoint_sha256"] == metrics["checkpoint_sha256"] == tree_sha256(folder / "again")
    assert json.loads((folder / "again" / "recipe.json").read_text())["threads"] == 1


def test_folded_scales_are_undone_before_weights_are_compared(llama_awq):
    """At 8 bits a group of 16 is nearly exact: half a step is 1/510 of its range; a scale left in would be far off."""
    _, _, metrics = llama_awq
    assert metrics["unscaled_modules"] == 0
    assert metrics["tokens"] == 48 + 40 + 8 + 48
    assert all(line["weight_error"] < 0.01 for line in metrics["layers"])
    assert all(line["error"] < 0.01 for line in metrics["layers"])


def test_folding_leaves_the_logits_of_the_whole_model_alone(llama_awq):
    import torch

    from pipeline.checkpoint.load import load_decoder

    folder, model, _ = llama_awq
    decoder = load_decoder(folder / "out", device="cpu", dtype=torch.float32, pack_head=False, trust_remote_code=False)
    ids = torch.arange(40)
    with torch.inference_mode():
        ours = decoder.forward(ids, decoder.new_cache(40))
        theirs = model(ids[None]).logits[0]
    # 8-bit rounding alone moves these sharp random logits by 2 %; one scale left unfolded moves them by far more.
    assert float((ours - theirs).norm() / theirs.norm()) < 0.04


def test_a_tied_head_is_stored_once(llama_awq):
    import torch

    folder, model, _ = llama_awq
    tensors = tensors_of(folder / "out")
    assert "lm_head.weight" not in tensors
    assert json.loads((folder / "out" / "config.json").read_text())["tie_word_embeddings"] is True
    assert torch.equal(tensors["model.embed_tokens.weight"], model.state_dict()["model.embed_tokens.weight"])


def test_a_singular_hessian_is_counted_and_everywhere_fails_the_stage(tmp_path, monkeypatch):
    import torch
    from llmcompressor.modifiers.gptq import helpers

    make_model(tmp_path / "m")
    make_rows(tmp_path / "c")
    whole = torch.linalg.cholesky_ex

    def fails(columns):
        def cholesky_ex(hessian, *, check_errors, out):
            whole(hessian, check_errors=check_errors, out=out)
            out[1].fill_(int(hessian.shape[-1] in columns))

        return cholesky_ex

    monkeypatch.setattr(helpers.torch.linalg, "cholesky_ex", fails({128}))
    metrics = run(tmp_path, method())
    assert metrics["fallbacks"] == 2
    assert {line["module"] for line in metrics["layers"] if line["fallback"]} == {"mlp.down_proj"}
    monkeypatch.setattr(helpers.torch.linalg, "cholesky_ex", fails({64, 128}))
    with pytest.raises(QuantizationError, match=r"only rounded to nearest \(singular Hessian\)"):
        run(tmp_path, method(), "none")
    assert not (tmp_path / "none").exists()
