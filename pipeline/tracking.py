"""MLflow sink: a finished study as one parent run with a child per arm. Results files stay the truth.

A study is known by the digest of its results: logging it again adds nothing, and what a killed process left
half-written is replaced. No trouble with the store ever fails a pipeline: `log` answers with a status and a reason.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config import redacted

if TYPE_CHECKING:
    from mlflow import MlflowClient

SQLITE = "sqlite:///"
ARTIFACTS = "mlruns"  # beside a SQLite store; ignored by git
MAX_PARAM_CHARS = 6000  # MLflow refuses longer values
MAX_TAG_CHARS = 5000  # and cuts these
BATCH = 100  # params or tags a request
LOCK_TIMEOUT_S = 600
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


@dataclass(frozen=True)
class Run:
    """What one run shows. `curves`: metric -> its value at each step; `artifacts`: files and folders to copy."""

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, Any] = field(default_factory=dict)
    curves: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)
    artifacts: tuple[Path, ...] = ()
    children: tuple[Run, ...] = ()


def log(run: Run, *, digest: str, uri: str, experiment: str, root: Path) -> dict[str, Any]:
    """Log `run` unless a complete one with this digest is there. `root`: folder that relative SQLite paths start from.

    Returns {"status": "logged" | "kept" | "unavailable", "reason"}; raises nothing but KeyboardInterrupt.
    """
    os.environ.update(ENVIRONMENT)
    try:
        import mlflow  # noqa: F401  seconds of work, not to be done while others wait for the lock

        with locked(uri, root):
            client = connect(absolute_uri(uri, root))
            experiment_id = find_or_create(client, experiment, uri, root)
            local = sqlite_path(uri, root) is not None
            if not replace_incomplete(client, experiment_id, digest, alone=local):
                return {"status": "kept", "reason": "a complete run with these results is there"}
            write_study(client, experiment_id, run, digest)
    except Exception as e:
        reason = redacted(" ".join(f"{type(e).__name__}: {e}".split()))[:300]
        print(f"warning: not tracked, results are unharmed ({reason})", file=sys.stderr)
        return {"status": "unavailable", "reason": reason}
    return {"status": "logged", "reason": None}


def sqlite_path(uri: str, root: Path) -> Path | None:
    """File of a SQLite store; None for a server."""
    return (root / uri.removeprefix(SQLITE)).absolute() if uri.startswith(SQLITE) else None


def absolute_uri(uri: str, root: Path) -> str:
    path = sqlite_path(uri, root)
    return uri if path is None else f"{SQLITE}{path}"


def repository(folder: Path) -> Path:
    """`folder`, or the repository it is a throw-away copy of: `dvc exp run --temp` works under .dvc/tmp/exps."""
    for parent in folder.absolute().parents:
        if parent.name == ".dvc":
            return parent.parent
    return folder.absolute()


@contextlib.contextmanager
def locked(uri: str, root: Path) -> Iterator[None]:
    """One writer at a time on a SQLite store: several processes creating one file would crash each other."""
    path = sqlite_path(uri, root)
    if path is None:
        yield
        return
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock", timeout=LOCK_TIMEOUT_S):
        yield


def connect(uri: str) -> MlflowClient:
    from mlflow import MlflowClient

    logging.getLogger("alembic").setLevel(logging.WARNING)  # a line a migration on every new store
    for name in ("mlflow.store.db.utils", "sqlalchemy.pool"):  # tracebacks of errors that `log` tells in one line
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def find_or_create(client: MlflowClient, name: str, uri: str, root: Path) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        if found.lifecycle_stage == "deleted":
            client.restore_experiment(found.experiment_id)
        return found.experiment_id
    path = sqlite_path(uri, root)
    location = None if path is None else (path.parent / ARTIFACTS).as_uri()
    return client.create_experiment(name, location, tags={"mlflow.experimentKind": "custom_model_development"})


def replace_incomplete(client: MlflowClient, experiment_id: str, digest: str, alone: bool) -> bool:
    """Delete what earlier attempts at this study left; False when a complete run is there and nothing is to do.

    `alone`: we hold the lock, so that whatever is incomplete belongs to a dead process, whichever study it was.
    """
    runs = client.search_runs([experiment_id], f"tags.digest = '{digest}'")
    if any(r.data.tags.get("complete") == "true" and r.info.status == "FINISHED" for r in runs):
        return False
    dead = {digest}
    if alone:
        half = client.search_runs([experiment_id], "tags.complete = 'false'")
        dead |= {r.data.tags["digest"] for r in half}
    for value in dead:
        for run in client.search_runs([experiment_id], f"tags.digest = '{value}'"):
            client.delete_run(run.info.run_id)
    return True


def write_study(client: MlflowClient, experiment_id: str, run: Run, digest: str) -> None:
    """Parent first, children next, and the tag `complete` last: no earlier state passes for a finished study."""
    parent_id = open_run(client, experiment_id, run, {"digest": digest, "complete": "false"})
    opened = [parent_id]
    try:
        fill(client, parent_id, run)
        for child in run.children:
            tags = {"mlflow.parentRunId": parent_id, "digest": digest}
            opened.append(open_run(client, experiment_id, child, tags))
            fill(client, opened[-1], child)
            client.set_terminated(opened.pop(), "FINISHED")
        client.set_terminated(parent_id, "FINISHED")
        client.set_tag(parent_id, "complete", "true")
    except BaseException as e:
        for run_id in opened:
            with contextlib.suppress(Exception):
                client.set_terminated(run_id, "FAILED" if isinstance(e, Exception) else "KILLED")
        raise


def open_run(client: MlflowClient, experiment_id: str, run: Run, tags: dict[str, str]) -> str:
    return client.create_run(experiment_id, tags={"mlflow.runName": run.name, **tags}).info.run_id


def fill(client: MlflowClient, run_id: str, run: Run) -> None:
    """Params, metrics and tags in batches. A number that is not finite becomes a tag, a long param an artifact."""
    from mlflow.entities import Metric, Param, RunTag

    now_ms = time.time_ns() // 1_000_000
    params = {spelt(k): str(v) for k, v in run.params.items()}
    long = {k: v for k, v in params.items() if len(v) > MAX_PARAM_CHARS}
    short = [Param(k, v) for k, v in params.items() if k not in long]
    points = {(spelt(name), 0): value for name, value in run.metrics.items()}
    points |= {(spelt(name), step): value for name, curve in run.curves.items() for step, value in curve.items()}
    metrics = [Metric(name, float(v), now_ms, step) for (name, step), v in points.items() if is_metric(v)]
    tags = {spelt(k): str(v)[:MAX_TAG_CHARS] for k, v in run.tags.items()}
    tags |= {f"{name}.{step}" if step else name: str(v) for (name, step), v in points.items() if not is_metric(v)}
    tags |= {f"param.{k}": f"{len(v)} characters, see artifact params/{k}.txt" for k, v in long.items()}
    for i in range(0, len(metrics), BATCH):
        client.log_batch(run_id, metrics=metrics[i : i + BATCH])
    for i in range(0, max(len(short), len(tags)), BATCH):
        some = [RunTag(k, v) for k, v in list(tags.items())[i : i + BATCH]]
        client.log_batch(run_id, params=short[i : i + BATCH], tags=some)
    for name, text in long.items():
        client.log_text(run_id, text, f"params/{name}.txt")
    for path in run.artifacts:
        if path.is_dir():
            client.log_artifacts(run_id, str(path), path.name)
        else:
            client.log_artifact(run_id, str(path))


def spelt(name: str) -> str:
    """`name` in the characters that MLflow takes in keys: the @ of a sweep's file names is none of them."""
    return re.sub(r"[^\w\-. :/]", "-", name)


def is_metric(value: Any) -> bool:
    """MLflow counts NaN as 0 and brings infinity back finite, so neither may enter."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
