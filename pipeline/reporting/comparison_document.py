"""reports/compare.md: regressions first, then what does not compare, then every row; for a pull request's comment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.config import Compare
from pipeline.reporting import markdown
from pipeline.reporting.comparison import ORDER, Change, Comparison
from pipeline.reporting.conditions import differences
from pipeline.reporting.numbers import fixed, is_finite, na, number, size, span

MAX_CHARS = 60_000  # of a comment on GitHub: 65,536
MAX_LINES = 60
MAX_VALUE_CHARS = 120
TRUNCATED = "\n\nCut here: the rest does not fit in a comment.\n"


def headline(found: Comparison) -> str:
    count = len(found.regressions)
    if count:
        rows = ", ".join(f"`{name}`" for name in dict.fromkeys(c.row for c in found.regressions))
        return f"{count} regression{'s' if count > 1 else ''} beyond the limits: {rows}"
    if found.same_timing and found.same_quality and not found.changes_of("worse", "better", "UNDECIDED"):
        return "No difference: the same measurements stand behind both"
    incomparable = [part for part, why in (("speed", found.speed), ("quality", found.quality)) if why]
    if incomparable:
        return f"NOT COMPARABLE: {' and '.join(incomparable)} were measured under other conditions"
    if not found.changes_of("worse", "better", "UNDECIDED"):
        return "No difference that can be told from noise"
    return "No regression beyond the limits"


def render(
    revision: str, found: Comparison, before: Mapping[str, Any], after: Mapping[str, Any],
    settings: Mapping[str, tuple[Any, Any]], limits: Compare,
) -> str:  # fmt: skip
    parts = [
        f"# Against `{revision}`",
        f"**{headline(found)}.**",
        _regressions(found),
        _incomparable(found),
        _recommendation(before, after),
        _rows(found),
        markdown.section("What ran differently", _setups(before, after)) if _setups(before, after) else "",
        markdown.section("Settings that differ", _listed(dict(settings))) if settings else "",
        _reading(limits),
    ]
    text = "\n\n".join(p for p in parts if p) + "\n"
    return text if len(text) < MAX_CHARS else text[: MAX_CHARS - len(TRUNCATED) - 1] + TRUNCATED


def _regressions(found: Comparison) -> str:
    return markdown.section("Regressions", _table(found.regressions)) if found.regressions else ""


def _incomparable(found: Comparison) -> str:
    parts = [
        f"{part.capitalize()}:\n\n{_listed(why)}"
        for part, why in (("speed", found.speed), ("quality", found.quality))
        if why
    ]
    return markdown.section("NOT COMPARABLE", *parts) if parts else ""


def _recommendation(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    then, now = (s["recommendation"]["choice"] for s in (before, after))
    if then == now:
        return ""
    return f"Recommended: {_name(then)} before, {_name(now)} now."


def _name(choice: str | None) -> str:
    return f"`{choice}`" if choice else "nothing"


def _rows(found: Comparison) -> str:
    others = sorted((c for c in found.changes if c.status != "REGRESSION"), key=lambda c: ORDER.index(c.status))
    return markdown.section("Every other number", _table(others)) if others else ""


def _table(changes: list[Change]) -> str:
    headers = ("row", "number", "status", "before", "now", "change (95 %)")
    return markdown.table(headers, [_cells(c) for c in changes], left=3)


def _cells(c: Change) -> list[str]:
    status = f"{c.status}<br><sub>{c.note}</sub>" if c.note else c.status
    return [f"`{c.row}`", c.metric, status, _value(c, c.before), _value(c, c.after), _change(c)]


def _value(c: Change, value: float | str | None) -> str:
    if isinstance(value, str):
        return value
    if c.metric.startswith("peak memory"):
        return size(value)
    return number(value, digits=4)


def _change(c: Change) -> str:
    if c.change is None or not is_finite(c.change.value):
        return "–"
    shown = f"{fixed(c.change.value, 1, sign=True)} {c.unit}"
    return f"{shown} ({span(c.change, 1, sign=True)})" if c.change.known else shown


def _setups(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Kernels, engine, drafts: effects of the code and the settings, not conditions."""
    rows = [s.get("conditions", {}).get("rows", {}) for s in (before, after)]
    lines = {}
    for name in rows[1]:
        for key, values in differences(rows[0].get(name, {}), rows[1][name]).items():
            lines[f"{name}: {key}"] = values
    return _listed(lines) if lines and rows[0] else ""


def _listed(lines: dict[str, tuple[Any, Any]]) -> str:
    """One line a key, both values; a long list and long values are cut."""
    shown = [f"`{key}`: {_short(a)} before, {_short(b)} now" for key, (a, b) in list(lines.items())[:MAX_LINES]]
    more = [f"and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
    return markdown.bullets([*shown, *more])


def _short(value: Any) -> str:
    if value is None:
        return na("not there")
    text = " ".join(str(value).split())
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}…"


def _reading(limits: Compare) -> str:
    lines = [
        "A difference is claimed when its 95 % interval excludes none and it lies outside the noise floor (the A/A "
        "control of either run, whichever is wider). UNDECIDED: beyond the limit, but it may be noise; or the row is "
        "not OK.",
        "Two runs at different times compare the machine as much as the code. So a speed has changed only where two "
        "measures of it agree, and no more than both say (a small line tells which one stands alone): for `base` its "
        "speed as it is and **over** the read **bandwidth** of its run; for other rows that and the **speedup over "
        "base**, formed inside each run's blocks; for **ttft** as it is and against `base`'s.",
        "**token ppl** is paired by document where the losses of both revisions are at hand; accuracies are taken as "
        "independent, which is on the wide side; peak memory has no interval.",
        f"Limits (`report.compare`): speed {limits.max_speed_loss_pct:g} %, ttft {limits.max_ttft_increase_pct:g} %, "
        f"memory {limits.max_memory_increase_pct:g} %, perplexity {limits.max_ppl_increase_pct:g} %, accuracy "
        f"{limits.max_accuracy_drop_points:g} points.",
    ]
    return "How to read this:\n\n" + markdown.bullets(lines)
