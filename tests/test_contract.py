"""Config, graph and code agree: params.yaml is compiled, experiments compose, dvc.yaml names what the code reads."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest
import yaml

from pipeline import config
from pipeline.__main__ import SECTION_NAMES, arguments_of, log_file, stage_names

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pipeline"
EXPERIMENTS = sorted(p.stem for p in (ROOT / "conf/experiment").glob("*.yaml"))
# settings and records, not computation: their change alone never makes a result stale
NOT_DEPENDENCIES = {"config", "provenance", "progress", "__init__", "__main__"}
LAYERS = [
    ["config", "provenance"],
    ["progress"],
    ["engine"],
    ["checkpoint"],
    ["measure", "quantizers", "sources"],
    ["readers", "distill"],
    ["reporting", "tracking"],
    ["stages"],
    ["__main__", "sweep", "plan", "compile", "scratch", "compare", "verify", "tradeoff"],
]
HEAVY = {"torch", "transformers", "lm_eval", "mlflow", "datasets", "llmcompressor", "matplotlib", "pandas", "dvc"}


def graph() -> list[dict]:
    """Stages of dvc.yaml with foreach unfolded; interpolation done by DVC itself."""
    from dvc.repo import Repo

    with Repo(str(ROOT)) as repo:
        return [
            {
                "name": s.addressing,
                "cmd": s.cmd.split(),
                "params": [key for dep in s.params for key in dep.params],
                "deps": [Path(d.fs_path).relative_to(ROOT) for d in s.deps if d not in s.params],
                "outs": [Path(o.fs_path).relative_to(ROOT) for o in s.outs],
            }
            for s in repo.index.stages
        ]


@pytest.fixture(scope="module")
def stages() -> list[dict]:
    return graph()


def stage_of(entry: dict) -> str:
    return entry["cmd"][entry["cmd"].index("pipeline") + 1].partition("@")[0]


def test_every_stage_has_a_log(stages):
    for entry in stages:
        name = entry["cmd"][entry["cmd"].index("pipeline") + 1]
        assert log_file(name, paths_of(entry)) == Path(f"artifacts/logs/{name}.log")


def paths_of(entry: dict) -> dict[str, Path]:
    return {n: Path(p) for n, _, p in (w.partition("=") for w in entry["cmd"] if "=" in w)}


def test_params_are_compiled():
    assert (ROOT / "params.yaml").read_text() == config.compose(ROOT / "conf", []), "run `make params`"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_compose(name):
    params = config.parse(config.compose(ROOT / "conf", [f"experiment={name}"]), ROOT)
    assert params.name == name
    for corpus in params.corpus.values():
        assert corpus.path is None or (ROOT / corpus.path).exists()


def test_the_experiments_that_ship():
    assert {"smoke", "smollm2_1b7", "llama3_8b", "qwen3_8b"} <= set(EXPERIMENTS)


def test_every_stage_is_in_the_graph(stages):
    assert {stage_of(s) for s in stages} == set(stage_names())


def test_arguments_match_signatures(stages):
    for entry in stages:
        run = importlib.import_module(f"pipeline.stages.{stage_of(entry)}").run
        _, paths, takes_key = arguments_of(run)
        given = set(paths_of(entry)) - {"metrics"}
        assert {n for n, required in paths.items() if required} <= given <= set(paths), entry["name"]
        assert takes_key == ("@" in entry["cmd"][3]), entry["name"]


def test_params_cover_the_sections_that_a_stage_takes(stages):
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    for entry in stages:
        sections, _, _ = arguments_of(importlib.import_module(f"pipeline.stages.{stage_of(entry)}").run)
        for hint in sections.values():
            key = f"quantize.{entry['name'].split('@')[1]}" if hint is config.QuantizeMethod else SECTION_NAMES[hint]
            leaves = {f"{key}.{k}" for k in params[key]} if "." not in key else set()
            tracked = set(entry["params"])
            assert key in tracked or (leaves and leaves <= tracked), f"{entry['name']} does not track {key}"


def test_paths_are_dependencies_or_outputs(stages):
    for entry in stages:
        for name, path in paths_of(entry).items():
            if name.startswith("out") or name == "metrics":
                assert path in entry["outs"], f"{entry['name']}: {path} is not an output"
            else:
                # a folder of records is covered by the records in it
                covered = any(path == d or d in path.parents or path in d.parents for d in entry["deps"])
                assert covered, f"{entry['name']} reads {path} without a dependency"


def imported(path: Path) -> set[str]:
    """Modules of this package that a file imports, at any depth of its code, as names without `pipeline.`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pipeline":
            base = node.module.removeprefix("pipeline").removeprefix(".")
            for alias in node.names:
                deeper = ".".join(filter(None, [base, alias.name]))
                names.add(deeper if module_file(deeper) else base)
        elif isinstance(node, ast.Import):
            names |= {a.name.removeprefix("pipeline.") for a in node.names if a.name.startswith("pipeline.")}
    return names - {""}


def module_file(name: str) -> Path | None:
    stem = PACKAGE / name.replace(".", "/")
    return next((p for p in (stem.with_suffix(".py"), stem / "__init__.py") if p.exists()), None)


def closure(name: str) -> set[Path]:
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        module = waiting.pop()
        file = module_file(module)
        if module not in seen and file:
            seen.add(module)
            waiting += imported(file)
            waiting += [m for m in [module.rpartition(".")[0]] if m]
    files = {module_file(m) for m in seen if m not in NOT_DEPENDENCIES}
    return {f.relative_to(ROOT) for f in files if f and f.read_text().strip() and f.stem != "__init__"}


def test_code_that_a_stage_runs_is_a_dependency(stages):
    for entry in stages:
        for file in closure(f"stages.{stage_of(entry)}"):
            assert any(d == file or d in file.parents for d in entry["deps"]), f"{entry['name']}: {file} is missing"


def layer_of(name: str) -> int:
    top = name.split(".")[0]
    found = [i for i, layer in enumerate(LAYERS) if top in layer]
    assert found, f"pipeline/{top} has no layer in this test"
    return found[0]


def test_imports_point_one_way():
    for file in PACKAGE.rglob("*.py"):
        name = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        if name == "__init__":
            continue
        for other in imported(file):
            same = name.split(".")[0] == other.split(".")[0]
            allowed = same or layer_of(other) < layer_of(name) or (layer_of(name) == layer_of(other) == len(LAYERS) - 1)
            assert allowed, f"{name} imports {other}"
        if name.startswith("engine."):
            assert not {m for m in imported(file) if m.split(".")[0] in NOT_DEPENDENCIES}, name


def test_light_modules_import_nothing_heavy():
    """--help, config checks and the report start in well under a second: heavy imports stand inside functions."""
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE).parts
        if parts[0] in {"engine", "checkpoint", "measure", "quantizers"} or parts[-1] in {"sweep.py", "distill.py"}:
            continue
        for node in ast.parse(file.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {n.split(".")[0] for n in names} & HEAVY, f"{file}: {names}"
