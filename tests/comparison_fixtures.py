"""reports/metrics.json of a made-up study, and the same from another run, for tests of comparing two revisions."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from report_fixtures import PARAMS, sections_of, write_study

from pipeline import provenance
from pipeline.measure.statistics import Interval, Total, median_interval, paired_ratio
from pipeline.reporting import records, summary
from pipeline.reporting.study import Study

SPEEDS = ("decode_tok_per_s", "speedup")


def metrics_of_study(folder: Path) -> dict[str, Any]:
    """Every row OK, speeds within 1.5 to 3 %."""
    sections = sections_of(PARAMS)
    study = Study.gather(sections, records.load(*write_study(folder, PARAMS), sections), "figures")
    return json.loads(json.dumps(provenance.finite(summary.summarize(study))))


def another_run(before: dict[str, Any]) -> dict[str, Any]:
    """The same numbers, measured anew: the records' hashes differ."""
    found = copy.deepcopy(before)
    for origin in found["provenance"].values():
        origin["metrics_sha256"] = "0" * 64
    return found


def scale(found, names, factor, metrics=SPEEDS):
    for name in names:
        for metric in metrics:
            for end in ("", "_low", "_high"):
                found["arms"][name][metric + end] *= factor


def scale_bandwidth(found, factor):
    for end in ("", "_low", "_high"):
        found["bandwidth_bytes_per_s" + end] *= factor


def simulated(before, seed, slower=1.0, blocks=8, turns=4):
    """metrics.json of a run on the machine of a day, whose pace all arms and (within 3 %) the bandwidth share; a single
    reading of that is off by 8 %."""
    made = copy.deepcopy(before)
    generator = np.random.default_rng(seed)
    pace = math.exp(0.1 * generator.standard_normal())
    rates = {n: a["decode_tok_per_s"] for n, a in before["arms"].items()} | {"control": 1000 / 30}
    rates["gptq"] /= slower
    drift = np.exp(0.05 * generator.standard_normal(blocks))
    totals = [
        {n: Total(100, 100 / (r * pace * d * math.exp(0.03 * generator.standard_normal()))) for n, r in rates.items()}
        for d in drift
    ]

    def put(where, name, iv):
        where.update({name: iv.value, f"{name}_low": iv.low, f"{name}_high": iv.high})

    for name, arm in made["arms"].items():
        put(arm, "decode_tok_per_s", median_interval([t[name].rate for t in totals], seed))
        put(arm, "speedup", Interval(1.0, 1.0, 1.0) if name == "base" else paired_ratio(totals, [name], ["base"], seed))
    share = pace * math.exp(0.03 * generator.standard_normal())
    read = made["bandwidth_bytes_per_s"] * share * np.exp(0.08 * generator.standard_normal(blocks * turns))
    put(made, "bandwidth_bytes_per_s", median_interval(read, seed))
    put(made["noise_floor"], "ratio", paired_ratio(totals, ["control"], ["base"], seed))
    for origin in made["provenance"].values():
        origin["metrics_sha256"] = str(seed)
    return made
