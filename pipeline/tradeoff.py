"""`python -m pipeline.tradeoff FOLDER ...`: the copies of Hydra multiruns as one table of quality against size.

Each job of `python -m pipeline.sweep --multirun ... 'sweep.stages=[quantize@gptq,evaluate@gptq]'` left its records; the
workspace's own are points as well. Writes reports/sweep.json, which the report shows beside its own copies where model,
texts and evaluation are the same, and prints the table. `make sweep` is the default grid, this, and the report.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pipeline import config, provenance
from pipeline.__main__ import refused
from pipeline.reporting import tradeoff_section
from pipeline.reporting.records import METHODS
from pipeline.reporting.tradeoff_section import Point

OUT = Path("reports/sweep.json")
METRICS = Path("artifacts/metrics")


def points_in(metrics: Path) -> list[Point]:
    """Of a folder of records: the methods that were both quantized and evaluated."""
    found = []
    for method in METHODS:
        quantized, evaluated = (metrics / f"{stage}@{method}.json" for stage in ("quantize", "evaluate"))
        if quantized.exists() and evaluated.exists():
            found.append(Point.of(provenance.read_json(quantized), provenance.read_json(evaluated)))
    return found


def read(folders: list[Path], workspace: Path) -> tuple[list[Point], list[str]]:
    """(points of the workspace and of every job, errors of jobs that failed). Raises ConfigError without any point."""
    jobs = [path for folder in folders for path in sorted(folder.rglob("summary.json"))]
    points: list[Point] = []
    for metrics in (workspace / METRICS, *(job.parent / METRICS for job in jobs)):
        points += [p for p in points_in(metrics) if p not in points]
    if not points:
        places = ", ".join(map(str, folders))
        raise config.ConfigError(f"{places}: no job quantized and evaluated; run `make sweep`, or name its folder")
    summaries = [provenance.read_json(job) for job in jobs]
    return points, [s["error"] for s in summaries if "error" in s]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.tradeoff", description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, default=[Path("multirun")])
    parser.add_argument("--workspace", type=Path, default=Path(), help="folder of artifacts/")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(argv)
    try:
        points, errors = read(args.folders, args.workspace)
        provenance.write_json(args.out, {"points": provenance.finite(points)})
    except (ValueError, OSError) as e:
        return refused(e, [str(args.out)])
    alike = [p for p in points if p.same_quality_scale(points[0])]
    print(tradeoff_section.table(alike), tradeoff_section.libraries(alike), sep="\n\n")
    if len(alike) < len(points):
        print(f"left out, of another model, text or evaluation: {len(points) - len(alike)}", file=sys.stderr)
    for error in errors:
        print(f"failed: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
