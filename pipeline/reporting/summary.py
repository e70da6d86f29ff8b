"""reports/metrics.json: the report's numbers as flat scalars, for `dvc metrics diff` and for tracking.

Keys end in their unit; an interval is `name`, `name_low`, `name_high`. What was not measured is null, its reason under
`null_reasons`. `kl_nats_mean` of base is null: it is the reference of that number, so there is nothing to measure. A
speculative row repeats its target's quality, and `quality_of` says whose it is.
"""

from __future__ import annotations

from typing import Any

from pipeline import provenance
from pipeline.measure.statistics import Interval
from pipeline.reporting import deployment, headline
from pipeline.reporting.conditions import conditions
from pipeline.reporting.numbers import interval_of
from pipeline.reporting.records import Records
from pipeline.reporting.rows import Row
from pipeline.reporting.study import Study


def summarize(study: Study) -> dict[str, Any]:
    benchmark, chosen = study.records.metrics("benchmark"), study.recommendation
    return {
        "name": study.config.name,
        "model": study.config.model.name,
        "arms": {name: arm(row, study.rows["base"]) for name, row in study.rows.items()},
        "recommendation": {
            "verdict": headline.plain_verdict(study),
            "choice": chosen.choice,
            "objective": chosen.objective,
            "gains": {n: ends("gain", g)["gain"] for n, g in chosen.gains.items()},
            "reasons": list(chosen.reasons),
            "alternative": chosen.alternative,
            "alternative_reason": chosen.alternative_reason,
            "failures": {n: list(f) for n, f in chosen.failures.items()},
            "pareto_front": list(chosen.pareto_front),
            "serve": deployment.settings(study),
        },
        **ends("bandwidth_bytes_per_s", interval_of(benchmark["bandwidth_bytes_per_s"])),
        "noise_floor": ends("ratio", study.noise_floor),
        "interaction": {t: ends("ratio", interval_of(iv)) for t, iv in benchmark["interaction"].items()},
        "conditions": conditions(study),
        "provenance": origins(study.records),
    }


def arm(row: Row, base: Row) -> dict[str, Any]:
    held = row.resident_bytes / base.resident_bytes if row.resident_bytes and base.resident_bytes else None
    return {
        "verdict": row.verdict,
        "target": row.target,
        "speculative": row.speculative,
        "draft_len": row.draft_len,
        "weight_bytes": row.weight_bytes,
        "draft_weight_bytes": row.draft_weight_bytes,
        "weight_ratio": held,
        "peak_memory_bytes": row.peak_memory_bytes,
        **ends("ttft_ms", row.ttft_ms),
        **ends("tpot_ms", row.tpot_ms),
        **ends("decode_tok_per_s", row.decode_tok_per_s),
        **ends("speedup", row.speedup),
        **ends("over_plain", row.over_plain),
        **ends("answer_ms", row.answer_ms),
        **ends("answer_speedup", row.answer_speedup),
        **ends("ttft_speedup", row.ttft_speedup),
        "acceptance_rate": row.acceptance_rate,
        "lossless": row.lossless,
        "quality_of": row.target,
        "token_ppl": row.token_ppl,
        **ends("ppl_increase_pct", row.ppl_increase_pct),
        "acc_last_word": row.accuracy,
        "acc_last_word_stderr": row.accuracy_stderr,
        "kl_nats_mean": row.kl_nats_mean,
        "top1_agreement": row.top1_agreement,
        "reasons": list(row.reasons),
        "null_reasons": null_reasons(row),
    }


def null_reasons(row: Row) -> dict[str, str]:
    reasons = dict(row.null_reasons)
    if row.target == "base":
        reasons |= dict.fromkeys(("kl_nats_mean", "top1_agreement"), "base is the reference of this number")
    if not row.speculative:
        reasons |= dict.fromkeys(("draft_weight_bytes", "acceptance_rate", "lossless"), "plain decoding has no draft")
    return reasons


def ends(name: str, iv: Interval | None) -> dict[str, float | None]:
    if iv is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: iv.value, f"{name}_low": iv.low, f"{name}_high": iv.high}


def origins(records: Records) -> dict[str, dict[str, Any]]:
    """Where each number came from: commit, inputs and sections of every record, and the record's own hash."""
    return {
        name: {
            "commit": record["provenance"]["git"]["commit"],
            "dirty": record["provenance"]["git"]["dirty"],
            "inputs_sha256": record["provenance"]["inputs"],
            "sections_sha256": record["provenance"]["sections_sha256"],
            "metrics_sha256": provenance.json_sha256(record["metrics"]),
        }
        for name, record in records.by_name.items()
    }
