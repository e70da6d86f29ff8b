"""Two of the same at once, in one folder: each has its own, or the second says who is there; jobs without memory."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline import provenance, scratch

ROOT = Path(__file__).parents[1]
WRITER = """
import sys
from pathlib import Path
from pipeline import provenance
for turn in range(40):
    with provenance.whole_folder(Path("out")) as folder:
        for name in "ab":
            (folder / name).write_text(f"{sys.argv[1]} {turn}")
    provenance.write_text(Path("out.txt"), sys.argv[1] * 1000)
"""


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = scratch.environment(ROOT, folder) | {"PYTHONPATH": str(folder if folder.name == "laid" else ROOT)}
    return subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def laid(tmp_path_factory):
    """The smoke experiment, laid out and not run."""
    folder = tmp_path_factory.mktemp("at_once") / "laid"
    scratch.make(ROOT, folder, ["experiment=smoke"])
    return folder


def test_writers_of_one_folder_leave_a_whole_one_and_nothing_else(tmp_path):
    writers = [started(tmp_path, sys.executable, "-c", WRITER, str(i)) for i in range(4)]
    said = [w.communicate()[1] for w in writers]
    assert [w.returncode for w in writers] == [0] * 4, said
    texts = [p.read_text() for p in sorted((tmp_path / "out").iterdir())]
    assert len(texts) == 2 and texts[0] == texts[1], "both files are of one writer"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "out.txt"]


def test_what_a_killed_writer_left_goes_with_the_next_one_and_a_living_ones_stays(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    for name in (f".out.{gone.pid}.partial", f".out.{gone.pid}.old.partial", f".out.{os.getppid()}.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("")
    (tmp_path / f".out.json.{gone.pid}.partial").write_text("")
    with provenance.whole_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("")
    provenance.write_json(tmp_path / "out.json", {})
    left = {f".out.{os.getppid()}.partial"}
    assert {p.name for p in tmp_path.iterdir()} == {"out", "out.json"} | left
    ignored = subprocess.run(["git", "check-ignore", "-q", "--no-index", *left], cwd=ROOT)
    assert ignored.returncode == 0, "and Git does not see it"


def test_a_folder_is_whole_when_the_last_step_is_interrupted(tmp_path, monkeypatch):
    """Between the renames of the old result and of the new one."""
    out = tmp_path / "out"
    with provenance.whole_folder(out) as folder:
        (folder / "a").write_text("old")
    replace = Path.replace

    def interrupted(self, target):
        if target == out and ".old." not in self.name:
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt), provenance.whole_folder(out) as folder:
        (folder / "a").write_text("new")
    assert (out / "a").read_text() == "old" and list(tmp_path.iterdir()) == [out]


def test_what_a_stage_writes_takes_its_places_together_or_not_at_all(tmp_path, monkeypatch):
    """A folder, a file and the record of a stage; the disk is full for the record, or for the file before it."""
    import pipeline.stages.prompts as stage
    from pipeline import __main__ as cli

    monkeypatch.chdir(tmp_path)
    out, text, record = Path("out"), Path("text"), Path("metrics/record.json")
    paths = {"out": out, "out_text": text, "metrics": record}

    def run(name, *, out, out_text):
        with provenance.whole_folder(out) as folder:
            (folder / "a").write_text(what)
        provenance.write_text(out_text, what)
        seen.append([p.read_text() for p in (out / "a", out_text) if p.exists()])
        return {"hash": provenance.file_sha256(provenance.written(out_text))}

    def results():
        return (out / "a").read_text(), text.read_text(), json.loads(record.read_text())["metrics"]["hash"]

    seen = []
    monkeypatch.setattr(stage, "run", run)
    monkeypatch.setattr(cli, "arguments_of", lambda run: (["name"], {"out": True, "out_text": True}, False))
    monkeypatch.setattr(cli, "select_sections", lambda *_: {"name": "made up"})
    what = "old"
    cli.run_stage("prompts", None, dict(paths), None)
    old = results()
    assert old[:2] == ("old", "old") and seen == [[]], "nothing was there before the end"
    fsync, what = os.fsync, "new"
    for refused in (1, 2):
        writes = iter(range(1, 9))

        def full(descriptor, writes=writes, refused=refused):
            if next(writes) == refused:
                raise OSError(errno.ENOSPC, "No space left on device")
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            cli.run_stage("prompts", None, dict(paths), None)
        assert results() == old
    monkeypatch.setattr(os, "fsync", fsync)
    found = cli.run_stage("prompts", None, dict(paths), None)
    assert results() == ("new", "new", found["metrics"]["hash"]) and results() != old
    hashes = {"out": provenance.tree_sha256(out), "out_text": provenance.file_sha256(text)}
    assert found["provenance"]["outputs"] == hashes
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "metrics", "out", "record.json", "text"]


def test_a_scratch_folder_that_is_held_names_its_holder(tmp_path):
    folder = tmp_path / "folder"
    with scratch.held(folder):
        second = started(ROOT, sys.executable, "-m", "pipeline.scratch", str(folder), "experiment=smoke")
        said = second.communicate()[1]
        assert second.returncode == 2
        due = rf"error: {folder}: process {os.getpid()} (since "
        assert said.startswith(due) and said.count("\n") == 1 and "wait until it has ended" in said
    assert [p.name for p in folder.iterdir()] == [".scratch.lock"], "the second touched nothing"
    with scratch.held(folder):
        pass
    refused = started(ROOT, sys.executable, "-m", "pipeline.scratch", str(tmp_path / "new"), "no.such=key")
    assert refused.communicate()[1].startswith("error: ") and refused.returncode == 2
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("text", "stays"), [
    ("", False), ("schema: '2.0'\nstages:\n  a:\n    cmd: x\n    ou", False), ("schema: '2.0'\nstages: {}\n", True),
    ("<<<<<<< ours\nschema: '2.0'\n", True),
])  # fmt: skip
def test_a_dvc_lock_that_a_kill_left_half_written_is_removed(tmp_path, monkeypatch, text, stays):
    """DVC refuses an empty one as well; one that Git left in conflict is not ours."""
    monkeypatch.setattr(scratch, "WRITTEN_S", 0.0)
    (tmp_path / "dvc.lock").write_text(text)
    scratch.drop_broken_lock(tmp_path)
    assert (tmp_path / "dvc.lock").exists() == stays


@pytest.mark.parametrize("lives", [True, False])
@pytest.mark.parametrize("use", ["read", "write"])
def test_old_results_come_back_unless_another_run_is_at_work(tmp_path, monkeypatch, use, lives):
    """2**22 is Linux's largest process number."""
    user = {"pid": os.getpid() if lives else 2**22 + 1, "cmd": "dvc repro"}
    provenance.write_json(tmp_path / ".dvc/tmp/rwlock", {"/a": {use: [user] if use == "read" else user}})
    asked = []
    monkeypatch.setattr(scratch.subprocess, "run", lambda command, **_: asked.append(command[-2:]))
    scratch.restore(tmp_path)
    assert asked == [["checkout", "--quiet"]] * (not lives)


REPRO = """
python -m pipeline.compile --unlock
dvc repro fetch@target || { code=$?; python -m pipeline.compile --restore; exit $code; }
"""


@pytest.mark.slow
def test_of_two_runs_at_once_one_goes_on_and_the_other_says_who_that_is(tmp_path):
    """What `make repro` runs, of the graph's first stage that takes long."""
    scratch.make(ROOT, tmp_path, ["experiment=smoke"])
    both = [started(tmp_path, "bash", "-c", REPRO) for _ in range(2)]
    said = [run.communicate() for run in both]
    good, bad = sorted(zip(both, said, strict=True), key=lambda pair: pair[0].returncode)
    assert good[0].returncode == 0 and bad[0].returncode != 0, said
    assert re.search(r"is busy, it is being blocked by:\s+\(PID \d+\)|Unable to acquire lock", bad[1][1])
    again = started(tmp_path, "bash", "-c", REPRO)
    assert "Running stage" not in again.communicate()[0] and again.returncode == 0
    assert (tmp_path / "artifacts/target/model.safetensors").exists() and not list(tmp_path.rglob("*.partial"))


@pytest.mark.slow
def test_eight_sweeps_of_one_second_have_a_folder_each(laid):
    command = (sys.executable, "-m", "pipeline.sweep", "--multirun", "experiment=smoke", "sweep.stages=[fetch_corpus]")
    sweeps = [started(laid, *command, f"runtime.seed={seed}") for seed in range(1, 9)]
    said = [s.communicate()[1] for s in sweeps]
    assert [s.returncode for s in sweeps] == [0] * 8, said
    summaries = list(laid.glob("multirun/*/*/0/summary.json"))
    assert len(summaries) == 8
    seeds = [p.parent / ".hydra/overrides.yaml" for p in summaries]
    assert len({p.read_text() for p in seeds}) == 8
    assert all(json.loads(p.read_text())["fetch_corpus"]["corpora"] for p in summaries)


@pytest.mark.slow
def test_a_job_without_memory_is_an_error_of_its_own_and_the_sweep_goes_on(laid):
    """A stage of the copy asks for what no machine has, once as Python's error and once as torch's."""
    stage = laid / "pipeline/stages/fetch_corpus.py"
    text = stage.read_text()
    spoilt = """
    if runtime.seed == 1:
        raise MemoryError
    if runtime.seed == 2:
        import torch

        torch.empty(2**45, dtype=torch.uint8)
    metrics: dict"""
    stage.write_text(text.replace("\n    metrics: dict", spoilt, 1))
    folder = f"hydra.sweep.dir=multirun/memory{time.time()}"
    words = ("experiment=smoke", "sweep.stages=[fetch_corpus]", "runtime.seed=1,2,3", folder)
    try:
        sweep = started(laid, sys.executable, "-m", "pipeline.sweep", "--multirun", *words)
        said = sweep.communicate()[1]
    finally:
        stage.write_text(text)
    assert sweep.returncode == 1 and "Traceback" not in said, said
    assert len([line for line in said.splitlines() if line.startswith("error: ")]) == 2
    one, two, three = [json.loads(p.read_text()) for p in sorted(laid.glob("multirun/memory*/*/summary.json"))]
    assert one["error"].startswith("not enough memory; ")
    assert two["error"].startswith("not enough memory for a tensor of 32768.0 GiB")
    assert three["fetch_corpus"]["corpora"]
