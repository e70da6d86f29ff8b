"""`make compare`: planted changes are found, noise and a slower machine are not, and what does not compare says so."""

import copy
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from report_fixtures import PARAMS, sections_of, write_study

from pipeline import compare, provenance
from pipeline.measure.statistics import Interval, Total, median_interval, paired_ratio
from pipeline.reporting import comparison, comparison_document, records, summary
from pipeline.reporting.study import Study

ROOT = Path(__file__).parents[1]
LIMITS = PARAMS.report.compare
SPEEDS = ("decode_tok_per_s", "speedup", "ttft_ms", "tpot_ms")


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """metrics.json of the made-up study: every row OK, speeds within 1.5 to 3 %."""
    sections = sections_of(PARAMS)
    read = records.load(*write_study(tmp_path_factory.mktemp("study"), PARAMS), sections)
    return json.loads(json.dumps(provenance.finite(summary.summarize(Study.gather(sections, read, "figures")))))


@pytest.fixture
def after(before):
    """The same numbers from another run: the records' hashes differ."""
    found = copy.deepcopy(before)
    for origin in found["provenance"].values():
        origin["metrics_sha256"] = "0" * 64
    return found


def scale(found, names, factor, metrics=SPEEDS[:2]):
    for name in names:
        for metric in metrics:
            for end in ("", "_low", "_high"):
                found["arms"][name][metric + end] *= factor


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


def test_without_a_control_no_speed_is_claimed(before, after):
    after["noise_floor"] |= {"ratio": None, "ratio_low": None, "ratio_high": None}
    scale(after, ["gptq"], 0.5)
    assert not compared(before, after).regressions


def test_a_slower_machine_is_not_a_regression(before, after):
    """Every speed fell by a fifth, and so did the bandwidth: speedups stand still."""
    scale(after, after["arms"], 0.8, ("decode_tok_per_s",))
    after["bandwidth_bytes_per_s"] *= 0.8
    found = compared(before, after)
    assert not found.regressions
    for row in ("base", "awq"):
        assert status(found, row, "decode, tok/s") == "worse"
        assert status(found, row, "decode over bandwidth") == "no difference"
    assert "the machine may have moved" in text_of(found, before, after)


def test_a_slower_engine_on_the_same_machine_is_a_regression_of_base(before, after):
    scale(after, after["arms"], 0.8, ("decode_tok_per_s",))
    assert regressed(compared(before, after)) == {("base", "decode, tok/s"), ("base", "decode over bandwidth")}


def test_a_faster_base_makes_no_other_row_a_regression(before, after):
    scale(after, ["base"], 1.5, ("decode_tok_per_s",))
    scale(after, [n for n in after["arms"] if n != "base"], 1 / 1.5, ("speedup",))
    found = compared(before, after)
    assert not found.regressions and status(found, "base", "decode, tok/s") == "better"
    assert status(found, "gptq", "speedup over base") == "worse"
    assert "base became faster" in text_of(found, before, after)


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


def simulated(before, seed, slower=1.0, blocks=8):
    """metrics.json of a run on the machine of a day, whose pace all arms and (within 3 %) the bandwidth share."""
    made = copy.deepcopy(before)
    generator = np.random.default_rng(seed)
    pace = math.exp(0.1 * generator.standard_normal())
    rates = {n: a["decode_tok_per_s"] for n, a in before["arms"].items()} | {"control": 1000 / 30}
    rates["gptq"] /= slower
    drift = np.exp(0.05 * generator.standard_normal(blocks))
    totals = [
        {n: Total(100, 100 / (r * pace * d * math.exp(0.03 * generator.standard_normal()))) for n, r in rates.items()}
        for d in drift
    ]

    def put(where, name, iv):
        where.update({name: iv.value, f"{name}_low": iv.low, f"{name}_high": iv.high})

    for name, arm in made["arms"].items():
        put(arm, "decode_tok_per_s", median_interval([t[name].rate for t in totals], seed))
        put(arm, "speedup", Interval(1.0, 1.0, 1.0) if name == "base" else paired_ratio(totals, [name], ["base"], seed))
    made["bandwidth_bytes_per_s"] *= pace * math.exp(0.03 * generator.standard_normal())
    put(made["noise_floor"], "ratio", paired_ratio(totals, ["control"], ["base"], seed))
    for origin in made["provenance"].values():
        origin["metrics_sha256"] = str(seed)
    return made


def test_two_runs_of_the_same_commit_rarely_differ_and_a_real_loss_is_found(before):
    """200 pairs of runs on days whose paces differ by 10 %: at most 5 % false alarms, a loss of 15 % found in 90 %."""
    pairs = [(simulated(before, 2 * i), 2 * i + 1) for i in range(200)]
    alarms = sum(bool(compared(a, simulated(before, seed)).regressions) for a, seed in pairs)
    assert alarms <= 0.05 * len(pairs)
    found = [regressed(compared(a, simulated(before, seed, slower=1 / 0.85))) for a, seed in pairs]
    assert sum(("gptq", "speedup over base") in f for f in found) >= 0.9 * len(pairs)


def run_in(folder, *arguments):
    """`python -m pipeline.compare` in `folder`: exit code, standard output, standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.compare", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "random"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def commit(folder, message):
    name = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    for command in (["add", "."], [*name, "commit", "-qm", message]):
        subprocess.run(["git", *command], cwd=folder, check=True)


@pytest.fixture
def repository(tmp_path, before):
    """A repository whose first commit has no results and whose second, tagged `base`, has those of `before`."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    commit(tmp_path, "no results yet")
    subprocess.run(["git", "tag", "empty"], cwd=tmp_path, check=True)
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports/metrics.json").write_text(json.dumps(before))
    commit(tmp_path, "results")
    subprocess.run(["git", "tag", "base"], cwd=tmp_path, check=True)
    return tmp_path


def test_the_command_writes_the_same_bytes_and_ends_with_1_on_a_regression(repository, after):
    assert run_in(repository, "--base", "base")[0] == 0
    assert "No difference" in (repository / "reports/compare.md").read_text()
    scale(after, ["gptq"], 0.8)
    (repository / "reports/metrics.json").write_text(json.dumps(after))
    code, out, err = run_in(repository, "--base", "base")
    assert (code, err) == (1, "") and out.startswith("2 regressions beyond the limits: `gptq`.")
    first = (repository / "reports/compare.md").read_bytes()
    assert run_in(repository, "--base", "base")[0] == 1
    assert (repository / "reports/compare.md").read_bytes() == first


def test_limits_come_from_params(repository, after):
    scale(after, ["gptq"], 0.8)
    (repository / "reports/metrics.json").write_text(json.dumps(after))
    params = repository / "params.yaml"
    params.write_text(params.read_text().replace("max_speed_loss_pct: 5.0", "max_speed_loss_pct: 30.0"))
    assert run_in(repository, "--base", "base")[0] == 0


@pytest.mark.parametrize(
    ("revision", "said"),
    [
        ("nope", "error: --base nope: git knows no such commit; give a branch, tag or hash"),
        ("--help-me", "error: --base --help-me: git knows no such commit"),
        ("empty", "error: --base empty: has no reports/metrics.json; give a revision at which"),
    ],
)
def test_a_revision_that_cannot_be_used_is_one_line(repository, revision, said):
    code, out, err = run_in(repository, f"--base={revision}")
    assert (code, out) == (2, "") and err.startswith(said) and err.count("\n") == 1
    assert not (repository / "reports/compare.md").exists()


def test_outside_a_repository_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    code, _, err = run_in(tmp_path, "--base", "main")
    assert (
        code == 2 and err.startswith("error: --base main: this folder is in no git repository") and err.count("\n") == 1
    )


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_results_that_are_no_results_are_one_line(repository, text):
    (repository / "reports/metrics.json").write_text(text)
    code, _, err = run_in(repository, "--base", "base")
    assert code == 2 and err.startswith("error: reports/metrics.json: ") and err.count("\n") == 1


def test_the_committed_results_against_themselves_have_no_difference(tmp_path, repository):
    (repository / "reports/metrics.json").write_text((ROOT / "reports/metrics.json").read_text())
    commit(repository, "the real results")
    code, out, err = run_in(repository, "--base", "HEAD")
    assert (code, err) == (0, "") and out.startswith("No difference: the same measurements stand behind both.")


def test_perplexities_are_paired_by_document_when_both_losses_are_at_hand(repository, before, monkeypatch):
    import pandas

    documents = 40
    tokens = np.arange(50, 50 + documents)
    harder = np.linspace(1.0, 5.0, documents)  # documents differ far more than the two revisions do

    def table(shift):
        nll = tokens * (harder + shift + 0.001 * (-1.0) ** np.arange(documents))
        rows = {"document": [f"d{i}" for i in range(documents)], "category": "code", "nll_nats": nll, "tokens": tokens}
        return pandas.DataFrame(rows)

    def perplexity(t):
        return math.exp(t["nll_nats"].sum() / t["tokens"].sum())

    old, new = table(0.0), table(0.03)
    then, now = (json.loads(json.dumps({"arms": {"gptq": before["arms"]["gptq"]}})) for _ in range(2))
    then["arms"]["gptq"]["token_ppl"], now["arms"]["gptq"]["token_ppl"] = perplexity(old), perplexity(new)
    monkeypatch.chdir(repository)
    path = Path("artifacts/evaluate/gptq/token_nll.parquet")
    path.parent.mkdir(parents=True)
    new.to_parquet(path)
    monkeypatch.setattr(compare, "from_cache", lambda where, rev: old.to_parquet() if where == path else None)
    found = compare.log_perplexity_changes("HEAD", then, now, 1)["gptq"]
    assert found.value == pytest.approx(0.03) and 0.0299 < found.low <= found.high < 0.0301
    now["arms"]["gptq"]["token_ppl"] *= 1.01  # the losses at hand are not those of these results
    assert compare.log_perplexity_changes("HEAD", then, now, 1) == {}


def test_make_compare_needs_a_base():
    done = subprocess.run(["make", "-n", "compare", "BASE=main"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 'python -m pipeline.compare --base "main"' in done.stdout
