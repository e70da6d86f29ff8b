import dataclasses
import math

import pytest

from pipeline.config import Report
from pipeline.measure.statistics import Interval, claimable
from pipeline.reporting.recommendation import recommend
from pipeline.reporting.rows import Row

QUIET = Interval(1.0, 0.99, 1.01)
NO_LIMITS = Report(
    objective="throughput",
    max_memory_bytes=None,
    max_ppl_increase_pct=None,
    max_accuracy_drop_points=None,
    min_decode_tok_per_s=None,
    compare=None,
)


def near(value, half=0.01):
    return Interval(value, value / (1 + half), value * (1 + half))


def row(name, speedup, *, mib=100, ppl=10.0, draft_mib=None, verdict="OK", accuracy=0.5, **changes):
    made = Row(
        name=name,
        target=name.removesuffix("_spec"),
        speculative=name.endswith("_spec"),
        draft_len=2 if name.endswith("_spec") else 0,
        verdict=verdict,
        reasons=() if verdict == "OK" else ("made up",),
        weight_bytes=mib * 2**20,
        draft_weight_bytes=None if draft_mib is None else draft_mib * 2**20,
        peak_memory_bytes=3 * mib * 2**20,
        ttft_ms=near(100.0),
        tpot_ms=near(10 / speedup),
        decode_tok_per_s=near(100 * speedup),
        speedup=Interval(1.0, 1.0, 1.0) if name == "base" else near(speedup),
        over_plain=None,
        answer_ms=None,
        answer_speedup=None,
        answer_over_plain=None,
        ttft_speedup=None,
        acceptance_rate=None,
        lossless=None,
        token_ppl=ppl,
        delta_log_ppl=Interval(math.log(ppl / 10), math.log(ppl / 10), math.log(ppl / 10)),
        accuracy=accuracy,
        accuracy_stderr=0.03,
        kl_nats_mean=None,
        top1_agreement=None,
        null_reasons={},
    )
    return dataclasses.replace(made, **changes)


def decide(*rows, limits=NO_LIMITS, noise_floor=QUIET, answer_floor=QUIET, **changes):
    found = {r.name: r for r in rows}
    return recommend(found, dataclasses.replace(limits, **changes), noise_floor, answer_floor)


def test_the_fastest_row_that_qualifies_wins_and_the_next_is_the_alternative():
    found = decide(row("base", 1.0), row("gptq", 1.8, ppl=10.5), row("awq", 1.5, ppl=10.4))
    assert (found.choice, found.alternative) == ("gptq", "awq")
    assert found.alternative_reason.startswith("0.833 ")
    assert found.failures == {}


@pytest.mark.parametrize("verdict", ["UNDECIDED", "VOID", "NOT COMPARABLE"])
def test_a_row_that_is_not_ok_cannot_be_recommended(verdict):
    found = decide(row("base", 1.0), row("gptq", 9.0, verdict=verdict))
    assert found.choice == "base"
    assert found.failures == {"gptq": (verdict,)}
    assert found.alternative == "gptq"
    assert "gptq" not in found.pareto_front


def test_a_difference_below_the_noise_floor_is_a_tie_that_plain_decoding_wins():
    rows = row("base", 1.0), row("gptq", 1.8, mib=40), row("gptq_spec", 1.9, mib=40, draft_mib=9)
    assert decide(*rows).choice == "gptq_spec"
    noisy = decide(*rows, noise_floor=Interval(1.0, 0.93, 1.0))  # 1 / 0.93 = 1.075 > 1.9 / 1.8
    assert noisy.choice == "gptq"
    assert noisy.ties == ("gptq_spec",)
    assert noisy.alternative_reason == "not distinguishable in the objective, and it needs a draft"


def test_overlapping_intervals_tie_and_fewer_bytes_then_lower_perplexity_decide():
    found = decide(row("base", 1.0), row("gptq", 1.80, mib=50, ppl=10.2), row("awq", 1.81, mib=50, ppl=10.4))
    assert found.choice == "gptq"
    assert found.alternative_reason == "not distinguishable in the objective, and its perplexity is no lower"
    found = decide(row("base", 1.0), row("gptq", 1.80, mib=51, ppl=10.2), row("awq", 1.81, mib=50, ppl=10.4))
    assert found.choice == "awq"


def test_without_an_a_a_control_no_speed_is_claimed():
    for control in (None, Interval(1.0, math.nan, math.nan)):
        found = decide(row("base", 1.0, mib=100), row("gptq", 3.0, mib=40), noise_floor=control)
        assert set(found.ties) | {found.choice} == {"base", "gptq"}
        assert found.choice == "gptq"  # by bytes, not by speed


@pytest.mark.parametrize(
    ("changes", "made", "why"),
    [
        ({"max_ppl_increase_pct": 10.0}, {"ppl": 11.5}, "perplexity increase of 15.0 % is above the limit of 10.0 %"),
        (
            {"max_accuracy_drop_points": 3.0},
            {"accuracy": 0.46},
            "accuracy drop of 4.0 points is above the limit of 3.0",
        ),
        ({"max_memory_bytes": 2**27}, {}, "peak memory of 300 MiB is above the limit of 128 MiB"),
        ({"min_decode_tok_per_s": 500.0}, {}, "decoding at 200 tok/s is below the limit of 500"),
        ({"max_memory_bytes": 2**40}, {"peak_memory_bytes": None}, "peak memory was not measured, so the limit of"),
    ],
)
def test_a_limit_that_is_not_met_is_named_with_both_values(changes, made, why):
    found = decide(row("base", 1.0, peak_memory_bytes=1), row("gptq", 2.0, **made), **changes)
    assert why in found.failures["gptq"][0].replace("\u00a0", " ")
    assert found.choice != "gptq"


def test_a_value_at_its_limit_qualifies():
    at_limit = row("gptq", 2.0, accuracy=0.25)
    found = decide(row("base", 1.0, accuracy=0.5), at_limit, max_accuracy_drop_points=25.0)
    assert found.choice == "gptq"


def test_nothing_qualifies_says_what_every_row_lacks():
    found = decide(row("base", 1.0), row("gptq", 2.0, verdict="VOID"), min_decode_tok_per_s=1e6)
    assert found.choice is None and found.alternative is None
    assert set(found.failures) == {"base", "gptq"}
    assert len(found.failures["gptq"]) == 2


def test_memory_counts_the_draft_and_knows_no_noise():
    rows = (
        row("base", 1.0),
        row("gptq", 1.8, mib=40),
        row("gptq_spec", 2.9, mib=40, draft_mib=1),
        row("awq", 1.7, mib=39),
    )
    found = decide(*rows, objective="memory", noise_floor=Interval(1.0, 0.5, 2.0))
    assert found.choice == "awq"
    assert found.gains["gptq_spec"].value == pytest.approx(100 / 41)


def test_latency_is_decided_by_whole_answers_beside_their_own_control():
    rows = row("base", 1.0), row("gptq", 4.0, answer_speedup=near(0.9))
    assert decide(*rows, objective="latency").choice == "base"
    assert decide(*rows, objective="throughput").choice == "gptq"
    faster = row("base", 1.0), row("gptq", 1.0, answer_speedup=near(1.2))
    assert decide(*faster, objective="latency", noise_floor=Interval(1.0, 0.5, 2.0)).choice == "gptq"
    tie = decide(*faster, objective="latency", answer_floor=Interval(1.0, 0.75, 1.1))
    assert set(tie.ties) | {tie.choice} == {"base", "gptq"}, "1.2 is within 1 / 0.75"


def test_pareto_front_by_hand():
    rows = (
        row("base", 1.0, mib=100, ppl=10.0),  # best perplexity
        row("base_spec", 1.3, mib=100, draft_mib=20, ppl=10.0),  # faster than base for more bytes
        row("gptq", 1.8, mib=40, ppl=10.5),  # fewest bytes
        row("gptq_spec", 1.5, mib=40, draft_mib=20, ppl=10.5),  # gptq is faster, smaller and as good
        row("awq", 1.8, mib=40, ppl=10.6),  # as fast and small as gptq, but worse
    )
    assert decide(*rows).pareto_front == ("base", "base_spec", "gptq")


def test_the_floor_is_the_same_for_a_ratio_and_its_inverse():
    floor = claimable(Interval(1.0, 0.9, 1.02))
    assert (floor.low, floor.high) == pytest.approx((0.9, 1 / 0.9))
