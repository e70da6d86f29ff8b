"""`python -m tests.torture --kills 50`: the smoke graph, killed again and again, ends with the results of a quiet run.

A run of `dvc repro` in a scratch folder is hit while a stage runs: SIGINT, SIGTERM or SIGKILL, to DVC, to the stage or
to one of its workers. Stages take turns, and the moment is a random one of those that the undisturbed run was seen to
spend there. After each kill: what was hit is gone within GONE_WITHIN_S with all below it, DVC ends by itself within
DVC_ENDS_WITHIN_S of its stage, what is finished stays finished, and the next plain run goes on. Once the graph is done
its results are wiped and it starts again, until the kills are spent; each completed graph must equal the undisturbed
one in everything that no clock decides.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
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
BETWEEN = "between stages"
WORKER_TURNS = 3
GONE_WITHIN_S = 15.0
DVC_ENDS_WITHIN_S = 15.0
LOOK_EVERY_S = 0.05
Spans = dict[tuple[str, str], float]  # seconds for which (stage, kind of process) was seen in the undisturbed run


@dataclass(frozen=True)
class Aim:
    """What the next hit is to be: `at` is the share of the time for which the victim is there."""

    signal: signal.Signals
    victim: str
    stage: str
    at: float


@dataclass(frozen=True)
class Kill:
    """One hit: `left` names processes that outlived it, `redone` finished stages that ran again; both must be empty."""

    signal: str
    victim: str
    stage: str
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
        env=scratch.environment(ROOT, folder) | {"PYTHONUNBUFFERED": "1"},  # what DVC said is there when it is killed
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
            if Path(process.cwd()).is_relative_to(folder) and runs(process):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def below(process: psutil.Process) -> list[psutil.Process]:
    """The process and all its descendants."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return [process]


def named(found: list[psutil.Process]) -> list[str]:
    return [f"{kind_of(p) or 'process'} {p.pid}" for p in found]


def kind_of(process: psutil.Process) -> str | None:
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:
        return None
    if "-m dvc" in words:
        return "dvc"
    if "pipeline.measure.worker" in words:
        return "worker"
    if "envs/quantizers/run_" in words:
        return "worker"
    return "stage" if "-m pipeline " in words and not words.startswith("/bin/sh") else None


def stage_of(process: psutil.Process) -> str | None:
    """By its name in dvc.yaml."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return None
    return words[words.index("pipeline") + 1].replace("fetch_", "fetch@") if "pipeline" in words else None


def look(running: subprocess.Popen[str]) -> tuple[str, dict[str, psutil.Process]]:
    """The stage that a run is in, or BETWEEN, and its processes by kind."""
    alive = {"dvc": psutil.Process(running.pid)}
    alive |= {kind: p for p in below(alive["dvc"])[1:] if (kind := kind_of(p)) in ("stage", "worker") and runs(p)}
    stage = stage_of(alive["stage"]) if "stage" in alive else None
    return stage or BETWEEN, alive


def locked(folder: Path) -> set[str]:
    """Stages in dvc.lock; none in a file that a kill of DVC left empty, which the next `start` removes."""
    path = folder / "dvc.lock"
    return set((yaml.safe_load(path.read_text()) or {}).get("stages", ())) if path.exists() else set()


def finished(folder: Path) -> set[str]:
    """Stages that no later run has to do again: `environment` always runs, and so may `track` after it."""
    return locked(folder) - {"environment", "track"}


def ran(folder: Path, since: int) -> set[str]:
    """Stages that DVC says it has run, in what it printed from the byte `since` on."""
    with (folder / "torture.log").open() as log:
        log.seek(since)
        return {line.split("'")[1] for line in log if line.startswith("Running stage '")}


def printed(folder: Path) -> int:
    path = folder / "torture.log"
    return path.stat().st_size if path.exists() else 0


def ignores_sigint(pid: int) -> bool:
    """DVC does while a stage runs and until it sees that stage's end: a Ctrl-C in the moment between is lost."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigIgn:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGINT - 1) & 1)
    return False


def choose(draw: random.Random, spans: Spans, done: set[str], aimed: Counter[str]) -> Aim | None:
    """At the next stage of the graph that is neither done nor had its turn; None when there is no other.

    Every stage has one turn, and WORKER_TURNS more for its workers if it has any. A worker ignores SIGINT, which its
    stage handles, so it is never sent one.
    """
    order = list(dict.fromkeys(stage for stage, _ in spans))
    turns = {s: 1 + WORKER_TURNS * ((s, "worker") in spans) for s in order}
    ahead = [s for s in order if s not in done and aimed[s] < turns[s] and (s != BETWEEN or order[0] not in done)]
    if not ahead:
        return None
    sent, at = draw.choice(SIGNALS), draw.uniform(0.0, 0.8)
    victim = draw.choice(("dvc", "stage")) if ahead[0] != BETWEEN else "dvc"
    if aimed[ahead[0]]:
        victim, sent = "worker", signal.SIGTERM if sent == signal.SIGINT else sent
    return Aim(sent, victim, ahead[0], at)


def hit(folder: Path, aim: Aim, spans: Spans, targets: tuple[str, ...]) -> Kill | None:
    """Start a run and kill one of its processes at the moment aimed at; None when the graph was done before."""
    before, seen = finished(folder), printed(folder)
    running = start(folder, targets)
    started = time.monotonic()
    stages: set[str] = set()
    due_at: float | None = None
    while running.poll() is None:
        stage, alive = look(running)
        passed = aim.stage in stages and stage != aim.stage  # it ended sooner than in the undisturbed run
        if due_at is None and stage == aim.stage and aim.victim in alive and (stage != BETWEEN or stages - {BETWEEN}):
            due_at = time.monotonic() + aim.at * spans[aim.stage, aim.victim]
        deaf = stage == BETWEEN and aim.signal == signal.SIGINT and ignores_sigint(running.pid)
        if due_at is not None and (time.monotonic() >= due_at or passed) and not deaf:
            break
        stages.add(stage)
        time.sleep(LOOK_EVERY_S)
    else:
        return None
    victim = next(v for v in (aim.victim, "stage", "dvc") if v in alive)
    due = processes(folder) if victim == "dvc" else below(alive[victim])
    killed_at = time.monotonic()
    try:
        if victim == "dvc" and aim.signal == signal.SIGINT:
            os.killpg(running.pid, aim.signal)  # as Ctrl-C does: DVC leaves it to its child and ignores one of its own
        else:
            alive[victim].send_signal(aim.signal)
    except (psutil.Error, ProcessLookupError):
        end_all(folder, running)
        return hit(folder, aim, spans, targets)  # it ended by itself in this moment
    left = outlived(folder, running, due, stage, alive.get("stage"), spans)
    end_all(folder, running)
    redone = sorted(ran(folder, seen) & before)
    return Kill(aim.signal.name, victim, stage, round(killed_at - started, 1), left, redone)


def outlived(
    folder: Path,
    running: subprocess.Popen[str],
    due: list[psutil.Process],
    stage: str,
    stage_process: psutil.Process | None,
    spans: Spans,
) -> list[str]:
    """Names of processes that should have ended and have not: those `due`, then the stage, then DVC and the rest.

    A stage that is done with the worker which was hit may finish, in twice the time that it takes undisturbed; and a
    run goes on after a stage whose end came before the kill.
    """
    if left := wait_for(lambda: [p for p in due if runs(p)], GONE_WITHIN_S):
        return named(left)
    if stage_process is not None:
        patience_s = GONE_WITHIN_S + 2 * spans.get((stage, "stage"), 0.0)
        if left := wait_for(lambda: [p for p in [stage_process] if runs(p)], patience_s):
            return [f"{name} after its worker ended" for name in named(left)]

    def rest() -> list[psutil.Process]:
        if running.poll() is None and look(running)[0] not in (stage, BETWEEN):
            return []
        return processes(folder)

    return named(wait_for(rest, DVC_ENDS_WITHIN_S))


def wait_for(left: Callable[[], list[psutil.Process]], limit_s: float) -> list[psutil.Process]:
    """What is left when nothing is, or after `limit_s`."""
    until = time.monotonic() + limit_s
    while (found := left()) and time.monotonic() < until:
        time.sleep(LOOK_EVERY_S)
    return found


def end_all(folder: Path, running: subprocess.Popen[str]) -> None:
    """By force, and wait for it: what is left has been noted."""
    if running.poll() is None:
        running.kill()
    running.wait()
    for process in processes(folder):
        with contextlib.suppress(psutil.Error):
            process.kill()
    if left := wait_for(lambda: processes(folder), GONE_WITHIN_S):
        raise RuntimeError(f"SIGKILL did not end {', '.join(named(left))}")


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


def torture(folder: Path, kills: int, seed: int, targets: tuple[str, ...] = ()) -> dict[str, Any]:
    """The record of all kills. `targets`: stages of a shorter graph."""
    draw = random.Random(seed)
    scratch.make(ROOT, folder, ["experiment=smoke"])
    wipe(folder)
    started = time.monotonic()
    spans, _ = finish(folder, targets)
    undisturbed_s = time.monotonic() - started
    due = outcome(folder, targets)
    wipe(folder)
    hits: list[Kill] = []
    redone: set[str] = set()
    aimed: Counter[str] = Counter()
    graphs, equal, good_runs = 0, True, None if targets else True
    while len(hits) < kills:
        aim = choose(draw, spans, locked(folder) - {"environment"}, aimed)
        kill = hit(folder, aim, spans, targets) if aim is not None else None
        if aim is not None and kill is not None:
            aimed[aim.stage] += 1
            hits.append(kill)
            print(f"{len(hits)}/{kills} {kill}", file=sys.stderr)
        if kill is None or len(hits) == kills:
            redone |= finish(folder, targets)[1]
            graphs, equal = graphs + 1, equal and outcome(folder, targets) == due
            good_runs = good_runs and tracked(folder)  # a part of the graph does not get as far
            aimed.clear()
            wipe(folder)
    return {
        "kills": len(hits),
        "survived": sum(h.survived for h in hits),
        "by_signal": {s.name: tally(h for h in hits if h.signal == s.name) for s in SIGNALS},
        "by_victim": {v: tally(h for h in hits if h.victim == v) for v in VICTIMS},
        "by_stage": {s: tally(h for h in hits if h.stage == s) for s in dict.fromkeys(s for s, _ in spans)},
        "redone_in_plain_runs": sorted(redone),
        "completed_graphs": graphs,
        "results_equal_undisturbed": equal,
        "only_whole_runs_in_mlflow": good_runs,
        "undisturbed_graph_s": round(undisturbed_s),
        "not_survived": [asdict(h) for h in hits if not h.survived],
    }


def tally(hits: Iterable[Kill]) -> dict[str, int]:
    survived = [h.survived for h in hits]
    return {"kills": len(survived), "survived": sum(survived)}


def finish(folder: Path, targets: tuple[str, ...]) -> tuple[Spans, set[str]]:
    """A plain run to the end: how long each stage and its workers were there, and finished stages that ran again.

    Raises RuntimeError when the run fails. Seconds between stages are those of one gap, the mean of all.
    """
    before, seen = finished(folder), printed(folder)
    running = start(folder, targets)
    spans: Spans = {}
    gaps, was, last = 0, BETWEEN, time.monotonic()
    while running.poll() is None:
        stage, alive = look(running)
        now = time.monotonic()
        first_seen = stage == BETWEEN and not spans
        gaps += stage == BETWEEN and was != BETWEEN
        for kind in () if first_seen else alive:
            spans[stage, kind] = spans.get((stage, kind), 0.0) + now - last
        was, last = stage, now
        time.sleep(LOOK_EVERY_S)
    if running.returncode != 0:
        raise RuntimeError(f"{folder}/torture.log: a plain run after a kill failed with exit code {running.returncode}")
    if (BETWEEN, "dvc") in spans:
        spans[BETWEEN, "dvc"] /= gaps
    return spans, ran(folder, seen) & before


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
    good = good and not record["redone_in_plain_runs"]
    return 0 if record["survived"] == record["kills"] and good else 1


if __name__ == "__main__":
    sys.exit(main())
