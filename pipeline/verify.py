"""`python -m pipeline.verify [OVERRIDE ...]`: the chosen experiment twice, in two clean folders; what is the same.

Calibration rows, checkpoints, answers, acceptance traces, perplexities and KL must be identical to the byte; speeds
must agree within their intervals, and what else ran beside each timing stands next to them. Writes reports/verify.md;
exit code 1 when something that no clock decides differs. `make verify` is this.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import provenance, scratch
from pipeline.__main__ import refused
from pipeline.measure.setup import TARGETS
from pipeline.measure.statistics import Interval

RUNS = ("first", "second")
ARTIFACTS = (
    "target",
    "corpus",
    "calibration",
    "prompts.jsonl",
    "draft",
    "quantized/gptq",
    "quantized/awq",
    "quantized/draft",
    *(f"evaluate/{key}" for key in TARGETS),
)


@dataclass(frozen=True)
class Row:
    """One thing compared: `same` is None where it could not be (no interval, another draft length).

    `slower`: index of the run that was, where speeds differ beyond their intervals.
    """

    name: str
    kind: str
    same: bool | None
    detail: str
    slower: int | None = None


@dataclass(frozen=True)
class OtherWork:
    """What else ran beside the timed blocks of one run, as their meter recorded it; None = not recorded.

    `cores`: mean cores taken by other processes and by the host; `load_1min`: lowest and highest load average;
    `max_cores`: above it a block is flagged as disturbed.
    """

    blocks: int
    disturbed: int
    max_cores: float
    cores: float | None
    load_1min: tuple[float, float] | None

    def shown(self) -> str:
        cores = "cores not recorded" if self.cores is None else f"{self.cores:.2f} cores"
        load = "" if self.load_1min is None else f", load {self.load_1min[0]:.1f} to {self.load_1min[1]:.1f}"
        limit = f"flagged as disturbed, which takes more than {self.max_cores:g} cores"
        return f"{cores}{load}; {self.disturbed} of {self.blocks} blocks {limit}"


def other_work(folder: Path) -> OtherWork:
    """Of a finished graph: metrics of the benchmark, and its blocks, whose every line repeats what its block saw."""
    record = provenance.read_json(folder / "artifacts/metrics/benchmark.json")
    lines = (folder / "artifacts/benchmark/blocks.jsonl").read_text(encoding="utf-8").splitlines()
    blocks = {row["block"]: row for row in map(json.loads, lines)}.values()
    cores = [b["other_cores"] + (b["steal_cores"] or 0.0) for b in blocks if b["other_cores"] is not None]
    loads = [b["load_1min"] for b in blocks if b["load_1min"] is not None]
    return OtherWork(
        record["metrics"]["blocks"]["run"],
        record["metrics"]["blocks"]["disturbed"],
        record["provenance"]["sections"]["benchmark"]["timing"]["max_load"],
        statistics.fmean(cores) if cores else None,
        (min(loads), max(loads)) if loads else None,
    )


def fixed_results(folder: Path) -> dict[str, Any]:
    """What no clock decides, of a finished graph: hashes of artifacts, answers and traces, scores."""
    found: dict[str, Any] = {
        name: provenance.tree_sha256(path) for name in ARTIFACTS if (path := folder / "artifacts" / name).exists()
    }
    for key in TARGETS:
        trace = provenance.read_json(folder / f"artifacts/speculate/{key}/trace.json")
        found[f"answers of {key}"] = [[t["prompt"], t["ids"]] for t in trace]
        found[f"acceptance trace of {key}"] = [[t["prompt"], t["hits"]] for t in trace]
        metrics = provenance.read_json(folder / f"artifacts/metrics/evaluate@{key}.json")["metrics"]
        found[f"perplexity of {key}"] = metrics["token_ppl"]
        found[f"tasks of {key}"] = metrics["tasks"]
        if key != "base":
            found[f"divergence of {key} from base"] = metrics["against_base"]
    return found


def compare(first: Path, second: Path) -> list[Row]:
    """Everything of `fixed_results`, then the speed of each arm."""
    a, b = fixed_results(first), fixed_results(second)
    rows = []
    for name in sorted({*a, *b}, key=list({**a, **b}).index):
        same = a.get(name) == b.get(name)
        rows.append(Row(name, "identical", same, "" if same else first_difference(a.get(name), b.get(name), "")))
    arms = [provenance.read_json(folder / "reports/metrics.json")["arms"] for folder in (first, second)]
    return rows + [_speed(name, arms[0][name], arms[1][name]) for name in arms[0]]


def _speed(name: str, one: dict[str, Any], two: dict[str, Any]) -> Row:
    if one["draft_len"] != two["draft_len"]:
        chosen = f"K = {one['draft_len']} and {two['draft_len']}: each run's own timings choose it"
        return Row(f"speed of {name}", "within intervals", None, chosen)
    intervals = []
    for arm in (one, two):
        ends = [float(e) for end in ("", "_low", "_high") if (e := arm.get(f"decode_tok_per_s{end}")) is not None]
        if len(ends) < 3:
            return Row(f"speed of {name}", "within intervals", None, "no interval: too few blocks in the time budget")
        intervals.append(Interval(*ends))
    shown = " and ".join(f"{i.value:.1f} ({i.low:.1f}–{i.high:.1f})" for i in intervals)
    same = intervals[0].overlaps(intervals[1])
    slower = None if same else int(intervals[1].value < intervals[0].value)
    return Row(f"speed of {name}", "within intervals", same, f"{shown} tok/s", slower)


def first_difference(one: Any, two: Any, where: str) -> str:
    """The first place in which two results differ, and both values, cut short."""
    if isinstance(one, dict) and isinstance(two, dict):
        key = next((k for k in {**one, **two} if one.get(k) != two.get(k)), None)
        return "" if key is None else first_difference(one.get(key), two.get(key), f"{where}.{key}")
    if isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        index = next((i for i, pair in enumerate(zip(one, two, strict=True)) if pair[0] != pair[1]), None)
        return "" if index is None else first_difference(one[index], two[index], f"{where}[{index}]")
    return f"{where or 'hash'}: {str(one)[:60]} and {str(two)[:60]}"


def headline(rows: list[Row]) -> str:
    """Both answers at once: what no clock decides, and the speeds."""
    fixed = [r for r in rows if r.kind == "identical"]
    speeds = [r for r in rows if r.kind != "identical"]
    equal = sum(r.same is True for r in fixed)
    answer = "yes" if equal == len(fixed) else "no"
    within = sum(r.same is True for r in speeds)
    missing = sum(r.same is None for r in speeds)
    note = f" ({missing} not compared)" if missing else ""
    return (
        f"Two runs in clean folders. Artifacts, answers and scores identical: **{answer}** ({equal} of {len(fixed)}). "
        f"Speeds within their intervals: **{within} of {len(speeds)}**{note}."
    )


def cause(rows: list[Row], works: Sequence[OtherWork]) -> str:
    """What ran beside each run, and whether the speeds that differ follow it."""
    lines = [f"- {name} run: {work.shown()}." for name, work in zip(RUNS, works, strict=True)]
    slower = [r.slower for r in rows if r.slower is not None]
    told = ""
    cores = [w.cores for w in works if w.cores is not None]
    if slower and len(cores) == len(RUNS):
        fits = sum(s == cores.index(max(cores)) for s in slower)
        which = f"the run with more other work beside it is the slower one in {fits}"
        told = f"\n\nOf {len(slower)} speeds that differ, {which}."
    return "Other work on the cores while speed was timed:\n\n" + "\n".join(lines) + told


def markdown(experiment: str, rows: list[Row], works: Sequence[OtherWork]) -> str:
    from tabulate import tabulate

    say: Callable[[bool | None], str] = lambda same: {True: "yes", False: "**no**", None: "not compared"}[same]  # noqa: E731
    table = tabulate(
        [[r.name, r.kind, say(r.same), r.detail] for r in rows],
        ["", "due", "so", ""],
        tablefmt="github",
        disable_numparse=True,
    )
    return f"# {experiment}: the same twice?\n\n{headline(rows)}\n\n{cause(rows, works)}\n\n{table}\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.verify", description=__doc__.split("\n")[0])
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, such as experiment=smoke; none: the default")
    parser.add_argument("--folder", type=Path, default=Path("artifacts/verify"))
    parser.add_argument("--out", type=Path, default=Path("reports/verify.md"))
    args = parser.parse_args(argv)
    folders = [args.folder / name for name in RUNS]
    try:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
            scratch.make(Path.cwd(), folder, args.overrides)
            code = scratch.reproduce(folder)
            if code:
                print(f"error: {folder}: `dvc repro` failed with exit code {code}; see above", file=sys.stderr)
                return 1
        rows = compare(*folders)
        works = [other_work(folder) for folder in folders]
        name = provenance.read_json(folders[0] / "reports/metrics.json")["name"]
        provenance.write_text(args.out, markdown(name, rows, works))
    except (ValueError, OSError) as e:
        return refused(e, [str(args.folder), str(args.out)])
    print(args.out.read_text())
    return int(any(r.same is False and r.kind == "identical" for r in rows))


if __name__ == "__main__":
    sys.exit(main())
