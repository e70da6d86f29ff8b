"""The short form of `make torture`: the first stages of the smoke graph under a few kills; and that it sees a hang."""

import random
import signal
from collections import Counter

import pytest
import torture

DVC = """
import subprocess, sys, time
code = subprocess.run([sys.executable, "-m", "pipeline", "calibrate"]).returncode
if {hangs}:
    time.sleep(60)
sys.exit(code)
"""
STAGE = """
import signal, time
if {deaf}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
"""
SPANS = {("calibrate", "dvc"): 1.0, ("calibrate", "stage"): 1.0, (torture.BETWEEN, "dvc"): 0.1}


@pytest.mark.slow
def test_the_first_stages_survive_kills(tmp_path):
    found = torture.torture(tmp_path, kills=4, seed=3, targets=("fetch@target", "fetch@corpus"))
    assert found["not_survived"] == []
    assert found["kills"] == found["survived"] == 4
    assert found["results_equal_undisturbed"] and found["completed_graphs"] >= 1
    assert found["redone_in_plain_runs"] == []
    assert sum(counts["kills"] for counts in found["by_stage"].values()) == 4


@pytest.mark.parametrize(
    ("victim", "hangs", "deaf", "left"),
    [
        ("stage", False, True, ["stage"]),
        ("dvc", False, True, ["stage"]),
        ("stage", True, False, ["dvc"]),
        ("stage", False, False, []),
        ("dvc", False, False, ["stage"]),  # nothing tells this one that DVC was killed
    ],
)
def test_what_outlives_a_kill_is_named_and_counts_as_not_survived(tmp_path, monkeypatch, victim, hangs, deaf, left):
    """A `dvc` and a stage of our own in place of the real ones."""
    monkeypatch.setattr(torture, "GONE_WITHIN_S", 1.0)
    monkeypatch.setattr(torture, "DVC_ENDS_WITHIN_S", 1.0)
    (tmp_path / "dvc.py").write_text(DVC.format(hangs=hangs))
    (tmp_path / "pipeline.py").write_text(STAGE.format(deaf=deaf))
    kill = torture.hit(tmp_path, torture.Aim(signal.SIGTERM, victim, "calibrate", 0.3), SPANS, ())
    assert (kill.signal, kill.victim, kill.stage) == ("SIGTERM", victim, "calibrate")
    assert [name.split()[0] for name in kill.left] == left
    assert kill.survived == (not left)
    assert torture.processes(tmp_path) == [], "what was left is ended by force"


def test_dvc_is_not_hit_by_what_it_does_not_hear(tmp_path, monkeypatch):
    """It ignores SIGINT while a stage runs, and for a moment after that."""
    monkeypatch.setattr(torture, "GONE_WITHIN_S", 3.0)
    stage = 'subprocess.run([sys.executable, "-m", "pipeline", "calibrate"])'
    ignored = f"signal.signal(2, 1)\n{stage}\ntime.sleep(2)\nsignal.signal(2, 0)\ntime.sleep(60)"
    (tmp_path / "dvc.py").write_text(f"import signal, subprocess, sys, time\n{ignored}\n")
    (tmp_path / "pipeline.py").write_text("import time\ntime.sleep(1)\n")
    kill = torture.hit(tmp_path, torture.Aim(signal.SIGINT, "dvc", torture.BETWEEN, 0.1), SPANS, ())
    assert (kill.stage, kill.victim, kill.left) == (torture.BETWEEN, "dvc", [])


def test_an_empty_lock_file_names_no_stage(tmp_path):
    assert torture.locked(tmp_path) == set()
    (tmp_path / "dvc.lock").write_text("")
    assert torture.locked(tmp_path) == set()
    (tmp_path / "dvc.lock").write_text("schema: '2.0'\nstages:\n  a: {cmd: x}\n")
    assert torture.locked(tmp_path) == {"a"}


def test_stages_take_turns_and_a_seed_gives_the_same_aims():
    spans = {(s, k): 1.0 for s in ("a", torture.BETWEEN, "b", "c") for k in ("dvc", "stage")} | {("c", "worker"): 1.0}

    def aims(seed):
        draw, found = random.Random(seed), []
        for _ in range(30):
            aimed = Counter()
            while (aim := torture.choose(draw, spans, set(), aimed)) is not None:
                found.append(aim)
                aimed[aim.stage] += 1
        return found

    first = aims(0)
    turns = torture.WORKER_TURNS
    assert [aim.stage for aim in first[: 4 + turns]] == ["a", torture.BETWEEN, "b", "c", *["c"] * turns]
    assert first == aims(0) != aims(1)
    workers = [aim for aim in first if aim.victim == "worker"]
    assert len(workers) == 30 * turns and {aim.stage for aim in workers} == {"c"}
    assert signal.SIGINT not in {aim.signal for aim in workers}, "a worker ignores it"
    assert [aim.stage for aim in [torture.choose(random.Random(0), spans, {"a"}, Counter())]] == ["b"], (
        "what is done is done"
    )
