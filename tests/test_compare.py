"""`python -m pipeline.compare`: revisions, files, exit codes, and losses paired by document."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from comparison_fixtures import another_run, metrics_of_study, scale

from pipeline import compare

ROOT = Path(__file__).parents[1]


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


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    return metrics_of_study(tmp_path_factory.mktemp("study"))


@pytest.fixture
def after(before):
    return another_run(before)


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
