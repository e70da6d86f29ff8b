"""Two studies compared: planted changes are found; noise and a slower machine are not; unlike studies say so."""

import math
import re

import pytest
from comparison_fixtures import another_run, metrics_of_study, scale, scale_bandwidth, simulated
from report_fixtures import PARAMS

from pipeline.measure.statistics import Interval
from pipeline.reporting import comparison, comparison_document

LIMITS = PARAMS.report.compare


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    return metrics_of_study(tmp_path_factory.mktemp("study"))


@pytest.fixture
def after(before):
    return another_run(before)


def compared(before, after, **log_ppl):
    return comparison.compare(before, after, LIMITS, log_ppl)


def status(found, row, metric):
    return next(c.status for c in found.changes if (c.row, c.metric) == (row, metric))


def regressed(found):
    return {(c.row, c.metric) for c in found.regressions}


def text_of(found, before, after, settings=None):
    return comparison_document.render("main", found, before, after, settings or {}, LIMITS)


def test_a_result_against_itself_has_no_difference(before):
    found = compared(before, before)
    assert {c.status for c in found.changes} == {"no difference"}
    assert comparison_document.headline(found) == "No difference: the same measurements stand behind both"


def test_another_run_with_the_same_numbers_has_no_difference(before, after):
    found = compared(before, after)
    assert not found.same_timing and {c.status for c in found.changes} == {"no difference"}
    assert comparison_document.headline(found) == "No difference that can be told from noise"


def test_a_slower_row_is_a_regression_with_its_interval(before, after):
    scale(after, ["gptq"], 0.8)
    found = compared(before, after)
    assert regressed(found) == {("gptq", "decode over bandwidth"), ("gptq", "speedup over base")}
    change = next(c.change for c in found.regressions if c.metric == "speedup over base")
    half = math.hypot(math.log(1 / 0.985), math.log(1.015))  # the lower end now, the upper one before, in quadrature
    assert change.value == pytest.approx(-20) and change.low == pytest.approx(100 * (0.8 * math.exp(-half) - 1))


def test_a_loss_within_the_limit_is_not_a_regression(before, after):
    scale(after, ["gptq"], 0.955)
    found = compared(before, after)
    assert not found.regressions and status(found, "gptq", "speedup over base") == "worse"


def test_a_loss_that_may_be_noise_is_undecided(before, after):
    after["noise_floor"] |= {"ratio_low": 0.7, "ratio_high": 1.3}
    scale(after, ["gptq"], 0.8)
    found = compared(before, after)
    assert not found.regressions and status(found, "gptq", "speedup over base") == "UNDECIDED"
    assert comparison_document.headline(found) == "No regression beyond the limits", "nor is that no difference"


def test_without_a_control_no_speed_is_claimed(before, after):
    after["noise_floor"] |= {"ratio": None, "ratio_low": None, "ratio_high": None}
    scale(after, ["gptq"], 0.5)
    assert not compared(before, after).regressions


def test_a_slower_machine_is_not_a_regression(before, after):
    """Every speed fell by a fifth, and so did the bandwidth: speedups stand still."""
    scale(after, after["arms"], 0.8, ("decode_tok_per_s",))
    scale_bandwidth(after, 0.8)
    found = compared(before, after)
    assert {c.status for c in found.changes} == {"no difference"}
    assert "alone: the machine as a whole may have moved" in text_of(found, before, after)


def test_a_bandwidth_that_was_read_higher_is_not_a_loss(before, after):
    """The speeds stand still, and with them the speedups."""
    scale_bandwidth(after, 1.15)
    found = compared(before, after)
    assert {c.status for c in found.changes} == {"no difference"}
    assert "not confirmed by the other measure" in text_of(found, before, after)


def test_a_bandwidth_that_is_hardly_known_decides_nothing(before, after):
    scale(after, ["gptq"], 0.8)
    after["bandwidth_bytes_per_s_low"] *= 0.5
    found = compared(before, after)
    assert not found.regressions
    assert {status(found, "gptq", m) for m in ("decode over bandwidth", "speedup over base")} == {"UNDECIDED"}


def test_a_bandwidth_without_an_interval_claims_nothing(before, after):
    """As in results of two readings, from before there was one in every turn."""
    before = {k: v for k, v in before.items() if k not in ("bandwidth_bytes_per_s_low", "bandwidth_bytes_per_s_high")}
    scale(after, after["arms"], 0.8, ("decode_tok_per_s",))
    found = compared(before, after)
    assert status(found, "base", "decode, tok/s") == "UNDECIDED" and not found.regressions


def test_a_slower_engine_on_the_same_machine_is_a_regression_of_base(before, after):
    scale(after, after["arms"], 0.8, ("decode_tok_per_s",))
    assert regressed(compared(before, after)) == {("base", "decode, tok/s"), ("base", "decode over bandwidth")}


def test_a_faster_base_makes_no_other_row_a_regression(before, after):
    scale(after, ["base"], 1.5, ("decode_tok_per_s",))
    scale(after, [n for n in after["arms"] if n != "base"], 1 / 1.5, ("speedup",))
    found = compared(before, after)
    assert not found.regressions and status(found, "base", "decode, tok/s") == "better"
    assert status(found, "gptq", "speedup over base") == "no difference"
    assert "alone: base may have moved" in text_of(found, before, after)


def test_a_slower_prefill_of_every_row_on_a_slower_machine_is_not_a_regression(before, after):
    scale(after, after["arms"], 1.3, ("ttft_ms",))
    assert regressed(compared(before, after)) == {("base", "ttft, ms")}
    scale_bandwidth(after, 1 / 1.3)
    assert {c.status for c in compared(before, after).changes if c.metric == "ttft, ms"} == {"no difference"}


def test_a_faster_machine_is_not_a_gain(before, after):
    scale(after, after["arms"], 1.3, ("decode_tok_per_s",))
    scale_bandwidth(after, 1.3)
    assert {c.status for c in compared(before, after).changes} == {"no difference"}


@pytest.mark.parametrize("verdict", ["UNDECIDED", "VOID"])
def test_only_ok_rows_enter_a_ratio(before, after, verdict):
    after["arms"]["gptq"] |= {"verdict": verdict, "reasons": ["made up"]}
    scale(after, ["gptq"], 0.5)
    found = compared(before, after)
    assert status(found, "gptq", "speedup over base") == "UNDECIDED"
    assert regressed(found) == ({("gptq", "verdict")} if verdict == "VOID" else set())


@pytest.mark.parametrize(
    ("name", "metric", "changes", "found"),
    [
        ("awq", "peak memory, bytes", {"peak_memory_bytes": 1.2}, "REGRESSION"),
        ("awq", "peak memory, bytes", {"peak_memory_bytes": 1.04}, "no difference"),
        ("awq", "peak memory, bytes", {"peak_memory_bytes": 0.8}, "better"),
        ("awq", "ttft, ms", {"ttft_ms": 1.5, "ttft_ms_low": 1.5, "ttft_ms_high": 1.5}, "REGRESSION"),
        ("awq", "ttft, ms", {"ttft_ms": 0.5, "ttft_ms_low": 0.5, "ttft_ms_high": 0.5}, "better"),
        ("awq", "token ppl", {"token_ppl": 1.05}, "REGRESSION"),
        ("awq", "token ppl", {"token_ppl": 1.005}, "worse"),
        ("awq", "token ppl", {"token_ppl": 0.9}, "better"),
        ("awq", "accuracy, %", {"acc_last_word": 0.5}, "REGRESSION"),
        ("awq", "accuracy, %", {"acc_last_word": 0.9}, "UNDECIDED"),
        ("awq", "accuracy, %", {"acc_last_word": 0.99}, "no difference"),
    ],
)
def test_each_number_has_its_limit(before, after, name, metric, changes, found):
    for key, factor in changes.items():
        after["arms"][name][key] *= factor
    result = compared(before, after)
    assert status(result, name, metric) == found
    assert regressed(result) == ({(name, metric)} if found == "REGRESSION" else set())


@pytest.mark.parametrize(
    ("log_ppl", "found"),
    [
        (Interval(0.05, 0.04, 0.06), "REGRESSION"),
        (Interval(0.05, -0.01, 0.11), "UNDECIDED"),
        (Interval(0.005, 0.004, 0.006), "worse"),
        (Interval(0.005, -0.001, 0.011), "no difference"),
        (Interval(-0.05, -0.06, -0.04), "better"),
    ],
)
def test_perplexity_is_judged_by_its_paired_interval(before, after, log_ppl, found):
    after["arms"]["gptq"]["token_ppl"] *= math.exp(log_ppl.value)
    assert status(compared(before, after, gptq=log_ppl), "gptq", "token ppl") == found


PARTS = {
    "device": ("speed", "machine.cpu"),
    "GPU": ("speed", "machine.gpus"),
    "threads": ("speed", "machine.threads"),
    "prompts": ("speed", "prompts_sha256"),
    "target": ("speed", "target_sha256"),
    "versions": ("speed", "machine.versions.torch"),
    "dtype": ("speed", "settings.runtime.dtype"),
    "answer length": ("speed", "settings.benchmark.max_new_tokens"),
    "sampling": ("speed", "settings.sampling.temperature"),
    "tasks": ("quality", "tasks_sha256"),
    "window": ("quality", "settings.evaluate.window_tokens"),
    "text": ("quality", "scored_tokens"),
    "evaluated target": ("quality", "target_sha256"),
}


@pytest.mark.parametrize(("part", "key"), PARTS.values(), ids=PARTS)
def test_other_conditions_are_not_comparable(before, after, part, key):
    """However much worse the numbers are: that says nothing then, and fails nothing."""
    assert key in after["conditions"][part]
    after["conditions"][part][key] = "another"
    scale(after, ["gptq"], 0.5)
    after["arms"]["gptq"]["token_ppl"] *= 2
    found = compared(before, after)
    speed, quality = status(found, "gptq", "speedup over base"), status(found, "gptq", "token ppl")
    assert ((speed, quality) if part == "speed" else (quality, speed)) == ("NOT COMPARABLE", "REGRESSION")
    text = text_of(found, before, after)
    assert "## NOT COMPARABLE" in text and f"`{key}`: " in text and "another now" in text


def test_results_from_before_conditions_were_recorded_compare_with_nothing(before, after):
    old = {k: v for k, v in before.items() if k != "conditions"}
    found = compared(old, after)
    assert {c.status for c in found.changes} == {"NOT COMPARABLE"}
    assert comparison_document.headline(found).startswith("NOT COMPARABLE: speed and quality")
    assert comparison.NOT_ON_FILE in text_of(found, old, after)


def test_a_row_that_is_gone_is_a_regression_and_a_new_one_is_not(before, after):
    del after["arms"]["awq_spec"]
    assert regressed(compared(before, after)) == {("awq_spec", "verdict")}
    assert not compared(after, before).regressions


def test_regressions_come_first_and_the_change_of_choice_is_said(before, after):
    scale(after, ["gptq"], 0.8)
    after["recommendation"]["choice"] = None
    after["conditions"]["rows"]["gptq"]["kernel"] = "Linear"
    text = text_of(compared(before, after), before, after, {"quantize.gptq.group_size": (64, 32)})
    places = [
        text.index(part)
        for part in (
            "**2 regressions beyond the limits: `gptq`.**",
            "## Regressions",
            "Recommended: `gptq` before, nothing now.",
            "## Every other number",
            "`gptq: kernel`: Int4Linear before, Linear now",
            "`quantize.gptq.group_size`: 64 before, 32 now",
            "How to read this",
        )
    ]
    assert places == sorted(places)
    assert not re.search(r"\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d|[0-9a-f]{40}|\bnan\b|\binf\b|None", text)


def test_the_document_fits_in_a_comment(before, after):
    """Even when everything differs, at length."""
    huge = {f"model.key_{i}": ("x" * 5000, i) for i in range(5000)}
    after["conditions"]["speed"] |= {f"machine.{i}": "y" * 5000 for i in range(500)}
    for arm in after["arms"].values():
        arm |= {"verdict": "VOID", "reasons": ["z" * 40_000]}
    text = text_of(compared(before, after), before, after, huge)
    assert len(text) < comparison_document.MAX_CHARS and text.endswith(comparison_document.TRUNCATED)


def test_long_lists_of_differences_are_cut(before, after):
    settings = {f"model.key_{i}": ("x" * 5000, i) for i in range(500)}
    text = text_of(compared(before, after), before, after, settings)
    assert "- and 440 more\n" in text and "`model.key_59`" in text and "`model.key_60`" not in text
    assert "How to read this" in text and len(text) < comparison_document.MAX_CHARS


def test_two_runs_of_the_same_commit_rarely_differ_and_a_real_loss_is_found(before):
    """200 pairs of runs on days whose paces differ by 10 %: at most 5 % false alarms, a loss of 20 % found in 95 %."""
    pairs = [(simulated(before, 2 * i), 2 * i + 1) for i in range(200)]
    alarms = sum(bool(compared(a, simulated(before, seed)).regressions) for a, seed in pairs)
    assert alarms <= 0.05 * len(pairs)
    found = [regressed(compared(a, simulated(before, seed, slower=1 / 0.8))) for a, seed in pairs]
    assert sum(("gptq", "speedup over base") in f for f in found) >= 0.95 * len(pairs)
