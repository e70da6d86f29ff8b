"""Two runs compared: what must be equal to the byte, what only within intervals, and where a difference lies."""

from __future__ import annotations

import json
import shutil

import pytest

from pipeline import provenance, verify


def busy(folder, cores, load):
    """Blocks beside which other processes took so many cores; two lines each, as two arms leave them."""
    seen = [{"block": i, "other_cores": c, "steal_cores": 0.0, "load_1min": load + i} for i, c in enumerate(cores)]
    lines = [json.dumps({**block, "arm": arm}) for block in seen for arm in ("base", "gptq")]
    provenance.write_text(folder / "artifacts/benchmark/blocks.jsonl", "\n".join(lines) + "\n")


def document(folders):
    return verify.markdown("tiny", verify.compare(*folders), [verify.other_work(f) for f in folders])


@pytest.fixture
def folders(tmp_path):
    first = tmp_path / "first"
    for name in verify.ARTIFACTS:
        provenance.write_text(first / "artifacts" / name / "file", f"of {name}")
    for key in verify.TARGETS:
        trace = [{"prompt": "code:1", "ids": [1, 2, 3], "hits": [True, False], "decode_s": 0.1}]
        provenance.write_json(first / f"artifacts/speculate/{key}/trace.json", trace)
        metrics = {"token_ppl": {"value": 17.5}, "tasks": {"last_word": {"acc": 0.3}}, "against_base": {"kl": 0.1}}
        provenance.write_json(first / f"artifacts/metrics/evaluate@{key}.json", {"metrics": metrics})
    arms = {
        name: {"decode_tok_per_s": 50.0, "decode_tok_per_s_low": 48.0, "decode_tok_per_s_high": 52.0, "draft_len": 0}
        for name in ("base", "gptq")
    }
    provenance.write_json(first / "reports/metrics.json", {"name": "tiny", "arms": arms})
    timed = {
        "metrics": {"blocks": {"run": 3, "disturbed": 0}},
        "provenance": {"sections": {"benchmark": {"timing": {"max_load": 1.5}}}},
    }
    provenance.write_json(first / "artifacts/metrics/benchmark.json", timed)
    busy(first, [0.25, 0.75], load=1.5)
    second = tmp_path / "second"
    shutil.copytree(first, second)
    return first, second


def change(path, edit):
    value = provenance.read_json(path)
    edit(value)
    provenance.write_json(path, value)


def differing(folders):
    return {r.name: r.detail for r in verify.compare(*folders) if r.same is False}


def test_equal_runs_are_equal_in_every_row(folders):
    rows = verify.compare(*folders)
    assert differing(folders) == {} and len(rows) == len(verify.ARTIFACTS) + 4 * 3 + 2 + 2
    text = document(folders)
    assert "identical: **yes** (25 of 25). Speeds within their intervals: **2 of 2**." in text
    assert "that differ" not in text


def test_times_in_a_trace_do_not_count(folders):
    change(folders[1] / "artifacts/speculate/base/trace.json", lambda t: t[0].update(decode_s=9.0))
    assert differing(folders) == {}


@pytest.mark.parametrize(
    ("file", "edit", "name", "detail"),
    [
        (
            "artifacts/speculate/gptq/trace.json",
            lambda t: t[0]["ids"].reverse(),
            "answers of gptq",
            "[0][1][0]: 1 and 3",
        ),
        (
            "artifacts/speculate/awq/trace.json",
            lambda t: t[0].update(hits=[True, True]),
            "acceptance trace of awq",
            "[0][1][1]: False and True",
        ),
        (
            "artifacts/metrics/evaluate@awq.json",
            lambda m: m["metrics"]["against_base"].update(kl=0.2),
            "divergence of awq from base",
            ".kl: 0.1 and 0.2",
        ),
    ],
)
def test_a_difference_is_named_with_its_place(folders, file, edit, name, detail):
    change(folders[1] / file, edit)
    assert differing(folders) == {name: detail}
    assert "identical: **no** (24 of 25). Speeds within their intervals: **2 of 2**." in document(folders)


def test_one_other_byte_in_a_checkpoint_is_a_difference(folders):
    (folders[1] / "artifacts/quantized/awq/file").write_text("of quantized/awQ")
    assert list(differing(folders)) == ["quantized/awq"]


def test_speeds_differ_beyond_their_intervals_only(folders):
    metrics = folders[1] / "reports/metrics.json"
    change(metrics, lambda m: m["arms"]["base"].update(decode_tok_per_s_low=51.0, decode_tok_per_s_high=60.0))
    assert differing(folders) == {}
    change(metrics, lambda m: m["arms"]["base"].update(decode_tok_per_s_low=53.0))
    assert list(differing(folders)) == ["speed of base"]
    change(metrics, lambda m: m["arms"]["base"].update(decode_tok_per_s_low=None))
    assert "Speeds within their intervals: **1 of 2** (1 not compared)." in document(folders)
    assert {r.name: r.same for r in verify.compare(*folders)}["speed of base"] is None


def test_speeds_at_other_draft_lengths_are_not_compared(folders):
    """Which is best is a matter of timing, so two runs may choose differently."""
    change(folders[1] / "reports/metrics.json", lambda m: m["arms"]["gptq"].update(draft_len=2, decode_tok_per_s=70.0))
    assert "| speed of gptq" in (text := document(folders)) and "K = 0 and 2: each run's own timings choose it" in text
    assert "Speeds within their intervals: **1 of 2** (1 not compared)." in text


def slow(folder, name, value):
    ends = {"decode_tok_per_s": value, "decode_tok_per_s_low": value - 1, "decode_tok_per_s_high": value + 1}
    change(folder / "reports/metrics.json", lambda m: m["arms"][name].update(ends))


def test_speeds_that_differ_stand_beside_what_else_ran(folders):
    slow(folders[1], "base", 30.0)
    slow(folders[1], "gptq", 70.0)
    busy(folders[1], [1.0, 1.5], load=3.0)
    text = document(folders)
    assert "identical: **yes** (25 of 25). Speeds within their intervals: **0 of 2**." in text
    limit = "0 of 3 blocks flagged as disturbed, which takes more than 1.5 cores."
    assert f"- first run: 0.50 cores, load 1.5 to 2.5; {limit}" in text
    assert f"- second run: 1.25 cores, load 3.0 to 4.0; {limit}" in text
    assert "Of 2 speeds that differ, the run with more other work beside it is the slower one in 1." in text


def test_a_system_that_does_not_tell_the_load_is_said(folders):
    slow(folders[1], "base", 30.0)
    busy(folders[1], [None], load=3.0)
    text = document(folders)
    assert "- second run: cores not recorded, load 3.0 to 3.0;" in text and "that differ" not in text
