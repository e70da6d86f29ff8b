"""Numbers as a reader meets them: rounding, units, intervals, and "n/a (reason)" for what could not be measured."""

from __future__ import annotations

import math
from dataclasses import astuple
from typing import Any, TypeGuard

from pipeline.measure.statistics import Interval

KIB = 1024
SMALL = 1e-3  # below, a power of ten is easier to read than zeros
NBSP = "\u00a0"  # keeps a number and its unit on one line
WORD_JOINER = "\u2060"  # and the ends of a range


def interval_of(data: Any) -> Interval | None:
    """From {"value", "low", "high"}; None when there is no finite value, NaN ends when those are not known."""
    if not isinstance(data, dict) or not is_finite(data.get("value")):
        return None
    low, high = data.get("low"), data.get("high")
    ends = (float(low), float(high)) if is_finite(low) and is_finite(high) else (math.nan, math.nan)
    return Interval(float(data["value"]), *ends)


def over(a: Interval, b: Interval) -> Interval:
    """a / b for positive ratios, errors taken as independent: relative half-widths add in quadrature.

    Two ratios against the same baseline are positively correlated, so this interval is on the wide side.
    """
    value = a.value / b.value
    if not (a.known and b.known):
        return Interval(value, math.nan, math.nan)
    below = math.hypot(math.log(a.value / a.low), math.log(b.high / b.value))
    above = math.hypot(math.log(a.high / a.value), math.log(b.value / b.low))
    return Interval(value, value * math.exp(-below), value * math.exp(above))


def change_pct(log_ratio: Interval) -> Interval:
    """A difference of logarithms as a change in percent."""
    return Interval(*(100 * math.expm1(x) for x in (log_ratio.value, log_ratio.low, log_ratio.high)))


EXACTLY_ONE = Interval(1.0, 1.0, 1.0)


def is_finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def na(reason: str) -> str:
    return f"n/a ({reason})"


def decimals(value: float, digits: int) -> int:
    """Decimal places that show `value` with `digits` significant digits, never fewer than its whole part."""
    if value == 0:
        return 0
    return max(0, digits - 1 - math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}")))))


def number(value: Any, reason: str = "not measured", digits: int = 3) -> str:
    """`digits` significant digits, thousands separated, a true minus sign; "n/a (reason)" when not finite."""
    if not is_finite(value):
        return na(reason)
    if 0 < abs(value) < SMALL:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    return f"{value:z,.{decimals(value, digits)}f}".replace("-", "−")


def fixed(value: Any, places: int, reason: str = "not measured", sign: bool = False) -> str:
    if not is_finite(value):
        return na(reason)
    return f"{value:{'+' if sign else '-'}z,.{places}f}".replace("-", "−")


def interval(iv: Interval | None, reason: str = "not measured", places: int | None = None) -> str:
    """Like `1.80 (1.72–1.88)`: both ends with as many decimals as the value, three digits unless `places` says."""
    if iv is None:
        return na(reason)
    shown = decimals(iv.value, 3) if places is None else places
    return f"{fixed(iv.value, shown)} ({span(iv, shown) if iv.known else 'no interval'})"


def gigabytes_per_s(bytes_per_s: Interval | None) -> str:
    return f"{interval(bytes_per_s and Interval(*(x / 1e9 for x in astuple(bytes_per_s))))} GB/s"


def ratio(iv: Interval | None, reason: str = "not measured") -> str:
    return interval(iv, reason, places=2)


def stacked(text: str) -> str:
    """A cell whose bracket stands small under the value, so that wide tables stay on the page."""
    value, bracket, inside = text.partition(" (")
    inside = inside.removesuffix(")").replace("–", f"–{WORD_JOINER}")
    return f"{value}<br><sub>{inside}</sub>" if bracket and value != "n/a" else text


def span(iv: Interval, places: int, sign: bool = False) -> str:
    low, high = fixed(iv.low, places, sign=sign), fixed(iv.high, places, sign=sign)
    return f"{low} to {high}" if sign or iv.low < 0 else f"{low}–{high}"


def signed_interval(iv: Interval | None, unit: str, places: int = 1, reason: str = "not measured") -> str:
    """Like `+2.1 % (+1.8 to +2.4)`."""
    if iv is None:
        return na(reason)
    inside = span(iv, places, sign=True) if iv.known else "no interval"
    return f"{fixed(iv.value, places, sign=True)} {unit} ({inside})"


def share(value: Any, reason: str = "not measured", places: int = 0) -> str:
    """A fraction as a percentage."""
    return f"{fixed(100 * value, places)}{NBSP}%" if is_finite(value) else na(reason)


def size(n_bytes: Any, reason: str = "not measured") -> str:
    """Bytes in the largest binary unit that leaves at least one: `257 MiB`."""
    if not is_finite(n_bytes):
        return na(reason)
    value, unit = float(n_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < KIB:
            break
        value, unit = value / KIB, larger
    return f"{number(value) if value < 1000 else fixed(value, 0)}{NBSP}{unit}"


def mib(n_bytes: Any, reason: str = "not measured") -> str:
    """Bytes as bare MiB, for columns whose heading names the unit; whole ones unless there are few."""
    if not is_finite(n_bytes):
        return na(reason)
    value = n_bytes / KIB**2
    return fixed(value, 0) if value >= 10 else number(value, digits=2)


def count(value: Any, reason: str = "not recorded") -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else number(value, reason)
