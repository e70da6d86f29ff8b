import dataclasses
import json
from pathlib import Path

import pytest
import test_contract
from report_fixtures import PARAMS, sections_of, study, write_study

from pipeline import __main__, provenance
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


def edit(results, name, change):
    path = results / f"{name}.json"
    record = json.loads(path.read_text())
    change(record["provenance"])
    path.write_text(json.dumps(record))


READS = [(artifact, *reader) for artifact, readers in records.READ_BY.items() for reader in readers]


@pytest.mark.parametrize(("artifact", "name", "own"), READS, ids=[f"{a}-{n}-{o}" for a, n, o in READS])
def test_every_result_made_with_another_artifact_is_refused(artifact, name, own):
    """Quality of one checkpoint beside the speed of another would be a row of no model at all."""
    found = study(PARAMS)
    writer = records.WRITTEN_BY[artifact]
    found[writer]["provenance"]["outputs"] = {"out": "a" * 64}
    for other, other_own in records.READ_BY[artifact]:
        found[other]["provenance"]["inputs"][other_own] = "a" * 64
    records.check_artifacts(Path("results"), found)
    found[name]["provenance"]["inputs"][own] = "b" * 64
    with pytest.raises(records.StaleResults) as refused:
        records.check_artifacts(Path("results"), found)
    assert str(refused.value) == (
        f"results/{name}.json: made with {artifact} {'b' * 12}, but {writer}.json has {'a' * 12}; run `dvc repro`"
    )


def test_readers_that_disagree_are_refused_without_the_writers_hash(tmp_path):
    results, environment = write_study(tmp_path, PARAMS)
    edit(results, "benchmark", lambda p: p["inputs"].update(gptq="b" * 64))
    edit(results, "quantize@gptq", lambda p: p["outputs"].clear())
    with pytest.raises(records.StaleResults, match=r"benchmark\.json: made with gptq b+, but evaluate@gptq\.json has"):
        records.load(results, environment, sections_of(PARAMS))


def test_artifacts_are_read_as_the_graph_reads_them():
    """READ_BY and WRITTEN_BY against dvc.yaml: who is given the path that the writer writes."""
    stages = {entry["name"]: test_contract.paths_of(entry) for entry in test_contract.graph()}
    for artifact, readers in records.READ_BY.items():
        out = stages[records.WRITTEN_BY[artifact]]["out"]
        found = [
            (name, own)
            for name, paths in stages.items()
            for own, path in paths.items()
            if path == out and not own.startswith("out") and name in records.RECORDS
        ]
        assert sorted(found) == sorted(readers), artifact


def test_every_record_says_where_it_comes_from(tmp_path):
    """Inputs, outputs, sections, commit, device and versions: by running the smallest stage as the graph does."""
    out = tmp_path / "report"
    results, environment = write_study(tmp_path, PARAMS)
    paths = {"results": results, "environment": environment, "metrics": tmp_path / "record.json"}
    paths |= {f"out_{n}": out / n for n in ("report", "metrics", "figures", "serve")}
    __main__.run_stage("report", None, dict(paths), PARAMS)
    found = json.loads((tmp_path / "record.json").read_text())["provenance"]
    assert set(found) == {"git", "inputs", "outputs", "sections", "sections_sha256", "device", "versions"}
    assert found["inputs"]["results"] == provenance.tree_sha256(results)
    assert {n: provenance.tree_sha256(paths[n]) for n in found["outputs"]} == found["outputs"]
    assert set(found["outputs"]) == {n for n in paths if n.startswith("out")}
    assert found["sections"]["report"] == provenance.finite(PARAMS.report)
    assert found["device"]["cpu"] and found["device"]["cores"] >= 1
    assert found["versions"]["torch"]
