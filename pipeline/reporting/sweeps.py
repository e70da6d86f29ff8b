"""What the sweeps over draft lengths are worth: verdict of each best K, misses of the prediction, divergences."""

from __future__ import annotations

from typing import Any

from pipeline.reporting import markdown, numbers
from pipeline.reporting.numbers import interval_of, share
from pipeline.reporting.rows import divergence
from pipeline.reporting.study import Study


def verdicts(study: Study) -> str:
    """Under the curve over K: the best K of each sweep with its verdict, blocks and reasons."""
    lines = []
    for target, found in study.records.per_target("speculate").items():
        why = "; ".join([found["best_reason"], *found["reasons"]]).replace("+-", "±")
        lines.append(f"`{target}`: best K = {found['best_draft_len']}, {worth(found)}: {why}.")
    return "Each sweep over K (natural stopping), its verdict and why:\n\n" + markdown.bullets(lines)


def worth(speculation: dict[str, Any]) -> str:
    """`UNDECIDED, 3 blocks`: short enough for a figure's title."""
    run = speculation["blocks"]["run"]
    return f"{speculation['verdict']}, {run} block{'s' * (run != 1)}"


def misses(study: Study) -> str:
    """How far the predictions are off, told in the same words whether or not one is."""
    lines = [f"`{target}`: {_misses(found)}." for target, found in study.records.per_target("speculate").items()]
    return (
        "**Misses of the prediction**: the largest |predicted / measured − 1| of a sweep, and how many measured 95 % "
        "intervals exclude the prediction:\n\n" + markdown.bullets(lines)
    )


def _misses(speculation: dict[str, Any]) -> str:
    timed = [
        (point["draft_len"], point["predicted_speedup"], iv)
        for point in speculation["curve"]
        if point["draft_len"] and point["measured"] and numbers.is_finite(point["predicted_speedup"])
        if (iv := interval_of(point["measured"]["speedup"]))
    ]
    if not timed:
        return numbers.na("no K with a prediction was timed")
    off, draft_len = max((abs(predicted / iv.value - 1), k) for k, predicted, iv in timed)
    bounded = [(predicted, iv) for _, predicted, iv in timed if iv.known]
    excluded = sum(not iv.low <= predicted <= iv.high for predicted, iv in bounded)
    return f"largest {share(off)} (K = {draft_len}); {excluded} of {len(bounded)} intervals exclude it"


def divergences(study: Study) -> str:
    """Where answers at a timed K part from plain decoding; nothing where all are exact."""
    return markdown.bullets(
        [
            f"`{target}`, K = {point['draft_len']}: {where}."
            for target, found in study.records.per_target("speculate").items()
            for point in found["curve"]
            if point["measured"] and (where := divergence(point["measured"]["lossless"]))
        ]
    )
