"""How tests run commands in a scratch copy of the graph; the fixture `smoke` is such a copy, run to its end."""

from __future__ import annotations

import subprocess
from pathlib import Path

from pipeline import scratch

ROOT = Path(__file__).parents[1]
TOKEN = "hf_planted_secret_0123456789"


def environment(folder: Path) -> dict[str, str]:
    return scratch.environment(ROOT, folder) | {"HF_TOKEN": TOKEN}


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=folder, env=environment(folder), capture_output=True, text=True)
