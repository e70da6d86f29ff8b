"""`python -m pipeline.scratch FOLDER [OVERRIDE ...]`: the whole graph for another experiment in a folder of its own.

The folder holds a copy of what the graph reads (code, conf/, evals/, envs/, dvc.yaml), params.yaml compiled from the
overrides, a DVC repository without Git, and the results. Nothing in this repository changes. `make smoke` is this.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline import config, provenance
from pipeline.__main__ import refused

COPIED = ("pipeline", "conf", "evals", "dvc.yaml", "envs")
DVC = (sys.executable, "-m", "dvc")
WRITTEN_S = 0.5  # DVC's file of some hundred bytes takes microseconds
NOT_COPIED = shutil.ignore_patterns("__pycache__", ".venv", "*.partial")


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """`folder` for this process alone. Raises ConfigError naming the process that holds it.

    The lock ends with the process, however that ends; the file stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".scratch.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise config.ConfigError(
                f"{folder}: {holder} is at work in it; wait until it has ended, or give another folder"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} (since {time.strftime('%H:%M:%S')})\n")
        file.flush()
        yield


def make(root: Path, folder: Path, overrides: list[str]) -> None:
    """Lay the copy out in `folder`; results that lie there already stay, so that a run goes on where it stopped.

    Raises ConfigError for overrides that do not compile, and OSError for a folder that cannot be written.
    """
    text = config.compose(root / "conf", overrides)
    folder.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        source, target = root / name, folder / name
        if source.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, ignore=NOT_COPIED, symlinks=True)
            _make_writable(target)
        else:
            shutil.copyfile(source, target)
    archived = root / "envs/quantizers/.venv"
    if archived.exists():
        (folder / "envs/quantizers/.venv").symlink_to(archived)
    provenance.write_text(folder / "params.yaml", text)
    if not (folder / "reports/sweep.json").exists():
        provenance.write_json(folder / "reports/sweep.json", {"points": []})
    if not (folder / ".dvc").exists():
        code = subprocess.run([*DVC, "init", "--no-scm", "--quiet"], cwd=folder, check=False).returncode
        if code:
            raise OSError(f"{folder}: `dvc init` failed with exit code {code}; see above")


def _make_writable(folder: Path) -> None:
    """A checkout may be read-only, and copies keep that: they are replaced by the next run."""
    for path in [folder, *(p for p in folder.rglob("*") if not p.is_symlink())]:
        path.chmod(path.stat().st_mode | stat.S_IWUSR)


def environment(root: Path, folder: Path) -> dict[str, str]:
    """In which commands run in `folder`; kernels are those of the repository `root`."""
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",  # the `python` of dvc.yaml is this one
        "PYTHONPATH": str(folder.resolve()),
        "DVC_NO_ANALYTICS": "true",
        "KERNELS_DIR": os.environ.get("KERNELS_DIR", str((root / "artifacts/kernels").resolve())),
    }


def drop_broken_lock(folder: Path) -> None:
    """Removes what a kill left half-written of DVC's two files: who reads and writes what, and dvc.lock.

    DVC writes them in place, and would refuse every later run; results whose entry is lost come back from its cache of
    runs. A file that is being written is whole a moment later, and one with a merge conflict is the user's to solve.
    """
    for path, whole in ((folder / ".dvc/tmp/rwlock", _whole_json), (folder / "dvc.lock", _whole_lock)):
        for last_look in (False, True):
            try:
                if whole(path.read_bytes()):
                    break
            except FileNotFoundError:
                break
            if last_look:
                path.unlink(missing_ok=True)
                print(f"{path}: half-written by a run that was killed; removed", file=sys.stderr)
            else:
                time.sleep(WRITTEN_S)


def _whole_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except ValueError:
        return False
    return True


def _whole_lock(raw: bytes) -> bool:
    import yaml

    if b"<<<<<<<" in raw:
        return True
    try:
        return yaml.load(raw, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) is not None
    except yaml.YAMLError:
        return False


def restore(folder: Path) -> None:
    """`dvc checkout`: results that a failed stage lost come back. Not while another run is at work in `folder`, which
    would find old results in place of those that it has just written."""
    if not at_work(folder):
        subprocess.run([*DVC, "checkout", "--quiet"], cwd=folder, env=environment(Path.cwd(), folder), check=False)


def at_work(folder: Path) -> bool:
    """Whether a living process holds one of DVC's locks on a file there."""
    import psutil

    try:
        held = provenance.read_json(folder / ".dvc/tmp/rwlock")
    except (OSError, ValueError):
        return False
    users = [user for uses in held.values() for user in (*uses.get("read", ()), uses.get("write")) if user]
    return any(psutil.pid_exists(user["pid"]) for user in users)


def reproduce(folder: Path) -> int:
    """`dvc repro` in `folder`; returns its exit code."""
    drop_broken_lock(folder)
    return subprocess.run([*DVC, "repro"], cwd=folder, env=environment(Path.cwd(), folder), check=False).returncode


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.scratch", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, such as experiment=smoke")
    args = parser.parse_args(argv)
    try:
        config.compose(Path("conf"), args.overrides)  # what is refused leaves no folder
        with held(args.folder):
            make(Path.cwd(), args.folder, args.overrides)
            return reproduce(args.folder)
    except (ValueError, OSError) as e:
        return refused(e, [str(args.folder)])


if __name__ == "__main__":
    sys.exit(main())
