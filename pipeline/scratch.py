"""`python -m pipeline.scratch FOLDER [OVERRIDE ...]`: the whole graph for another experiment in a folder of its own.

The folder holds a copy of what the graph reads (code, conf/, evals/, envs/, dvc.yaml), params.yaml compiled from the
overrides, a DVC repository without Git, and the results. Nothing in this repository changes. `make smoke` is this.
"""

from __future__ import annotations

import argparse
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

from pipeline import config, provenance

COPIED = ("pipeline", "conf", "evals", "dvc.yaml", "envs")
DVC = (sys.executable, "-m", "dvc")
NOT_COPIED = shutil.ignore_patterns("__pycache__", ".venv", "*.partial")


def make(root: Path, folder: Path, overrides: list[str]) -> None:
    """Lay the copy out in `folder`; results that lie there already stay, so that a run goes on where it stopped."""
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
        subprocess.run([*DVC, "init", "--no-scm", "--quiet"], cwd=folder, check=True)


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


def reproduce(folder: Path) -> int:
    """`dvc repro` in `folder`; returns its exit code."""
    return subprocess.run([*DVC, "repro"], cwd=folder, env=environment(Path.cwd(), folder), check=False).returncode


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.scratch", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, such as experiment=smoke")
    args = parser.parse_args(argv)
    try:
        make(Path.cwd(), args.folder, args.overrides)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return reproduce(args.folder)


if __name__ == "__main__":
    sys.exit(main())
