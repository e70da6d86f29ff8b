"""The way to the archived environment and back: config for its old transformers, requests, refusals, no orphans."""

from __future__ import annotations

import json
import os
import sys
import time
import types

import pytest
from quantize_fixtures import make_model, method

from pipeline.quantizers import Job, QuantizationError, adapter, archived
from pipeline.quantizers.autoawq import equal_rows
from pipeline.quantizers.plan import make_plan


@pytest.fixture
def job(tmp_path):
    import torch

    make_model(tmp_path / "model")
    (tmp_path / "scratch").mkdir()
    return Job(
        model=tmp_path / "model",
        plan=make_plan(tmp_path / "model", method(), "quantize.x", adapter("llmcompressor")),
        rows=[[1, 2, 3]],
        method=method(),
        device="cpu",
        dtype="float32",
        threads=1,
        seed=0,
        scratch=tmp_path / "scratch",
        probe_ids=[1, 2],
        probe_logits_TV=torch.tensor([[1.0, 2.0]]),
    )


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """runner(body): a script in place of the real ones, run by this interpreter; returns its name."""
    monkeypatch.setenv("QUANTIZERS_PYTHON", sys.executable)
    monkeypatch.setattr(archived, "ENVIRONMENT", tmp_path)
    protocol = (archived.Path(__file__).parents[1] / "envs" / "quantizers" / "protocol.py").read_text()
    (tmp_path / "protocol.py").write_text(protocol)

    def write(body: str) -> str:
        head = "import os, shutil, sys, time\nfrom protocol import serve, Refused\ndef work(request, emit):\n"
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        (tmp_path / "fake.py").write_text(f"{head}{lines}sys.exit(serve(work))\n")
        return "fake.py"

    return write


def probe_of(folder, logits):
    import torch
    from safetensors.torch import save_file

    save_file({"logits_TV": torch.tensor([logits])}, folder / "made.safetensors")
    return folder / "made.safetensors"


def test_legacy_config_keeps_theta_and_scaling():
    plain = {"hidden_size": 64, "dtype": "bfloat16", "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}
    assert archived.legacy_config(plain) == {"hidden_size": 64, "torch_dtype": "bfloat16", "rope_theta": 1e5}
    scaled = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}
    assert archived.legacy_config(scaled) == {
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
    }
    old = {"rope_theta": 1e6, "torch_dtype": "float16"}
    assert archived.legacy_config(old) == old


def test_rope_by_layer_type_is_refused():
    with pytest.raises(QuantizationError, match="differ by layer type"):
        archived.legacy_config({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}})


def test_rows_of_one_length_stay_and_others_lose_less_than_a_token_a_row():
    equal = [[1, 2], [3, 4]]
    assert equal_rows(equal) == equal
    uneven = [list(range(40)), list(range(40, 48)), list(range(48, 59))]
    cut = equal_rows(uneven)
    assert [len(row) for row in cut] == [19, 19, 19]
    assert [token for row in cut for token in row] == list(range(57))


def test_a_missing_environment_names_the_way_out(monkeypatch, tmp_path):
    monkeypatch.setenv("QUANTIZERS_PYTHON", str(tmp_path / "none"))
    with pytest.raises(QuantizationError, match=r"none: not found; run `make setup-quantizers`.*llmcompressor"):
        archived.python()
    newer = types.SimpleNamespace(version_info=(3, 12, 1))
    monkeypatch.setattr(archived, "sys", newer)
    with pytest.raises(QuantizationError, match=r"end at Python 3\.11 and this is 3\.12"):
        archived.python()


def test_request_events_and_prints(job, runner, tmp_path):
    """Prints of a library do not disturb the protocol, and the model folder is readable by old transformers."""
    name = runner(
        "print('noise')\n"
        "config = open(request['model'] + '/config.json').read()\n"
        f"shutil.copy('{probe_of(tmp_path, [1.0, 2.0])}', request['probe'])\n"
        "emit('loaded')\n"
        "emit('seen', config=config, rows=request['rows'], visible=os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    _, event = archived.run(name, job, job.rows)
    assert event["rows"] == [[1, 2, 3]]
    assert event["visible"] == ""
    assert json.loads(event["config"])["rope_theta"] == 10000.0
    assert "rope_parameters" not in json.loads(event["config"])
    assert (job.scratch / "printed.txt").read_text() == "noise\n"


def test_other_logits_in_the_archived_environment_are_an_error(job, runner, tmp_path):
    name = runner(f"shutil.copy('{probe_of(tmp_path, [1.0, 2.1])}', request['probe'])\nemit('loaded')\ntime.sleep(60)")
    with pytest.raises(QuantizationError, match=r"computes other logits \(relative difference 0\.045"):
        list(archived.run(name, job, job.rows))


def test_refusals_and_crashes_become_one_line(job, runner):
    with pytest.raises(QuantizationError, match=r"^layer 3: NaN$"):
        list(archived.run(runner("raise Refused('layer 3: NaN')"), job, job.rows))
    os.rename(job.scratch, job.scratch.with_name("first"))
    job.scratch.mkdir()
    with pytest.raises(QuantizationError, match=r"^fake\.py ended with status 1: KeyError: 'x'$"):
        list(archived.run(runner("{}['x']"), job, job.rows))


def test_a_runner_ends_with_its_parent(job, runner):
    """Interrupted while it works: the generator is closed and the child is gone."""
    events = archived.run(runner("emit('pid', pid=os.getpid())\ntime.sleep(60)"), job, job.rows)
    pid = next(events)["pid"]
    events.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_runner_notices_that_its_parent_was_killed(job, runner, tmp_path):
    import subprocess

    name = runner("emit('pid', pid=os.getpid())\ntime.sleep(60)")
    child = subprocess.Popen(
        [sys.executable, tmp_path / name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert child.stdin and child.stdout
    child.stdin.write("{}\n")
    child.stdin.flush()
    child.stdout.readline()
    child.stdin.close()  # what the kernel does for a killed parent
    started = time.monotonic()
    assert child.wait(timeout=20) == 1
    assert time.monotonic() - started < 20
