"""Every case from the field has a test that is found by name, and those that had none have it here."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from bad_input.world import digest
from quantize_fixtures import make_model, method

from pipeline import provenance, tracking

TESTS = Path(__file__).parent
CASES = yaml.safe_load((TESTS / "cases.yaml").read_text())


def functions(file: Path) -> dict[str, set[str]]:
    """Test functions of a file, each with the cases that its own decorators name."""
    found = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            text = " ".join(map(ast.unparse, node.decorator_list))
            found[node.name] = set(re.findall(r"pytest\.mark\.case\('(\w+)'\)", text))
    return found


@pytest.fixture(scope="module")
def written() -> dict[str, dict[str, set[str]]]:
    return {file.name: functions(file) for file in TESTS.glob("test_*.py")}


@pytest.mark.parametrize("entry", CASES, ids=lambda entry: entry["name"])
def test_every_case_has_tests_that_exist(entry, written):
    for test in entry["tests"]:
        file, _, name = test.partition("::")
        assert name in written.get(file, {}), f"{entry['name']}: {test} is gone; name the test that holds it now"
    own = [name for name, cases in written["test_cases.py"].items() if entry["name"] in cases]
    assert entry["tests"] or own


def test_the_cases_are_all_there_and_each_once(written):
    """By area, as they were collected; marks name no other."""
    areas = Counter(entry["name"].partition("_")[0] for entry in CASES)
    assert {a: areas[a] for a in ("calibration", "checkpoint", "evaluation", "speculation", "benchmark")} == {
        "calibration": 3, "checkpoint": 9, "evaluation": 4, "speculation": 5, "benchmark": 3,
    }  # fmt: skip
    names = [entry["name"] for entry in CASES]
    assert len(names) == len(set(names)) == 30
    marked = set().union(*(cases for found in written.values() for cases in found.values()))
    assert marked <= set(names)


def test_a_case_is_run_by_its_name():
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-o",
        "addopts=-q",
        "--collect-only",
        "-k",
        "case_speculation_accepted_prefix",
    ]
    files = [str(TESTS / name) for name in ("test_measure_speculation.py", "test_cases.py")]
    done = subprocess.run([*words, *files], cwd=TESTS.parent, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(found) == 1 and "test_acceptance_counts_the_accepted_prefix" in found[0], done.stdout


@pytest.mark.case("calibration_rows_of_unequal_length")
def test_inputs_of_a_module_weigh_every_token_alike(tmp_path):
    """Rows of 40 and 8 tokens: the second moment is (40 A + 8 B) / 48 of the rows' own, in either order."""
    from pipeline.quantizers import llmcompressor
    from pipeline.quantizers.error import reference
    from pipeline.quantizers.plan import make_plan

    make_model(tmp_path / "m")
    plan = make_plan(tmp_path / "m", method(), "quantize.gptq", llmcompressor)
    long, short = [(7 * i) % 128 for i in range(40)], [(11 * i + 3) % 128 for i in range(8)]

    def moments(*rows: list[int]) -> dict[str, torch.Tensor]:
        inputs, _ = reference(tmp_path / "m", plan, list(rows), long[:4], "cpu", "float32")
        assert all(len(x) == sum(map(len, rows)) for x in inputs.values()), "no token is padded, cut or skipped"
        return {name: x.double().T @ x.double() / len(x) for name, x in inputs.items()}

    a, b, both, turned = moments(long), moments(short), moments(long, short), moments(short, long)
    for name in plan.shapes:
        by_hand = (40 * a[name] + 8 * b[name]) / 48
        assert torch.allclose(both[name], by_hand, rtol=1e-6, atol=1e-9)
        assert torch.allclose(both[name], turned[name], rtol=1e-6, atol=1e-9)
        assert not torch.allclose(by_hand, (a[name] + b[name]) / 2, rtol=1e-2), "a mean of rows would differ"


@pytest.mark.case("numbers_that_are_not_finite")
def test_the_best_perplexity_is_a_number(tmp_path):
    """NaN, infinity and 12.3: strict JSON keeps one number, and only that one can be compared or logged."""
    values = {"a": math.nan, "b": math.inf, "c": 12.3}
    provenance.write_json(tmp_path / "r.json", values)
    text = (tmp_path / "r.json").read_text()
    found = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert found == {"a": None, "b": None, "c": 12.3}
    assert [k for k, v in values.items() if tracking.is_metric(v)] == ["c"]


@pytest.mark.case("numbers_that_are_not_finite")
@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_a_row_without_a_perplexity_is_never_recommended(tmp_path, bad):
    from report_fixtures import PARAMS, sections_of, write_study

    from pipeline.reporting import records
    from pipeline.reporting.study import Study

    def change(metrics: dict) -> None:
        metrics["token_ppl"]["value"] = bad
        metrics["against_base"] = {**metrics["against_base"], "log_ppl_change": None}

    changes = {"evaluate__gptq": change}
    sections = sections_of(PARAMS)
    plain = Study.gather(sections, records.load(*write_study(tmp_path / "good", PARAMS), sections), "figures")
    assert plain.recommendation.choice == "gptq", "the row that would be chosen"
    spoilt = Study.gather(
        sections, records.load(*write_study(tmp_path / "bad", PARAMS, **changes), sections), "figures"
    )
    assert spoilt.recommendation.choice not in ("gptq", "gptq_spec")


KILLED = """
import os, sys
from pipeline import provenance
from pipeline.__main__ import main
write = provenance.write_json
def half_way(path, value):  # the folder beside the results is half full, and the record is still to come
    write(path, value)
    os.kill(os.getpid(), int(sys.argv[1]))
if int(sys.argv[1]):
    provenance.write_json = half_way
sys.exit(main(["fetch_corpus", "out=corpus", "metrics=record.json"]))
"""


@pytest.mark.case("killed_in_the_middle")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_in_the_middle_of_a_stage_keeps_the_old_result_and_a_rerun_finishes(tmp_path, sent):
    from report_fixtures import PARAMS

    tree = provenance.finite(PARAMS)
    prose = {"source": "path", "path": "texts", "reader": "text", "min_chars": 0, "evaluation_documents": ["b*"]}
    tree["corpus"] = {"prose": tree["corpus"]["prose"] | prose}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "texts").mkdir()
    for name in "ab":
        (tmp_path / f"texts/{name}.txt").write_text(f"Text {name}.\n")
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent)}

    def run(number: int) -> subprocess.CompletedProcess:
        words = [sys.executable, "-c", KILLED, str(number)]
        # where the tests run in the background, SIGINT is ignored, and children inherit that
        told = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, **told)

    assert run(0).returncode == 0
    first = digest(tmp_path / "corpus")
    (tmp_path / "texts/c.txt").write_text("Another text.\n")
    done = run(sent)
    assert done.returncode == (-sent if sent == signal.SIGKILL else 130), done.stderr
    assert digest(tmp_path / "corpus") == first, "the old result is whole"
    if sent != signal.SIGKILL:
        assert done.stderr == "interrupted: nothing half-written was kept\n"
        assert not list(tmp_path.glob("*partial*")) + list(tmp_path.glob(".*partial*"))
    assert run(0).returncode == 0
    assert digest(tmp_path / "corpus") != first and not list(tmp_path.glob("corpus.partial"))
