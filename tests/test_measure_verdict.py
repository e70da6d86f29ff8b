"""Planted faults: what must be exact, numeric, broken, degenerate, not comparable."""

import pytest

from pipeline.measure.verdict import (
    Judgement,
    LogitGaps,
    degeneration,
    first_difference,
    grade_lossless,
    unequal_setups,
)

NEAR, FAR = LogitGaps(0.1, 0.0, 0.1), LogitGaps(1.3, 0.0, 1.3)


def grade(pairs, gaps=NEAR, dtype="bfloat16"):
    return grade_lossless(pairs, lambda prompt, position, other: gaps, 0.25, dtype)


def test_equal_answers_are_exact():
    found = grade([("p", [1, 2], [1, 2])])
    assert (found.grade, found.first_divergence, found.compared) == ("exact", None, 1)


def test_a_near_tie_is_numeric_and_recorded():
    found = grade([("p", [1, 2], [1, 2]), ("q", [1, 2, 3], [1, 9, 3])])
    assert found.grade == "numeric"
    assert (found.first_divergence.prompt, found.first_divergence.position) == ("q", 1)
    assert found.first_divergence.top2_gap == pytest.approx(0.1)


def test_a_clear_choice_ignored_is_broken():
    assert grade([("p", [1], [2])], FAR).grade == "broken"


def test_a_tie_between_two_others_does_not_excuse_a_third_token():
    assert grade([("p", [1], [2])], LogitGaps(0.01, 0.0, 5.0)).grade == "broken"


@pytest.mark.parametrize("other", [[1, 2], [1, 2, 3, 4]])
def test_a_missing_or_superfluous_token_is_broken(other):
    found = grade([("p", [1, 2, 3], other)])
    assert found.grade == "broken" and found.first_divergence.position == min(3, len(other))


def test_float32_must_be_exact():
    assert grade([("p", [1], [2])], NEAR, "float32").grade == "broken"


def test_broken_outweighs_numeric_whatever_the_order():
    gaps = {"near": NEAR, "far": FAR}
    for order in (["near", "far"], ["far", "near"]):
        found = grade_lossless([(p, [1], [2]) for p in order], lambda p, i, o: gaps[p], 0.25, "bfloat16")
        assert found.grade == "broken" and found.first_divergence.prompt == "far"


def test_first_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([], [1]) == 0


def test_loops_are_found_in_ids_and_in_text():
    # 1 2 3 4 1 2 3 4: five 4-grams, the last one stood before
    assert degeneration([[1, 2, 3, 4, 1, 2, 3, 4]], ["x"]).loop_share == pytest.approx(1 / 5)
    loop = degeneration([[7] * 64], ["the same " * 200])
    assert loop.beyond(0.5, 1000.0).startswith("degenerate text: 0.98")
    assert "compresses" in loop.beyond(1.0, 4.0)
    assert degeneration([list(range(64))], ["Call me Ishmael."]).beyond(0.5, 4.0) is None


def test_short_answers_have_no_share_rather_than_zero():
    assert degeneration([[1, 2]], [""]) == degeneration([], [])
    assert degeneration([[1, 2]], [""]).loop_share is None


def test_a_verdict_only_gets_worse():
    judgement = Judgement()
    judgement.add("VOID", "loops")
    judgement.add("UNDECIDED", "wide")
    judgement.note("wide")
    assert (judgement.verdict, judgement.reasons) == ("VOID", ["loops", "wide"])


def test_unlike_setups_are_named():
    base = {"engine": "hf", "activations_dtype": "float32", "threads": 2, "device": "cpu"}
    assert unequal_setups(base, {**base, "kernels": {"Int4Linear": 3}}) == []
    assert unequal_setups(base, {**base, "activations_dtype": "bfloat16"}) == [
        "activations dtype: bfloat16 here, float32 in base"
    ]
