import math

import pytest

from pipeline.measure.statistics import Interval
from pipeline.reporting import numbers

NBSP = "\u00a0"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (1.8, "1.80"),
        (0.06004, "0.0600"),
        (0.9996, "1.00"),
        (9.996, "10.0"),
        (123.4, "123"),
        (12345.6, "12,346"),
        (-0.5, "−0.500"),
        (0.00000223, "2.23e−6"),
    ],
)
def test_three_significant_digits(value, shown):
    assert numbers.number(value) == shown


@pytest.mark.parametrize("value", [None, math.nan, math.inf, True, "12"])
def test_what_is_not_a_finite_number_is_said_with_its_reason(value):
    assert numbers.number(value, "no GPU") == "n/a (no GPU)"
    assert numbers.fixed(value, 1, "no GPU") == "n/a (no GPU)"
    assert numbers.size(value, "no GPU") == "n/a (no GPU)"
    assert numbers.share(value, "no GPU") == "n/a (no GPU)"


def test_interval_ends_have_the_decimals_of_the_value():
    assert numbers.interval(Interval(62.5, 60.625, 64.375)) == "62.5 (60.6–64.4)"
    assert numbers.ratio(Interval(0.889, 0.871, 0.9071)) == "0.89 (0.87–0.91)"
    assert numbers.interval(Interval(1.0, math.nan, math.nan)) == "1.00 (no interval)"
    assert numbers.interval(None, "VOID") == "n/a (VOID)"


def test_signed_interval_never_reads_as_a_range_of_negatives():
    assert numbers.signed_interval(Interval(-0.01, -0.02, 0.3), "%") == "+0.0 % (+0.0 to +0.3)"
    assert numbers.signed_interval(Interval(-1.24, -2.06, 0.3), "%") == "−1.2 % (−2.1 to +0.3)"


def test_stacked_moves_the_bracket_and_leaves_a_reason_alone():
    assert numbers.stacked("62.5 (60.6–64.4)") == "62.5<br><sub>60.6–\u206064.4</sub>"
    assert numbers.stacked("n/a (VOID)") == "n/a (VOID)"
    assert numbers.stacked("1") == "1"


@pytest.mark.parametrize(
    ("n_bytes", "shown"), [(512, "512 B"), (1024, "1.00 KiB"), (269_484_032, "257 MiB"), (8 * 2**30, "8.00 GiB")]
)
def test_sizes_are_binary(n_bytes, shown):
    assert numbers.size(n_bytes) == shown.replace(" ", NBSP)


def test_ratio_of_ratios_adds_relative_errors_in_quadrature():
    found = numbers.over(Interval(3.0, 3.0 / 1.03, 3.0 * 1.03), Interval(2.0, 2.0 / 1.04, 2.0 * 1.04))
    half = math.exp(math.sqrt(math.log(1.03) ** 2 + math.log(1.04) ** 2))
    assert found.value == 1.5
    assert found.low == pytest.approx(1.5 / half)
    assert found.high == pytest.approx(1.5 * half)
    assert not numbers.over(Interval(3.0, math.nan, math.nan), Interval(2.0, 1.9, 2.1)).known


def test_change_of_log_perplexity_in_percent():
    found = numbers.change_pct(Interval(math.log(1.1), 0.0, math.log(1.21)))
    assert (found.value, found.low, found.high) == pytest.approx((10.0, 0.0, 21.0))


def test_interval_of_json_needs_a_value_and_both_ends():
    assert numbers.interval_of({"value": None, "low": 1, "high": 2}) is None
    assert numbers.interval_of(None) is None
    assert not numbers.interval_of({"value": 1.5, "low": 1.4, "high": None}).known
