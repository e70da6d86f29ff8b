"""The table over settings: what is a row, what is on the front, which pairs differ in the library alone."""

from __future__ import annotations

import math

import pytest

from pipeline import provenance, tradeoff

SETTINGS = {
    "backend": "auto_gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": False, "zero_point": True,
    "clip": False, "duo_scaling": True,
}  # fmt: skip


def job(method="gptq", size=100_000_000, kl=0.1, **settings):
    return {
        f"quantize@{method}": {"recipe": {"settings": {**SETTINGS, **settings}}, "weight_bytes": size},
        f"evaluate@{method}": {
            "against_base": {
                "delta_log_ppl": {"value": math.log(1.1), "low": math.log(1.05), "high": math.log(1.2)},
                "kl_nats_mean": kl,
                "top1_agreement": 0.9,
            }
        },
    }


def laid_out(tmp_path, jobs):
    for i, summary in enumerate(jobs):
        provenance.write_json(tmp_path / f"multirun/{i}/summary.json", summary)
    return tradeoff.main([str(tmp_path / "multirun"), "--metrics", str(tmp_path), "--out", str(tmp_path / "sweep.md")])


def rows_of(text):
    table = text.split("## The same settings")[0]
    return [
        [c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines() if "auto" in line or "llm" in line
    ]


def test_the_smallest_first_and_the_front_in_bold(tmp_path, capsys):
    jobs = [job(size=120_000_000, kl=0.05, group_size=32), job(), job(size=110_000_000, kl=0.2, group_size=128)]
    assert laid_out(tmp_path, jobs) == 0
    text = (tmp_path / "sweep.md").read_text()
    assert text.strip() == capsys.readouterr().out.strip()
    rows = rows_of(text)
    assert [r[3] for r in rows] == ["100.0", "110.0", "120.0"]
    assert [r[0] for r in rows] == ["**gptq**", "gptq", "**gptq**"], "110 MB is larger than 100 MB and no better"
    assert rows[0][2] == "64" and rows[0][4] == "+10.0 (+5.0 to +20.0)"
    assert "bits" not in text.splitlines()[4], "a setting that never varies has no column"


def test_pairs_differ_in_the_backend_alone(tmp_path):
    jobs = [job(), job(backend="llmcompressor", kl=0.08), job(backend="llmcompressor", group_size=32)]
    assert laid_out(tmp_path, jobs) == 0
    pairs = (tmp_path / "sweep.md").read_text().split("two libraries")[1]
    assert pairs.count("auto_gptq / llmcompressor") == 1
    assert "0.1000 / 0.0800 | " in pairs and "1.25" in pairs


def test_the_workspace_is_a_row_and_equal_jobs_are_one(tmp_path):
    for name, metrics in job(kl=0.3).items():
        provenance.write_json(tmp_path / f"{name}.json", {"metrics": metrics})
    assert laid_out(tmp_path, [job(kl=0.3), job(method="awq", kl=0.2)]) == 0
    assert len(rows_of((tmp_path / "sweep.md").read_text())) == 2


def test_failed_jobs_are_named_and_nothing_at_all_is_an_error(tmp_path, capsys):
    assert laid_out(tmp_path, [job(), {"error": "quantize.gptq.bits: 9 is above"}]) == 0
    assert "- failed: quantize.gptq.bits: 9 is above" in (tmp_path / "sweep.md").read_text()
    capsys.readouterr()
    assert tradeoff.main([str(tmp_path / "nowhere"), "--metrics", str(tmp_path / "nowhere")]) == 2
    assert "no job quantized and evaluated; run `make sweep`" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["quantize@gptq", "evaluate@gptq"])
def test_a_job_that_did_one_of_the_two_is_no_row(missing):
    summary = job()
    del summary[missing]
    assert tradeoff.points_of(summary) == []
