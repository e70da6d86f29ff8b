"""`python -m tests.torture --kills 50`: the smoke graph, killed again and again, ends with the results of a quiet run.

A run of `dvc repro` in a scratch folder is hit after a random time: SIGINT, SIGTERM or SIGKILL, to DVC, to the stage or
to one of its workers. After each kill: no process is left, what is finished stays finished, and the next plain run goes
on. Once the graph is done its results are wiped and it starts again, until the kills are spent; each completed graph
must equal the undisturbed one in everything that no clock decides.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from pipeline import provenance, scratch
from pipeline.verify import ARTIFACTS, fixed_results

ROOT = Path(__file__).parents[1]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
VICTIMS = ("dvc", "stage", "worker")
GONE_WITHIN_S = 15.0


@dataclass(frozen=True)
class Kill:
    """One hit: `left` names processes that outlived it, `redone` finished stages that ran again; both must be empty."""

    signal: str
    victim: str
    stage: str | None
    after_s: float
    left: list[str]
    redone: list[str]

    @property
    def survived(self) -> bool:
        return not self.left and not self.redone


def start(folder: Path, targets: tuple[str, ...]) -> subprocess.Popen[str]:
    scratch.drop_broken_lock(folder)  # as `make repro` does
    log = (folder / "torture.log").open("a")
    command = [sys.executable, "-m", "dvc", "repro", *targets]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=scratch.environment(ROOT, folder),
        stdout=log,
        stderr=log,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored if this runs in the background
    )


def processes(folder: Path) -> list[psutil.Process]:
    """Everything that runs in `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()).is_relative_to(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def kind_of(process: psutil.Process) -> str | None:
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:
        return None
    if "-m dvc" in words:
        return "dvc"
    if "pipeline.measure.worker" in words:
        return "worker"
    return "stage" if "-m pipeline " in words and not words.startswith("/bin/sh") else None


def stage_of(process: psutil.Process) -> str | None:
    try:
        words = process.cmdline()
    except psutil.Error:
        return None
    return words[words.index("pipeline") + 1] if "pipeline" in words else None


def finished(folder: Path) -> dict[str, Any]:
    """Stages in dvc.lock, with the hashes of what they wrote."""
    path = folder / "dvc.lock"
    if not path.exists():
        return {}
    stages = yaml.safe_load(path.read_text())["stages"]
    return {name: entry.get("outs") for name, entry in stages.items() if name not in ("environment", "track")}


def hit(folder: Path, draw: random.Random, targets: tuple[str, ...], longest_s: float) -> Kill | None:
    """Start a run and kill one of its processes after a random time; None when the graph was done before."""
    before = finished(folder)
    seen = (folder / "torture.log").stat().st_size if (folder / "torture.log").exists() else 0
    running = start(folder, targets)
    sent, wanted = draw.choice(SIGNALS), draw.choice(VICTIMS)
    started, wait_s = time.monotonic(), draw.uniform(3, longest_s)
    while time.monotonic() - started < wait_s and running.poll() is None:
        time.sleep(0.05)
    if running.poll() is not None:
        return None
    alive = {kind: p for p in processes(folder) if (kind := kind_of(p)) is not None}
    stage = stage_of(alive["stage"]) if "stage" in alive else None
    victim = wanted if wanted in alive else "stage" if "stage" in alive else "dvc"
    try:
        if victim == "dvc" and sent == signal.SIGINT:
            os.killpg(running.pid, sent)  # as Ctrl-C does: DVC leaves it to its child and ignores one of its own
        else:
            alive[victim].send_signal(sent)
    except (psutil.Error, KeyError, ProcessLookupError):
        return None
    killed_at = time.monotonic()
    while time.monotonic() - killed_at < GONE_WITHIN_S and (running.poll() is None or processes(folder)):
        if running.poll() is None and victim == "worker" and time.monotonic() - killed_at > GONE_WITHIN_S / 2:
            break  # a stage that is done with the worker goes on
        time.sleep(0.1)
    left = [f"{kind_of(p)} {p.pid}" for p in processes(folder)] if running.poll() is not None else []
    if running.poll() is None:
        end_all(folder, running)
    with (folder / "torture.log").open() as log:
        log.seek(seen)
        ran = [line.split("'")[1] for line in log if line.startswith("Running stage '")]
    return Kill(sent.name, victim, stage, round(killed_at - started, 1), left, sorted(set(ran) & set(before)))


def end_all(folder: Path, running: subprocess.Popen[str]) -> None:
    for process in processes(folder):
        process.kill()
    running.wait()


def tracked(folder: Path) -> bool:
    """Whether MLflow holds one finished parent with its six arms, and no killed run beside them."""
    from mlflow import MlflowClient
    from mlflow.entities import ViewType

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    ids = [e.experiment_id for e in client.search_experiments()]
    runs = client.search_runs(ids, run_view_type=ViewType.ACTIVE_ONLY)
    return len(runs) == 7 and {r.info.status for r in runs} == {"FINISHED"}


def wipe(folder: Path) -> None:
    written = ("report.md", "metrics.json", "figures", "serve")
    others = ("artifacts", "dvc.lock", "mlflow.db", "mlruns", ".dvc/cache", ".dvc/tmp")
    for name in (*others, *(f"reports/{n}" for n in written)):
        subprocess.run(["rm", "-rf", str(folder / name)], check=True)


def outcome(folder: Path, targets: tuple[str, ...]) -> dict[str, Any]:
    """What no clock decides: of the whole graph, or of the artifacts that some targets leave."""
    if not targets:
        return fixed_results(folder)
    paths = {name: folder / "artifacts" / name for name in ARTIFACTS}
    return {name: provenance.tree_sha256(path) for name, path in paths.items() if path.exists()}


def torture(
    folder: Path, kills: int, seed: int, targets: tuple[str, ...] = (), longest_s: float = 45.0
) -> dict[str, Any]:
    """The record of all kills. `targets`: stages of a shorter graph; a run is hit after `longest_s` at most."""
    draw = random.Random(seed)
    scratch.make(ROOT, folder, ["experiment=smoke"])
    wipe(folder)
    undisturbed_s = finish(folder, targets)
    due = outcome(folder, targets)
    wipe(folder)
    hits: list[Kill] = []
    graphs, equal, good_runs = 0, True, None if targets else True
    while len(hits) < kills:
        kill = hit(folder, draw, targets, longest_s)
        if kill is not None:
            hits.append(kill)
            print(f"{len(hits)}/{kills} {kill}", file=sys.stderr)
        if kill is None or len(hits) == kills:
            finish(folder, targets)
            graphs, equal = graphs + 1, equal and outcome(folder, targets) == due
            good_runs = good_runs and tracked(folder)  # a part of the graph does not get as far
            wipe(folder)
    counts = {s.name: sum(h.survived for h in hits if h.signal == s.name) for s in SIGNALS}
    by_stage: dict[str, int] = {}
    for h in hits:
        by_stage[h.stage or "between stages"] = by_stage.get(h.stage or "between stages", 0) + 1
    return {
        "kills": len(hits),
        "survived": sum(h.survived for h in hits),
        "survived_by_signal": counts,
        "kills_by_victim": {v: sum(h.victim == v for h in hits) for v in VICTIMS},
        "kills_by_stage": dict(sorted(by_stage.items())),
        "completed_graphs": graphs,
        "results_equal_undisturbed": equal,
        "only_whole_runs_in_mlflow": good_runs,
        "undisturbed_graph_s": round(undisturbed_s),
        "not_survived": [asdict(h) for h in hits if not h.survived],
    }


def finish(folder: Path, targets: tuple[str, ...]) -> float:
    """A plain run to the end; returns its seconds. Raises RuntimeError when it fails."""
    started = time.monotonic()
    running = start(folder, targets)
    if running.wait() != 0:
        raise RuntimeError(f"{folder}/torture.log: a plain run after a kill failed with exit code {running.returncode}")
    return time.monotonic() - started


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("artifacts/torture"))
    parser.add_argument("--out", type=Path, default=Path("reports/torture.json"))
    args = parser.parse_args()
    record = torture(args.folder.resolve(), args.kills, args.seed)
    provenance.write_json(args.out, record)
    print(json.dumps(record, indent=1))
    good = record["results_equal_undisturbed"] and record["only_whole_runs_in_mlflow"] is True
    return 0 if record["survived"] == record["kills"] and good else 1


if __name__ == "__main__":
    sys.exit(main())
