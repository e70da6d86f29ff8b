import math
import multiprocessing
import os
import signal
import sqlite3
from pathlib import Path

import pytest

from pipeline import tracking
from pipeline.tracking import Run

STUDY = Run(
    name="default: Tiny",
    params={"model.name": "Tiny", "evaluate.limit": "null"},
    metrics={"noise_floor.ratio": 1.01},
    tags={"git.commit": "f1c7"},
    children=(
        Run(name="base", metrics={"decode_tok_per_s": 12.3}),
        Run(name="gptq_spec", metrics={"token_ppl": math.nan}, curves={"sweep.speed": {0: 1.0, 2: 0.9, 4: math.inf}}),
    ),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """One migrated store for all tests of this file; each uses an experiment of its own."""
    return tmp_path_factory.mktemp("store")


def log(root, experiment, run=STUDY, digest="d1", uri="sqlite:///mlflow.db"):
    return tracking.log(run, digest=digest, uri=uri, experiment=experiment, root=root)


def runs(root, experiment):
    """Active runs by name."""
    client = tracking.connect(tracking.absolute_uri("sqlite:///mlflow.db", root))
    found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    assert len({r.info.run_name for r in found}) == len(found)
    return {r.info.run_name: r for r in found}


def history(root, run, metric):
    client = tracking.connect(tracking.absolute_uri("sqlite:///mlflow.db", root))
    return {m.step: m.value for m in client.get_metric_history(run.info.run_id, metric)}


def test_one_parent_with_a_child_per_arm(root):
    assert log(root, "nested") == {"status": "logged", "reason": None}
    found = runs(root, "nested")
    parent = found["default: Tiny"]
    assert set(found) == {"default: Tiny", "base", "gptq_spec"}
    assert found["base"].data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert found["base"].data.metrics == {"decode_tok_per_s": 12.3}
    assert parent.data.params == {"model.name": "Tiny", "evaluate.limit": "null"}
    assert parent.data.tags["complete"] == "true"
    assert {r.info.status for r in found.values()} == {"FINISHED"}


def test_what_is_not_finite_becomes_a_tag_never_a_metric(root):
    log(root, "finite")
    spec = runs(root, "finite")["gptq_spec"]
    assert "token_ppl" not in spec.data.metrics
    assert spec.data.tags["token_ppl"] == "nan"
    assert spec.data.tags["sweep.speed.4"] == "inf"
    assert history(root, spec, "sweep.speed") == {0: 1.0, 2: 0.9}


def test_logging_the_same_results_again_adds_nothing(root):
    log(root, "again")
    before = {name: r.info.run_id for name, r in runs(root, "again").items()}
    assert log(root, "again")["status"] == "kept"
    assert {name: r.info.run_id for name, r in runs(root, "again").items()} == before
    renamed = Run(name="other", children=(Run(name="arm"),))
    assert log(root, "again", renamed, digest="d2")["status"] == "logged"
    assert set(runs(root, "again")) == {*before, "other", "arm"}


@pytest.mark.parametrize(("error", "status"), [(RuntimeError("disk full"), "FAILED"), (KeyboardInterrupt(), "KILLED")])
def test_a_study_broken_off_does_not_look_good_and_is_replaced(root, monkeypatch, error, status):
    fill = tracking.fill

    def stumble(client, run_id, run):
        if run.name == "gptq_spec":
            raise error
        fill(client, run_id, run)

    with monkeypatch.context() as patched:
        patched.setattr(tracking, "fill", stumble)
        if isinstance(error, Exception):
            assert log(root, status)["status"] == "unavailable"
        else:
            with pytest.raises(KeyboardInterrupt):
                log(root, status)
    broken = runs(root, status)
    assert {n: r.info.status for n, r in broken.items()} == {
        "default: Tiny": status,
        "base": "FINISHED",
        "gptq_spec": status,
    }
    assert broken["default: Tiny"].data.tags["complete"] == "false"
    assert log(root, status)["status"] == "logged"
    after = runs(root, status)
    assert {r.info.status for r in after.values()} == {"FINISHED"}
    assert not {r.info.run_id for r in after.values()} & {r.info.run_id for r in broken.values()}


def kill_midway(root):
    fill = tracking.fill

    def die(client, run_id, run):
        if run.name == "base":
            os.kill(os.getpid(), signal.SIGKILL)
        fill(client, run_id, run)

    tracking.fill = die
    log(root, "killed", digest="lost")


@pytest.mark.slow
def test_a_killed_process_leaves_a_run_that_the_next_study_clears_away(root):
    log(root, "warm-up")  # the store exists, so that the kill hits the study
    process = multiprocessing.get_context("spawn").Process(target=kill_midway, args=(root,))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    half = runs(root, "killed")
    assert (half["default: Tiny"].info.status, half["default: Tiny"].data.tags["complete"]) == ("RUNNING", "false")
    assert log(root, "killed", digest="next")["status"] == "logged"
    assert {r.data.tags["digest"] for r in runs(root, "killed").values()} == {"next"}


def test_a_long_parameter_becomes_an_artifact(root):
    log(root, "long", Run(name="long", params={"note": "x" * 7000, "short": "y" * 6000}))
    found = runs(root, "long")["long"]
    assert found.data.params == {"short": "y" * 6000}
    assert found.data.tags["param.note"] == "7000 characters, see artifact params/note.txt"
    assert (Path(found.info.artifact_uri.removeprefix("file://")) / "params/note.txt").read_text() == "x" * 7000


def test_more_params_and_tags_than_one_request_takes(root):
    many = {f"key{i}": str(i) for i in range(250)}
    log(root, "many", Run(name="many", params=many, tags=many))
    found = runs(root, "many")["many"]
    assert found.data.params == many
    assert many.items() <= found.data.tags.items()


def test_names_are_spelt_in_characters_that_the_store_takes(root):
    named = {"dvc.artifacts/metrics/evaluate@gptq.json": 1.0}
    log(root, "names", Run(name="names", params=named, tags=named, metrics=named, curves={"a@b": {1: 2.0}}))
    found = runs(root, "names")["names"]
    assert found.data.params == {"dvc.artifacts/metrics/evaluate-gptq.json": "1.0"}
    assert found.data.metrics == {"dvc.artifacts/metrics/evaluate-gptq.json": 1.0, "a-b": 2.0}
    assert found.data.tags["dvc.artifacts/metrics/evaluate-gptq.json"] == "1.0"


def test_report_and_figures_are_artifacts_beside_the_store(root, tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "a.svg").write_text("<svg/>")
    (tmp_path / "report.md").write_text("# it")
    log(root, "files", Run(name="files", artifacts=(tmp_path / "report.md", tmp_path / "figures")))
    kept = Path(runs(root, "files")["files"].info.artifact_uri.removeprefix("file://"))
    assert kept.is_relative_to(root / tracking.ARTIFACTS)
    assert (kept / "report.md").read_text() == "# it"
    assert (kept / "figures" / "a.svg").read_text() == "<svg/>"


@pytest.mark.parametrize("uri", ["sqlite:///corrupt.db", "http://127.0.0.1:9", "nonsense://store"])
def test_a_store_that_is_not_there_costs_one_line_and_nothing_else(tmp_path, capfd, uri):
    (tmp_path / "corrupt.db").write_bytes(b"not a database" * 100)
    found = log(tmp_path, "any", uri=uri)
    assert found["status"] == "unavailable" and found["reason"]
    warning = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(warning) == 1 and "results are unharmed" in warning[0]


def log_one(root, i):
    return log(root, "crowd", Run(name=f"study {i}", children=(Run(name=f"arm {i}", metrics={"x": i}),)), digest=str(i))


@pytest.mark.slow
def test_three_processes_on_one_fresh_store(tmp_path):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        found = pool.starmap(log_one, [(tmp_path, i) for i in range(3)])
    assert [f["status"] for f in found] == ["logged"] * 3, found
    assert set(runs(tmp_path, "crowd")) == {f"{kind} {i}" for kind in ("study", "arm") for i in range(3)}
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        assert database.execute("pragma integrity_check").fetchone() == ("ok",)


def test_telemetry_is_off(root):
    log(root, "quiet")
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


@pytest.mark.parametrize(
    ("folder", "repository"),
    [
        ("/a/repo", "/a/repo"),
        ("/a/repo/.dvc/tmp/exps/temp1", "/a/repo"),
        ("/a/repo/artifacts/smoke", "/a/repo/artifacts/smoke"),
    ],
)
def test_a_temporary_experiment_tracks_to_its_repository(folder, repository):
    assert tracking.repository(Path(folder)) == Path(repository)
