"""Paired tests against numbers from tables and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.measure.statistics import mcnemar, paired_mean_difference


def test_mcnemar_exact():
    baseline = [True] * 5 + [False] * 1 + [True] * 10 + [False] * 10
    other = [False] * 5 + [True] * 1 + [True] * 10 + [False] * 10
    found = mcnemar(baseline, other)
    assert (found.gained, found.lost) == (1, 5)
    assert found.mcnemar_p == pytest.approx(2 * (1 + 6) / 64)  # both tails of a fair binomial of 6
    assert mcnemar(other, baseline).mcnemar_p == pytest.approx(found.mcnemar_p)


def test_mcnemar_without_a_change_shows_nothing():
    assert mcnemar([True, False], [True, False]).mcnemar_p == 1.0


def test_paired_difference_weighs_by_tokens():
    found = paired_mean_difference([1.0, 30.0], [10, 100], seed=0)
    assert found.value == pytest.approx(31 / 110)  # not the mean of 0.1 and 0.3
    assert found.low == pytest.approx(0.1) and found.high == pytest.approx(0.3)


def test_paired_difference_interval_covers_at_its_rate():
    generator = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        weights = generator.integers(50, 150, 30)
        totals = weights * (0.02 + 0.05 * generator.standard_normal(30))
        interval = paired_mean_difference(totals, weights, seed=trial)
        hits += interval.low <= 0.02 <= interval.high
    assert 0.88 <= hits / 200 <= 0.99


def test_one_document_has_no_interval_and_seeds_repeat():
    alone = paired_mean_difference([2.0], [4], seed=0)
    assert alone.value == 0.5 and math.isnan(alone.low) and math.isnan(alone.high)
    assert paired_mean_difference([1, 2, 4], [5, 5, 5], 7) == paired_mean_difference([1, 2, 4], [5, 5, 5], 7)
