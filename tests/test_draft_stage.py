"""Stage `draft`, kind by kind, on tiny models; nothing is downloaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from data_fixtures import RUNTIME, model_section
from transformers import AutoModelForCausalLM

from pipeline.checkpoint import random_llama
from pipeline.checkpoint.tokenizer import TokenizerMismatch
from pipeline.config import Distill, Draft, RandomLlama
from pipeline.provenance import tree_sha256
from pipeline.stages import draft, fetch_target

SHAPE = RandomLlama(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=300,
    max_position_embeddings=128,
)
RECIPE = Distill(
    layers=[0, -1],
    prompts_per_category=3,
    held_out_per_category=2,
    answer_tokens=8,
    answer_batch_size=4,
    steps=4,
    batch_size=2,
    learning_rate=1e-3,
    temperature=1.0,
    vocab=100,
    prompt_weight=0.5,
    prompt_tokens=4,
    train_embedding=False,
    time_budget_s=60.0,
)


def section(kind: str, **changed) -> Draft:
    return Draft(**{"kind": kind, "model": None, "distill": RECIPE, "ngram_max": 3, **changed})


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    random_llama.make(SHAPE, folder, dtype=torch.float32, seed=1)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    rows = [
        {"id": f"{c}{i}", "split": split, "category": c, "text": "", "input_ids": [10 + i, 20, 30 + i]}
        for split in ("evaluation", "calibration")
        for c in ("code", "prose")
        for i in range(5)
    ]
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def other_tokens(target: Path, folder: Path) -> Path:
    """The target with two tokens exchanged, and weights that nobody could load."""
    shutil.copytree(target, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "model.safetensors").write_bytes(b"not a checkpoint")
    return folder


def test_distill_writes_a_checkpoint_and_says_what_it_is_worth(target, prompts, tmp_path):
    out = tmp_path / "draft"
    found = draft.run(section("distill"), RUNTIME, target=target, prompts=prompts, out=out)
    assert json.loads((out / "draft.json").read_text()) == {"kind": "distill", "layers": [0, 2], "target_layers": 3}
    module = AutoModelForCausalLM.from_pretrained(out)
    assert found["parameters"] == sum(p.numel() for p in module.parameters())
    assert found["common_vocab_size"] == 300
    assert found["weight_bytes"] == (out / "model.safetensors").stat().st_size
    assert found["answers"]["prompts"] == 6 and found["answers"]["held_out_prompts"] == 4
    after = found["agreement"]["after"]
    assert after["tokens"] == sum(c["tokens"] for c in after["by_category"].values()) <= 4 * 8
    assert set(after["by_category"]) == {"code", "prose"}
    assert found["training"]["steps"] == 4 and found["training"]["vocab"] == 100
    again = tmp_path / "again"
    draft.run(section("distill"), RUNTIME, target=target, prompts=prompts, out=again)
    assert tree_sha256(again) == tree_sha256(out)


def test_prompts_without_a_calibration_split_leave_nothing_behind(target, prompts, tmp_path):
    only = tmp_path / "prompts.jsonl"
    only.write_text("".join(r for r in prompts.read_text().splitlines(True) if '"evaluation"' in r))
    with pytest.raises(ValueError, match="no prompt is in the calibration split"):
        draft.run(section("distill"), RUNTIME, target=target, prompts=only, out=tmp_path / "draft")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["prompts.jsonl"]


@pytest.mark.parametrize(("kind", "about"), [("self", {}), ("ngram", {"ngram_max": 3})])
def test_kinds_without_weights_write_only_their_name(kind, about, target, prompts, tmp_path):
    found = draft.run(section(kind), RUNTIME, target=target, prompts=prompts, out=tmp_path / "draft")
    assert found == {"kind": kind, **about}
    (file,) = (tmp_path / "draft").iterdir()
    assert json.loads(file.read_text()) == {"kind": kind, **about}


def test_model_from_a_folder_is_taken_whole(target, prompts, tmp_path):
    other = model_section(source="path", path=str(target), random=None)
    found = draft.run(section("model", model=other), RUNTIME, target=target, prompts=prompts, out=tmp_path / "draft")
    assert (found["kind"], found["name"], found["common_vocab_size"]) == ("model", "m", 300)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "draft" / name).read_bytes() == (target / name).read_bytes()
    assert json.loads((tmp_path / "draft/draft.json").read_text()) == {"kind": "model", "name": "m"}


def test_model_with_other_tokens_is_refused_before_its_weights_are_touched(target, prompts, tmp_path):
    folder = other_tokens(target, tmp_path / "other")
    other = model_section(source="path", path=str(folder), random=None)
    with pytest.raises(TokenizerMismatch, match="but 'a' in the target"):
        draft.run(section("model", model=other), RUNTIME, target=target, prompts=prompts, out=tmp_path / "draft")
    assert not (tmp_path / "draft").exists()


def test_hub_model_with_other_tokens_is_refused_before_its_weights_are_downloaded(
    target, prompts, tmp_path, monkeypatch
):
    other = other_tokens(target, tmp_path / "other")

    def download(repo, *, revision, allow_patterns, local_dir, **rest):
        assert (repo, revision) == ("some/model", "abc") and rest["token"] is False
        assert not any("safetensors" in pattern or "*" in pattern for pattern in allow_patterns)
        for name in allow_patterns:
            shutil.copyfile(other / name, Path(local_dir) / name)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(fetch_target, "run", lambda *args, **rest: pytest.fail("weights were asked for"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    hub = model_section(source="hub", id="some/model", revision="abc", random=None)
    with pytest.raises(TokenizerMismatch, match=r"id .* is 'b', but 'a' in the target"):
        draft.run(section("model", model=hub), RUNTIME, target=target, prompts=prompts, out=tmp_path / "draft")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other"]
