"""`python -m pipeline STAGE[@KEY] name=path ...`: params.yaml -> sections, arguments -> paths, then the stage's run().

A stage is `pipeline/stages/STAGE.py` with one public `run`: its dataclass-typed arguments are config sections, its
`Path`-typed ones are the name=path arguments, `key` is what follows the @. What it returns is written, with its
provenance, to `metrics=path`.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import inspect
import os
import re
import resource
import shutil
import signal
import sys
import time
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline import config, progress, provenance

STAGES_DIR = Path(__file__).parent / "stages"
WAYS_OUT = {  # for a disk that takes nothing
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EROFS: "make the folder writable",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
}
SECTION_NAMES = {hint: name for name, hint in typing.get_type_hints(config.Params).items()}


def stage_names() -> list[str]:
    return sorted(p.stem for p in STAGES_DIR.glob("*.py") if p.stem != "__init__")


def arguments_of(run: Any) -> tuple[dict[str, Any], dict[str, bool], bool]:
    """Sections (name -> type), paths (name -> required) and whether `key` is taken, read off a stage's signature."""
    hints = typing.get_type_hints(run)
    sections: dict[str, Any] = {}
    paths: dict[str, bool] = {}
    for name, parameter in inspect.signature(run).parameters.items():
        hint = hints[name]
        if hint is Path or Path in typing.get_args(hint):
            paths[name] = parameter.default is inspect.Parameter.empty
        elif name != "key":
            sections[name] = hint
    return sections, paths, "key" in hints


def select_sections(sections: dict[str, Any], params: config.Params, key: str | None) -> dict[str, Any]:
    """The config sections a stage asks for; a QuantizeMethod is params.quantize[key]."""
    chosen: dict[str, Any] = {}
    for name, hint in sections.items():
        if hint is config.QuantizeMethod:
            if key not in params.quantize:
                known = ", ".join(params.quantize)
                raise config.ConfigError(f"quantize.{key}: no such section; known: {known}")
            chosen[name] = params.quantize[key]
        else:
            chosen[name] = getattr(params, name)
    return chosen


def run_stage(stage: str, key: str | None, paths: dict[str, Path], params: config.Params) -> dict[str, Any]:
    """Run one stage and return its record: provenance, cost and metrics. `paths` may hold `metrics`."""
    run = importlib.import_module(f"pipeline.stages.{stage}").run
    sections, path_names, takes_key = arguments_of(run)
    if takes_key != (key is not None):
        due = f"needs a key, {stage}@KEY" if takes_key else f"takes no key; give {stage} alone"
        raise config.ConfigError(f"{stage}@{key or ''}: {due}")
    metrics_path = paths.pop("metrics", None)
    for name in sorted(set(paths) - set(path_names)):
        raise config.ConfigError(f"{stage}: unknown path {name!r}; it takes {', '.join(path_names)} and metrics")
    for name in sorted(n for n, required in path_names.items() if required and n not in paths):
        raise config.ConfigError(f"{stage}: path {name!r} is missing; give {name}=PATH")
    chosen = select_sections(sections, params, key)
    if "runtime" in sections and stage != "environment":
        refuse_missing_device(params.runtime.device)
    refuse_unusable(stage, paths, metrics_path)
    inputs = hashes({n: p for n, p in paths.items() if not n.startswith("out")})
    started = time.monotonic()
    outs = {n: p for n, p in paths.items() if n.startswith("out")}
    with provenance.together([*outs.values(), *([metrics_path] if metrics_path else [])]):
        with system_errors():
            metrics = run(**chosen, **paths, **({"key": key} if takes_key else {}))
        plain_sections = provenance.finite(chosen)
        record = {
            "stage": stage,
            "key": key,
            "metrics": metrics,
            "cost": {"wall_s": time.monotonic() - started, "peak_memory_bytes": peak_memory_bytes()},
            "provenance": {
                "git": provenance.git_revision(Path.cwd()),
                "inputs": inputs,
                "outputs": hashes({n: provenance.written(p) for n, p in outs.items()}) if metrics_path else {},
                "sections": plain_sections,
                "sections_sha256": provenance.json_sha256(plain_sections),
                "device": provenance.device(),
                "versions": provenance.versions(),
            },
        }
        if metrics_path is not None:
            provenance.write_json(metrics_path, record)
    return record


def refuse_unusable(stage: str, paths: dict[str, Path], metrics: Path | None) -> None:
    """Raises ConfigError for an input that is not there or a place that cannot be written, before any work."""
    for name, path in paths.items():
        if not name.startswith("out") and not path.exists():
            raise config.ConfigError(f"{stage}: {name}={path} not found; run `dvc repro` to produce it, or correct it")
    if metrics is not None and metrics.is_dir():
        raise config.ConfigError(f"{stage}: metrics={metrics} is a folder; give a file")
    for name, path in {**paths, "metrics": metrics or Path("metrics")}.items():
        blocked = next((p for p in path.parents if p.exists() and not p.is_dir()), None)
        if blocked is not None:
            raise config.ConfigError(f"{stage}: {name}={path} lies below the file {blocked}; give another place")


def hashes(paths: dict[str, Path]) -> dict[str, str]:
    """Of each file or folder."""
    return {name: provenance.tree_sha256(path) for name, path in paths.items()}


def log_file(name: str, paths: dict[str, Path]) -> Path | None:
    """In `logs` beside the folder of metrics that a stage writes to; the two stages without one name another place."""
    instead = paths.get({"environment": "out", "report": "results"}.get(name, ""))
    beside = paths["metrics"].parent if "metrics" in paths else instead
    return None if beside is None else beside.parent / "logs" / f"{name}.log"


def refuse_missing_device(device: str) -> None:
    """Raises ConfigError when `device` is a GPU and no NVIDIA driver is here; known without importing torch."""
    if device.startswith("cuda") and shutil.which("nvidia-smi") is None:
        raise config.ConfigError(f"runtime.device: {device}, but this machine has no NVIDIA driver; use cpu")


def peak_memory_bytes() -> int:
    """Largest resident size of this process or of a finished child, whichever is greater (Linux: ru_maxrss in KiB)."""
    return 1024 * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise config.ConfigError(f"{message}; see `{self.prog} --help`")


def parse_arguments(argv: list[str]) -> tuple[str, str | None, dict[str, Path], Path]:
    parser = OneLineParser(prog="python -m pipeline", description=__doc__.split("\n")[0])
    parser.add_argument("stage", metavar="STAGE[@KEY]", help=", ".join(stage_names()))
    parser.add_argument("paths", nargs="*", metavar="name=path")
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="compiled config")
    args = parser.parse_args(argv)
    stage, _, key = args.stage.partition("@")
    if stage not in stage_names():
        raise config.ConfigError(f"{stage}: no such stage; known: {', '.join(stage_names())}")
    paths: dict[str, Path] = {}
    for item in args.paths:
        name, equals, path = item.partition("=")
        if not equals or not path:
            raise config.ConfigError(f"{item}: not of the form name=path")
        if name in paths:
            raise config.ConfigError(f"{item}: {name} is given twice; give it once")
        paths[name] = Path(path)
    return stage, key or None, paths, args.params


def main(argv: list[str] | None = None) -> int:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("KERNELS_DIR", str(Path("artifacts/kernels").resolve()))
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    signal.signal(signal.SIGTERM, _terminate)
    if "DVC_STAGE" in os.environ:  # a killed `dvc repro` is not to leave a stage that goes on without it
        from pipeline.measure.worker import die_with_parent

        die_with_parent(os.getppid(), signal.SIGTERM)
    places: list[str] = []
    try:
        stage, key, paths, params_path = parse_arguments(sys.argv[1:] if argv is None else argv)
        places = [str(p) for n, p in paths.items() if n.startswith("out") or n == "metrics"]
        params, name = config.load(params_path), stage if key is None else f"{stage}@{key}"
        if stage != "evaluate":  # whose tasks may score with it
            # transformers imports scikit-learn (2.5 s) for a kind of generation that no stage asks for
            sys.modules.setdefault("sklearn", None)  # type: ignore[arg-type]
        with progress.stage_log(name, log_file(name, paths)):
            run_stage(stage, key, paths, params)
    except (ValueError, OSError, MemoryError) as e:
        if os.environ.get("PIPELINE_TRACEBACK"):
            raise
        return refused(e, places)
    except RuntimeError as e:
        from pipeline.measure.memory import allocation_failure

        if os.environ.get("PIPELINE_TRACEBACK") or (text := allocation_failure(e)) is None:
            raise
        print(f"error: {text}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing half-written was kept", file=sys.stderr)
        return 130
    return 0


@contextlib.contextmanager
def system_errors() -> Iterator[None]:
    """What the system refused to safetensors or tokenizers, of whoever writes with them, as the OSError that it is."""
    try:
        yield
    except Exception as e:
        found = re.search(r"\(os error (\d+)\)", str(e))
        named = type(e).__name__ in ("SafetensorError", "Exception")  # importing the former would import torch
        if not named or found is None:
            raise
        raise OSError(int(found[1]), str(e)) from e


def refused(error: Exception, places: Sequence[str]) -> int:
    """Print the one line of an error that ended a command which was to write `places`; returns the exit code."""
    trouble = disk_trouble(error, places)
    print(f"error: {trouble or one_line(error)}", file=sys.stderr)
    return 2 if isinstance(error, ValueError) and trouble is None else 1


def disk_trouble(error: BaseException, places: Sequence[str]) -> str | None:
    """A disk that takes nothing, in one line with what was to be written; None for any other error.

    The error of a library's own process, or of many files at once, has the system's number in its text alone.
    """
    code = getattr(error, "errno", None)
    if code is None:
        found = re.search(r"\(os error (\d+)\)|\[Errno (\d+)\]", str(error))
        code = int(found[1] or found[2]) if found else None
    if code not in WAYS_OUT:
        return None
    return (
        f"{os.strerror(code)}, for {', '.join(places)}; {WAYS_OUT[code]} and run again: nothing half-written was kept"
    )


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, MemoryError) and not str(error):
        text = "not enough memory; close other programs, or lower what the job asks for"
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        text = f"{error.filename}: not found; run `dvc repro` to produce it, or correct the path"
    elif isinstance(error, PermissionError) and error.filename is not None:
        path = Path(error.filename).absolute()  # of what is written whole the name is passing, the folder is not
        place = path.parent if path.name.endswith(".partial") else path
        text = f"{place}: permission denied; give this user access to it, or choose another place"
    elif isinstance(error, shutil.Error) and isinstance(error.args[0], list):
        text = f"{error.args[0][0][-1]} ({len(error.args[0])} files could not be copied); correct it and run again"
    return config.redacted(text)


def _terminate(signum: int, frame: types.FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
