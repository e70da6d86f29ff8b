"""`python -m pipeline.tradeoff FOLDER ...`: quality against size over the settings of Hydra multiruns, one table.

Each job of `python -m pipeline.sweep --multirun ... 'sweep.stages=[quantize@gptq,evaluate@gptq]'` left a summary.json;
the workspace's own results are rows as well. Settings that differ in the backend alone stand side by side: how far
apart are two implementations of one method? Writes reports/sweep.md; `make sweep` is the default grid and this.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import config, provenance
from pipeline.measure.statistics import Interval
from pipeline.reporting.numbers import change_pct, interval_of

METHODS = ("gptq", "awq")
SHOWN = ("bits", "group_size", "sym", "desc_act", "zero_point", "clip", "duo_scaling")


@dataclass(frozen=True)
class Point:
    """One quantized copy: its settings, size, and quality against full precision on the same tokens."""

    method: str
    settings: dict[str, Any]
    weight_bytes: int
    ppl_increase_pct: Interval
    kl_nats_mean: float
    top1_agreement: float

    @property
    def backend(self) -> str:
        return str(self.settings["backend"])

    @property
    def without_backend(self) -> tuple[Any, ...]:
        return (self.method, *sorted((k, str(v)) for k, v in self.settings.items() if k != "backend"))


def points_of(summary: dict[str, Any]) -> list[Point]:
    """Of {stage: metrics}: the methods that were both quantized and evaluated."""
    found = []
    for method in METHODS:
        quantized, evaluated = summary.get(f"quantize@{method}"), summary.get(f"evaluate@{method}")
        if quantized is None or evaluated is None:
            continue
        against = evaluated["against_base"]
        delta = interval_of(against["delta_log_ppl"])
        assert delta is not None, "evaluate refuses a perplexity that is not finite"
        found.append(
            Point(
                method,
                quantized["recipe"]["settings"],
                quantized["weight_bytes"],
                change_pct(delta),
                against["kl_nats_mean"],
                against["top1_agreement"],
            )
        )
    return found


def read(folders: list[Path], metrics: Path) -> tuple[list[Point], list[str]]:
    """(points of the workspace and of every job, errors of jobs that failed). Raises ConfigError without any point."""
    records = [p for m in METHODS for p in (metrics / f"quantize@{m}.json", metrics / f"evaluate@{m}.json")]
    summaries = [{p.stem: provenance.read_json(p)["metrics"] for p in records if p.exists()}]
    summaries += [provenance.read_json(p) for folder in folders for p in sorted(folder.rglob("summary.json"))]
    points: list[Point] = []
    for point in (p for s in summaries for p in points_of(s)):
        if point not in points:
            points.append(point)
    if not points:
        places = ", ".join(map(str, folders))
        raise config.ConfigError(f"{places}: no job quantized and evaluated; run `make sweep`, or name its folder")
    return points, [s["error"] for s in summaries if "error" in s]


def markdown(points: list[Point], errors: list[str]) -> str:
    from tabulate import tabulate

    settings = [name for name in SHOWN if len({str(p.settings[name]) for p in points}) > 1]
    head = ["method", "backend", *settings, "weights, MB", "perplexity, % (95 %)", "KL, nats", "same top token, %"]
    ordered = sorted(points, key=lambda p: (p.weight_bytes, p.kl_nats_mean))
    lines = ["# Quality against size", "", "Against full precision, on the same tokens; the smallest first.", ""]
    lines += [
        tabulate([_row(p, settings, ordered) for p in ordered], head, tablefmt="github", disable_numparse=True),
        "",
    ]
    lines += ["**Bold**: no other row is at most as large with a smaller KL.", ""]
    pairs = [(a, b) for a in points for b in points if a.without_backend == b.without_backend and a.backend < b.backend]
    lines += ["## The same settings by two libraries", ""]
    if pairs:
        rows = [_pair(a, b) for a, b in pairs]
        head = ["method", "libraries", "perplexity, % (95 %)", "KL, nats", "ratio of KL"]
        lines += [tabulate(rows, head, tablefmt="github", disable_numparse=True), ""]
    else:
        lines += ["No two jobs differ in the backend alone.", ""]
    lines += [f"- failed: {e}" for e in errors]
    return "\n".join(lines).rstrip() + "\n"


def _row(point: Point, settings: list[str], points: list[Point]) -> list[Any]:
    front = not any(
        p.weight_bytes <= point.weight_bytes and p.kl_nats_mean < point.kl_nats_mean for p in points if p is not point
    )
    name = f"**{point.method}**" if front else point.method
    shown = [str(point.settings[s]) for s in settings]
    size = f"{point.weight_bytes / 1e6:.1f}"
    quality = [_change(point), f"{point.kl_nats_mean:.4f}", f"{100 * point.top1_agreement:.1f}"]
    return [name, point.backend, *shown, size, *quality]


def _pair(a: Point, b: Point) -> list[str]:
    kl = f"{a.kl_nats_mean:.4f} / {b.kl_nats_mean:.4f}"
    ratio = f"{a.kl_nats_mean / b.kl_nats_mean:.2f}" if b.kl_nats_mean else "n/a (the second is 0)"
    return [a.method, f"{a.backend} / {b.backend}", f"{_change(a)} / {_change(b)}", kl, ratio]


def _change(point: Point) -> str:
    i = point.ppl_increase_pct
    return f"{i.value:+.1f} ({i.low:+.1f} to {i.high:+.1f})"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.tradeoff", description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, default=[Path("multirun")])
    parser.add_argument("--metrics", type=Path, default=Path("artifacts/metrics"), help="records of the workspace")
    parser.add_argument("--out", type=Path, default=Path("reports/sweep.md"))
    args = parser.parse_args(argv)
    try:
        text = markdown(*read(args.folders, args.metrics))
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    provenance.write_text(args.out, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
