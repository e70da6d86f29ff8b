"""A folder in which every stage has its inputs, and the ways to spoil one of them."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from checkpoint_fixtures import quantized, rewrite, tiny
from data_fixtures import tiny_target
from report_fixtures import PARAMS as STUDIED
from report_fixtures import write_study

from pipeline import config, provenance
from pipeline.__main__ import arguments_of, main

ROOT = Path(__file__).parents[2]
QUICK_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
QUICK_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
Plant = Callable[[Path], object]
# argument of a stage -> what lies in the world under that name; arguments that are not listed are called as their file
INPUTS = {
    "target": "model", "checkpoint": "model", "base": "model", "prompts": "prompts.jsonl", "quantized_draft": "draft",
    "environment": "environment.json", "report": "reports/report.md", "summary": "reports/metrics.json",
    "figures": "reports/figures", **{f"speculate_{t}": f"results/speculate@{t}.json" for t in ("base", "gptq", "awq")},
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One bad input: how to plant it, the command that meets it, and what its line must name and advise (patterns)."""

    name: str
    run: str
    plant: Plant
    names: str
    way_out: str
    code: int = 2


def words_of(command: str) -> list[str]:
    """`STAGE[@KEY] [name=path ...]` with every path of the stage's signature filled in: inputs from INPUTS, out/..."""
    stage, *given = command.split()
    run = importlib.import_module(f"pipeline.stages.{stage.partition('@')[0]}").run
    _, paths, _ = arguments_of(run)
    told = {word.partition("=")[0] for word in given}
    usual = [
        f"{name}=" + (f"out/{name}" if name.startswith("out") else INPUTS.get(name, name))
        for name, required in paths.items()
        if required and name not in told
    ]
    record = [] if "metrics" in told else ["metrics=out/record.json"]
    return [stage, *usual, *record, *given]


def build(folder: Path) -> Path:
    """Everything that the stages read, made by the stages themselves where that is quick."""
    params = yaml.safe_load(config.compose(ROOT / "conf", ["experiment=smoke"]))
    params["runtime"] |= {"dtype": "float32", "threads": 1, "min_free_memory_bytes": 0}
    params["model"] |= {"source": "path", "path": "source", "random": None}
    params["corpus"]["prose"]["path"], params["corpus"]["code"]["path"] = "texts/prose", "texts/functions.jsonl"
    params["draft"]["kind"] = "ngram"
    (folder / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    shutil.copytree(ROOT / "evals/tiny", folder / "texts")
    source = tiny_target(folder / "source")
    _shard(source, folder / "sharded")
    for name, method in (("gptq", "gptq"), ("awq", "awq"), ("packed", "compressed-tensors")):
        quantized(tiny("Llama", vocab_size=320, num_hidden_layers=1), folder / name, method)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(source / file, folder / name / file)
    for stage, out in (("fetch_target", "model"), ("fetch_corpus", "corpus"), ("calibrate", "calibration"),
                       ("prompts", "prompts.jsonl"), ("draft", "draft")):  # fmt: skip
        assert main(words_of(f"{stage} out={out} metrics={stage}.json")) == 0, stage
    (folder / "studied.yaml").write_text(yaml.safe_dump(dataclasses.asdict(STUDIED), sort_keys=False))
    results, environment = write_study(folder, STUDIED)
    results.rename(folder / "results")
    environment.rename(folder / "environment.json")
    places = "out_report=reports/report.md out_metrics=reports/metrics.json out_figures=reports/figures"
    assert main(words_of(f"report {places} --params=studied.yaml")) == 0
    shutil.rmtree(folder / "out")
    return folder


def _shard(source: Path, folder: Path) -> None:
    """The model in two shards and an index."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({n: tensors[n] for n in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def digest(folder: Path) -> dict[str, str]:
    """Every path below `folder` with the hash of its content, but for the logs: they tell of a refusal."""
    found = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*")}
    found = {name: p for name, p in found.items() if name.partition("/")[0] != "logs"}
    return {name: provenance.file_sha256(p) if p.is_file() else "folder" for name, p in found.items()}


def restore(folder: Path, good: Path, pristine: dict[str, str]) -> None:
    """Make `folder` again what `good` is, whose digest is `pristine`: only what differs is touched."""
    found = digest(folder)
    wrong = [name for name in {**found, **pristine} if found.get(name) != pristine.get(name)]
    for path in (folder / name for name in sorted(wrong, reverse=True) if name in found):
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink()
    for name in sorted(name for name in wrong if name in pristine):
        if pristine[name] == "folder":
            (folder / name).mkdir()
        else:
            shutil.copyfile(good / name, folder / name)


# Ways to spoil something; each returns a Plant.


def nothing(folder: Path) -> None:
    """The command itself is the mistake."""


def put(key: str, value: object) -> Plant:
    """A value in params.yaml, by dotted key."""
    *parents, leaf = key.split(".")

    def change(tree: Any) -> None:
        for part in parents:
            tree = tree[part]
        tree[leaf] = value

    return params(change)


def params(change: Callable[[Any], object]) -> Plant:
    def plant(folder: Path) -> None:
        tree = yaml.load((folder / "params.yaml").read_text(), QUICK_LOADER)
        change(tree)
        (folder / "params.yaml").write_text(yaml.dump(tree, Dumper=QUICK_DUMPER, sort_keys=False))

    return plant


def write(file: str, content: str | bytes) -> Plant:
    def plant(folder: Path) -> None:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)

    return plant


def replace(file: str, old: str, new: str) -> Plant:
    def plant(folder: Path) -> None:
        text = (folder / file).read_text()
        assert old in text, f"{file} lacks {old}"
        (folder / file).write_text(text.replace(old, new, 1))

    return plant


def remove(*files: str) -> Plant:
    def plant(folder: Path) -> None:
        for file in files:
            path = folder / file
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return plant


def bytes_of(file: str, change: Callable[[bytes], bytes]) -> Plant:
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes()))


def edit(file: str, change: Callable[[Any], object]) -> Plant:
    """A JSON file; `change` edits in place or returns the new value."""

    def plant(folder: Path) -> None:
        value = json.loads((folder / file).read_text())
        made = change(value)
        (folder / file).write_text(json.dumps(value if made is None else made))

    return plant


def row_of(file: str, change: Callable[[dict[str, Any]], object], number: int = 0) -> Plant:
    """One line of a JSON lines file."""

    def plant(folder: Path) -> None:
        lines = (folder / file).read_text().splitlines()
        value = json.loads(lines[number])
        made = change(value)
        lines[number] = json.dumps(value if made is None else made)
        (folder / file).write_text("\n".join(lines) + "\n")

    return plant


def tensors(model: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Plant:
    return lambda folder: rewrite(folder / model, change)


def header(file: str, change: Callable[[dict[str, Any]], object]) -> Plant:
    """The JSON header of a safetensors file, its data left as it is."""

    def spoil(raw: bytes) -> bytes:
        (size,) = struct.unpack("<Q", raw[:8])
        value = json.loads(raw[8 : 8 + size])
        change(value)
        made = json.dumps(value).encode()
        return struct.pack("<Q", len(made)) + made + raw[8 + size :]

    return bytes_of(file, spoil)


def each(*plants: Plant) -> Plant:
    return lambda folder: [plant(folder) for plant in plants]
