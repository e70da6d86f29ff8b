"""Running auto-gptq or autoawq in envs/quantizers: one request in, JSON lines out, tensors through files.

That environment's transformers (4.51) does not read what this one's (5.17) writes: it ignores `rope_parameters` and
silently uses a theta of 10,000. `legacy_config` rewrites the config, and the logits of a probe prove that both compute
the same model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.quantizers import Job, QuantizationError

if TYPE_CHECKING:
    from torch import Tensor

ENVIRONMENT = Path(__file__).parents[2] / "envs" / "quantizers"
# Rounding alone gives 0.016 in bfloat16 on a 135M Llama; a theta of 10,000 instead of 100,000 gives 0.2.
PROBE_LIMIT = {"float32": 1e-3, "bfloat16": 0.06, "float16": 0.02}


def python() -> Path:
    """The archived environment's interpreter: QUANTIZERS_PYTHON, or the one that `make setup-quantizers` builds."""
    chosen = Path(os.environ.get("QUANTIZERS_PYTHON") or ENVIRONMENT / ".venv" / "bin" / "python")
    if not chosen.exists():
        major, minor = sys.version_info[:2]
        newer = f" and this is {major}.{minor}" if (major, minor) > (3, 11) else ""
        raise QuantizationError(
            f"{chosen}: not found; run `make setup-quantizers` (auto-gptq's wheels end at Python 3.11{newer}: it needs "
            f"a python3.11), or set backend: llmcompressor"
        )
    return chosen


def run(script: str, job: Job, rows: list[list[int]]) -> Iterator[dict[str, Any]]:
    """Yield the runner's events. Raises QuantizationError with its own message or the end of what it printed."""
    folder = readable_copy(job.model, job.scratch / "model")
    files = {name: (job.scratch / f"{name}.safetensors").as_posix() for name in ("probe", "tensors", "scales")}
    request = {
        "model": folder.as_posix(),
        "rows": rows,
        "modules": list(job.plan.shapes),
        "settings": asdict(job.method),
        "device": "cpu" if job.device == "cpu" else "cuda:0",
        "dtype": job.dtype,
        "threads": job.threads,
        "seed": job.seed,
        "probe_ids": job.probe_ids,
        **files,
    }
    printed = job.scratch / "printed.txt"
    with printed.open("w") as errors:
        process = subprocess.Popen(
            [python(), ENVIRONMENT / script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=_environment(job),
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] == "refused":
                    raise QuantizationError(event["message"])
                if event["event"] == "loaded":
                    _check_probe(job, load(Path(files["probe"]))["logits_TV"])
                yield event
            status = process.wait()
        finally:
            process.kill()
            process.wait()
    if status:
        last = [line.strip() for line in printed.read_text().splitlines() if line.strip()][-1:]
        raise QuantizationError(f"{script} ended with status {status}: {' '.join(last)}")


def load(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def readable_copy(model: Path, folder: Path) -> Path:
    """`folder` with links to the model's files and a config that transformers 4.51 understands."""
    folder.mkdir(parents=True)
    for path in model.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path.resolve())
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(legacy_config(config), indent=2))
    return folder


def legacy_config(config: dict[str, Any]) -> dict[str, Any]:
    """A config of transformers 5 in the keys of 4.51: rope_theta, rope_scaling, partial_rotary_factor, torch_dtype.

    Raises QuantizationError for rope parameters that 4.51 cannot express (one set a layer type).
    """
    made = {k: v for k, v in config.items() if k not in ("rope_parameters", "dtype")}
    if "dtype" in config:
        made["torch_dtype"] = config["dtype"]
    rope = dict(config.get("rope_parameters") or {})
    if any(isinstance(v, dict) for v in rope.values()):
        raise QuantizationError("rope_parameters differ by layer type, which the archived libraries do not know")
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            made[name] = rope.pop(name)
    if rope.get("rope_type", "default") != "default":
        made["rope_scaling"] = rope
    return made


def _environment(job: Job) -> dict[str, str]:
    """Only the chosen GPU visible, because both libraries take the first they see; none for the CPU; no downloads."""
    visible = ""
    if job.device != "cpu":
        index = int(job.device.partition(":")[2] or 0)
        listed = [v for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v]
        visible = listed[index] if listed else str(index)
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "DEBUG")
    return {k: v for k, v in os.environ.items() if k not in hidden} | {
        "CUDA_VISIBLE_DEVICES": visible,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_NUM_THREADS": str(job.threads),
        "HF_HUB_OFFLINE": "1",
    }


def _check_probe(job: Job, logits_TV: Tensor) -> None:
    """Both environments must compute the same model before its quantization means anything."""
    ours_TV = job.probe_logits_TV
    difference = ((logits_TV - ours_TV).norm() / ours_TV.norm()).item()
    if not difference < PROBE_LIMIT[job.dtype]:
        raise QuantizationError(
            f"{job.model}: the archived environment computes other logits (relative difference {difference:.2g}, limit "
            f"{PROBE_LIMIT[job.dtype]}): it misreads this model's config; use backend llmcompressor"
        )
