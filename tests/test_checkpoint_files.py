"""Folders that are damaged, incomplete or unsafe are refused with the file's name."""

import json
import struct

import pytest
import torch
from checkpoint_fixtures import edit_config, rewrite, saved, tiny
from safetensors.torch import save_file

from pipeline.checkpoint import files
from pipeline.checkpoint.files import CheckpointError, TensorFiles
from pipeline.checkpoint.read import read


@pytest.fixture
def folder(tmp_path):
    return saved(tiny("Llama"), tmp_path)


@pytest.fixture
def sharded(tmp_path):
    tiny("Llama").save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    return tmp_path


def test_single_file_and_shards_read_the_same(sharded, tmp_path_factory):
    single = read(saved(tiny("Llama"), tmp_path_factory.mktemp("single")))
    shards = read(sharded)
    assert set(single.tensors) == set(shards.tensors)
    assert all(torch.equal(single.tensors[n], shards.tensors[n]) for n in single.tensors)
    assert single.weight_bytes == shards.weight_bytes == sum(4 * p.numel() for p in tiny("Llama").parameters())
    assert single.bits_per_weight == 32 and single.format == "full"


def test_tensors_outlive_their_file(folder):
    tensor = read(folder).tensors["model.norm.weight"]
    before = tensor.clone()
    with (folder / "model.safetensors").open("r+b") as f:
        f.seek(-4096, 2)
        f.write(b"\x77" * 4096)
    assert torch.equal(tensor, before)


def test_a_file_is_opened_once_for_many_tensors_and_anew_when_much_of_it_is_mapped(sharded, monkeypatch):
    opened = []
    monkeypatch.setattr(files, "_opened", lambda file, really=files._opened: opened.append(file.name) or really(file))
    tensors = TensorFiles(sharded)
    for name in sorted(tensors, key=lambda name: tensors.entries[name].file):
        tensors[name]
    shards = sorted(path.name for path in sharded.glob("model-*.safetensors"))
    assert opened == [*shards, *shards], "for its header, and for its data"
    monkeypatch.setattr(files, "MAPPED_BYTES", 0)
    opened.clear()
    for _ in range(3):
        tensors["model.norm.weight"]
    assert len(opened) == 3


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "..", "sub/model.safetensors", 7])
def test_index_that_leaves_the_folder_is_refused(sharded, shard):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = shard
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="outside the folder"):
        read(sharded)


def test_missing_shard(sharded):
    next(sharded.glob("model-00002*")).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002.*missing; fetch"):
        read(sharded)


def test_shard_without_the_tensor_the_index_promises(sharded):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.ghost.weight"] = content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"lacks model\.ghost\.weight"):
        read(sharded)


def test_truncated_file(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a whole safetensors file"):
        read(folder)


@pytest.mark.parametrize("claimed", [2**63, 10**12, 3])
def test_header_that_claims_an_absurd_size(folder, claimed):
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", claimed) + file.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        read(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_weights_are_refused_with_the_tensors_name(folder, value):
    rewrite(folder, lambda t: t["model.norm.weight"].__setitem__(3, value))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds 1 NaN"):
        read(folder).tensors["model.norm.weight"]


def test_pickle_only_is_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"only pickled weights.*safe_serialization"):
        read(folder)


def test_empty_folder_and_bad_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: not found"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not readable JSON"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        read(tmp_path)


def test_two_files_without_an_index_are_ambiguous_unless_one_is_the_models(folder):
    save_file({"a": torch.ones(1)}, folder / "adapter.safetensors")
    assert "a" not in read(folder).tensors
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(CheckpointError, match="2 safetensors files and no index"):
        TensorFiles(folder)


def test_unknown_method_and_settings_without_layers(folder):
    edit_config(folder, lambda c: c.update(quantization_config={"quant_method": "fp8"}))
    with pytest.raises(CheckpointError, match="'fp8' is not read; known: gptq, awq, compressed-tensors"):
        read(folder)
    edit_config(folder, lambda c: c.update(quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32}))
    with pytest.raises(CheckpointError, match="no layer of that format"):
        read(folder)
