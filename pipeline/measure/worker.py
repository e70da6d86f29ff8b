"""A process for one arm: commands as JSON lines on stdin, one JSON line back for each on stdout.

The child dies with its parent, whatever way the parent ends. What libraries print goes to stderr, never between the
answers. An error comes back as one line and is raised in the parent as the kind that it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pipeline import provenance
from pipeline.measure.memory import allocation_failure
from pipeline.measure.setup import ArmSpec, Ask

if TYPE_CHECKING:
    from pipeline.measure.arm import Arm

PR_SET_PDEATHSIG = 1
GRACE_S = 5.0  # for a worker to end by itself
ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "OSError": OSError, "MemoryError": MemoryError}


class WorkerDied(ChildProcessError):
    """The worker ended without an answer."""


class Worker:
    """The parent's side. Starting returns at once, so that several workers can load side by side."""

    def __init__(self, name: str, spec: ArmSpec | None) -> None:
        """`spec` None: a process without models, for `bandwidth`."""
        self.name = name
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        root = Path(__file__).resolve().parents[2]
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.measure.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        self.loaded = spec is None
        if spec is not None:
            self._send({"command": "load", "spec": asdict(spec)})

    def ready(self) -> None:
        """Wait until the arm is loaded. Raises what loading raised, or WorkerDied."""
        if not self.loaded:
            self._receive()
            self.loaded = True

    def call(self, command: str, **arguments: Any) -> Any:
        """Run one command and return its result. Raises ValueError, OSError, MemoryError or WorkerDied."""
        self.ready()
        self._send({"command": command, **arguments})
        return self._receive()

    def end_input(self) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def close(self, grace_s: float = GRACE_S) -> None:
        """End the process: by the end of its input, or by force if it does not listen within `grace_s`."""
        self.end_input()
        try:
            self.process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.log.close()

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except OSError:
            raise self._death() from None

    def _receive(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self._death()
        answer = json.loads(line)
        if "error" in answer:
            raise ERRORS.get(answer["kind"], WorkerDied)(f"{self.name}: {answer['error']}")
        return answer["result"]

    def _death(self) -> WorkerDied:
        code = self.process.wait()
        how = f"exit code {code}"
        if code < 0:
            how = f"signal {signal.Signals(-code).name}"
            how += " (out of memory?)" if code == -signal.SIGKILL else ""
        self.log.seek(0)
        last = self.log.read().decode(errors="replace").strip().splitlines()[-1:]
        return WorkerDied(f"{self.name}: its worker ended by {how}{': ' + last[0] if last else ''}")


class Workers:
    """All arms, by name. `resident`: all loaded at once; otherwise one at a time, loaded anew at each use.

    `warm_up(name, worker)` is called once for each worker that was loaded.
    """

    def __init__(self, resident: bool, warm_up: Callable[[str, Worker], None]) -> None:
        self.specs: dict[str, ArmSpec] = {}
        self.resident = resident
        self.warm_up = warm_up
        self.open: dict[str, Worker] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def load(self, specs: dict[str, ArmSpec]) -> None:
        """Add arms; resident ones load side by side now."""
        self.specs |= specs
        if self.resident:
            for name, spec in specs.items():
                self.open[name] = Worker(name, spec)
            for name in specs:
                self.open[name].ready()
            for name in specs:
                self.warm_up(name, self.open[name])

    def __getitem__(self, name: str) -> Worker:
        if name not in self.open:
            self.close()
            self.open[name] = Worker(name, self.specs[name])
            self.warm_up(name, self.open[name])
        return self.open[name]

    def pids(self) -> list[int]:
        return [w.process.pid for w in self.open.values()]

    def close(self) -> None:
        """All at once: one that loads does not listen, and an interrupted study takes one grace, not one each."""
        until = time.monotonic() + GRACE_S
        for worker in self.open.values():
            worker.end_input()
        for worker in self.open.values():
            worker.close(max(0.0, until - time.monotonic()))
        self.open = {}


def die_with_parent(parent_pid: int, by: signal.Signals) -> None:
    """Linux: a signal for this process when its parent ends. Elsewhere the end of stdin does it, between commands."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent_pid:
        sys.exit(1)  # it ended before the call above


def commands_of(arm: Arm) -> dict[str, Callable[..., Any]]:
    def answers(prompt_ids: list[int], asks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        chosen = [Ask.from_json(ask) for ask in asks]
        reading = arm.read(prompt_ids, chosen)
        return [asdict(arm.generate(prompt_ids, ask, reading)) for ask in chosen]

    return {
        "answers": answers,
        "gaps": lambda **k: asdict(arm.gaps(**k)),
        "dense_from": arm.dense_from,
        "describe": arm.describe,
        "read_bytes": arm.read_bytes,
        "ledger": arm.ledger,
    }


def bandwidth(device: str, threads: int | None) -> float:
    """In a process of its own, since the tensor that is read would count as an arm's memory; it is not kept."""
    import torch

    from pipeline.measure.costs import read_bandwidth_bytes_per_s

    if threads is not None:
        torch.set_num_threads(threads)
    found = read_bandwidth_bytes_per_s(device)
    torch.cuda.empty_cache()
    return found


def serve(lines: Iterator[str], answers: IO[str]) -> None:
    """Answer commands until the input ends. Those of an arm are known after `load`."""
    commands: dict[str, Callable[..., Any]] = {"bandwidth": bandwidth}
    for line in lines:
        message = json.loads(line)
        name = message.pop("command")
        try:
            if name == "load":
                from pipeline.measure.arm import Arm

                commands = commands_of(Arm(ArmSpec.from_json(message["spec"])))
                answer: dict[str, Any] = {"result": None}
            else:
                answer = {"result": commands[name](**message)}
        except Exception as e:  # every error is the parent's to judge
            too_large = allocation_failure(e)
            known = next((k for k, cls in ERRORS.items() if isinstance(e, cls)), type(e).__name__)
            kind, text = ("MemoryError", too_large) if too_large else (known, " ".join(str(e).split()))
            answer = {"kind": kind, "error": text if kind in ERRORS else f"{type(e).__name__}: {text}"}
        answers.write(json.dumps(provenance.finite(answer)) + "\n")
        answers.flush()


def main() -> None:
    die_with_parent(int(sys.argv[1]), signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent closes stdin, so that Ctrl-C gives one message, not nine
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(iter(sys.stdin.readline, ""), answers)


if __name__ == "__main__":
    main()
