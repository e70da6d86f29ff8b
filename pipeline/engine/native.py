"""The C++ kernels of kernels/*.cpp, compiled once a machine and torch version, and what was measured of them there.

Both are kept in the folder that the environment variable KERNELS_DIR names (else in the temporary one); where that
cannot be written, as in a read-only checkout, what it lacks is kept in the user's cache. The library loads in
milliseconds. Not torch's extension loader: a build that is killed there leaves a lock on which the next
process waits for ever. Here a process that finds no library compiles its own and renames it into place.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LOGGER = logging.getLogger("pipeline")
SOURCES = sorted(Path(__file__).parent.joinpath("kernels").glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.joinpath("kernels").glob("*.h"))
FLAGS = ["-O3", "-std=c++20", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fopenmp"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]


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


def folders() -> list[Path]:
    """Where to look, in this order; the last one is where to write. The user's cache only where the first is closed."""
    first = Path(os.environ.get("KERNELS_DIR", Path(tempfile.gettempdir()) / f"kernels-{os.getuid()}"))
    if _writable(first):
        return [first]
    return [first, Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "quantspec/kernels"]


def _writable(folder: Path) -> bool:
    """Made if need be; False when it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _flags() -> list[str]:
    level = torch.backends.cpu.get_cpu_capability()  # what torch itself would use, and ATEN_CPU_CAPABILITY lowers
    vnni = ["-mavx512vnni"] if torch.cpu.get_capabilities().get("avx512_vnni") else []
    cpu = {"AVX2": AVX2, "AVX512": [*AVX512, *vnni]}.get(level, [])
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return [*FLAGS, *cpu, abi]


@functools.cache
def key() -> str:
    """Of everything that the library is made from."""
    made_from = "\0".join([*(p.read_text() for p in (*SOURCES, *HEADERS)), torch.__version__, *_flags()])
    return hashlib.sha256(made_from.encode()).hexdigest()[:16]


def _library(compiler: str) -> Path:
    from torch.utils.cpp_extension import include_paths

    places = [folder / f"kernels-{key()}.so" for folder in folders()]
    library = next((place for place in places if place.exists()), places[-1])
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
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

    A timing that decides between kernels must not come out otherwise in the next process of the same study. Where
    nothing can be written, each process measures anew.
    """
    paths = [folder / f"choices-{key()}.json" for folder in folders()]
    for path in paths:
        if question in (known := _read(path)):
            return known[question]
    answer = measure()
    known = {question: answer, **_read(paths[-1])}  # another process may have answered meanwhile: the first one stands
    _write(paths[-1], known)
    return known[question]


def _write(path: Path, known: dict[str, Any]) -> None:
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
        partial.replace(path)
    except OSError as e:
        LOGGER.warning("%s cannot be written (%s): what was measured of the kernels is measured again", path, e)
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
