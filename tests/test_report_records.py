import dataclasses
import json

import pytest
from report_fixtures import PARAMS, sections_of, write_study

from pipeline.reporting import records


def test_results_of_the_present_configuration_are_taken(tmp_path):
    found = records.load(*write_study(tmp_path, PARAMS), sections_of(PARAMS))
    assert tuple(found.by_name) == records.RECORDS
    assert found.environment["cpu"] == "Made-Up CPU"
    assert list(found.per_target("evaluate")) == ["base", "gptq", "awq"]


def test_a_result_made_with_another_setting_is_refused_by_file_key_and_both_values(tmp_path):
    results, environment = write_study(tmp_path, PARAMS)
    sections = sections_of(PARAMS)
    sections["evaluate"] = dataclasses.replace(PARAMS.evaluate, window_tokens=1024)
    with pytest.raises(records.StaleResults) as refused:
        records.load(results, environment, sections)
    assert str(refused.value) == (
        f"{results}/evaluate@base.json: made with evaluate.window_tokens={PARAMS.evaluate.window_tokens}, "
        f"but params.yaml now has 1024; run `dvc repro`"
    )


def test_only_the_method_that_changed_makes_its_own_result_stale(tmp_path):
    results, environment = write_study(tmp_path, PARAMS)
    sections = sections_of(PARAMS)
    sections["quantize"] = PARAMS.quantize | {"awq": dataclasses.replace(PARAMS.quantize["awq"], bits=8)}
    with pytest.raises(records.StaleResults, match=r"quantize@awq\.json: made with quantize\.awq\.bits=4"):
        records.load(results, environment, sections)


def test_a_result_of_another_machine_is_refused(tmp_path):
    results, environment = write_study(tmp_path, PARAMS)
    record = json.loads((results / "benchmark.json").read_text())
    record["provenance"]["inputs"]["environment"] = "0" * 64
    (results / "benchmark.json").write_text(json.dumps(record))
    with pytest.raises(records.StaleResults, match=r"benchmark\.json: measured on another machine"):
        records.load(results, environment, sections_of(PARAMS))


def test_an_absent_result_is_named(tmp_path):
    results, environment = write_study(tmp_path, PARAMS)
    (results / "speculate@awq.json").unlink()
    with pytest.raises(ValueError, match=r"speculate@awq\.json: not found; run `dvc repro`"):
        records.load(results, environment, sections_of(PARAMS))


@pytest.mark.parametrize(
    ("then", "now", "found"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 1}}, None),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, ("s.a.b", 1, 2)),
        ({"a": 1}, {"a": 1, "new": 3}, ("s.new", None, 3)),
        ({"gone": 1}, {}, ("s.gone", 1, None)),
        ({"a": [1, 2]}, {"a": [2, 1]}, ("s.a", [1, 2], [2, 1])),
        ({"a": 1}, {"a": 1.0}, None),
    ],
)
def test_first_difference_names_the_leaf(then, now, found):
    assert records.first_difference(then, now, "s") == found
