"""Interleaving, disturbance and stopping, with a fake clock and a fake meter."""

import os
import subprocess
import sys
import time

import pytest
from measure_fixtures import timing

from pipeline.measure.blocks import Disturbance, ProcessMeter, order_of, run_blocks
from pipeline.measure.statistics import median

QUIET = Disturbance(0.0, 0.0, 0.1, None)
NOISY = Disturbance(1.5, 0.0, 3.0, None)


class Machine:
    """A clock that arms advance, a drift that slows everything, and a scripted disturbance for each block."""

    def __init__(self, disturbances=(), drift=0.0):
        self.now, self.drift, self.disturbances, self.calls = 0.0, drift, list(disturbances), []

    def clock(self):
        return self.now

    def arm(self, name, seconds):
        def run(index, turn):
            self.calls.append(name)
            took = seconds * (1 + self.drift * len(self.calls))
            self.now += took
            return took

        return run

    def start(self):
        pass

    def stop(self):
        return self.disturbances.pop(0) if self.disturbances else QUIET


def run(machine, arms, precise=lambda blocks: False, turns=1, probe=None, **changes):
    made = {name: machine.arm(name, seconds) for name, seconds in arms.items()}
    how = {"turns": turns, "join": sum, "timing": timing(max_load=0.5, **changes), "precise": precise}
    return run_blocks(made, probe=probe, meter=machine, clock=machine.clock, **how)


def test_order_turns_round_in_every_other_block():
    machine = Machine()
    run(machine, {"a": 1, "b": 1, "c": 1}, max_blocks=3, time_budget_s=100.0)
    assert machine.calls == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]
    assert order_of(["a", "b"], 5) == ["b", "a"]


def test_ratio_does_not_depend_on_the_order_of_the_arms():
    def ratio(names):
        machine = Machine(drift=0.01)
        done = run(machine, {n: {"a": 1.0, "b": 2.0}[n] for n in names}, max_blocks=8, time_budget_s=1000.0)
        return median([b.samples["b"] / b.samples["a"] for b in done.kept])

    # 16 calls that drift by 1 % each: a fixed order would be off by the same step, the same way, in every block
    assert ratio("ab") == pytest.approx(ratio("ba"), rel=0.005)
    assert ratio("ab") == pytest.approx(2.0, rel=0.005)


def test_a_disturbed_block_is_run_again_and_not_kept():
    done = run(Machine([QUIET, NOISY, QUIET]), {"a": 1}, min_blocks=2, max_blocks=2, time_budget_s=100.0)
    assert [b.disturbed for b in done.all] == [False, True, False]
    assert [b.index for b in done.kept] == [0, 2] and done.reason is None
    assert done.summary()["disturbed"] == 1


def test_a_machine_that_never_rests_ends_with_the_budget_and_says_so():
    done = run(Machine([NOISY] * 99), {"a": 1}, min_blocks=3, max_blocks=9, time_budget_s=5.0)
    assert len(done.all) == 5 and len(done.kept) == 3
    assert done.reason == "3 of the 3 blocks kept ran beside other work"


def test_stops_when_precise_but_not_before_the_least_number():
    done = run(Machine(), {"a": 1}, precise=lambda blocks: True, min_blocks=4, max_blocks=9, time_budget_s=100.0)
    assert len(done.kept) == 4


def test_the_least_number_of_blocks_is_run_whatever_the_budget():
    assert len(run(Machine(), {"a": 100}, min_blocks=3, max_blocks=9, time_budget_s=1.0).kept) == 3
    noisy = run(Machine([NOISY] * 99), {"a": 100}, min_blocks=3, max_blocks=9, time_budget_s=1.0)
    assert len(noisy.all) == 3, "a machine that never rests is not waited for"


def test_arms_take_turns_within_a_block():
    machine = Machine()
    done = run(machine, {"a": 1, "b": 2}, turns=3, min_blocks=2, max_blocks=2, time_budget_s=100.0)
    assert machine.calls == ["a", "b", "b", "a", "a", "b", "b", "a", "a", "b", "b", "a"]
    assert [b.samples for b in done.kept] == [{"a": 3, "b": 6}] * 2


def test_the_probe_reads_before_each_turn():
    machine = Machine()
    done = run(machine, {"a": 1, "b": 2}, turns=2, probe=machine.clock, min_blocks=2, max_blocks=2, time_budget_s=100.0)
    assert [b.readings for b in done.kept] == [[0.0, 3.0], [6.0, 9.0]]


def test_short_turns_pair_what_a_drift_of_seconds_pulls_apart():
    """A machine that is slow for some seconds, again and again: arms that follow each other closely meet it alike."""

    class Uneven(Machine):
        def arm(self, name, seconds):
            def run(index, turn):
                took = seconds * (3.0 if self.now % 40 < 13 else 1.0)
                self.now += took
                return took

            return run

    def spread(turns, seconds):
        arms = dict.fromkeys("ab", seconds)
        done = run(Uneven(), arms, turns=turns, min_blocks=12, max_blocks=12, time_budget_s=1e6)
        ratios = [b.samples["b"] / b.samples["a"] for b in done.kept]
        return max(ratios) / min(ratios)

    assert spread(8, 1.0) < spread(1, 8.0)


def test_steal_and_foreign_gpu_processes_disturb():
    assert Disturbance(0.2, 0.4, 0, None).beyond(0.5) and not Disturbance(0.2, 0.1, 0, None).beyond(0.5)
    assert not Disturbance(None, None, 0, None).beyond(0.5)
    assert Disturbance(0, 0, 0, {"sm_clock_mhz": [1], "other_pids": [4]}).beyond(0.5)


def test_the_meter_tells_own_work_from_that_of_others():
    burn = [sys.executable, "-c", "import time\nend = time.monotonic() + 30\nwhile time.monotonic() < end: pass"]
    child = subprocess.Popen(burn)
    try:
        time.sleep(0.2)
        own, other = ProcessMeter(lambda: [child.pid], lambda: None), ProcessMeter(lambda: [], lambda: None)
        before = sum(float(v) for v in os.times()[:2])
        own.start(), other.start()
        time.sleep(1.0)
        as_own, as_other = own.stop(), other.stop()
        assert sum(os.times()[:2]) - before < 0.5
    finally:
        child.kill()
        child.wait()
    if as_own.other_cores is None:
        pytest.skip("no /proc/stat here")
    # the child took what its share was: the two readings differ by just that, whatever else runs
    assert as_other.other_cores - as_own.other_cores > 0.1
