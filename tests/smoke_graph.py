"""How tests run commands in a scratch copy of the graph; the fixture `smoke` is such a copy, run to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOKEN = "hf_planted_secret_0123456789"


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
        "HF_TOKEN": TOKEN,
        "DVC_NO_ANALYTICS": "true",
        "KERNELS_DIR": os.environ.get("KERNELS_DIR", str(ROOT / "artifacts/kernels")),
    }


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=folder, env=environment(folder), capture_output=True, text=True)
