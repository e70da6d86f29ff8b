"""The C++ kernels of kernels/*.cpp, compiled once a machine and torch version, and what was measured of them there.

Both are kept in the folder that the environment variable KERNELS_DIR names (else in the temporary one); the library
loads in milliseconds. Not torch's extension loader: a build that is killed there leaves a lock on which the next
process waits for ever. Here a process that finds no library compiles its own and renames it into place.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SOURCES = sorted(Path(__file__).parent.joinpath("kernels").glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.joinpath("kernels").glob("*.h"))
FLAGS = ["-O3", "-std=c++20", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fopenmp"]
CPU_FLAGS = {"AVX2": ["-mavx2", "-mfma", "-mf16c"], "AVX512": ["-mavx2", "-mfma", "-mf16c"]}


@functools.cache
def refusal() -> str | None:
    """Compiles and loads the kernels if need be; None when they can be used, else why not."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return "no C++ compiler"
    try:
        torch.ops.load_library(str(_library(compiler)))
    except (OSError, subprocess.CalledProcessError) as e:
        detail = getattr(e, "stderr", None) or str(e)
        return f"compiling the kernels failed: {detail.strip().splitlines()[-1]}"
    return None


def folder() -> Path:
    return Path(os.environ.get("KERNELS_DIR", Path(tempfile.gettempdir()) / f"kernels-{os.getuid()}"))


def _flags() -> list[str]:
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return [*FLAGS, *CPU_FLAGS.get(torch.backends.cpu.get_cpu_capability(), []), abi]


@functools.cache
def key() -> str:
    """Of everything that the library is made from."""
    made_from = "\0".join([*(p.read_text() for p in (*SOURCES, *HEADERS)), torch.__version__, *_flags()])
    return hashlib.sha256(made_from.encode()).hexdigest()[:16]


def _library(compiler: str) -> Path:
    from torch.utils.cpp_extension import include_paths

    library = folder() / f"kernels-{key()}.so"
    if not library.exists():
        folder().mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}.partial")
        includes = [f"-I{path}" for path in include_paths()]
        links = [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
        try:
            command = [compiler, *_flags(), *includes, *map(str, SOURCES), "-o", str(partial), *links]
            subprocess.run(command, check=True, capture_output=True, text=True)
            partial.replace(library)
        finally:
            partial.unlink(missing_ok=True)
    return library


def remembered(question: str, measure: Callable[[], Any]) -> Any:
    """The answer (JSON) measured once on this machine for these kernels and `question`, or measured now.

    A timing that decides between kernels must not come out otherwise in the next process of the same study.
    """
    path = folder() / f"choices-{key()}.json"
    known = _read(path)
    if question not in known:
        answer = measure()
        known = {question: answer, **_read(path)}  # another process may have answered meanwhile: the first one stands
        folder().mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
        partial.replace(path)
    return known[question]


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
