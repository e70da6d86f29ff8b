"""The same records give the same bytes in any process: figures, report, numbers and reports/serve."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from report_fixtures import PARAMS, write_study

from pipeline import provenance

ROOT = Path(__file__).parents[1]


def rendered(folder: Path, out: Path, **environment: str) -> dict[str, bytes]:
    """Every file that the stage writes, in a process of its own."""
    results, machine = write_study(folder, PARAMS)
    params = folder / "params.yaml"
    params.write_text(yaml.safe_dump(provenance.finite(PARAMS)))
    names = {"report": "report.md", "metrics": "metrics.json", "figures": "figures", "serve": "serve"}
    outputs = [f"out_{name}={out / path}" for name, path in names.items()]
    arguments = ["report", f"results={results}", f"environment={machine}", *outputs, f"--params={params}"]
    subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        check=True,
    )
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def renders(tmp_path_factory):
    places = [{"PYTHONHASHSEED": "1", "TZ": "Asia/Tokyo"}, {"PYTHONHASHSEED": "2", "TZ": "America/Lima"}]
    return [
        rendered(tmp_path_factory.mktemp(f"study{i}"), tmp_path_factory.mktemp(f"reports{i}"), **place)
        for i, place in enumerate(places)
    ]


def test_two_renders_of_the_same_records_are_the_same_bytes(renders):
    first, second = renders
    assert list(first) == list(second)
    assert {name.partition("/")[0] for name in first} == {"report.md", "metrics.json", "figures", "serve"}
    for name, content in first.items():
        assert content == second[name], name


def test_figures_are_drawn_and_hold_no_date(renders):
    drawn = {name: content for name, content in renders[0].items() if name.endswith(".svg")}
    assert len(drawn) == 8
    assert all(b"<svg" in content and b"<dc:date>" not in content for content in drawn.values())
