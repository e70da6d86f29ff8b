"""`python -m tests.full_disk [STAGE ...]`: stages of a finished smoke graph, the disk full from the n-th write on.

A stage runs again over its own results, for every n up to the writes that it makes (POINTS of them, spread, where there
are more). What it writes is counted and refused by full_disk.c, which is loaded before all libraries, so native code is
no exception. Not counted: renames and fsync, and what other processes write that a stage starts. Each time: an error of
one line and an exit code that is not 0, the old results to the byte, nothing half-written; or, where only the log was
cut short, the same results. So are those of a last run with room. Each stage is forked for each n.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import yaml

from pipeline import provenance, scratch

ROOT = Path(__file__).parents[1]
SOURCE = Path(__file__).with_suffix(".c")
POINTS = 40
HEAVY = ("torch", "transformers.models.auto", "lm_eval.evaluator", "mlflow", "matplotlib.pyplot")
NO_RESULT = {"logs", "kernels", "__pycache__"}
CLOCKED = ("speculate", "benchmark", "rank_drafts")  # stages whose results hold seconds, as all metrics do


def commands(folder: Path) -> dict[str, list[str]]:
    """By stage, what `python -m pipeline` is given, from dvc.lock."""
    stages = yaml.safe_load((folder / "dvc.lock").read_text())["stages"]
    return {name: stage["cmd"].split("-m pipeline ")[1].split() for name, stage in stages.items()}


def results(folder: Path) -> dict[str, str]:
    """Hash by path, of all files that are not a log."""
    paths = (p for top in ("artifacts", "reports") for p in sorted((folder / top).rglob("*")) if p.is_file())
    return {str(p): provenance.file_sha256(p) for p in paths if not NO_RESULT & set(p.relative_to(folder).parts)}


def same(stage: str, new: dict[str, str], old: dict[str, str]) -> bool:
    """Whether two runs that went well left the same files, with the same bytes where no clock decides them."""
    clocked = stage.startswith(CLOCKED)
    fixed = [path for path in old if not clocked and "/artifacts/metrics/" not in path]
    return new.keys() == old.keys() and all(new[path] == old[path] for path in fixed)


def points(writes: int, most: int) -> list[int]:
    """All writes, or `most` of them: half at the start, half spread up to the last."""
    if writes <= most:
        return list(range(1, writes + 1))
    first = most // 2
    step = (writes - first) / (most - first)
    return [*range(1, first + 1), *(first + round(step * i) for i in range(1, most - first + 1))]


def attempt(words: list[str], full_from: int) -> tuple[int, str, int]:
    """A stage in a fork of this process: exit code, what it said, how often it wrote."""
    from pipeline.__main__ import main

    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as counted:
        if (child := os.fork()) == 0:
            code = 70
            try:
                shim = ctypes.CDLL(None)
                shim.disk_writes.restype = ctypes.c_long
                os.dup2(said.fileno(), 2)
                os.dup2(said.fileno(), 1)
                shim.disk_full_from(ctypes.c_long(full_from))
                code = main(words)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os.write(counted.fileno(), str(shim.disk_writes()).encode())
                os._exit(code)
        _, status = os.waitpid(child, 0)
        for file in (said, counted):
            file.seek(0)
        return os.waitstatus_to_exitcode(status), said.read().decode(), int(counted.read() or -1)


def fill(stage: str, words: list[str], most: int) -> dict[str, Any]:
    """The record of one stage: how often it writes, how often that was refused, and what was not as it should be."""
    folder = Path.cwd()
    prepare(stage)
    code, said, writes = attempt(words, -1)
    if code != 0:
        raise RuntimeError(f"{stage}: fails on a disk with room: {said}")
    prepare(stage)
    old, wrong, ended = results(folder), [], 0
    refused_at = points(writes, most)
    for n in refused_at:
        code, said, _ = attempt(words, n)
        lines = [line for line in said.splitlines() if line.startswith("error: ")]
        ended += code != 0
        new = results(folder)
        if code == 0 and (lines or not same(stage, new, old)):
            wrong.append(f"write {n}: exit code 0 with {lines} or other results than before")
        elif code != 0 and (len(lines) != 1 or "Traceback" in said or "run again" not in said):
            wrong.append(f"write {n}: exit code {code}, said {said[-600:]!r}")
        elif code != 0 and new != old:
            changed = sorted(path for path in new.keys() | old.keys() if new.get(path) != old.get(path))
            wrong.append(f"write {n}: changed {changed}")
        old = new
        prepare(stage)
    code, said, _ = attempt(words, -1)
    if code != 0 or not same(stage, results(folder), old):
        wrong.append(f"and did not run again to the same results: {said[-600:]!r}")
    return {"writes": writes, "refused_at": len(refused_at), "ended_by_it": ended, "wrong": wrong}


def prepare(stage: str) -> None:
    """`track` adds nothing to a store that holds its run: it starts from none."""
    if stage == "track":
        Path("mlflow.db").unlink(missing_ok=True)
        shutil.rmtree("mlruns", ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.full_disk", description=__doc__.split("\n")[0])
    parser.add_argument("stages", nargs="*", help="as in dvc.yaml; all of them where none is named")
    parser.add_argument("--graph", type=Path, default=Path("artifacts/smoke"), help="a finished one, which is copied")
    parser.add_argument("--points", type=int, default=POINTS)
    parser.add_argument("--cold", action="store_true", help="import nothing beforehand: for stages that import little")
    args = parser.parse_args()
    if "DISK" in os.environ:  # the second time, with full_disk.c loaded
        for name in () if args.cold else HEAVY:
            __import__(name)
        own = commands(Path.cwd())
        record = {stage: fill(stage, own[stage], args.points) for stage in args.stages or own}
        print(json.dumps(record, indent=1))
        return int(any(found["wrong"] for found in record.values()))
    with tempfile.TemporaryDirectory() as place:
        library, folder = Path(place) / "full_disk.so", Path(place).resolve() / "disk"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
        shutil.copytree(args.graph, folder, symlinks=True, ignore=shutil.ignore_patterns("cache", "tmp"))
        shutil.rmtree(folder / "pipeline")  # the code is that of this tree, whatever made the graph
        (folder / "pipeline").symlink_to(ROOT / "pipeline")
        environment = scratch.environment(ROOT, folder) | {"LD_PRELOAD": str(library), "DISK": str(folder)}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "tests.full_disk", *args.stages, "--points", str(args.points)]
        command += ["--cold"] * args.cold
        return subprocess.run(command, cwd=folder, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
