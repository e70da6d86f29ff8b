"""Where a result comes from (code, inputs, packages, device), and writing it whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "datasets", "llmcompressor", "compressed-tensors", "lm-eval", "numpy")


def file_sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def tree_sha256(path: Path) -> str:
    """Hash of a file, or of a folder: relative names and contents of all files, in sorted order."""
    if path.is_file():
        return file_sha256(path)
    digest = hashlib.sha256()
    for p in sorted(p for p in path.rglob("*") if p.is_file()):
        digest.update(f"{p.relative_to(path).as_posix()}\0{file_sha256(p)}\n".encode())
    return digest.hexdigest()


def json_sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def git_revision(root: Path) -> dict[str, Any]:
    """`commit` (null outside a repository) and `dirty`: tracked code or config differs from that commit."""

    def git(*args: str) -> str | None:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "pipeline", "conf", "evals", "params.yaml")
        return {"commit": git("rev-parse", "HEAD"), "dirty": None if changed is None else bool(changed)}
    except FileNotFoundError:
        return {"commit": None, "dirty": None}


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def device() -> dict[str, Any]:
    """What this process runs on: processor, cores it may use, GPUs with their driver (none without nvidia-smi)."""
    cpu = platform.processor()
    with contextlib.suppress(OSError):
        rows = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
        cpu = next((value.strip() for name, _, value in rows if name.strip() == "model name"), cpu)
    gpus: list[str] = []
    if shutil.which("nvidia-smi") is not None:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, check=False)
        gpus = done.stdout.splitlines() if done.returncode == 0 else []
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "gpus": [gpu.strip() for gpu in gpus]}


def finite(value: Any) -> Any:
    """`value` as JSON data: dataclasses and paths unfolded, non-finite numbers null (strict JSON has neither)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return finite(dataclasses.asdict(value))
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, Path):
        return value.as_posix()
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON atomically: readers see the old file or the whole new one."""
    write_text(path, json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(path)
    try:
        with partial.open("w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        _place(partial, path)
    finally:
        if written(path) != partial:
            partial.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """Raises ValueError naming the file when it is absent or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: not found; run `dvc repro` to produce it") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"{path}: not JSON ({e}); delete it and run `dvc repro`") from None


def _partial(path: Path) -> Path:
    """A name beside `path` that is this process's own; what processes that are gone left under theirs is removed."""
    of_path = re.compile(rf"\.{re.escape(path.name)}\.(\d{{1,9}})\.(old\.)?partial")
    for left in path.parent.iterdir():
        found = of_path.fullmatch(left.name)
        if found and (int(found[1]) == os.getpid() or not _runs(int(found[1]))):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    return True


@contextlib.contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A fresh folder beside `out` that takes its place when the block ends well, and vanishes otherwise.

    Of two processes that write `out` at once, the one that ends last leaves its folder there, whole.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(out)
    partial.mkdir()
    try:
        yield partial
        _place(partial, out)
    finally:
        if written(out) != partial:
            shutil.rmtree(partial, ignore_errors=True)


_held: dict[Path, Path | None] = {}


@contextlib.contextmanager
def together(paths: Iterable[Path]) -> Iterator[None]:
    """Of what is written to these files and folders inside the block, all takes its place at the end, or nothing.

    A disk that fills up before the last of them is written leaves the old ones, which belong together. Until the end
    `written` says where the new ones are.
    """
    _held.update(dict.fromkeys(paths))
    try:
        yield
        for path, partial in _held.items():
            if partial is not None:
                _put(partial, path)
    finally:
        left = [partial for partial in _held.values() if partial is not None]
        _held.clear()
        for partial in left:
            shutil.rmtree(partial, ignore_errors=True) if partial.is_dir() else partial.unlink(missing_ok=True)


def written(path: Path) -> Path:
    """Where the newest content of `path` is: in a block of `together`, not yet in its place."""
    return _held.get(path) or path


def _place(partial: Path, path: Path) -> None:
    if path in _held:
        _held[path] = partial
    else:
        _put(partial, path)


def _put(partial: Path, path: Path) -> None:
    """A file or a folder in the place of the old one."""
    if not partial.is_dir():
        partial.replace(path)
        return
    old = partial.with_suffix(".old.partial")
    try:
        while partial.exists():
            shutil.rmtree(old, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                path.replace(old)  # renamed, not removed: the moment without any is as short as can be
            try:
                partial.replace(path)
            except OSError as e:
                if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise  # otherwise another process has put its own there meanwhile
    finally:
        if old.exists() and not path.exists():
            with contextlib.suppress(OSError):
                old.replace(path)  # ended between the two renames
        shutil.rmtree(old, ignore_errors=True)
