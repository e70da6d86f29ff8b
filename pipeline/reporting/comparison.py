"""Two studies of the same matrix: what changed of each row, with intervals, and whether it is a regression.

A row's decode speed is compared across two runs at different times, as it is and over the read bandwidth that each run
measured, so that a machine which was slower as a whole cancels out. Its speedup over `base` was formed inside the
blocks of each run, which cancels it better, but a faster `base` lowers it too. So one fall alone is no regression:
`base` has regressed when its speed fell both as it is and over the bandwidth, another row when it fell over the
bandwidth and against `base`. Nor is it a loss: of two measures of one speed the weaker claim counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipeline.config import Compare
from pipeline.measure.statistics import Interval, claimable, differs_from_one
from pipeline.reporting.conditions import differences
from pipeline.reporting.numbers import interval_of, is_finite, over

Status = Literal["REGRESSION", "NOT COMPARABLE", "UNDECIDED", "worse", "better", "no difference"]
ORDER: tuple[Status, ...] = ("REGRESSION", "NOT COMPARABLE", "UNDECIDED", "worse", "better", "no difference")
CLAIMS: tuple[Status, ...] = ("no difference", "UNDECIDED", "worse", "REGRESSION")  # of a loss, weakest first
Z_95 = 1.96
OVER_BANDWIDTH = "decode over bandwidth"
UNCONFIRMED = "alone: the machine as a whole may have moved"
NOT_ALONE = {
    "decode, tok/s": UNCONFIRMED,
    "ttft, ms": UNCONFIRMED,
    OVER_BANDWIDTH: "not confirmed by the other measure of this speed",
    "speedup over base": "alone: base may have moved",
}
NOT_ON_FILE = "the conditions are not on file there"

Summary = Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """One metric of one row. `change`: in `unit` (% or points), positive = grew; `limit`: what is a regression."""

    row: str
    metric: str
    before: float | str | None
    after: float | str | None
    change: Interval | None
    unit: str
    limit: float | None
    status: Status
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """`speed`, `quality`: why these do not compare (key -> both values), empty when they do."""

    changes: list[Change]
    speed: dict[str, tuple[Any, Any]]
    quality: dict[str, tuple[Any, Any]]
    same_timing: bool
    same_quality: bool

    @property
    def regressions(self) -> list[Change]:
        return self.changes_of("REGRESSION")

    def changes_of(self, *statuses: Status) -> list[Change]:
        return [c for c in self.changes if c.status in statuses]


def compare(before: Summary, after: Summary, limits: Compare, log_ppl: Mapping[str, Interval]) -> Comparison:
    """`before`, `after`: reports/metrics.json of two revisions. `log_ppl`: change of log-perplexity of a target, paired
    by document, where the losses of both are at hand.
    """
    same_timing, same_quality = _same(before, after, "benchmark"), _same(before, after, "evaluate@")
    speed = {} if same_timing else unequal(before, after, "speed")
    quality = {} if same_quality else unequal(before, after, "quality")
    floor = widest(interval_of_ends(before["noise_floor"], "ratio"), interval_of_ends(after["noise_floor"], "ratio"))
    bandwidth = _ratio(*(interval_of_ends(s, "bandwidth_bytes_per_s") for s in (before, after)))
    base_ttft = _ratio(*(interval_of_ends(s["arms"].get("base", {}), "ttft_ms") for s in (before, after)))
    changes: list[Change] = []
    for name, now in after["arms"].items():
        then = before["arms"].get(name)
        if then is None:
            changes.append(Change(name, "verdict", None, now["verdict"], None, "", None, "NOT COMPARABLE", "a new row"))
            continue
        changes += _verdict(name, then, now)
        changes += _speeds(name, then, now, limits, floor, bandwidth, base_ttft, bool(speed), same_timing)
        if not now["speculative"]:
            changes += _qualities(name, then, now, limits, log_ppl.get(name), bool(quality))
    gone = [name for name in before["arms"] if name not in after["arms"]]
    changes += [
        Change(n, "verdict", before["arms"][n]["verdict"], None, None, "", None, "REGRESSION", "row is gone")
        for n in gone
    ]
    return Comparison(changes, speed, quality, same_timing, same_quality)


def _same(before: Summary, after: Summary, stage: str) -> bool:
    """Whether the very same measurements stand behind both: nothing was run in between."""
    hashes = [
        {n: o["metrics_sha256"] for n, o in s["provenance"].items() if n.startswith(stage)} for s in (before, after)
    ]
    return bool(hashes[0]) and hashes[0] == hashes[1]


def unequal(before: Summary, after: Summary, part: str) -> dict[str, tuple[Any, Any]]:
    """Conditions that differ. Results from before conditions were recorded compare with nothing."""
    found = [s.get("conditions", {}).get(part) for s in (before, after)]
    if None in found:
        return {part: tuple(NOT_ON_FILE if f is None else "on file" for f in found)}  # type: ignore[dict-item]
    return differences(found[0], found[1])


def widest(*floors: Interval | None) -> Interval:
    """The A/A control that allows fewer claims; unknown ends allow none."""
    return max(map(claimable, floors), key=lambda f: f.high if f.known else math.inf)


def interval_of_ends(data: Mapping[str, Any], name: str) -> Interval | None:
    """From the flat form of metrics.json: name, name_low, name_high."""
    return interval_of({"value": data.get(name), "low": data.get(f"{name}_low"), "high": data.get(f"{name}_high")})


def _verdict(name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    for metric in ("verdict", "lossless"):
        if then[metric] != now[metric]:
            fell = now[metric] in ("VOID", "NOT COMPARABLE", "broken")
            note = "; ".join(now["reasons"][:2]) if fell else ""
            status: Status = "REGRESSION" if fell else "no difference"
            yield Change(name, metric, then[metric], now[metric], None, "", None, status, note)


def _speeds(
    name: str,
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    limits: Compare,
    floor: Interval,
    bandwidth: Interval | None,
    base_ttft: Interval | None,
    unlike: bool,
    same: bool,
) -> Iterator[Change]:
    decode, speedup, ttft = (
        _ratio(interval_of_ends(then, n), interval_of_ends(now, n)) for n in ("decode_tok_per_s", "speedup", "ttft_ms")
    )
    bad = next((v for v in (then["verdict"], now["verdict"]) if v != "OK"), None)

    def judged(metric: str, key: str, ratio: Interval | None, limit: float, grows: bool, note: str = "") -> Change:
        change = None if ratio is None else pct(ratio)
        if unlike:
            status: Status = "NOT COMPARABLE"
        elif same:
            status = "no difference"
        elif ratio is None or bad is not None:
            status, note = "UNDECIDED", f"the row is {bad}" if bad else "not measured in both"
        else:
            status = graded(ratio, floor, limit, good_when_greater=not grows)
        return Change(name, metric, then.get(key), now.get(key), change, "%", limit, status, note)

    limit = limits.max_speed_loss_pct
    plain = judged("decode, tok/s", "decode_tok_per_s", decode, limit, grows=False)
    adjusted = judged(
        OVER_BANDWIDTH, "decode_tok_per_s", decode and bandwidth and over(decode, bandwidth), limit, grows=False
    )
    paired = judged("speedup over base", "speedup", speedup, limit, grows=False)
    yield from confirmed(plain, adjusted) if name == "base" else confirmed(adjusted, paired)
    raw, relative = (
        judged("ttft, ms", "ttft_ms", ratio, limits.max_ttft_increase_pct, grows=True)
        for ratio in (ttft, times(ttft, bandwidth) if name == "base" else ttft and base_ttft and over(ttft, base_ttft))
    )
    yield confirmed(raw, relative)[0]
    yield _memory(name, then, now, limits, unlike)


def confirmed(one: Change, other: Change) -> tuple[Change, Change]:
    """Two measures of one speed, neither claiming more than the other does; a note says where one stands alone."""
    return _held_to(one, other.status), _held_to(other, one.status)


def _held_to(change: Change, other: Status) -> Change:
    if change.status == other or not {change.status, other} <= {*CLAIMS, "better"}:
        return change
    both_lost = "better" not in (change.status, other)
    status: Status = min(change.status, other, key=CLAIMS.index) if both_lost else "no difference"
    return change if status == change.status else replace(change, status=status, note=NOT_ALONE[change.metric])


def times(a: Interval | None, b: Interval | None) -> Interval | None:
    return a and b and over(a, Interval(1 / b.value, 1 / b.high, 1 / b.low))


def graded(ratio: Interval, floor: Interval | None, limit_pct: float, good_when_greater: bool) -> Status:
    """A difference is claimed where the interval excludes 1 and the value lies outside the noise floor."""
    lost_pct = 100 * ((1 - ratio.value) if good_when_greater else (ratio.value - 1))
    if not differs_from_one(ratio, floor):
        return "UNDECIDED" if lost_pct > limit_pct else "no difference"
    if lost_pct > limit_pct:
        return "REGRESSION"
    return "worse" if lost_pct > 0 else "better"


def _memory(name: str, then: Mapping[str, Any], now: Mapping[str, Any], limits: Compare, unlike: bool) -> Change:
    """Peak memory has no interval; within the limit nothing is claimed."""
    a, b, limit = then["peak_memory_bytes"], now["peak_memory_bytes"], limits.max_memory_increase_pct
    change, note = None, ""
    if unlike:
        status: Status = "NOT COMPARABLE"
    elif not (is_finite(a) and is_finite(b)):
        status, note = "UNDECIDED", "not measured in both"
    else:
        status = "no difference"
    if is_finite(a) and is_finite(b):
        value = 100 * (b / a - 1)
        change = Interval(value, math.nan, math.nan)
        if not unlike and abs(value) > limit:
            status = "REGRESSION" if value > 0 else "better"
    return Change(name, "peak memory, bytes", a, b, change, "%", limit, status, note)


def _qualities(
    name: str, then: Mapping[str, Any], now: Mapping[str, Any], limits: Compare, log_ppl: Interval | None, unlike: bool
) -> Iterator[Change]:
    yield _perplexity(name, then["token_ppl"], now["token_ppl"], limits.max_ppl_increase_pct, log_ppl, unlike)
    points = _points(then, now)
    limit = limits.max_accuracy_drop_points
    status: Status = "NOT COMPARABLE" if unlike else "no difference"
    if not unlike and points is None:
        status = "UNDECIDED"
    elif not unlike and points is not None and points.value:
        shown = points.known and not points.low <= 0 <= points.high
        status = ("REGRESSION" if -points.value > limit else "worse") if points.value < 0 else "better"
        if not shown:
            status = "UNDECIDED" if -points.value > limit else "no difference"
    before, after = (None if a["acc_last_word"] is None else 100 * a["acc_last_word"] for a in (then, now))
    yield Change(name, "accuracy, %", before, after, points, "points", limit, status)


def _perplexity(
    name: str, then: float | None, now: float | None, limit: float, log_ppl: Interval | None, unlike: bool
) -> Change:
    """With the losses of both at hand, paired by document; else by value, as the same tokens were scored."""
    note = "" if log_ppl else "no interval: the losses by document are not at hand"
    if then is None or now is None:
        return Change(name, "token ppl", then, now, None, "%", limit, "UNDECIDED", "not measured in both")
    ratio = Interval(*(math.exp(x) for x in (log_ppl.value, log_ppl.low, log_ppl.high))) if log_ppl else None
    if then == now:
        ratio, note = Interval(1.0, 1.0, 1.0), ""
    if unlike:
        status: Status = "NOT COMPARABLE"
    elif ratio is not None:
        status = graded(ratio, None, limit, good_when_greater=False)
    else:
        grown = 100 * (now / then - 1)
        status = "REGRESSION" if grown > limit else "worse" if grown > 0 else "better"
    change = pct(ratio or Interval(now / then, math.nan, math.nan))
    return Change(name, "token ppl", then, now, change, "%", limit, status, "" if unlike else note)


def _points(then: Mapping[str, Any], now: Mapping[str, Any]) -> Interval | None:
    """Difference of two accuracies in points, their errors taken as independent: on the wide side."""
    a, b = then["acc_last_word"], now["acc_last_word"]
    if not (is_finite(a) and is_finite(b)):
        return None
    errors = [x["acc_last_word_stderr"] for x in (then, now)]
    if not all(map(is_finite, errors)):
        return Interval(100 * (b - a), math.nan, math.nan)
    half = 100 * Z_95 * math.hypot(*errors)
    return Interval(100 * (b - a), 100 * (b - a) - half, 100 * (b - a) + half)


def _ratio(before: Interval | None, after: Interval | None) -> Interval | None:
    return None if before is None or after is None else over(after, before)


def pct(ratio: Interval) -> Interval:
    return Interval(*(100 * (x - 1) for x in (ratio.value, ratio.low, ratio.high)))
