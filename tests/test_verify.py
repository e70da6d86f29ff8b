"""Two runs compared: what must be equal to the byte, what only within intervals, and where a difference lies."""

from __future__ import annotations

import shutil

import pytest

from pipeline import provenance, verify


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
        name: {"decode_tok_per_s": 50.0, "decode_tok_per_s_low": 48.0, "decode_tok_per_s_high": 52.0}
        for name in ("base", "gptq")
    }
    provenance.write_json(first / "reports/metrics.json", {"name": "tiny", "arms": arms})
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
    assert "gave the same answer" in verify.markdown("tiny", rows)


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
    assert "Two runs differ" in verify.markdown("tiny", verify.compare(*folders))


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
    assert {r.name: r.same for r in verify.compare(*folders)}["speed of base"] is None
