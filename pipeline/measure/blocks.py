"""Interleaved blocks of turns: A B C D, then D C B A, ..., watched for work of other processes, repeated if need be."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pipeline.config import Timing
from pipeline.measure.statistics import median
from pipeline.progress import bar


@dataclass(frozen=True)
class Disturbance:
    """What else ran during a block: mean cores used by other processes, mean cores stolen by the host, load average.

    Null where this system does not tell. `gpu`: clocks and foreign processes, null without a GPU.
    """

    other_cores: float | None
    steal_cores: float | None
    load_1min: float | None
    gpu: dict[str, Any] | None

    def beyond(self, max_cores: float) -> bool:
        foreign = bool(self.gpu and self.gpu["other_pids"])
        return foreign or (self.other_cores or 0.0) + (self.steal_cores or 0.0) > max_cores


class Meter(Protocol):
    def start(self) -> None: ...
    def stop(self) -> Disturbance: ...


@dataclass(frozen=True)
class _Cpu:
    at_s: float
    busy_s: float
    steal_s: float
    own_s: float


class ProcessMeter:
    """Reads /proc: busy time of the cores this process may use, less that of this process and of `own_pids`."""

    def __init__(self, own_pids: Callable[[], Iterable[int]], gpu: Callable[[], dict[str, Any] | None]) -> None:
        self.own_pids = own_pids
        self.gpu = gpu
        self.before: _Cpu | None = None

    def start(self) -> None:
        self.before = self._read()

    def stop(self) -> Disturbance:
        before, after = self.before, self._read()
        load = os.getloadavg()[0]
        if before is None or after is None or after.at_s <= before.at_s:
            return Disturbance(None, None, load, self.gpu())
        wall_s = after.at_s - before.at_s
        # clock ticks of 10 ms, and workers that came or went, can make the difference slightly negative
        other_s = max(0.0, (after.busy_s - before.busy_s) - (after.own_s - before.own_s))
        return Disturbance(other_s / wall_s, (after.steal_s - before.steal_s) / wall_s, load, self.gpu())

    def _read(self) -> _Cpu | None:
        try:
            tick = os.sysconf("SC_CLK_TCK")
            mine = {f"cpu{i}" for i in os.sched_getaffinity(0)}
            rows = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
            counts = [[int(v) for v in row[1:]] for row in rows if row and row[0] in mine]
            # user nice system idle iowait irq softirq steal: busy is all but idle, iowait and steal
            busy = sum(sum(c[:3]) + sum(c[5:7]) for c in counts)
            steal = sum(c[7] for c in counts)
        except (OSError, ValueError, IndexError, AttributeError):
            return None
        times = os.times()  # this process, and children that ended
        own = sum(times[:4]) + sum(cpu_seconds(pid) for pid in self.own_pids())
        return _Cpu(time.monotonic(), busy / tick, steal / tick, own)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all threads; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Block:
    """`samples`: what each arm returned, keyed by arm. `readings`: of the probe, one a turn."""

    index: int
    order: list[str]
    samples: dict[str, Any]
    disturbance: Disturbance
    disturbed: bool
    seconds: float
    readings: list[float] = field(default_factory=list)


@dataclass
class Blocks:
    """`all`: every block run; `kept`: those that count. `reason`: what the reader must know, or None."""

    all: list[Block] = field(default_factory=list)
    seconds: float = 0.0
    reason: str | None = None
    kept: list[Block] = field(default_factory=list)

    @property
    def quiet(self) -> list[Block]:
        return [b for b in self.all if not b.disturbed]

    def summary(self) -> dict[str, Any]:
        return {"run": len(self.all), "disturbed": len(self.all) - len(self.quiet), "seconds": self.seconds}


def order_of(arms: Sequence[str], block: int) -> list[str]:
    return list(arms) if block % 2 == 0 else list(reversed(arms))


def run_blocks(
    arms: dict[str, Callable[[int, int], Any]],
    *,
    turns: int,
    join: Callable[[list[Any]], Any],
    timing: Timing,
    meter: Meter,
    precise: Callable[[list[Block]], bool],
    probe: Callable[[], float] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Blocks:
    """Run blocks until `precise` holds on `timing.min_blocks` undisturbed ones or more, or time or blocks run out.

    A block has `turns`, in each of which every arm runs once: `arms[name](index, turn)`; `join` makes one sample of an
    arm's turns. The shorter a turn, the more alike is what slows two arms within it; `probe` is read before each. A
    disturbed block does not count, so that another is run for it within the budget; `timing.min_blocks` are run
    whatever the budget, since fewer decide nothing. The first call of each arm belongs to the caller's warm-up.
    """
    done = Blocks()
    started = clock()
    with bar("blocks", timing.max_blocks, "block") as shown:
        while True:
            index = len(done.all)
            order = order_of(list(arms), index)
            meter.start()
            block_started = clock()
            parts: dict[str, list[Any]] = {name: [] for name in order}
            readings = []
            for turn in range(turns):
                if probe is not None:
                    readings.append(probe())
                for name in order_of(list(arms), index + turn):
                    parts[name].append(arms[name](index, turn))
            samples = {name: join(found) for name, found in parts.items()}
            seconds = clock() - block_started
            disturbance = meter.stop()
            disturbed = disturbance.beyond(timing.max_load)
            done.all.append(Block(index, order, samples, disturbance, disturbed, seconds, readings))
            done.seconds = clock() - started
            shown.update(left_s=timing.time_budget_s - done.seconds)
            quiet = done.quiet
            if len(quiet) >= timing.max_blocks or (len(quiet) >= timing.min_blocks and precise(quiet)):
                break
            next_s = median([b.seconds for b in done.all])
            if len(done.all) >= timing.min_blocks and done.seconds + next_s > timing.time_budget_s:
                break
    _choose(done, timing.min_blocks)
    return done


def _choose(done: Blocks, min_blocks: int) -> None:
    """Keep the undisturbed blocks; when they are too few, the least disturbed others as well, and say so."""
    disturbed = [b for b in done.all if b.disturbed]
    short = max(0, min_blocks - len(done.quiet))
    added = sorted(disturbed, key=lambda b: (b.disturbance.other_cores or 0) + (b.disturbance.steal_cores or 0))[:short]
    done.kept = [b for b in done.all if not b.disturbed or any(b is a for a in added)]
    if added:
        done.reason = f"{len(added)} of the {len(done.kept)} blocks kept ran beside other work"


def nvidia_state(own_pids: Iterable[int]) -> dict[str, Any] | None:
    """SM clocks and compute processes that are not ours, by nvidia-smi; None where there is none.

    In a container nvidia-smi may list other numbers than ours; when none of ours is listed, none is called foreign.
    """
    import subprocess

    def ask(query: str) -> list[str]:
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return [line.strip() for line in done.stdout.splitlines() if line.strip()]

    try:
        clocks = [int(float(v)) for v in ask("--query-gpu=clocks.sm")]
        pids = {int(v) for v in ask("--query-compute-apps=pid")}
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    own = {os.getpid(), *own_pids}
    return {"sm_clock_mhz": clocks, "other_pids": sorted(pids - own) if pids & own else []}
