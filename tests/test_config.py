"""Bad config: each gives one line with the key, the value, the limit and a way out, and nothing is written."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline import config, provenance

ROOT = Path(__file__).parents[1]
PARAMS = yaml.safe_load((ROOT / "params.yaml").read_text())


def with_value(key: str, value: object) -> dict:
    tree = yaml.safe_load((ROOT / "params.yaml").read_text())
    node = tree
    *parents, leaf = key.split(".")
    for part in parents:
        node = node[part]
    node[leaf] = value
    return tree


BAD = [
    ("quantize.gptq.bits", "4", "is str, but an integer is due"),
    ("quantize.gptq.bits", 9, "above the limit of 8"),
    ("quantize.gptq.bits", 5, "packs 2, 3, 4 or 8 bits"),
    ("quantize.gptq.bits", True, "an integer is due"),
    ("quantize.gptq.bits", None, "an integer is due"),
    ("quantize.gptq.bits", [4], "an integer is due"),
    ("quantize.gptq.bits", 4.5, "an integer is due"),
    ("quantize.gptq.sym", "yes", "true or false is due"),
    ("quantize.gptq.group_size", 0, "give a positive size, or -1"),
    ("quantize.gptq.group_size", -2, "below the limit of -1"),
    ("quantize.gptq.backend", "autoawq", "autoawq has no gptq; use one of auto_gptq, llmcompressor"),
    ("quantize.gptq.backend", "gptqmodel", "not one of auto_gptq, autoawq, llmcompressor"),
    ("quantize.gptq.damp_percent", 0, "must be greater than 0"),
    ("quantize.gptq.damp_percent", float("nan"), "not a finite number"),
    ("quantize.gptq.damp_percent", float("inf"), "not a finite number"),
    ("quantize.gptq.damp_percent", "1e-5", "a number is due"),
    ("quantize.awq.bits", 3, "it packs 4 bits only"),
    ("quantize.awq.groupsize", 64, "unknown key; did you mean group_size?"),
    ("speculate.draft_lens", [0, 2, -1], "-1 is below the limit of 0"),
    ("speculate.draft_lens", [1, 2, 4], "lacks 0"),
    ("speculate.draft_lens", [0, 2, 2], "twice"),
    ("speculate.draft_lens", 4, "a list, such as [1, 2] is due"),
    ("speculate.draft_lens", [0, 1, 2, 4, 5000], "does not fit in speculate.max_new_tokens"),
    ("speculate.draft_lens", [0, "2"], "speculate.draft_lens[1]: '2' is str"),
    ("speculate.timed_draft_lens", [0, 99], "[99] not in speculate.draft_lens"),
    ("speculate.sampling.top_p", 0, "must be greater than 0"),
    ("speculate.sampling.temperature", -0.1, "below the limit of 0"),
    ("evaluate.stride_tokens", 100000, "beyond evaluate.window_tokens"),
    ("evaluate.batch_size", 0, "below the limit of 1"),
    ("benchmark.timing.max_blocks", 2, "below"),
    ("benchmark.timing.precision", 0, "must be greater than 0"),
    ("model.source", "s3", "not one of hub, pypi, path, random"),
    ("model.sha256", None, "null, but model.source is pypi"),
    ("model.trust_remote_code", "false", "true or false is due"),
    ("calibration.rows", 0, "below the limit of 1"),
    ("calibration.max_overlap", 2, "above the limit of 1"),
    ("draft.kind", "medusa", "not one of distill, self, ngram, model"),
    ("draft.kind", "model", "draft.model: null, but draft.kind is model"),
    ("draft.distill", None, "draft.distill: null, but draft.kind is distill"),
    ("runtime.dtype", "int8", "not one of bfloat16, float16, float32"),
    ("runtime.device", "gpu", "not cpu, cuda or cuda:N"),
    ("runtime.threads", 0, "below the limit of 1"),
    ("report.objective", "cost", "not one of latency, throughput, memory"),
    ("benchmark", [], "a mapping with the keys of Benchmark is due"),
    ("trak", {}, "unknown key; did you mean track?"),
    ("benchmark", {"\n": None}, r"benchmark.'\n': unknown key"),
    ("quantize", {"a\nb": 1}, r"quantize.'a\nb': 1 is int"),
]  # fmt: skip


@pytest.mark.parametrize("key,value,message", BAD, ids=[f"{k}={v!r}" for k, v, _ in BAD])
def test_bad_value(key, value, message):
    with pytest.raises(config.ConfigError) as e:
        config.check(config.build(config.Params, with_value(key, value)))
    assert message in str(e.value) and key.split(".")[0] in str(e.value)
    assert "\n" not in str(e.value)


def test_missing_key():
    tree = with_value("track", None)
    del tree["track"]
    with pytest.raises(config.ConfigError, match="track: missing; add it to conf/"):
        config.build(config.Params, tree)


def test_an_integer_is_a_number_and_nothing_else_is_converted():
    made = config.build(config.Params, with_value("quantize.gptq.damp_percent", 1))
    assert made.quantize["gptq"].damp_percent == 1.0 and isinstance(made.quantize["gptq"].damp_percent, float)


def test_small_number_survives_the_compilation():
    """1e-5 is a string to YAML 1.1 readers: what is compiled must come back as the number."""
    text = config.compose(ROOT / "conf", ["quantize.gptq.damp_percent=1e-5"])
    assert config.parse(text, ROOT).quantize["gptq"].damp_percent == 1e-5


@pytest.mark.parametrize("override", ["quantize.gptq.bitz=4", "experiment=smokee", "quantize.gptq.bits=08x", "model=["])
def test_bad_override_is_one_line(override):
    with pytest.raises(config.ConfigError) as e:
        config.compose(ROOT / "conf", [override])
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "text,message",
    [("a: [", "not YAML"), ("", "a mapping with the keys of Params is due"), ("- 1", "a mapping with the keys")],
)
def test_params_file_that_is_not_config(tmp_path, text, message):
    (tmp_path / "params.yaml").write_text(text)
    with pytest.raises(config.ConfigError, match=message):
        config.load(tmp_path / "params.yaml")


def command(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", *words], cwd=cwd, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "words,message",
    [
        (["nosuch"], "nosuch: no such stage; known: "),
        (["environment", "out"], "out: not of the form name=path"),
        (["environment", "in=x"], "unknown path 'in'; it takes out and metrics"),
        (["environment"], "path 'out' is missing"),
        (["quantize@int3", "model=a", "calibration=b", "out=c"], "quantize.int3: no such section; known: gptq, awq"),
        (["environment", "out=x", "--params", "nowhere.yaml"], "nowhere.yaml: not found; run `make params`"),
    ],
)
def test_command_line_mistakes(words, message, tmp_path):
    done = command("pipeline", *words)
    assert done.returncode == 2 and message in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has an NVIDIA driver")
def test_a_gpu_that_is_not_here(tmp_path):
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(with_value("runtime.device", "cuda:1")))
    done = command(
        "pipeline", "calibrate", "corpus=a", "target=b", f"out={tmp_path}/c", f"--params={tmp_path}/params.yaml"
    )
    assert done.returncode == 2 and not (tmp_path / "c").exists()
    assert done.stderr == "error: runtime.device: cuda:1, but this machine has no NVIDIA driver; use cpu\n"


def test_a_full_disk_is_one_line_and_keeps_the_old_file(tmp_path, monkeypatch):
    """Writing fails midway: the old result stays, no partial file is left."""
    out = tmp_path / "result.json"
    provenance.write_json(out, {"old": 1})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", str(out))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        provenance.write_json(out, {"new": 2})
    assert provenance.read_json(out) == {"old": 1} and [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_compile_checks_and_writes(tmp_path):
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    (tmp_path / "pipeline").symlink_to(ROOT / "pipeline")
    assert command("pipeline.compile", "--check", cwd=tmp_path).returncode == 1
    assert command("pipeline.compile", cwd=tmp_path).returncode == 0
    assert (tmp_path / "params.yaml").read_text() == config.compose(ROOT / "conf", [])
    assert command("pipeline.compile", "--check", cwd=tmp_path).returncode == 0
    bad = command("pipeline.compile", "quantize.gptq.bits=oops", cwd=tmp_path)
    assert bad.returncode == 2 and bad.stderr.startswith("error: ") and "bits" in bad.stderr
    assert (tmp_path / "params.yaml").read_text() == config.compose(ROOT / "conf", []), (
        "a refused config changes nothing"
    )
