import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from itertools import dropwhile, takewhile
from pathlib import Path

import pytest
import yaml
from report_fixtures import PARAMS, sections_of, write_study

from pipeline import provenance
from pipeline.reporting import document, figures, records, speed_sections
from pipeline.reporting.study import Study
from pipeline.stages import report

ROOT = Path(__file__).parents[1]
ARMS = ("base", "base_spec", "gptq", "gptq_spec", "awq", "awq_spec")


def study_of(folder, **changes):
    sections = sections_of(PARAMS)
    return Study.gather(sections, records.load(*write_study(folder, PARAMS, **changes), sections), "figures")


def text_of(folder, **changes):
    return document.render(study_of(folder, **changes)).replace("\u00a0", " ").replace("\u2060", "")


def write(folder, out):
    results, environment = write_study(folder, PARAMS)
    return report.run(
        **sections_of(PARAMS),
        results=results,
        environment=environment,
        out_report=out / "report.md",
        out_metrics=out / "metrics.json",
        out_figures=out / "figures",
        out_serve=out / "serve",
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("reports")
    write(tmp_path_factory.mktemp("results"), out)
    return out


def row_of(text, name):
    """Cells of the matrix row `name`, its verdict last."""
    line = next(li for li in text.splitlines() if li.startswith((f"| `{name}`<br>", f"| **`{name}`**<br>")))
    first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
    label, verdict = first.split("<br>")
    return [label, *cells, verdict]


def change_arm(name, **changes):
    return {"benchmark": lambda metrics: metrics["arms"][name].update(changes)}


def test_the_same_results_give_the_same_bytes(written, tmp_path):
    write(tmp_path / "results", tmp_path / "reports")
    names = sorted(p.relative_to(written) for p in written.rglob("*") if p.is_file())
    assert len(names) == 2 + 2 * 4 + 3
    for name in names:
        assert (tmp_path / "reports" / name).read_bytes() == (written / name).read_bytes(), name


def test_every_link_is_relative_and_leads_somewhere(written):
    text = (written / "report.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", text)
    assert len(links) == 2 * 4 + 1
    for link in (a or b for a, b in links):
        assert (written / link).is_file(), link


def test_the_body_holds_no_path_time_or_python(written):
    text = (written / "report.md").read_text()
    assert not re.search(r"(?<![\w.])/(?:home|tmp|root|work|usr)/|\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d", text)
    assert not re.search(r"\b(nan|inf|None|True|False)\b", text)
    assert str(written) not in text


def test_figures_have_no_date_and_a_theme_each(written):
    for light in (written / "figures").glob("*-light.svg"):
        dark = light.with_name(light.name.replace("light", "dark"))
        assert "<dc:date>" not in light.read_text()
        for color, replaced in figures.DARK.items():
            assert color not in dark.read_text() and replaced not in light.read_text()
        assert figures.INK in light.read_text() and figures.DARK[figures.INK] in dark.read_text()


def test_first_lines_are_the_verdict_and_the_six_rows(written):
    lines = [line for line in (written / "report.md").read_text().splitlines() if line]
    assert lines[1].startswith("**Deploy `gptq`, plain decoding**: 1.88 (1.85–1.90) times the decode speed of `base`")
    assert "speculation does not pay here: 0.89 (0.88–0.90) times the speed of plain decoding at K = 1." in lines[1]
    assert [line.split("`")[1] for line in lines[4:10]] == list(ARMS)


def test_metrics_hold_scalars_of_every_arm(written):
    found = json.loads((written / "metrics.json").read_text(), parse_constant=lambda c: pytest.fail(c))
    needed = (
        "weight_bytes", "peak_memory_bytes", "ttft_ms", "tpot_ms", "decode_tok_per_s", "speedup", "token_ppl",
        "acc_last_word", "kl_nats_mean", "lossless", "draft_len", "acceptance_rate", "verdict", "weight_ratio",
    )  # fmt: skip
    assert tuple(found["arms"]) == ARMS
    for name, arm in found["arms"].items():
        for key in needed:
            assert key in arm, (name, key)
            assert arm[key] is not None or key in arm["null_reasons"], (name, key)
        assert arm["speedup_low"] <= arm["speedup"] <= arm["speedup_high"]
    assert found["arms"]["base"]["kl_nats_mean"] is None
    assert found["arms"]["gptq_spec"]["token_ppl"] == found["arms"]["gptq"]["token_ppl"]
    assert found["arms"]["gptq_spec"]["weight_ratio"] == pytest.approx((114_200_000 + 61_000_000) / 269_030_016)
    assert found["recommendation"]["choice"] == "gptq"
    assert found["recommendation"]["verdict"].startswith("Deploy gptq, plain decoding: 1.88 ")
    assert set(found["provenance"]) == set(records.RECORDS)


def test_speculative_rows_never_show_a_perplexity_of_their_own(tmp_path):
    text = text_of(tmp_path)
    assert row_of(text, "gptq")[7] == "17.01"
    assert row_of(text, "gptq_spec")[7:10] == ["= target", "=", "="]


@pytest.mark.parametrize(
    ("verdict", "speed"), [("VOID", "n/a (VOID)"), ("NOT COMPARABLE", "62.5<br><sub>60.6–64.4</sub>")]
)
def test_a_row_that_says_nothing_shows_no_speed_and_enters_no_ratio(tmp_path, verdict, speed):
    text = text_of(tmp_path, **change_arm("gptq", verdict=verdict, reasons=["it loops"]))
    cells = row_of(text, "gptq")
    assert (cells[5], cells[6], cells[-1]) == (speed, f"n/a ({verdict})", verdict)
    assert "- `gptq`: it loops." in text
    assert f"`gptq`: n/a (`gptq` is {verdict})" in text
    assert "**Deploy `awq`, plain decoding**" in text


def test_undecided_speculation_is_not_called_a_loss(tmp_path):
    text = text_of(tmp_path, **change_arm("gptq_spec", verdict="UNDECIDED", reasons=["interval +-9 %, asked +-5 %"]))
    assert "whether speculation pays is not known (`gptq_spec` is UNDECIDED)." in text
    assert "does not pay" not in text


def test_a_missing_peak_is_a_reason_never_zero(tmp_path):
    def change(metrics):
        memory = metrics["arms"]["awq"]["memory"]
        memory |= {"peak_memory_bytes": None, "null_reasons": {"peak_memory_bytes": "cannot be reset here"}}

    assert "n/a (cannot be reset here)" in text_of(tmp_path, benchmark=change)


def test_other_evaluation_inputs_make_a_target_not_comparable(tmp_path):
    found = study_of(tmp_path, evaluate__awq=lambda metrics: metrics.update(task_hash="another"))
    assert {n for n, r in found.rows.items() if r.verdict == "NOT COMPARABLE"} == {"awq", "awq_spec"}
    assert found.rows["awq"].reasons == ("evaluation's task hash differs from base's",)


def test_a_void_sweep_voids_its_row(tmp_path):
    def change(metrics):
        metrics |= {"verdict": "VOID", "reasons": ["nothing was ever drafted"]}

    found = study_of(tmp_path, speculate__base=change)
    assert (found.rows["base_spec"].verdict, found.rows["base"].verdict) == ("VOID", "OK")


def test_base_that_stands_alone_says_why(tmp_path):
    def change(metrics):
        for name, arm in metrics["arms"].items():
            arm["verdict"] = "OK" if name == "base" else "UNDECIDED"

    first = text_of(tmp_path, benchmark=change).splitlines()[2]
    assert first.startswith(
        "**No decision, keep `base`, plain decoding**: no other row qualifies: "
        "`base_spec`, `gptq`, `gptq_spec`, `awq`, `awq_spec` (UNDECIDED); "
    )


def test_speculation_that_pays_is_recommended_with_its_draft(tmp_path):
    def change(metrics):
        for target in ("gptq", "awq"):
            for name in (target, f"{target}_spec"):
                metrics["arms"][name] |= {"verdict": "VOID", "reasons": ["it loops"]}

    text = text_of(tmp_path, benchmark=change)
    assert text.splitlines()[2] == (
        "**Deploy `base`, speculative decoding with K = 2**: 1.27 (1.25–1.28) times the decode speed of `base`; "
        "1.2 times its weight bytes, draft included; "
        "speculation pays: an answer comes 1.15 (1.13–1.17) times as fast, its prompt's reading included."
    )
    assert "draft_len: 2" in text and "draft.precision: bfloat16" in text


def test_nothing_qualifies_is_said_first(tmp_path):
    def change(metrics):
        for name, arm in metrics["arms"].items():
            arm |= {"verdict": "UNDECIDED", "reasons": [f"wide {name}"]}

    text = text_of(tmp_path, benchmark=change)
    assert text.splitlines()[2].startswith("**Nothing qualifies**: `base`: UNDECIDED; `base_spec`: UNDECIDED")
    assert "The recommended row as settings" not in text


def test_a_row_that_could_not_run_is_reported_with_its_reason(tmp_path):
    from pipeline.measure.matrix import Row, void_metrics

    no_draft = void_metrics(Row("awq_spec", "awq", None, 0, "no draft to quantize"))
    study = study_of(tmp_path, benchmark=lambda metrics: metrics["arms"].update(awq_spec=no_draft))
    text = document.render(study)
    assert row_of(text, "awq_spec")[-1] == "VOID"
    assert "- `awq_spec`: no draft to quantize." in text
    with figures.style():
        figures.save(figures.trade_off(study.rows, study.recommendation), tmp_path, "trade-off")


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        ({"kind": "ngram", "ngram_max": 3}, "No model: the longest suffix (up to 3 tokens)"),
        ({"kind": "self"}, "The target's own quantized weights"),
        (
            {"kind": "model", "name": "Small", "parameters": 135e6, "common_vocab_size": 49152},
            "Small (135 M parameters), with the target's tokenizer: 49,152 token ids in common.",
        ),
    ],
)
def test_every_kind_of_draft_is_described(tmp_path, draft, said):
    def replace(metrics):
        metrics.clear()
        metrics |= draft

    def nothing_to_quantize(metrics):
        metrics.clear()
        metrics |= {"kind": "ngram", "weight_bytes": 0, "modules": 0, "layers": []}

    assert said in text_of(tmp_path, draft=replace, quantize__draft=nothing_to_quantize)


def test_interaction_names_the_factor_by_hand(tmp_path):
    """At K = 1: base emits 1.55 for 4.5 / 30 + 1.05 + 0.6 / 30; gptq's checking, 1.34, put in its place."""
    base = 1.55 / (0.15 + 1.05 + 0.02)
    with_checking = 1.55 / (0.15 + 1.34 + 0.02)
    found = speed_sections.cause(study_of(tmp_path), "gptq")
    assert f"checking × {with_checking / base:.2f}" in found


def test_quality_says_how_far_the_engine_of_the_tasks_is_from_the_one_that_is_timed(tmp_path):
    assert "differs by `base` -0.0004, `gptq` -0.0004" in text_of(tmp_path / "a").replace("\u2212", "-")

    def same(metrics):
        metrics["engine_difference"] = None

    alone = {f"evaluate__{target}": same for target in ("base", "gptq", "awq")}
    assert "lm-eval runs in transformers" not in text_of(tmp_path / "b", **alone)


def test_an_interaction_is_claimed_only_where_the_control_shows_it_too(tmp_path):
    def both(control):
        def change(metrics):
            metrics["interaction"]["gptq"] = {"value": 0.9, "low": 0.85, "high": 0.95}
            metrics["interaction_control"]["gptq"] = control

        text = text_of(tmp_path / str(control["high"]), benchmark=change)
        return next(li for li in text.splitlines() if li.startswith("- `gptq`: 0.90"))

    assert "together they gain less than the product" in both({"value": 0.91, "low": 0.86, "high": 0.96})
    assert "no departure from 1 that both show" in both({"value": 0.93, "low": 0.85, "high": 1.02})
    assert "no departure from 1 that both show" in both({"value": 1.1, "low": 1.05, "high": 1.2})


def test_speculation_that_decodes_faster_need_not_shorten_an_answer(tmp_path):
    def change(metrics):
        spec = metrics["arms"]["base_spec"]
        spec["over_plain"] = {"value": 1.1, "low": 1.05, "high": 1.15}
        spec["answer_over_plain"] = {"value": 0.995, "low": 0.97, "high": 1.02}

    found = speed_text(tmp_path / "a", change)
    assert "speculation decodes 1.10" in found
    assert "its prompt's reading included, is within the noise floor (0.99" in found
    assert "speculation pays: 1.10" in speed_text(tmp_path / "b", change, objective="throughput")


def test_the_floor_that_a_claim_rests_on_is_shown(tmp_path):
    def change(metrics):
        metrics["noise_floor"] = {"value": 0.99, "low": 1 / 1.05, "high": 1.02}
        metrics["noise_floor_answer"] = {"value": 1.01, "low": 0.99, "high": 1.031}

    assert "no difference in speed below 5.0 % or in the time of an answer below 3.1 % is claimed." in text_of(
        tmp_path / "a", benchmark=change
    )
    without = text_of(tmp_path / "b", benchmark=lambda metrics: metrics.pop("noise_floor_answer", None))
    assert "the time of an answer below" not in without


def speed_text(folder, change, objective="latency"):
    from pipeline.reporting import headline

    study = study_of(folder, benchmark=change)
    decided = dataclasses.replace(study.recommendation, objective=objective)
    return headline.speculation(study.rows["base"], dataclasses.replace(study, recommendation=decided))


def test_figure_names_are_pushed_apart_in_order():
    assert figures.spread({"a": 1.0, "b": 1.01, "c": 3.0}, 0.2) == {"a": 1.0, "b": 1.2, "c": 3.0}


def test_a_figure_without_intervals_still_has_its_points():
    from pipeline.measure.statistics import Interval

    assert figures.errors(Interval(1.0, math.nan, math.nan)) == [[0.0], [0.0]]


def test_the_stage_loads_no_model_library_and_ends_with_the_verdict(tmp_path):
    results, environment = write_study(tmp_path, PARAMS)
    code = (
        "import sys; from pipeline.__main__ import main; code = main(sys.argv[1:]);"
        "print(sorted({'torch', 'transformers', 'mlflow'} & set(sys.modules)), code)"
    )
    params = tmp_path / "params.yaml"
    params.write_text(yaml.safe_dump(provenance.finite(PARAMS)))
    arguments = [
        "report",
        f"results={results}",
        f"environment={environment}",
        *(
            f"out_{n}={tmp_path / 'out' / p}"
            for n, p in {"report": "r.md", "metrics": "m.json", "figures": "f", "serve": "s"}.items()
        ),
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, f"--params={params}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    *_, verdict, where, modules = done.stdout.splitlines()
    assert verdict.startswith("Deploy gptq, plain decoding: ")
    assert where == f"Report: {tmp_path / 'out' / 'r.md'}"
    assert modules == "[] 0", done.stderr
    assert 'src="f/draft-length-light.svg"' in (tmp_path / "out" / "r.md").read_text()


def test_a_candidate_that_beats_the_drafts_interval_is_named_with_the_way_to_measure_it(tmp_path):
    def lookup_first(metrics):
        rows = {c["candidate"]: c for c in metrics["targets"]["gptq"]}
        rows["ngram"]["predicted_speedup"] = {"value": 1.6, "low": 1.5, "high": 1.7}
        metrics["targets"]["gptq"].sort(key=lambda c: -c["predicted_speedup"]["value"])

    text = text_of(tmp_path, rank_drafts=lookup_first)
    assert (
        "- `gptq`: lookup in the text so far is predicted to be better than the draft in the matrix: "
        "`dvc exp run -S draft=ngram` measures it."
    ) in text
    assert "is predicted to be better" not in text_of(tmp_path / "b"), "intervals that meet name nobody"


def over_plain(**gains):
    """Edits base_spec's gain over plain decoding by kind of prompt; the noise floor is 2 % either way."""

    def change(metrics):
        for category, (value, low, high) in gains.items():
            entry = metrics["arms"]["base_spec"]["by_category"][category]
            entry["over_plain"] = {"value": value, "low": low, "high": high}
            metrics["noise_floor_by_category"][category] = {"value": 1.0, "low": 0.98, "high": 1.02}

    return {"benchmark": change}


def test_speculation_is_advised_by_kind_of_prompt(tmp_path):
    text = text_of(tmp_path, **over_plain(code=(1.26, 1.15, 1.3), prose=(0.8, 0.75, 0.85), summary=(1.05, 0.97, 1.2)))
    line = next(li for li in text.splitlines() if li.startswith("- `base`, K = 2: "))
    assert line == (
        "- `base`, K = 2: speculate for code (1.26 (1.15–1.30)); not for prose (0.80 (0.75–0.85)); "
        "no difference shown for summary (1.05 (0.97–1.20))."
    )


def test_a_gain_within_the_noise_floor_is_no_advice(tmp_path):
    text = text_of(tmp_path, **over_plain(code=(1.01, 1.005, 1.015), prose=(1.01, 1.005, 1.015)))
    line = next(li for li in text.splitlines() if li.startswith("- `base`, K = 2: "))
    assert "no difference shown for code" in line and "speculate for code" not in line


def test_what_a_number_rests_on_is_said_where_it_stands(tmp_path):
    text = text_of(tmp_path)
    for said in (
        "It proposes among 4,096 of the 49,152 token ids only",
        "of each document its first 600 characters are used",
        "a paired bootstrap interval over the 40 documents that hold these tokens",
        "over `base`'s 64 most likely tokens at each position and one bin for all others (2.03 MiB kept of it), which "
        "makes it a lower bound",
        "it comes from this formula with the measured c and v and is no measurement of its own",
        "Right panel: rounds at the longest K of each curve, K = 8.",
        "The prediction's interval is over 8 prompts",
        "9 blocks (1 disturbed by other work) in 212 s, which is what their bootstrap resamples",
    ):
        assert said in text, said
    with figures.style():
        drawn = figures.costs(study_of(tmp_path / "b").records.per_target("speculate"))
    assert drawn.axes[1].get_title(loc="left") == "share of rounds that keep position j (K = 8)"


def test_a_draft_that_can_say_everything_is_not_called_short_of_words(tmp_path):
    text = text_of(tmp_path, draft=lambda m: m["training"].update(vocab=m["common_vocab_size"]))
    assert "It proposes among" not in text


def gained_and_lost(gained, lost):
    """Edits the items of 200 that an evaluation gained and lost against base."""

    def change(metrics):
        metrics["tasks"]["last_word"]["items"] = 200
        metrics["against_base"]["acc_last_word"].update(gained=gained, lost=lost)

    return change


def test_the_limit_on_accuracy_is_held_against_its_resolution(tmp_path):
    """15 gained and 11 lost of 200: 1.96 sqrt(26 - 16 / 200) / 200 = 5.0 points; the limit is 3."""
    text = text_of(tmp_path, evaluate__gptq=gained_and_lost(15, 11), evaluate__awq=gained_and_lost(2, 1))
    assert "its change against `base` is known to ± 5.0 points (`gptq`), ± 1.7 points (`awq`), 95 %" in text
    assert "the limit of 3 points is finer than that for `gptq`: it is held against the value alone" in text
    fine = {f"evaluate__{m}": gained_and_lost(2, 1) for m in ("gptq", "awq")}
    assert "the limit of 3 points is no finer than that." in text_of(tmp_path / "b", **fine)
    none = {f"evaluate__{m}": gained_and_lost(0, 0) for m in ("gptq", "awq")}
    assert "is known to" not in text_of(tmp_path / "c", **none), "no item changed: nothing is known of the spread"


def test_the_front_is_told_as_it_is_made(tmp_path):
    """Without the floor base_spec is the faster of the two at base's perplexity; 27 % within it are no gain."""

    def even(metrics):
        metrics["noise_floor"] = {"value": 1.0, "low": 0.75, "high": 1.3}

    text = text_of(tmp_path, benchmark=even)
    rule = (
        "speeds that their intervals and the noise floor do not tell apart count as equal, the other two as they are."
    )
    assert rule in text and "no other row is at least as good" not in text
    on_it = re.search(r"On it: (.*)\.\n", text)
    assert on_it and "`gptq`" in on_it.group(1) and "`base_spec`" not in on_it.group(1)


TERMS = (
    "target", "plain decoding", "greedy", "GPTQ", "AWQ", "block", "noise floor", "natural", "nats", "bits per byte",
    "Groups of", "asymmetric", "K", "token ppl", "kept",
)  # fmt: skip


def test_every_term_is_explained_once(tmp_path):
    text = text_of(tmp_path)
    assert {term: text.count(f"**{term}**") for term in TERMS} == dict.fromkeys(TERMS, 1)
    assert "the target's chat template (the marks of turns that it was trained with)" in text
    first_table, words = text.index("| row, verdict"), text.index("\nWords:\n")
    assert first_table < words < text.index("## Quality, speed and memory"), "no longer on the way to the first table"


def test_tables_of_speed_name_their_protocol(tmp_path):
    text = text_of(tmp_path)
    for heading in (
        "decode, tok/s (natural)", "speedup over `base` (natural)", "reached, tok/s (natural)", "measured (natural)",
        "answer of 48 tokens, ms (natural)", "decode, tok/s (forced)", "speedup over `base` (forced)",
    ):  # fmt: skip
        assert f" {heading} |" in text, heading
    forced = cells_after(text, "Every answer forced to")
    assert [row[0] for row in forced] == ["`base`", "`gptq`", "`awq`"] and forced[0][2] == "1"
    void = text_of(tmp_path / "b", **change_arm("gptq", verdict="VOID", reasons=["it loops"]))
    assert cells_after(void, "Every answer forced to")[1][1:] == ["n/a (VOID)"] * 2


def test_the_interaction_says_what_its_noise_and_its_factors_are_of(tmp_path):
    text = text_of(tmp_path)
    assert "the control is the same number with the second copy of `base` in its place" in text
    assert "come from the sweeps, which ran at other times than these blocks and than each other." in text


def test_two_copies_with_the_same_scores_raise_an_alarm(tmp_path):
    def twice(metrics):
        metrics["token_ppl"]["value"], metrics["tasks"] = 17.0, {"last_word": {"acc": 0.4, "acc_stderr": 0.03}}
        metrics["token_ppl"]["by_category"] = {}

    text = text_of(tmp_path, evaluate__gptq=twice, evaluate__awq=twice)
    assert "- `gptq` and `awq`: identical scores for different weights" in text
    assert "No alarms" not in text
    assert "No alarms" in text_of(tmp_path / "b", evaluate__gptq=twice)


def test_the_dtype_of_activations_is_stated_once_as_it_was_loaded(tmp_path):
    def lean(metrics):
        for arm in metrics["arms"].values():
            for loaded in filter(None, (arm["readback"], arm["draft_readback"])):
                loaded |= {"engine": "lean", "activations_dtype": "float32"}

    text = text_of(tmp_path, benchmark=lean)
    engines = {cells[0]: cells[1] for cells in cells_after(text, "## Machine") if "engine" in cells[0]}
    assert engines == {
        "engine, as loaded: speed": "lean, float32 activations",
        "engine, as loaded: quality": "hf, bfloat16 activations",
    }
    settings = text[text.index("```yaml") :]
    assert "activations_dtype" not in settings and "weights_dtype: bfloat16" in settings
    assert "Measured in the engine lean, with float32 activations, on cpu;" in settings


def cells_after(text, heading):
    """Body rows of the first table after `heading`."""
    lines = text[text.index(heading) :].splitlines()
    table = takewhile(lambda li: li.startswith("|"), dropwhile(lambda li: not li.startswith("|"), lines))
    return [[c.strip() for c in li.strip("|").split("|")] for li in list(table)[2:]]


def test_the_break_even_column_says_never_where_no_acceptance_would_do(tmp_path):
    def dear(metrics):
        next(p for p in metrics["curve"] if p["draft_len"] == 4)["break_even_acceptance"] = 1.2

    rows = cells_after(text_of(tmp_path, speculate__base=dear), "Speculation is bound by other things")
    shown = {row[1]: row[3] for row in rows if row[0] == "`base`"}
    assert shown["4"] == "never" and shown["1"].endswith("%") and shown["2"].endswith("%")


def test_candidate_drafts_are_listed_with_the_best_first(tmp_path):
    first = cells_after(text_of(tmp_path), "**Which draft?**")[0]
    # (1 + agreement) / (c + 1.1) of the fixture: 1.55 / 1.30 is the highest of the four
    assert first[:2] == ["`base`", "**the draft**"] and "55 %" in first and first[-1].startswith("1.19")
    untold = text_of(tmp_path / "b", rank_drafts=lambda m: m.update(targets={}, reason="sampling"))
    assert "Candidate drafts: n/a (sampling)." in untold


def test_batches_show_where_the_gain_ends(tmp_path):
    rows = cells_after(text_of(tmp_path), "**When sequences are decoded together**")
    assert [(r[1], r[-1]) for r in rows[:3]] == [("1", "2"), ("4", "1"), ("16", "0")]
    untold = text_of(tmp_path / "b", speculate__gptq=lambda m: m.update(batches="no batches here"))
    assert "`gptq`: n/a (no batches here)." in untold
