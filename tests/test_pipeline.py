"""The whole graph on the smoke experiment, in a folder of its own: what it writes, and what a change reruns."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from smoke_graph import TOKEN, run

ARMS = {"base", "base_spec", "gptq", "gptq_spec", "awq", "awq_spec"}
KEYS = {
    "weight_bytes", "peak_memory_bytes", "ttft_ms", "tpot_ms", "decode_tok_per_s", "speedup", "token_ppl",
    "acc_last_word", "kl_nats_mean", "lossless", "draft_len", "acceptance_rate", "verdict",
}  # fmt: skip

pytestmark = pytest.mark.slow


def changed(folder: Path) -> set[str]:
    """Stages that `dvc repro` would run because of what they read or were told, without those that follow them."""
    status = json.loads(run(folder, "dvc", "status", "--json").stdout)
    return {stage for stage, why in status.items() if why != ["always changed"]}


def with_params(folder: Path, key: str, value: object) -> set[str]:
    path = folder / "params.yaml"
    before = path.read_text()
    tree = yaml.safe_load(before)
    node = tree
    *parents, leaf = key.split(".")
    for part in parents:
        node = node[part]
    node[leaf] = value
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    try:
        return changed(folder)
    finally:
        path.write_text(before)


def test_report_and_metrics(smoke):
    folder, stdout = smoke
    metrics = json.loads((folder / "reports/metrics.json").read_text())
    assert set(metrics["arms"]) == ARMS
    for name, arm in metrics["arms"].items():
        assert set(arm) >= KEYS, name
        assert arm["weight_bytes"] > 0 and arm["token_ppl"] > 1
        assert arm["verdict"] in {"OK", "UNDECIDED", "VOID", "NOT COMPARABLE"}
    report = (folder / "reports/report.md").read_text()
    assert metrics["recommendation"]["verdict"].split(":")[0].split()[-1] in report.replace("`", "").replace("*", "")
    assert "Report: reports/report.md" in stdout
    assert str(folder) not in report
    assert "draft precision:" not in report and "not how it was loaded" not in report, "a guard against its own default"


def test_every_record_says_where_it_comes_from(smoke):
    folder, _ = smoke
    records = sorted((folder / "artifacts/metrics").glob("*.json"))
    assert len(records) == 17
    for path in records:
        record = json.loads(path.read_text())
        assert record["cost"]["wall_s"] > 0 and record["cost"]["peak_memory_bytes"] > 0
        assert record["provenance"]["sections"] and record["provenance"]["versions"]["torch"]
        assert record["provenance"]["inputs"] or record["stage"].startswith("fetch")


def test_the_secret_in_the_environment_is_written_nowhere(smoke):
    folder, _ = smoke
    found = subprocess.run(["grep", "-rlaF", TOKEN, str(folder)], capture_output=True, text=True)
    assert found.returncode == 1 and found.stdout == ""


def test_a_second_run_does_nothing(smoke):
    folder, _ = smoke
    done = run(folder, "dvc", "repro")
    assert done.returncode == 0
    assert [line for line in done.stdout.splitlines() if line.startswith("Running stage")] == [
        "Running stage 'environment':"
    ]


def test_what_a_change_reruns(smoke):
    folder, _ = smoke
    assert changed(folder) == set()
    sweeps = {"speculate@base", "speculate@gptq", "speculate@awq"}
    lens = [*yaml.safe_load((folder / "params.yaml").read_text())["speculate"]["draft_lens"], 7]
    assert with_params(folder, "speculate.draft_lens", lens) == {*sweeps, "benchmark", "rank_drafts", "report"}
    assert with_params(folder, "quantize.awq.duo_scaling", False) == {"quantize@awq", "report"}
    assert with_params(folder, "report.objective", "memory") == {"report"}


def test_multirun_keeps_the_good_jobs_and_names_the_bad_one(smoke):
    folder, _ = smoke
    done = run(
        folder, "python", "-m", "pipeline.sweep", "--multirun", "experiment=smoke", "sweep.stages=[speculate@base]",
        "speculate.draft_lens=[0,1],[0,-1]", "speculate.timed_draft_lens=[0]",
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "error: speculate.draft_lens: -1 is below the limit of 0 tokens" in done.stderr
    summaries = sorted(folder.glob("multirun/*/*/*/summary.json"))
    first, second = (json.loads(p.read_text()) for p in summaries)
    assert [p["draft_len"] for p in first["speculate@base"]["curve"]] == [0, 1]
    assert "-1 is below" in second["error"]
    assert changed(folder) == set(), "results of the workspace are as they were"
