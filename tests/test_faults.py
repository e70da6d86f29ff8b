"""What happens on a machine that is shared: a full disk, a read-only folder, no memory, two of the same at once."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from data_fixtures import tiny_target
from smoke_graph import ROOT, environment, run
from test_safety import ordinary

from pipeline import config, distill, provenance
from pipeline.__main__ import disk_trouble, main, one_line, system_errors
from pipeline.checkpoint import random_llama
from pipeline.measure import baseline
from pipeline.measure.memory import allocation_failure
from pipeline.quantizers import Quantized
from pipeline.quantizers.export import write_checkpoint
from pipeline.quantizers.plan import Plan
from pipeline.scratch import drop_broken_lock

STAGES = ("environment", "calibrate", "benchmark", "report")  # of all: `make full-disk`
# own mounts, without root: what is mounted goes with the process
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]
WRITES = re.compile(r"^(out|out_\w+|metrics)=")

# In a small file system with the old results: fill it up or make it read-only, run the stage, show what is left.
ON_A_BAD_DISK = """
set -eu
results() { cd "$DISK" && find artifacts reports -type f -not -path '*/logs/*' -print0 | sort -z | xargs -0 sha256sum; }
mount -t tmpfs -o size=64m none "$DISK"
cp -r artifacts reports "$DISK/"
if [ "$FAULT" = full ]; then
  dd if=/dev/zero of="$DISK/filler" bs=4k 2> /dev/null || true
  dd if=/dev/zero of="$DISK/rest" bs=1 count=4096 2> /dev/null || true
else
  mount -o remount,ro "$DISK"
fi
before=$(results)
code=0
"$@" > "$LOG.out" 2> "$LOG.err" || code=$?
after=$(results)
[ "$before" = "$after" ] && echo "untouched $code" || { echo "changed $code"; cd "$DISK" && find . -newer filler; }
"""


@pytest.fixture
def workspace(smoke, tmp_path):
    """A copy of the finished graph that a test may change."""
    folder = tmp_path / "workspace"
    shutil.copytree(smoke[0], folder, symlinks=True)
    return folder


def can_mount(folder: Path) -> bool:
    try:
        done = subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "none", str(folder)], capture_output=True)
    except OSError:
        return False
    return done.returncode == 0


def command_of(folder: Path, stage: str) -> list[str]:
    """Its words in dvc.yaml, interpolated by DVC itself."""
    from dvc.repo import Repo

    with Repo(str(folder)) as repo:
        return next(s.cmd.split() for s in repo.index.stages if s.name == stage)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "fault"), [*((stage, "full") for stage in STAGES), ("calibrate", "read-only"), ("report", "read-only")]
)
def test_a_disk_that_takes_nothing_costs_one_line_and_no_result(smoke, tmp_path, stage, fault):
    folder, _ = smoke
    disk, log = tmp_path / "disk", tmp_path / "log"
    disk.mkdir()
    if not can_mount(disk):
        pytest.skip("no mounts in a user namespace here (unshare)")
    command = [
        re.sub(r"=", f"={disk}/", word, count=1) if WRITES.match(word) else word for word in command_of(folder, stage)
    ]
    done = subprocess.run(
        [*UNSHARE, "bash", "-c", ON_A_BAD_DISK, "bash", *command],
        cwd=folder,
        env=environment(folder) | {"DISK": str(disk), "LOG": str(log), "FAULT": fault},
        capture_output=True,
        text=True,
    )
    said = Path(f"{log}.err").read_text()
    assert done.stdout.split("\n")[0] == "untouched 1", done.stdout + done.stderr + said
    lines = [line for line in said.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and "Traceback" not in said, said
    due = "No space left on device" if fault == "full" else "Read-only file system"
    assert due in lines[0] and str(disk) in lines[0] and "run again" in lines[0], "what, where, and a way out"


@pytest.fixture
def small_files():
    """No file of this process may be longer than 16 KiB: what fits in a header fails with the weights."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, hard))  # Python ignores the signal, so that the write fails
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def random_target(folder: Path, _: Path) -> None:
    from data_fixtures import SHAPE

    random_llama.make(SHAPE, folder, dtype=torch.float32, seed=1)


def distilled(folder: Path, model: Path) -> None:
    from transformers import AutoModelForCausalLM

    distill.write(AutoModelForCausalLM.from_pretrained(model), model, torch.float32, folder)


def exported(folder: Path, model: Path) -> None:
    from safetensors.torch import load_file

    tensors = load_file(model / "model.safetensors")
    made = Quantized(tensors=tensors, config={}, solved={}, rows=0, tokens=0, versions={})
    write_checkpoint(made, Plan(family="llama", shapes={}, ignored={}, vocab_size=320), model, folder)


def logits(folder: Path, _: Path) -> None:
    from pipeline.measure.quality import CompactLogits, StreamScores

    compact = CompactLogits(torch.zeros(100, 100), torch.zeros(100, 100), torch.zeros(100))
    baseline.write_logits(folder, {"prose": StreamScores(np.zeros(100), compact, None, None)}, {})


@pytest.mark.parametrize("write", [random_target, distilled, exported, logits])
def test_weights_that_the_disk_does_not_take_are_one_line_whoever_writes_them(
    tmp_path, monkeypatch, capsys, request, write
):
    """A stage of whatever writes safetensors, by the one place through which all stages run."""
    model = tiny_target(tmp_path / "model")
    request.getfixturevalue("small_files")

    def run(*, out: Path) -> dict[str, int]:
        with provenance.whole_folder(out) as folder:
            write(folder, model)
        return {}

    monkeypatch.setitem(sys.modules, "pipeline.stages.environment", SimpleNamespace(run=run))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/old").write_text("an earlier result")
    assert main(["environment", "out=out", f"--params={ROOT / 'params.yaml'}"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: File too large, for out; raise the limit"), line
    assert [p.name for p in tmp_path.glob("out*/*")] == ["old"] and not list(tmp_path.glob("*.partial"))


WITHOUT_SCIKIT_LEARN = """
import sys
from pipeline.__main__ import main
assert main(["environment", "out=environment.json", f"--params={sys.argv[1]}"]) == 0
from transformers.generation import candidate_generator
from transformers import PreTrainedTokenizerFast
print(sys.modules["sklearn"])
"""


def test_a_stage_starts_without_the_scikit_learn_that_transformers_would_import(tmp_path):
    done = run(tmp_path, sys.executable, "-c", WITHOUT_SCIKIT_LEARN, str(ROOT / "params.yaml"))
    assert done.stdout.strip() == "None", done.stderr


ALMOST_FULL = """
set -eu
mount -t tmpfs -o size=64k none "$DISK"
exec "$@"
"""


def test_weights_for_which_the_disk_is_too_small_are_one_line(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if not can_mount(disk):
        pytest.skip("no mounts in a user namespace here (unshare)")
    (tmp_path / "params.yaml").write_text(config.compose(ROOT / "conf", ["experiment=smoke"]))
    command = [sys.executable, "-m", "pipeline", "fetch_target", f"out={disk}/target"]
    done = subprocess.run(
        [*UNSHARE, "bash", "-c", ALMOST_FULL, "bash", *command],
        cwd=tmp_path, env=environment(ROOT) | {"DISK": str(disk)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: No space left on device, for {disk}/target; free some space"), line


def test_what_the_system_refused_to_a_library_is_an_error_of_the_system():
    """The tokenizers library raises Exception itself."""
    with pytest.raises(OSError) as refusal, system_errors():
        raise Exception("No space left on device (os error 28)")
    assert refusal.value.errno == errno.ENOSPC
    for other in (Exception("no vocabulary"), ValueError("(os error 28)")):
        with pytest.raises(type(other)) as same, system_errors():
            raise other
        assert same.value is other


@pytest.mark.slow
def test_a_disk_that_is_full_from_any_write_on(smoke):
    """The short form of `make full-disk`."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler for full_disk.c")
    command = [sys.executable, "-m", "tests.full_disk", "--graph", str(smoke[0]), "--cold", "fetch@corpus"]
    done = subprocess.run(command, cwd=ROOT, env=environment(ROOT), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for stage in json.loads(done.stdout).values():
        assert stage["wrong"] == [] and stage["writes"] == stage["refused_at"] > stage["ended_by_it"] > 3


def test_other_words_for_a_disk_that_takes_nothing():
    full = "No space left on device, for out; free some space and run again: nothing half-written was kept"
    for error in (
        OSError(28, "No space left"),
        ValueError("run_autoawq.py ended with status 1: OSError: [Errno 28] No space left on device: 'x'"),
        ValueError("run_autoawq.py ended with status 1: SafetensorError: I/O error: ... (os error 28)"),
        shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")]),
    ):
        assert disk_trouble(error, ["out"]) == full
    for error in (OSError(2, "not found"), ValueError("[Errno 2] not found"), ValueError("28")):
        assert disk_trouble(error, ["out"]) is None


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="root without setpriv")
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("compile", "experiment=smoke"), "{checkout}"),
        (("scratch", "artifacts/smoke", "experiment=smoke"), "{checkout}/artifacts"),
        (("scratch", "{closed}/smoke", "experiment=smoke"), "{closed}"),
        (("verify", "experiment=smoke"), "{checkout}/artifacts"),
        (("environment", "out={closed}/x/environment.json"), "{closed}"),
    ],
)
def test_a_folder_that_this_user_cannot_write_is_one_line(tmp_path, words, named):
    checkout, closed = tmp_path / "checkout", tmp_path / "closed"
    shutil.copytree(ROOT / "conf", checkout / "conf")
    shutil.copyfile(ROOT / "params.yaml", checkout / "params.yaml")
    closed.mkdir()
    for folder in (checkout, closed):
        folder.chmod(0o555)
    module, *rest = [word.format(closed=closed) for word in words]
    program = ["-m", "pipeline", module] if module == "environment" else ["-m", f"pipeline.{module}"]
    try:
        done = subprocess.run(
            [*ordinary(), sys.executable, *program, *rest],
            cwd=checkout, env=environment(ROOT), capture_output=True, text=True,
        )  # fmt: skip
    finally:
        for folder in (checkout, closed):
            folder.chmod(0o755)
    (line,) = done.stderr.splitlines()
    due = named.format(checkout=checkout, closed=closed)
    assert done.returncode == 1 and line.startswith("error: ") and due in line, line
    assert line.endswith("permission denied; give this user access to it, or choose another place")


def flags_of(out: str) -> dict[str, bool]:
    """What dvc.yaml says of an out besides its path."""
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"].values()
    entries = [e for s in stages for part in ("outs", "metrics") for e in s.get("do", s).get(part, [])]
    return next((dict(e[out]) for e in entries if isinstance(e, dict) and out in e), {})


def test_a_stage_that_fails_under_dvc_leaves_the_earlier_result_and_a_good_one_replaces_it(tmp_path, monkeypatch):
    """A folder and a file that DVC caches, and one that it does not; the flags are those of our own outs."""
    from dvc.exceptions import ReproductionError
    from dvc.repo import Repo

    monkeypatch.setenv("DVC_NO_ANALYTICS", "true")
    monkeypatch.chdir(tmp_path)
    flags = {"out/folder": "artifacts/calibration", "out/file.json": "artifacts/metrics/calibrate.json",
             "out/report.md": "reports/report.md"}  # fmt: skip
    commands = (
        "import sys; from pathlib import Path; from pipeline import provenance as p\n"
        "what = Path('input').read_text()\n"
        "if what == 'bad': sys.exit(3)\n"
        "with p.whole_folder(Path('out/folder')) as folder: (folder / what).write_text(what)\n"
        "p.write_text(Path('out/file.json'), what); p.write_text(Path('out/report.md'), what)\n"
    )
    Path("make.py").write_text(commands)
    stage = {"cmd": f"{sys.executable} make.py", "deps": ["make.py", "input"]}

    def results() -> dict[str, str]:
        return {p.relative_to("out").as_posix(): p.read_text() for p in Path("out").rglob("*") if p.is_file()}

    def graph(outs: list[object]) -> Repo:
        Path("dvc.yaml").write_text(yaml.safe_dump({"stages": {"s": stage | {"outs": outs}}}))
        return Repo(".")

    first, second = ({"folder/" + w: w, "file.json": w, "report.md": w} for w in ("one", "two"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("input").write_text("one")
    with Repo.init(".", no_scm=True):
        plain = ["out/folder", "out/file.json", {"out/report.md": {"cache": False}}]
    with graph(plain) as repo:
        repo.reproduce()
    lock = Path("dvc.lock").read_bytes()
    with graph([{name: flags_of(ours)} for name, ours in flags.items()]) as repo:
        assert repo.status() == {}, "results made before the outs persisted are as good"
        Path("input").write_text("bad")
        with pytest.raises(ReproductionError):
            repo.reproduce()
        assert results()["report.md"] == "one", "outside DVC's cache, it must never go"
        repo.checkout()  # as `make repro` does
        assert results() == first and Path("dvc.lock").read_bytes() == lock
    with Repo(".") as repo:
        assert list(repo.status()) == ["s"], "and known to be of another input"
        Path("input").write_text("two")
        repo.reproduce()
        assert results() == second, "nothing of the earlier folder stays"
        assert repo.status() == {}


def test_every_out_outside_the_cache_persists():
    """DVC removes outs before it runs a stage, and one that fails has then cost the earlier result; but what persists
    is not in DVC's cache of runs, so the others do not."""
    from dvc.repo import Repo

    with Repo(str(ROOT)) as repo:
        outs = [out for stage in repo.index.stages for out in stage.outs]
    assert {str(out) for out in outs if not out.use_cache} == {str(out) for out in outs if out.persist}
    assert any(out.persist for out in outs)


def test_memory_that_is_not_there_is_one_line_with_a_way_out():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**45, dtype=torch.uint8)
    assert allocation_failure(caught.value).startswith("not enough memory for a tensor of 32768.0 GiB; ")
    gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 8 GiB")
    assert allocation_failure(gpu).startswith("not enough memory for a tensor of 2.50 GiB; ")
    assert allocation_failure(RuntimeError("shapes do not match")) is None
    assert allocation_failure(ValueError("not enough memory")) is None
    assert one_line(MemoryError()).startswith("not enough memory; "), "Python's own says nothing"


def test_an_allocation_that_fails_in_a_worker_is_the_parents_memory_error(tmp_path):
    from dataclasses import asdict

    import measure_fixtures as tiny

    from pipeline.config import Sampling
    from pipeline.measure.setup import Ask, arm_spec
    from pipeline.measure.worker import Worker

    folder = tiny.checkpoint(tmp_path / "base", seed=1)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 2**40}
    (folder / "config.json").write_text(json.dumps(config))
    worker = Worker("gptq", arm_spec(folder, None, tiny.runtime(), ends=[], trust_remote_code=False))
    too_long = Ask(0, 2**39, True, Sampling(temperature=0.0, top_k=None, top_p=1.0))
    short = Ask(0, 4, True, Sampling(temperature=0.0, top_k=None, top_p=1.0))
    try:
        with pytest.raises(MemoryError, match=r"^gptq: not enough memory for a tensor of .* GiB; close other programs"):
            worker.call("answers", prompt_ids=[1, 2], asks=[asdict(too_long)])
        assert len(worker.call("answers", prompt_ids=[1, 2], asks=[asdict(short)])[0]["ids"]) == 4, "it goes on"
    finally:
        worker.close()


@pytest.mark.slow
def test_a_lock_file_that_a_kill_left_half_written_stops_dvc_and_not_us(workspace):
    folder = workspace
    path = folder / ".dvc/tmp/rwlock"
    for half in ("", '{"read": {"'):
        path.write_text(half)
        refused = run(folder, "dvc", "repro", "--single-item", "calibrate")
        assert refused.returncode != 0 and "rwlock" in refused.stderr + refused.stdout, "then this can go"
        run(folder, sys.executable, "-m", "pipeline.compile", "--unlock")
        assert not path.exists()
        assert run(folder, "dvc", "repro", "--single-item", "calibrate").returncode == 0
    path.write_text('{"read": {}, "write": {}}')
    drop_broken_lock(folder)
    assert path.exists(), "a whole one is not ours to remove"


@pytest.mark.slow
def test_two_writers_to_one_store_leave_one_whole_run(smoke, tmp_path):
    """Both create the store; the second finds what the first has written and adds nothing."""
    folder, _ = smoke
    params = yaml.safe_load((folder / "params.yaml").read_text())
    params["track"]["uri"] = f"sqlite:///{tmp_path}/store.db"
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    words = [w for w in command_of(folder, "track") if not w.startswith("metrics=")]
    done = []

    def track(i: int) -> None:
        done.append(run(folder, *words, f"metrics={tmp_path}/metrics/{i}.json", "--params", f"{tmp_path}/params.yaml"))

    threads = [threading.Thread(target=track, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [d.returncode for d in done] == [0, 0], [d.stderr for d in done]
    found = sorted(json.loads((tmp_path / f"metrics/{i}.json").read_text())["metrics"]["status"] for i in range(2))
    assert found == ["kept", "logged"]
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/store.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == params["track"]["experiment"]]
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 7 and {r.info.status for r in runs} == {"FINISHED"}, "a parent and six arms"


@pytest.mark.slow
def test_memory_does_not_grow_over_a_thousand_generations(tmp_path):
    import measure_fixtures as tiny

    from pipeline.config import Sampling
    from pipeline.measure.arm import Arm
    from pipeline.measure.memory import resident_bytes
    from pipeline.measure.setup import Ask, DraftSpec, arm_spec

    folder = tiny.checkpoint(tmp_path / "base", seed=1)
    draft = DraftSpec("model", str(folder), None, pack_head=False)
    arm = Arm(arm_spec(folder, draft, tiny.runtime(), ends=[], trust_remote_code=False))
    greedy = Sampling(temperature=0.0, top_k=None, top_p=1.0)
    sampled = Sampling(temperature=1.0, top_k=None, top_p=1.0)
    asks = [Ask(k, 12, True, how) for k in (0, 3) for how in (greedy, sampled)]
    held = []
    for i in range(1000):
        arm.generate([1 + i % 200, 2, 3 + i % 50], asks[i % 4])
        if i % 100 == 99:
            held.append(resident_bytes("VmRSS"))
    print(f"MiB held after each hundred generations: {[round(b / 2**20, 1) for b in held]}")
    assert held[-1] - held[1] < 4 * 2**20, held
