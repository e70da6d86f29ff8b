"""Worker processes: answers, errors in one line, and no process left behind."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import measure_fixtures as tiny
import pytest

from pipeline.measure.setup import ArmSpec, Ask, DraftSpec, arm_spec
from pipeline.measure.worker import GRACE_S, Worker, WorkerDied, Workers

PROMPT = [5, 17, 99, 3, 42, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("worker") / "target", seed=1)


@pytest.fixture(scope="module")
def worker(folder):
    draft = DraftSpec("model", str(folder), None, pack_head=False)
    made = Worker("arm", spec(folder, draft))
    yield made
    made.close()


def spec(folder: Path, draft: DraftSpec | None = None, **changes) -> ArmSpec:
    made = arm_spec(folder, draft, tiny.runtime(), ends=[], trust_remote_code=False)
    return ArmSpec.from_json(asdict(made) | changes)


def generate(worker: Worker, draft_len: int, max_new_tokens: int = 9, ids=PROMPT):
    ask = Ask(draft_len, max_new_tokens, ignore_end=False, sampling=tiny.speculate().sampling)
    return worker.call("answers", prompt_ids=ids, asks=[asdict(ask)])[0]


def test_same_weights_draft_is_always_right(worker):
    plain, drafted = generate(worker, 0), generate(worker, 3)
    assert drafted["ids"] == plain["ids"] and len(plain["ids"]) == 9
    assert all(r["drafted"] == 3 for r in drafted["rounds"])
    # 8 tokens after the prompt's own, 4 a round
    assert [r["accepted"] for r in drafted["rounds"]] == [3, 3]


def test_one_new_token_has_no_rounds(worker):
    assert generate(worker, 0, max_new_tokens=1)["rounds"] == []


def test_the_ledger_on_a_cpu_is_never_zero(worker):
    generate(worker, 2)
    found = worker.call("ledger", budgets_bytes=[2**40])
    # 2 layers, keys and values, 1 head of 16, 4 bytes
    assert found["cache_bytes_per_token"] == found["draft_cache_bytes_per_token"] == 2 * 2 * 16 * 4
    for name, value in found.items():
        assert value is not None or name in found["null_reasons"]
        assert value != 0, name
    assert found["longest_context_tokens"][str(2**40)] == tiny.SHAPE.max_position_embeddings
    if found["peak_memory_bytes"] is not None:
        parts = found["weight_bytes"] + found["draft_weight_bytes"] + found["cache_bytes"] + found["workspace_bytes"]
        assert parts == found["peak_memory_bytes"]


def test_an_error_comes_back_as_one_line_and_the_worker_goes_on(worker):
    with pytest.raises(ValueError, match=r"^arm: the prompt is empty") as caught:
        generate(worker, 0, ids=[])
    assert "\n" not in str(caught.value)
    assert len(generate(worker, 0)["ids"]) == 9


def test_a_missing_checkpoint_is_the_users_error(tmp_path):
    made = Worker("gptq", spec(tmp_path / "absent"))
    try:
        with pytest.raises((ValueError, OSError), match=r"^gptq: .*absent"):
            made.ready()
    finally:
        made.close()


def test_a_killed_worker_is_named():
    made = Worker("awq", None)
    made.process.kill()
    with pytest.raises(WorkerDied, match="awq: its worker ended by signal SIGKILL"):
        made.call("bandwidth", device="cpu", threads=1)
    made.close()


@pytest.mark.slow
def test_not_resident_workers_hold_one_arm_at_a_time(folder):
    warmed = []
    with Workers(resident=False, warm_up=lambda name, worker: warmed.append(name)) as workers:
        workers.load({"a": spec(folder), "b": spec(folder)})
        assert workers.pids() == []
        first = generate(workers["a"], 0)["ids"]
        assert generate(workers["b"], 0)["ids"] == first
        assert len(workers.pids()) == 1 and warmed == ["a", "b"]
        pid = workers.pids()[0]
    assert gone(pid)


def gone(pid: int) -> bool:
    """Ended or a zombie that nobody reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
def test_no_worker_outlives_a_killed_driver():
    code = (
        "from pipeline.measure.worker import Worker\nw = Worker('x', None)\nprint(w.process.pid, flush=True)\ninput()"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pid = int(driver.stdout.readline())
    # a worker in the middle of a command does not read its input: stopping it makes that certain
    deadline = time.monotonic() + 30
    while b"pipeline.measure.worker" not in Path(f"/proc/{pid}/cmdline").read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.0)
    os.kill(pid, signal.SIGSTOP)
    driver.kill()
    driver.wait()
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(pid)


def test_workers_that_do_not_listen_are_ended_together():
    workers = Workers(resident=True, warm_up=lambda name, worker: None)
    workers.open = {str(i): Worker(str(i), None) for i in range(3)}
    processes = [w.process for w in workers.open.values()]
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    started = time.monotonic()
    workers.close()
    assert GRACE_S <= time.monotonic() - started < 2 * GRACE_S, "one grace for all, not one each"
    assert all(process.returncode == -signal.SIGKILL for process in processes)
