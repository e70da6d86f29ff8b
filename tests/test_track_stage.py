import math

import pytest
import yaml
from report_fixtures import PARAMS, sections_of, study, write_study

from pipeline import tracking
from pipeline.config import Track
from pipeline.reporting import records, summary
from pipeline.reporting.study import Study
from pipeline.stages import track


@pytest.fixture
def run(tmp_path):
    """The study as it would be logged."""
    sections = sections_of(PARAMS)
    found = records.load(*write_study(tmp_path, PARAMS), sections)
    numbers = summary.summarize(Study.gather(sections, found, "figures"))
    curves = {t: found.metrics(f"speculate@{t}")["curve"] for t in records.TARGETS}
    return track.parent(numbers, found.by_name, curves, ())


def test_children_are_the_six_arms_with_what_sets_them_apart(run):
    children = {c.name: c for c in run.children}
    assert list(children) == ["base", "base_spec", "gptq", "gptq_spec", "awq", "awq_spec"]
    assert children["gptq"].params["quantize.bits"] == "4"
    assert "draft.kind" not in children["gptq"].params
    assert children["gptq_spec"].params["draft.kind"] == "distill"
    assert children["base"].params == {"decoding": "plain", "target": "base", "draft_len": 0}


def test_numbers_are_metrics_and_what_is_missing_says_why(run):
    children = {c.name: c for c in run.children}
    assert children["gptq"].metrics["speedup"] == pytest.approx(1.875)
    assert children["base"].metrics["kl_nats_mean"] == "base is the reference of this number"
    assert children["gptq"].metrics["acceptance_rate"] == "plain decoding has no draft"
    assert not any(isinstance(v, bool) for c in run.children for v in c.metrics.values())
    numbers = [v for c in run.children for v in c.metrics.values() if isinstance(v, float)]
    assert numbers and all(map(math.isfinite, numbers))


def test_the_sweep_has_the_draft_length_as_step(run):
    curves = next(c for c in run.children if c.name == "awq_spec").curves
    curve = study(PARAMS)["speculate@awq"]["metrics"]["curve"]
    assert curves["sweep.predicted_speedup"] == {p["draft_len"]: p["predicted_speedup"] for p in curve}
    assert list(curves["sweep.measured_speedup"]) == [0, 1, 2, 4]
    assert list(curves["sweep.acceptance_rate"]) == list(range(1, 9))
    assert not next(c for c in run.children if c.name == "awq").curves


def test_the_parent_says_what_was_run_and_decided(run):
    assert run.params["quantize.awq.backend"] == PARAMS.quantize["awq"].backend
    assert run.params["speculate.draft_lens"] == str(PARAMS.speculate.draft_lens)
    assert run.tags["recommendation"] == "gptq"
    assert run.tags["git.commit"] == "f1c7" * 10
    assert run.metrics["noise_floor.ratio"] == 1.004


def test_dvc_hashes_are_tags(tmp_path):
    lock = tmp_path / "dvc.lock"
    lock.write_text(
        yaml.safe_dump({"stages": {"fetch@target": {"outs": [{"path": "artifacts/target", "md5": "ab.dir"}]}}})
    )
    assert track.dvc_hashes(lock) == {"dvc.artifacts/target": "ab.dir"}
    assert track.dvc_hashes(tmp_path / "none") == {}


def test_the_digest_follows_the_results_and_nothing_else(tmp_path, monkeypatch):
    logged = []

    def log(study, *, digest, **_):
        logged.append(digest)
        return {"status": "logged", "reason": None}

    monkeypatch.setattr(tracking, "log", log)
    summary_path = tmp_path / "metrics.json"
    for change in ({}, {}, {"speculate__awq": lambda m: m["curve"][1].update(predicted_speedup=0.5)}):
        sections = sections_of(PARAMS)
        results, environment = write_study(tmp_path, PARAMS, **change)
        found = summary.summarize(Study.gather(sections, records.load(results, environment, sections), "figures"))
        track.provenance.write_json(summary_path, found)
        outcome = track.run(
            Track(uri="sqlite:///mlflow.db", experiment="e"),
            summary=summary_path, report=tmp_path / "report.md", figures=tmp_path / "figures", results=results,
        )  # fmt: skip
        assert outcome == {"digest": logged[-1], "runs": 7, "status": "logged", "reason": None}
    assert logged[0] == logged[1] != logged[2]


def test_leaves_by_dotted_key():
    assert track.flatten({"a": {"b": 1, "c": {}}, "d": [1, 2], "e": "x", "f": None}) == {
        "a.b": "1", "a.c": "{}", "d": "[1, 2]", "e": "x", "f": "null",
    }  # fmt: skip
