"""Bad inputs: each gives the right exit code and one line with the key or file and a way out, and writes nothing."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from bad_input import checkpoints, commands, models, results, settings, texts
from bad_input.world import Row, build, digest, restore, words_of

from pipeline.__main__ import main

ROOT = Path(__file__).parents[1]
TABLES = {m.__name__.rpartition(".")[2]: m.ROWS for m in (settings, commands, models, checkpoints, texts, results)}
ROWS = [pytest.param(row, id=f"{area}: {row.name}") for area, rows in TABLES.items() for row in rows]


@pytest.fixture(autouse=True)
def as_a_command(monkeypatch, tmp_path):
    """main() sets handlers and variables for a process of its own; here they end with the test."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name in ("TOKENIZERS_PARALLELISM", "HF_HUB_DISABLE_TELEMETRY", "TQDM_DISABLE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    monkeypatch.setenv("KERNELS_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("PATH", str(tmp_path / "commands"))  # no GPU driver, no compiler
    monkeypatch.delenv("PIPELINE_TRACEBACK", raising=False)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The world with nothing spoilt; that its own stages run through shows that each row's fault is the only one."""
    folder = tmp_path_factory.mktemp("good")
    before = Path.cwd()
    os.chdir(folder)
    try:
        build(folder)
    finally:
        os.chdir(before)
    (folder / "out/out").mkdir(parents=True)
    (folder / "out/out/old.json").write_text("an earlier result")
    return folder, digest(folder)


@pytest.fixture(scope="module")
def spoilt(good, tmp_path_factory):
    """The copy that the rows spoil, one after the other."""
    return Path(shutil.copytree(good[0], tmp_path_factory.mktemp("spoilt") / "world"))


@pytest.fixture
def folder(good, spoilt, monkeypatch):
    monkeypatch.chdir(spoilt)
    yield spoilt
    restore(spoilt, *good)


@pytest.mark.parametrize("row", ROWS)
def test_bad_input(row: Row, folder, capfd):
    row.plant(folder)
    before = digest(folder)
    words = words_of(row.run) if not row.run.startswith("$ ") else row.run.split()[1:]
    capfd.readouterr()
    code = main(words)
    printed = capfd.readouterr()
    lines = [line for line in printed.err.splitlines() if not line.startswith("warning: ")]
    assert lines and lines[0].startswith("error: "), printed.err[-3000:]
    assert len(lines) == 1 and len(lines[0]) < 1500, lines
    assert code == row.code
    assert re.search(row.names, lines[0]), f"{lines[0]}\ndoes not name {row.names}"
    assert re.search(row.way_out, lines[0]), f"{lines[0]}\ndoes not advise {row.way_out}"
    assert printed.out == ""
    assert digest(folder) == before, "a refused input leaves everything as it was"


def test_the_table_is_large_enough_and_says_so(capsys):
    counts = Counter({area: len(rows) for area, rows in TABLES.items()})
    with capsys.disabled():
        print(f" {counts.total()} bad inputs ({', '.join(f'{area} {n}' for area, n in counts.items())}) ", end="")
    assert counts.total() >= 120
    assert len({id_ for rows in ROWS for id_ in [rows.id]}) == len(ROWS), "each row has a name of its own"


@pytest.mark.parametrize(
    ("module", "words", "names"),
    [
        ("pipeline", "quantise", "quantise: no such stage"),
        ("pipeline", "quantize@gptq model=artifacts/target", "quantize: path 'out' is missing|path .* is missing"),
        ("pipeline.compile", "quantize.gptq.bits=7", "quantize.gptq.bits"),
        ("pipeline.compile", "experiment=nosuch", "nosuch"),
        ("pipeline.scratch", "nowhere experiment=nosuch", "nosuch"),
        ("pipeline.verify", "experiment=nosuch", "nosuch"),
        ("pipeline.compare", "--base nosuch", "git: not found on the PATH"),
        ("pipeline.sweep", "--multirun track.uri=https://me:planted@host", "track.uri"),
    ],
)
def test_what_is_known_up_front_is_refused_within_five_seconds(module, words, names):
    """Of its own CPU time, in a process of its own, imports included: wall time would be that of the machine."""
    child = subprocess.Popen(
        [sys.executable, "-m", module, *words.split()],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    said = child.stderr.read()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 2 and re.search(names, said), said
    assert used.ru_utime + used.ru_stime < 5
