"""Which stages a multirun job runs again, decided from dvc.yaml and two compiled configs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline import config, sweep

ROOT = Path(__file__).parents[1]
ALLOWED = ["quantize", "evaluate", "speculate"]


@pytest.fixture(scope="module")
def graph():
    return sweep.read_graph(ROOT)


def chosen(graph, overrides, allowed=ALLOWED):
    old, new = (yaml.safe_load(config.compose(ROOT / "conf", o)) for o in ([], overrides))
    return {s.name for s in sweep.stages_to_run(graph, allowed, old, new)}


def test_the_sweep_alone_depends_on_draft_lens(graph):
    overrides = ["speculate.draft_lens=[0,1,2]", "speculate.timed_draft_lens=[0,2]"]
    assert chosen(graph, overrides) == {"speculate@base", "speculate@gptq", "speculate@awq"}
    assert chosen(graph, overrides, ["speculate@gptq"]) == {"speculate@gptq"}


def test_a_method_reaches_what_reads_its_checkpoint_and_no_other(graph):
    assert chosen(graph, ["quantize.gptq.group_size=32"]) == {"quantize@gptq", "evaluate@gptq", "speculate@gptq"}
    assert chosen(graph, ["quantize.awq.clip=true"], ["quantize", "evaluate"]) == {"quantize@awq", "evaluate@awq"}


def test_the_quantized_draft_reaches_every_sweep(graph):
    assert chosen(graph, ["quantize.draft.group_size=32"]) == {
        "quantize@draft", "speculate@base", "speculate@gptq", "speculate@awq",
    }  # fmt: skip


def test_nothing_changed_nothing_runs(graph):
    assert chosen(graph, []) == set()
    assert chosen(graph, ["report.objective=memory"]) == set()


def test_a_job_writes_to_its_own_folder(tmp_path, monkeypatch):
    """Outputs move under the job's folder, later stages read them from there, other inputs stay where they are."""
    seen = {}

    def fake(name, key, paths, params):
        seen[f"{name}@{key}"] = paths
        return {"metrics": {"name": name}}

    monkeypatch.setattr(sweep, "run_stage", fake)
    stages = [
        sweep.GraphStage("quantize@gptq", {"model": Path("a/target"), "out": Path("a/q")}, {Path("a/q")}, []),
        sweep.GraphStage("evaluate@gptq", {"checkpoint": Path("a/q"), "out": Path("a/e")}, {Path("a/e")}, []),
    ]
    summary = sweep.run_job(None, stages, tmp_path)
    assert seen["quantize@gptq"] == {"model": Path("a/target"), "out": tmp_path / "a/q"}
    assert seen["evaluate@gptq"] == {"checkpoint": tmp_path / "a/q", "out": tmp_path / "a/e"}
    assert summary == {"quantize@gptq": {"name": "quantize"}, "evaluate@gptq": {"name": "evaluate"}}
    assert (tmp_path / "summary.json").exists()
