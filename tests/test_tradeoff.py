"""Other settings: what is a point, what is on the front, which pairs differ in the library alone."""

from __future__ import annotations

import dataclasses
import math

import pytest
from report_fixtures import PARAMS, sections_of, study, write_study

from pipeline import provenance, tradeoff
from pipeline.measure.statistics import Interval
from pipeline.reporting import records, tradeoff_section
from pipeline.reporting.study import Study
from pipeline.reporting.tradeoff_section import METHODS, Point


def points(**changes):
    """The made-up study's own copies, gptq and awq."""
    made_up = study(PARAMS)
    return [
        dataclasses.replace(Point.of(made_up[f"quantize@{m}"], made_up[f"evaluate@{m}"]), **changes) for m in METHODS
    ]


def other(point, size=None, kl=None, **settings):
    return dataclasses.replace(
        point,
        settings={**point.settings, **settings},
        weight_bytes=size or point.weight_bytes,
        kl_nats_mean=kl or point.kl_nats_mean,
    )


def section(folder, *swept):
    sections = sections_of(PARAMS)
    found = records.load(*write_study(folder, PARAMS), sections)
    text = tradeoff_section.tradeoff(Study.gather(sections, found, "figures", swept))
    return text.replace("\u00a0", " ")


def rows_of(text):
    lines = [li for li in text.split("**Two libraries**")[0].splitlines() if li.startswith("|")]
    return [[c.strip() for c in li.strip("|").split("|")] for li in lines[2:]]


def test_the_smallest_first_and_the_front_in_bold(tmp_path):
    gptq, _ = points()
    small = other(gptq, size=2**20, kl=0.5, group_size=128)
    large = other(gptq, size=2**30, kl=0.6, group_size=32)
    text = section(tmp_path, large, small, gptq)
    rows = rows_of(text)
    assert len(rows) == 4, "two of the matrix and two of the sweep; an equal one is no row"
    assert [rows[0][0], rows[-1][0]] == ["**gptq**", "gptq"], "1 GiB with a larger KL than 1 MiB is not on the front"
    assert rows[0][2] == "128" and rows[0][-4] == "1.00 MiB" and rows[-1][-4] == "1.00 GiB"
    assert "bits" not in text, "a setting that never varies has no column"
    change = 100 * math.expm1(gptq.delta_log_ppl.value)
    assert any(row[-3].startswith(f"{change:+.1f} %") for row in rows)


def test_a_setting_with_a_column_is_explained(tmp_path):
    gptq, _ = points()
    text = section(tmp_path, other(gptq, true_sequential=not gptq.settings["true_sequential"]))
    assert text.count("**true_sequential**: the modules of a layer are rounded in the order they run") == 1
    assert "**true_sequential**" not in section(tmp_path / "b", other(gptq, group_size=32)), "no column, no term"


def test_pairs_differ_in_the_library_alone(tmp_path):
    gptq, _ = points()
    twin = other(gptq, kl=gptq.kl_nats_mean / 2, backend="llmcompressor")
    other_group = other(gptq, backend="llmcompressor", group_size=32)
    other_rows = dataclasses.replace(twin, inputs={**twin.inputs, "calibration": "other"})
    pairs = section(tmp_path, twin, other_group, other_rows).split("**Two libraries**")[1]
    assert pairs.count("auto_gptq / llmcompressor") == 1 and "| 2.00 |" in " ".join(pairs.split())
    assert "no two of these differ" in section(tmp_path, other_group)


def test_points_of_another_model_or_text_are_counted_and_left_out(tmp_path):
    gptq, awq = points()
    strangers = [
        dataclasses.replace(gptq, inputs={**gptq.inputs, name: "other"}) for name in tradeoff_section.SAME_QUALITY
    ]
    text = section(tmp_path, *strangers)
    assert "4 of the sweep's copies belong to another model" in text and "|" not in text
    assert "Only the copies in the matrix" in section(tmp_path, gptq, awq)


def test_a_setting_within_the_limit_is_named_where_the_matrix_has_none(tmp_path):
    gptq, awq = points()
    own = [100 * math.expm1(p.delta_log_ppl.value) for p in (gptq, awq)]
    better, good = (dataclasses.replace(awq, delta_log_ppl=Interval(v, v - 0.001, v + 0.001)) for v in (0.0, 0.001))
    swept = [
        other(better, size=3 * 2**20, group_size=16, calibration_rows=None),
        other(good, size=2 * 2**20, group_size=32, backend="llmcompressor"),
        other(gptq, size=2**20, group_size=128),
    ]

    def named(limit, *swept):
        params = dataclasses.replace(PARAMS, report=dataclasses.replace(PARAMS.report, max_ppl_increase_pct=limit))
        sections = sections_of(params)
        found = records.load(*write_study(tmp_path, params), sections)
        return tradeoff_section.within_reach(Study.gather(sections, found, "figures", swept))

    text = named(min(own) / 2, *swept).replace("\u00a0", " ")
    assert "awq at +0.1 % (+0.0 to +0.2), 2.00 MiB as stored" in text, "the smallest that meets it"
    assert "`dvc exp run -S quantize.awq.backend=llmcompressor -S quantize.awq.group_size=32`" in text
    assert named(min(own) / 2, swept[-1]) is None, "none meets it"
    assert named(min(own) + 0.1, *swept) is None, "a row of the matrix does"
    assert named(None, *swept) is None, "no limit"
    assert "-S quantize.awq.calibration_rows=null -S quantize.awq.group_size=16" in named(min(own) / 2, swept[0])


def lay_out(folder, key="gptq", **settings):
    """Records of one quantized and evaluated copy, as a job leaves them."""
    made_up = study(PARAMS)
    made_up[f"quantize@{key}"]["metrics"]["recipe"]["settings"].update(settings)
    for stage in ("quantize", "evaluate"):
        provenance.write_json(folder / f"artifacts/metrics/{stage}@{key}.json", made_up[f"{stage}@{key}"])
    return made_up


def run(tmp_path):
    return tradeoff.main(
        [str(tmp_path / "multirun"), "--workspace", str(tmp_path), "--out", str(tmp_path / "reports/sweep.json")]
    )


def test_the_file_holds_the_workspace_and_every_job_once(tmp_path, capsys):
    lay_out(tmp_path)
    for i, group_size in enumerate((64, 32, 32)):
        provenance.write_json(tmp_path / f"multirun/{i}/summary.json", {})
        lay_out(tmp_path / f"multirun/{i}", group_size=group_size)
    provenance.write_json(tmp_path / "multirun/3/summary.json", {"error": "quantize.gptq.bits: 9 is above"})
    assert run(tmp_path) == 0
    found = tradeoff_section.read(tmp_path / "reports/sweep.json")
    assert sorted(p.settings["group_size"] for p in found) == [32, 64]
    assert found[0] == points()[0], "read back as it was"
    told = capsys.readouterr()
    assert " 32 |" in told.out and "failed: quantize.gptq.bits: 9 is above" in told.err


@pytest.mark.parametrize("missing", ["quantize@gptq", "evaluate@gptq"])
def test_a_job_that_did_one_of_the_two_is_no_point(tmp_path, capsys, missing):
    lay_out(tmp_path)
    (tmp_path / f"artifacts/metrics/{missing}.json").unlink()
    assert run(tmp_path) == 2
    assert "no job quantized and evaluated; run `make sweep`" in capsys.readouterr().err
    assert not (tmp_path / "reports").exists()


def test_quality_of_another_checkpoint_is_refused(tmp_path, capsys):
    evaluated = lay_out(tmp_path)["evaluate@gptq"]
    evaluated["provenance"]["inputs"]["checkpoint"] = "other"
    provenance.write_json(tmp_path / "artifacts/metrics/evaluate@gptq.json", evaluated)
    assert run(tmp_path) == 2 and "scored another checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "{}", '{"points": [{}]}', '{"points": 3}', "half"])
def test_a_file_that_is_no_sweep_is_named(tmp_path, text):
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(ValueError, match=r"sweep\.json: "):
        tradeoff_section.read(tmp_path / "sweep.json")
