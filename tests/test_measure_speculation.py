"""Costs, predictions and the choice of K, by hand."""

import math

import pytest

from pipeline.engine.replay import kept_from_hits
from pipeline.measure.answers import Acceptance, Answer, decode_total, ttft_ms
from pipeline.measure.setup import Prompt
from pipeline.measure.speculation import Costs, batch_point, best_measured, best_predicted, curve_point, replay_all
from pipeline.measure.statistics import Interval

COSTS = Costs(5.0, 3.0, target_step_ms={1: 20.0, 2: 20.0, 3: 30.0}, overhead_ms=2.0, context_tokens=9)
PROMPT = Prompt("p", "code", [1, 2])


def answer(tokens, rounds, ttft_s=0.1, decode_s=1.0):
    return Answer(PROMPT, 2, list(range(tokens)), rounds, ttft_s, decode_s, "length")


def test_break_even_is_the_acceptance_at_which_the_predicted_speedup_is_one():
    # a round of K = 2 costs 5 + 3 + 30 + 2 = 40 ms, 2 steps: 2 tokens a round, 1 of 2 drafted ones kept
    assert COSTS.break_even_acceptance(2) == pytest.approx(0.5)
    assert COSTS.predicted_speedup(1 + 2 * 0.5, 2) == pytest.approx(1.0)
    assert COSTS.break_even_acceptance(0) is None
    dear = Costs(30.0, 30.0, target_step_ms={1: 20.0, 2: 20.0}, overhead_ms=0.0, context_tokens=9)
    assert dear.break_even_acceptance(1) == pytest.approx(1.5), "more than all: it never pays"


def test_the_gain_of_a_batch_is_tokens_over_the_cost_of_a_round_paired_within_repeats():
    # the second repeat ran three times slower throughout, which is not the draft's doing
    quiet = {-1: 10.0, 0: 2.0, 1: 10.0, 2: 12.0, 5: 32.0}
    found = batch_point(4, [quiet, {n: 3 * s for n, s in quiet.items()}], {1: 1.6, 4: 2.4}, seed=0)
    assert found["gains"]["1"]["value"] == pytest.approx(1.6 * 10 / (2 + 12))
    assert found["gains"]["4"]["value"] == pytest.approx(2.4 * 10 / (4 * 2 + 32))
    assert found["gains"]["1"]["low"] == pytest.approx(found["gains"]["1"]["high"])
    assert found["plain_tok_per_s"] == pytest.approx(4 / 20)  # median of 10 and 30 seconds
    assert found["draft_len"] == 1


def test_a_batch_in_which_no_draft_length_pays_is_decoded_plain():
    assert batch_point(16, [{-1: 10.0, 0: 1.0, 1: 10.0, 2: 20.0}] * 3, {1: 1.5}, seed=0)["draft_len"] == 0


def test_a_batch_whose_gain_is_no_larger_than_its_controls_noise_is_decoded_plain():
    repeats = [{-1: 10.0 * noise, 0: 1.0, 1: 10.0, 2: 12.0} for noise in (0.9, 1.0, 1.02, 1.05, 1.1)]
    gain = 1.36 * 10 / 13
    assert batch_point(2, repeats, {1: 1.36}, seed=0)["draft_len"] == 0, f"{gain:.3f} is within the control"
    assert batch_point(2, [r | {-1: 10.0} for r in repeats], {1: 1.36}, seed=0)["draft_len"] == 1


def test_predicted_speedup_is_tokens_over_the_cost_of_a_round():
    assert COSTS.cost_ratio(1) == pytest.approx(0.25) and COSTS.cost_ratio(2) == pytest.approx(0.2)
    assert COSTS.verify_cost == {1: 1.0, 2: 1.0, 3: 1.5}
    assert COSTS.predicted_speedup(1.8, 1) == pytest.approx(1.8 / (0.25 + 1.0 + 0.1))
    assert COSTS.predicted_speedup(2.2, 2) == pytest.approx(2.2 / (0.25 + 0.15 + 1.5 + 0.1))
    assert COSTS.predicted_speedup(1.0, 0) == 1.0
    assert COSTS.predicted_speedup(None, 2) is None


def test_acceptance_counts_the_accepted_prefix():
    # masks 1010, 1111, 0111: 1 + 4 + 0 of 12 (0.75 would count positions after a rejection)
    found = Acceptance.of([answer(9, [(4, 1), (4, 4), (4, 0)])], 4)
    assert found.acceptance_rate == pytest.approx(5 / 12)
    assert found.accept_marginal == pytest.approx([2 / 3, 1 / 3, 1 / 3, 1 / 3])
    assert found.accept_conditional == pytest.approx([2 / 3, 1 / 2, 1, 1])
    assert found.mean_emitted_per_round == pytest.approx(1 + 5 / 3) and found.drafted_per_round == 4


def test_nothing_generated_divides_by_nothing():
    found = Acceptance.of([answer(1, [], decode_s=0.0)], 2)
    assert found.acceptance_rate is None and found.mean_emitted_per_round is None
    assert math.isnan(decode_total([answer(1, [], decode_s=0.0)]).rate)


def test_rate_is_over_produced_tokens_after_the_first():
    # the fourth token was an end token, though 64 were asked
    assert decode_total([answer(4, [(0, 0)] * 3, decode_s=1.5)]).rate == pytest.approx(2.0)


def test_a_slow_first_call_does_not_move_the_median():
    calls = [answer(4, [], ttft_s=t) for t in (1.1, 0.1, 0.1)]
    assert ttft_ms(calls) == pytest.approx(100.0)


def test_curve_from_one_trace():
    # after the prompt's own token: hit, miss, hit, hit
    found = replay_all([(5, kept_from_hits([False, True, False, True, True]))], [0, 1, 2])
    # K = 2: round at 1 keeps 1 and emits 2; round at 3 keeps 2, the answer's end
    point = curve_point(found[2], 2, COSTS)
    assert (point["rounds"], point["drafted"], point["accepted"]) == (2, 4, 3)
    assert point["predicted_speedup"] == pytest.approx(2.5 / 2.0)
    assert curve_point(found[0], 0, COSTS)["predicted_speedup"] == 1.0


def test_ties_go_to_the_smaller_k_and_zero_is_an_answer():
    one, wide, fast = Interval(1, 1, 1), Interval(1.2, 0.9, 1.6), Interval(1.5, 1.4, 1.6)
    assert best_measured({0: one, 1: Interval(0.8, 0.7, 0.9)}) == (0, "no timed K was faster than plain decoding")
    assert best_measured({0: one, 4: wide})[0] == 0
    assert best_measured({0: one, 2: fast, 4: Interval(1.55, 1.45, 1.7)})[0] == 2
    assert best_measured({0: one, 2: Interval(1.1, 1.05, 1.15), 4: fast})[0] == 4
    assert best_measured({0: one, 2: Interval(math.nan, math.nan, math.nan)})[0] == 0


def test_best_predicted_is_the_smaller_of_equals():
    curve = [{"draft_len": k, "predicted_speedup": s} for k, s in ((0, 1.0), (1, 1.3), (2, 1.3), (3, None))]
    assert best_predicted(curve) == 1
