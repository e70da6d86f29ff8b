"""Stage `track`: the finished report and its numbers -> MLflow. Nothing reads them back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline import provenance, tracking
from pipeline.config import Track
from pipeline.reporting import records
from pipeline.stages import written_by_stages

CURVES = ("acceptance_rate", "mean_emitted_per_round", "predicted_speedup")


def run(track: Track, *, summary: Path, report: Path, figures: Path, results: Path) -> dict[str, Any]:
    """Log `summary` (reports/metrics.json), the report, its figures and the curves in `results`, once per digest.

    A store that cannot be reached is a warning and a status, never a failure.
    """
    numbers, by_name = provenance.read_json(summary), records.read(results)
    with written_by_stages(summary, results):
        curves = {t: by_name[f"speculate@{t}"]["metrics"]["curve"] for t in records.TARGETS}
        study = parent(numbers, by_name, curves, (report, summary, figures))
    digest = provenance.json_sha256([numbers, curves])
    root = tracking.repository(Path.cwd())
    outcome = tracking.log(study, digest=digest, uri=track.uri, experiment=track.experiment, root=root)
    if outcome["status"] != "unavailable":
        print(f"Tracked ({outcome['status']}): mlflow ui --backend-store-uri {track.uri}")
    return {"digest": digest, "runs": 1 + len(study.children), **outcome}


def parent(
    numbers: dict[str, Any], by_name: dict[str, Any], curves: dict[str, Any], artifacts: tuple[Path, ...]
) -> tracking.Run:
    """The study: every config key as a param; what it was made of as tags."""
    sections: dict[str, Any] = {}
    for name, record in by_name.items():
        made_with = dict(record["provenance"]["sections"])
        if name.startswith("quantize@"):
            made_with[f"quantize.{record['key']}"] = made_with.pop("quantize")
        sections |= made_with
    chosen = numbers["recommendation"]
    return tracking.Run(
        name=f"{numbers['name']}: {numbers['model']}",
        params=flatten(sections),
        metrics={
            **{f"noise_floor.{k}": v for k, v in numbers["noise_floor"].items()},
            **{f"interaction.{t}.{k}": v for t, iv in numbers["interaction"].items() for k, v in iv.items()},
        },
        tags={
            "recommendation": chosen["choice"] or "nothing qualifies",
            "mlflow.note.content": chosen["verdict"],
            **origin_tags(by_name),
        },
        artifacts=artifacts,
        children=tuple(child(name, arm, by_name, curves) for name, arm in numbers["arms"].items()),
    )


def child(name: str, arm: dict[str, Any], by_name: dict[str, Any], curves: dict[str, Any]) -> tracking.Run:
    """One arm. A speculative one carries its target's sweep, so that comparing runs lays the curves over each other."""
    target, speculative = arm["target"], arm["speculative"]
    decoding = "speculative" if speculative else "plain"
    settings: dict[str, Any] = {"decoding": decoding, "draft_len": arm["draft_len"], "target": target}
    if f"quantize@{target}" in by_name:
        settings |= flatten({"quantize": by_name[f"quantize@{target}"]["provenance"]["sections"]["quantize"]})
    if speculative:
        settings["draft.kind"] = by_name["draft"]["metrics"]["kind"]
    measured = {k: v for k, v in arm.items() if v is None or (k not in settings and tracking.is_metric(v))}
    return tracking.Run(
        name=name,
        params=settings,
        metrics={k: arm["null_reasons"].get(k, "not measured") if v is None else v for k, v in measured.items()},
        tags={k: arm[k] for k in ("verdict", "lossless") if arm[k]} | {"reasons": "; ".join(arm["reasons"])},
        curves=sweep(curves[target]) if speculative else {},
    )


def sweep(curve: list[dict[str, Any]]) -> dict[str, dict[int, Any]]:
    """Metric -> value at each draft length (the step); points that were only predicted have no measured speed."""
    found = {f"sweep.{name}": {p["draft_len"]: p[name] for p in curve if p[name] is not None} for name in CURVES}
    timed = [p for p in curve if p["measured"]]
    found["sweep.measured_speedup"] = {p["draft_len"]: p["measured"]["speedup"]["value"] for p in timed}
    return found


def origin_tags(by_name: dict[str, Any]) -> dict[str, str]:
    """Commits of the code that measured, and DVC's hash of every output."""
    origins = [record["provenance"]["git"] for record in by_name.values()]
    commits = sorted({str(o["commit"]) for o in origins})
    tags = {"git.commit": ", ".join(commits)}
    if len(commits) == 1:
        tags["mlflow.source.git.commit"] = commits[0]
    if any(o["dirty"] for o in origins):
        tags["git.dirty"] = "true"
    return tags | dvc_hashes(Path("dvc.lock"))


def dvc_hashes(lock: Path) -> dict[str, str]:
    """Tag `dvc.PATH` -> md5 for each output in dvc.lock; empty where there is none."""
    import yaml

    try:
        stages = yaml.safe_load(lock.read_text(encoding="utf-8"))["stages"]
        return {f"dvc.{out['path']}": out["md5"] for stage in stages.values() for out in stage.get("outs", [])}
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return {}


def flatten(value: Any, path: str = "") -> dict[str, str]:
    """Leaves by dotted key; lists as JSON."""
    if isinstance(value, dict) and value:
        return {k: v for key, item in value.items() for k, v in flatten(item, f"{path}.{key}" if path else key).items()}
    return {path: value if isinstance(value, str) else json.dumps(value)}
