"""Stage `environment`: what the measurements depend on besides the inputs. Measurement stages rerun when it changes."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from pipeline import provenance
from pipeline.config import Runtime

CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")


def run(runtime: Runtime, *, out: Path) -> dict[str, Any]:
    """Write the fingerprint of this machine to `out`; deterministic, and without importing torch (well under 1 s)."""
    cpu = _cpu()
    fingerprint = {
        "cpu": cpu["model"],
        "cpu_features": [f for f in CPU_FEATURES if f in cpu["flags"]],
        "cores": len(os.sched_getaffinity(0)),
        "threads": runtime.threads or len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "compiler": _first_line(["c++", "--version"]),
        "versions": provenance.versions(),
    }
    provenance.write_json(out, fingerprint)
    return fingerprint


def _cpu() -> dict[str, Any]:
    info: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        info.setdefault(name.strip(), value.strip())
    flags = info.get("flags", info.get("Features", "")).split()
    return {"model": info.get("model name", platform.processor()), "flags": flags}


def _gpus() -> list[str]:
    """Name, memory and driver of each GPU; empty without an NVIDIA driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def _first_line(command: list[str]) -> str | None:
    """None when the command is not there: engines then run eager and say so."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.split("\n")[0] if done.returncode == 0 else None
