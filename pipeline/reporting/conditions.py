"""What two studies must have in common before their numbers are compared, and what they ran, as flat keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline import provenance
from pipeline.measure import guards
from pipeline.reporting.study import Study

PACE = ("max_new_tokens", "forced_new_tokens", "prompts_per_category")  # of section benchmark; budgets only add blocks
NOT_SCORED = ("batch_size",)  # of section evaluate: how, not what
SETUP = ("engine", "weights_dtype", "activations_dtype", "threads", "device")


def conditions(study: Study) -> dict[str, Any]:
    """`speed`, `quality`: equal in both studies, or their numbers do not compare. `rows`: what ran, as loaded."""
    return {
        "speed": _speed(study),
        "quality": _quality(study),
        "rows": {name: _row(study, name) for name in study.rows},
    }


def _speed(study: Study) -> dict[str, Any]:
    config, machine = study.config, study.records.environment
    benchmark = study.records.by_name["benchmark"]
    named = (
        "cpu",
        "cpu_features",
        "gpus",
        "cores",
        "threads",
        "memory_gib",
        "system",
        "python",
        "compiler",
        "versions",
    )
    settings = provenance.finite(
        {
            "benchmark": {name: getattr(config.benchmark, name) for name in PACE},
            "runtime": {name: getattr(config.runtime, name) for name in ("device", "dtype", "threads")},
            "sampling": config.speculate.sampling,
        }
    )
    return {
        **dict(flat({name: machine.get(name) for name in named}, "machine")),
        **dict(flat(settings, "settings")),
        "block_prompts_per_category": config.benchmark.timing.block_prompts_per_category,
        "prompts_sha256": benchmark["metrics"]["prompts"]["sha256"],
        "target_sha256": benchmark["provenance"]["inputs"].get("base"),
    }


def _quality(study: Study) -> dict[str, Any]:
    base = study.records.by_name["evaluate@base"]
    settings = {k: v for k, v in provenance.finite(study.config.evaluate).items() if k not in NOT_SCORED}
    versions = study.records.environment["versions"]
    return {
        **dict(flat(settings, "settings.evaluate")),
        **{f"versions.{name}": versions.get(name) for name in ("torch", "transformers", "lm-eval")},
        "dtype": study.config.runtime.dtype,
        "tasks_sha256": base["metrics"]["task_hash"],
        "scored_tokens": base["metrics"]["token_ppl"]["tokens"],
        "corpus_sha256": base["provenance"]["inputs"].get("corpus"),
        "target_sha256": base["provenance"]["inputs"].get("checkpoint"),
    }


def _row(study: Study, name: str) -> dict[str, Any]:
    arm, row = study.arms[name], study.rows[name]
    if arm["readback"] is None:
        return {}
    draft = arm.get("draft") or {}
    return {
        **{n: arm["readback"].get(n) for n in SETUP},
        "kernel": guards.main_kernel(arm["readback"]),
        "draft": f"{draft['kind']}, {draft['precision'].partition(' ')[0]}" if draft else None,
        "draft_len": row.draft_len,
        "lossless": row.lossless,
    }


def flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Leaves with their dotted keys; lists are leaves."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ, with both; an absent key counts as None."""
    keys = [*before, *(k for k in after if k not in before)]
    return {k: (before.get(k), after.get(k)) for k in keys if before.get(k) != after.get(k)}
