"""Medians and intervals: by hand where that is possible, by simulation where a coverage is claimed."""

import math

import numpy as np
import pytest

from pipeline.measure.blocks import order_of
from pipeline.measure.statistics import (
    Interval,
    Total,
    block_ratios,
    differs_from_one,
    median_interval,
    paired_ratio,
    precise_enough,
)

BLOCKS = [
    {"a": Total(10, 1.0), "b": Total(10, 2.0), "c": Total(30, 1.0)},
    {"a": Total(20, 1.0), "b": Total(20, 4.0), "c": Total(80, 1.0)},
    {"a": Total(30, 1.0), "b": Total(30, 9.0), "c": Total(150, 1.0)},
]


def test_ratios_are_paired_within_blocks():
    assert block_ratios(BLOCKS, ["a"], ["b"]) == [2.0, 4.0, 9.0]
    assert paired_ratio(BLOCKS, ["a"], ["b"], seed=0).value == pytest.approx(4.0)


def test_interaction_is_a_product_of_rates():
    # (a c) / (b b): 10 * 30 / 25, 20 * 80 / 25, 30 * 150 / (100 / 9)
    assert block_ratios(BLOCKS, ["a", "c"], ["b", "b"]) == pytest.approx([12.0, 64.0, 405.0])


def test_rate_without_tokens_is_not_zero_and_is_left_out():
    assert math.isnan(Total(0, 0.0).rate) and math.isnan(Total(0, 1.0).rate)
    found = median_interval([math.nan, 3.0, 3.0], seed=0)
    assert (found.value, found.low, found.high) == pytest.approx((3.0, 3.0, 3.0))
    assert not median_interval([], seed=0).known


def test_one_block_has_no_interval_and_excludes_nothing():
    single = median_interval([2.0], seed=0)
    assert single.value == pytest.approx(2.0) and not single.known
    assert single.overlaps(Interval(1, 1, 1)) and not precise_enough([single], 1.0)


def test_same_seed_same_interval_whatever_the_global_generator():
    values = [1.0, 1.1, 0.9, 1.3, 1.2]
    np.random.seed(1)
    first = median_interval(values, seed=3)
    np.random.seed(2)
    assert first == median_interval(values, seed=3) != median_interval(values, seed=4)
    assert first.low <= first.value <= first.high


def test_a_difference_needs_its_interval_and_the_noise_floor():
    floor = Interval(1.0, 0.95, 1.05)
    assert differs_from_one(Interval(1.2, 1.1, 1.3), floor)
    assert not differs_from_one(Interval(1.04, 1.02, 1.06), floor)
    assert not differs_from_one(Interval(1.2, 0.9, 1.5), floor)
    assert not differs_from_one(Interval(1.2, 1.1, 1.3), Interval(1.0, math.nan, math.nan))


TRUTH, TRIALS = 1.5, 1000


def simulated(generator, ratio, blocks, turns=3):
    """Blocks of runs of two arms for equal work, one after the other in the order that blocks give: the machine's pace
    wanders by 3 % from run to run, each run has 3 % noise of its own, and one in fifty takes 2 to 10 times as long."""
    made, pace, cost = [], 0.0, {"fast": 1.0, "slow": ratio}
    for block in range(blocks):
        seconds = dict.fromkeys(cost, 0.0)
        for turn in range(turns):
            for arm in order_of(list(cost), block + turn):
                pace += generator.normal(0, 0.03)
                spike = generator.uniform(2, 10) if generator.random() < 0.02 else 1.0
                seconds[arm] += cost[arm] * spike * math.exp(pace + generator.normal(0, 0.03))
        made.append({arm: Total(50, s) for arm, s in seconds.items()})
    return made


def covered(intervals, truth):
    return sum(found.low <= truth <= found.high for found in intervals) / TRIALS


@pytest.mark.parametrize("blocks", [5, 8, 12, 20])
def test_intervals_cover_the_true_ratio(blocks):
    generator = np.random.default_rng(blocks)
    found = [paired_ratio(simulated(generator, TRUTH, blocks), ["fast"], ["slow"], seed=t) for t in range(TRIALS)]
    assert 0.93 <= covered(found, TRUTH) <= 0.97


def stopped(generator, ratio, precision, seed, min_blocks=5, max_blocks=12):
    """The interval at which `run_blocks` would stop."""
    blocks = simulated(generator, ratio, max_blocks)
    for n in range(min_blocks, max_blocks + 1):
        found = paired_ratio(blocks[:n], ["fast"], ["slow"], seed)
        if precise_enough([found], precision):
            break
    return found


def test_two_equal_arms_when_blocks_stop_once_their_ratio_is_precise():
    """Their intervals still cover the true ratio, 1, and they are seldom called different."""
    generator = np.random.default_rng(7)
    found, controls = ([stopped(generator, 1.0, 0.03, t) for t in range(TRIALS)] for _ in range(2))
    assert 0.93 <= covered(found, 1.0) <= 0.97
    called = sum(differs_from_one(f, c) for f, c in zip(found, controls, strict=True))
    assert called / TRIALS <= 0.05


def test_means_of_arms_that_ran_one_after_the_other_are_far_off():
    """The same machine and the same runs, but all of one arm first: what the blocks are for."""
    generator = np.random.default_rng(9)
    inside = 0
    for _ in range(TRIALS):
        runs = [b["slow"].seconds for b in simulated(generator, 1.0, 20)]
        slow, fast = TRUTH * np.array(runs[:10]), np.array(runs[10:])
        ratio = slow.mean() / fast.mean()
        error = 1.96 * math.hypot(*(a.std(ddof=1) / math.sqrt(10) / a.mean() for a in (slow, fast)))
        inside += ratio * (1 - error) <= TRUTH <= ratio * (1 + error)
    assert inside / TRIALS < 0.85
