"""What the records together say against a row: kernels and dtypes as loaded against what the files hold and params ask.

The benchmark sees its own arms only; whether a checkpoint is packed is known to the stage that wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.measure import guards
from pipeline.measure.verdict import Judgement
from pipeline.reporting.records import Records


def judge(records: Records, name: str, arm: Mapping[str, Any], judgement: Judgement) -> None:
    """Add to the judgement of the row `name`; `arm`: its entry in the benchmark."""
    if arm["readback"] is None:
        return  # it never ran, and says why
    target = name.removesuffix("_spec")
    runtime = records.by_name["benchmark"]["provenance"]["sections"]["runtime"]
    packed = None if target == "base" else target
    found = [
        guards.weights_dtype(runtime["dtype"], arm["readback"]),
        guards.kernel(_holds_codes(records, packed), arm["readback"], "kernel"),
        _head(records, packed, arm["readback"], "head"),
    ]
    if name != target:
        sweep = records.metrics(f"speculate@{target}")
        found += [*_draft_precision(records, target, arm), _draft_len_in_sweep(arm, sweep)]
        _against_sweep(arm, sweep, judgement)
    for doubt in found:
        if doubt is not None:
            judgement.add("VOID", doubt)


def _holds_codes(records: Records, packed: str | None) -> bool:
    """`packed`: the quantized copy that is to run; None for full precision."""
    return packed is not None and bool(records.metrics(f"quantize@{packed}")["modules"])


def _head(records: Records, packed: str | None, readback: Mapping[str, Any], what: str) -> str | None:
    """The output head is held at 8 bits where the copy's recipe says so, and nowhere else."""
    asked = _holds_codes(records, packed) and records.metrics(f"quantize@{packed}")["recipe"]["settings"]["pack_head"]
    held = any("Int8" in kernel for kernel in readback["kernels"])
    if held == asked:
        return None
    return f"{what}: {'8 bits asked' if asked else 'full precision asked'}, but that is not how it was loaded"


def _draft_precision(records: Records, target: str, arm: Mapping[str, Any]) -> list[str | None]:
    """Targets named in the sweep's settings, and a target that drafts for itself, have the quantized draft."""
    if not arm["draft_readback"].get("kernels"):
        return []  # a lookup
    named = records.by_name["benchmark"]["provenance"]["sections"]["speculate"]["quantized_draft_for"]
    packed = "draft" if target in named or arm["draft"]["kind"] == "self" else None
    return [
        guards.kernel(_holds_codes(records, packed), arm["draft_readback"], "draft precision"),
        _head(records, packed, arm["draft_readback"], "the draft's head"),
    ]


def _draft_len_in_sweep(arm: Mapping[str, Any], sweep: Mapping[str, Any]) -> str | None:
    """The sweep timed what it calls K; a lookup may find fewer tokens."""
    for point in (p for p in sweep["curve"] if p["measured"] and p["draft_len"]):
        drafted, asked = point["measured"]["drafted_per_round"], point["draft_len"]
        if not drafted or (drafted != asked and arm["draft"]["kind"] != "ngram") or drafted > asked:
            return f"the sweep's K = {asked} did not act: {drafted or 0:.3g} tokens drafted a round"
    return None


def _against_sweep(arm: Mapping[str, Any], sweep: Mapping[str, Any], judgement: Judgement) -> None:
    """K was chosen in another process: with the same kernels, and above all with the same draft?"""
    for what, here, there in (
        ("target", arm["readback"], sweep["readback"]),
        ("draft", arm["draft_readback"], sweep["draft_readback"]),
    ):
        if not (here and there and here.get("kernels") and there.get("kernels")):
            continue
        if guards.is_packed(here) != guards.is_packed(there):
            judgement.add("NOT COMPARABLE", f"K was chosen with a {what} of another precision than the one that ran")
        elif guards.main_kernel(here) != guards.main_kernel(there):
            kernels = f"{guards.main_kernel(there)}, the row ran on {guards.main_kernel(here)}"
            judgement.note(f"K was chosen with the {what} on {kernels}")
