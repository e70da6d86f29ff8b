"""`python -m pipeline.compare --base REV`: the results of the working tree against those committed at REV.

Writes reports/compare.md and ends with 1 when a number is worse by more than `report.compare` allows, else with 0; with
2 when there is nothing to compare with. Reads reports/metrics.json and params.yaml of REV through git, and the losses
by document through DVC where its cache has them.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline import config, provenance
from pipeline.__main__ import refused
from pipeline.measure.statistics import Interval, paired_mean_difference
from pipeline.reporting import comparison, comparison_document
from pipeline.reporting.conditions import differences, flat

METRICS, PARAMS, OUT = Path("reports/metrics.json"), Path("params.yaml"), Path("reports/compare.md")
LOSSES = "artifacts/evaluate/{target}/token_nll.parquet"
OWN_SETTINGS = ("report.compare.",)  # the ruler, not what it measures
SAME_PERPLEXITY = 1e-6  # relative: the losses at hand are those of the results


class CompareError(ValueError):
    """Nothing to compare with: names the revision or file, and a way out."""


def git(*arguments: str) -> str | None:
    """Standard output, or None when git fails. Raises CompareError without git."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, check=False)
    except FileNotFoundError:
        raise CompareError(
            "git: not found on the PATH; install it, results of other commits are read with it"
        ) from None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


def commit_of(revision: str) -> str:
    """The commit that `revision` names. Raises CompareError."""
    if git("rev-parse", "--git-dir") is None:
        raise CompareError(f"--base {revision}: this folder is in no git repository; run it in a clone")
    found = git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if found is None:
        raise CompareError(
            f"--base {revision}: git knows no such commit; give a branch, tag or hash (git fetch it first)"
        )
    return found.strip()


def at(revision: str, commit: str, path: Path) -> str:
    """A tracked file as of `commit`. Raises CompareError."""
    text = git("show", f"{commit}:./{path.as_posix()}")
    if text is None:
        raise CompareError(f"--base {revision}: has no {path}; give a revision at which `make repro` was committed")
    return text


def summary_of(text: str, source: str) -> dict[str, Any]:
    """metrics.json with the parts a comparison needs. Raises CompareError."""
    needed = ("arms", "noise_floor", "recommendation", "provenance")
    try:
        found = json.loads(text)
    except json.JSONDecodeError as e:
        raise CompareError(f"{source}: not JSON ({e}); run `make repro` there and commit it") from None
    if not isinstance(found, dict) or any(name not in found for name in needed):
        raise CompareError(f"{source}: lacks one of {', '.join(needed)}; run `make repro` there and commit it")
    return found


def settings_that_differ(before: str, after: str) -> dict[str, tuple[Any, Any]]:
    """Dotted keys of two params.yaml, with both values."""
    import yaml

    trees = (dict(flat(yaml.safe_load(text), "")) for text in (before, after))
    found = differences(*trees)
    return {key: values for key, values in found.items() if not key.startswith(OWN_SETTINGS)}


def log_perplexity_changes(
    commit: str, before: Mapping[str, Any], after: Mapping[str, Any], seed: int
) -> dict[str, Interval]:
    """Change of each target's log-perplexity, paired by document; targets whose losses are not at hand are absent."""
    found = {}
    targets = [name for name, arm in after["arms"].items() if not arm["speculative"] and name in before["arms"]]
    for target in targets:
        path = Path(LOSSES.format(target=target))
        then = losses(from_cache(path, commit), before["arms"][target]["token_ppl"])
        now = losses(path.read_bytes() if path.is_file() else None, after["arms"][target]["token_ppl"])
        if then is not None and now is not None and list(then) == list(now):
            pairs = [(then[key], now[key]) for key in then]
            if all(a[1] == b[1] for a, b in pairs):
                grown = [b[0] - a[0] for a, b in pairs]
                found[target] = paired_mean_difference(grown, [a[1] for a, _ in pairs], seed)
    return found


def from_cache(path: Path, commit: str) -> bytes | None:
    """An output of the graph as of `commit`, from DVC's cache or remote; None when neither has it."""
    import dvc.api
    from dvc.exceptions import DvcException

    try:
        with dvc.api.open(path.as_posix(), repo=".", rev=commit, mode="rb") as file:
            return bytes(file.read())
    except (DvcException, OSError, ValueError):
        return None


def losses(parquet: bytes | None, token_ppl: float | None) -> dict[str, tuple[float, int]] | None:
    """document -> (nats, tokens); None unless they give the perplexity of the results."""
    if parquet is None or token_ppl is None:
        return None
    import pandas

    table = pandas.read_parquet(io.BytesIO(parquet))
    perplexity = math.exp(table["nll_nats"].sum() / table["tokens"].sum())
    if not math.isclose(perplexity, token_ppl, rel_tol=SAME_PERPLEXITY):
        return None
    keys = table["category"] + "/" + table["document"]
    return dict(zip(keys, zip(table["nll_nats"], table["tokens"], strict=True), strict=True))


def compare(revision: str) -> tuple[comparison.Comparison, str]:
    """The comparison and its document. Raises ValueError: the revision, a file or a setting is not usable."""
    commit = commit_of(revision)
    params = config.load(PARAMS)
    before = summary_of(at(revision, commit, METRICS), f"--base {revision}: {METRICS}")
    if not METRICS.is_file():
        raise CompareError(f"{METRICS}: not found; run `make repro` first")
    after = summary_of(METRICS.read_text(encoding="utf-8"), str(METRICS))
    log_ppl = log_perplexity_changes(commit, before, after, params.runtime.seed)
    found = comparison.compare(before, after, params.report.compare, log_ppl)
    settings = settings_that_differ(at(revision, commit, PARAMS), PARAMS.read_text(encoding="utf-8"))
    return found, comparison_document.render(revision, found, before, after, settings, params.report.compare)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.compare", description=__doc__.split("\n")[0])
    parser.add_argument("--base", required=True, metavar="REV", help="commit, branch or tag to compare with")
    args = parser.parse_args(argv)
    try:
        found, text = compare(args.base)
        provenance.write_text(OUT, text)
    except (ValueError, OSError) as e:
        return refused(e, [str(OUT)])
    print(f"{comparison_document.headline(found)}.\nComparison: {OUT}")
    return 1 if found.regressions else 0


if __name__ == "__main__":
    sys.exit(main())
