"""A made-up study in the form the stages write it: no number here was measured. For tests of report and track."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import inspect
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline import config, provenance
from pipeline.reporting.records import TARGETS
from pipeline.stages import report

STEP_MS = {"base": 30.0, "gptq": 16.0, "awq": 16.4}
TTFT_MS = {"base": 410.0, "gptq": 520.0, "awq": 524.0}
VERIFY_SLOPE = {"base": 0.05, "gptq": 0.34, "awq": 0.33}
KEPT = {"base": 0.55, "gptq": 0.52, "awq": 0.53}
CATEGORY_FACTOR = {"code": 1.15, "prose": 0.85, "summary": 1.0}
WEIGHT_BYTES = {"base": 269_030_016, "gptq": 114_200_000, "awq": 114_200_000}
PPL = {"base": 16.42, "gptq": 17.01, "awq": 17.22}
ACCURACY = {"base": 0.413, "gptq": 0.403, "awq": 0.397}
DRAFT_STEP_MS, OVERHEAD_MS, DRAFT_BYTES = 4.5, 0.6, 61_000_000
BEST_K = {"base": 2, "gptq": 1, "awq": 1}
SHA = "5eed" * 16
COMMITTED = config.load(Path(__file__).parents[1] / "params.yaml")
PARAMS = dataclasses.replace(
    COMMITTED,
    benchmark=dataclasses.replace(COMMITTED.benchmark, max_new_tokens=48),
    speculate=dataclasses.replace(COMMITTED.speculate, quantized_draft_for=["gptq", "awq"]),
    quantize={name: dataclasses.replace(q, pack_head=False) for name, q in COMMITTED.quantize.items()},
    report=config.Report(
        objective="latency",
        max_memory_bytes=None,
        max_ppl_increase_pct=10.0,
        max_accuracy_drop_points=3.0,
        min_decode_tok_per_s=None,
        compare=COMMITTED.report.compare,
    ),
)


def study(params: config.Params) -> dict[str, dict[str, Any]]:
    """Every record that the report reads, keyed as its file is named, made "with" the sections of `params`."""
    metrics: dict[str, Any] = {
        "fetch@target": fetch_target(),
        "fetch@corpus": fetch_corpus(),
        "calibrate": calibrate(),
        "prompts": prompts(),
        "draft": draft(),
        **{f"quantize@{key}": quantize(key) for key in ("gptq", "awq", "draft")},
        **{f"evaluate@{key}": evaluate(key) for key in TARGETS},
        **{f"speculate@{key}": speculate(key, params.speculate.quantized_draft_for) for key in TARGETS},
        "benchmark": benchmark(params.speculate.quantized_draft_for),
        "rank_drafts": rank_drafts(),
    }
    return {name: record(name, value, params) for name, value in metrics.items()}


SECTIONS = {
    "fetch@target": ("model", "runtime"),
    "fetch@corpus": ("corpus", "runtime"),
    "calibrate": ("calibration", "runtime"),
    "prompts": ("prompts", "runtime"),
    "draft": ("draft", "runtime"),
    "quantize": ("quantize", "runtime"),
    "evaluate": ("evaluate", "runtime"),
    "speculate": ("speculate", "runtime"),
    "benchmark": ("benchmark", "speculate", "runtime"),
    "rank_drafts": ("rank_drafts", "speculate", "runtime"),
}


def record(name: str, metrics: dict[str, Any], params: config.Params) -> dict[str, Any]:
    stage, _, key = name.partition("@")
    sections = {s: provenance.finite(getattr(params, s)) for s in SECTIONS.get(name) or SECTIONS[stage]}
    if "quantize" in sections:
        sections["quantize"] = sections["quantize"][key]
    return {
        "stage": stage,
        "key": key or None,
        "metrics": metrics,
        "cost": {"wall_s": 40.0 + len(name), "peak_memory_bytes": 2_000_000_000},
        "provenance": {
            "git": {"commit": "f1c7" * 10, "dirty": False},
            "inputs": inputs(stage, key),
            "outputs": {"out": sha_of("quantized_draft" if key == "draft" else key)} if stage == "quantize" else {},
            "sections": sections,
            "sections_sha256": provenance.json_sha256(sections),
            "versions": {"torch": "0.0.made-up"},
        },
    }


def inputs(stage: str, key: str) -> dict[str, str]:
    """Hashes of what the stage read, as __main__ records them; only what the report looks at."""
    own = {"checkpoint": sha_of(key), "draft": sha_of("draft"), "quantized_draft": sha_of("quantized_draft")}
    if stage in ("benchmark", "rank_drafts"):
        names = (*TARGETS, "draft", "quantized_draft", "prompts")
        return {name: sha_of(name) for name in names}
    if stage == "speculate":
        return {**own, "prompts": sha_of("prompts")}
    if stage == "evaluate":
        return {"checkpoint": sha_of(key), "corpus": sha_of("corpus"), "baseline": sha_of("evaluate@base")}
    return {"target": sha_of("base"), "calibration": sha_of("calibration")} if stage == "quantize" else {}


def sha_of(name: str) -> str:
    """A made-up hash of the artifact `name`."""
    return hashlib.sha256(name.encode()).hexdigest()


def around(value: float, half: float = 0.02) -> dict[str, float]:
    return {"value": value, "low": value * (1 - half), "high": value * (1 + half)}


def verify_cost(target: str, tokens: int) -> float:
    return 1 + VERIFY_SLOPE[target] * (tokens - 1)


def predicted(target: str, draft_len: int, kept: float) -> float:
    if draft_len == 0:
        return 1.0
    emitted = sum(kept**j for j in range(draft_len + 1))
    cost = draft_len * DRAFT_STEP_MS / STEP_MS[target] + verify_cost(target, draft_len + 1)
    return emitted / (cost + OVERHEAD_MS / STEP_MS[target])


def curve_point(target: str, draft_len: int, timed: bool) -> dict[str, Any]:
    kept, rounds = KEPT[target], 400
    marginal = [kept**j for j in range(1, draft_len + 1)]
    speed = predicted(target, draft_len, kept)
    measured = {
        "decode_tok_per_s": around(1000 / STEP_MS[target] * speed * 0.97),
        "tpot_ms": around(STEP_MS[target] / speed / 0.97),
        "speedup": around(speed * 0.97 if draft_len else 1.0),
        "drafted_per_round": float(draft_len),
        "lossless": {"grade": "exact", "first_divergence": None},
    }
    return {
        "draft_len": draft_len,
        "rounds": rounds,
        "drafted": rounds * draft_len,
        "accepted": round(rounds * sum(marginal)),
        "acceptance_rate": sum(marginal) / draft_len if draft_len else None,
        "accept_marginal": marginal,
        "accept_conditional": [kept] * draft_len,
        "mean_emitted_per_round": 1 + sum(marginal),
        "cost_ratio": DRAFT_STEP_MS / STEP_MS[target] if draft_len else None,
        "predicted_speedup": speed,
        "break_even_acceptance": ((1 + sum(marginal)) / speed - 1) / draft_len if draft_len else None,
        "measured": measured if timed else None,
    }


def speculate(target: str, quantized_draft_for: Sequence[str]) -> dict[str, Any]:
    steps = {str(n): STEP_MS[target] * verify_cost(target, n) for n in range(1, 10)}
    by_category = {
        category: [
            {
                "draft_len": k,
                "acceptance_rate": sum((KEPT[target] * f) ** j for j in range(1, k + 1)) / k if k else None,
                "mean_emitted_per_round": sum((KEPT[target] * f) ** j for j in range(k + 1)),
                "predicted_speedup": predicted(target, k, KEPT[target] * f),
            }
            for k in range(9)
        ]
        for category, f in CATEGORY_FACTOR.items()
    }
    loaded = draft_readback(target in quantized_draft_for)
    return {
        "target": target,
        "draft": {"kind": "distill", "precision": loaded["precision"], "weight_bytes": DRAFT_BYTES},
        "readback": readback(target),
        "draft_readback": loaded,
        "prompts": {"count": 8, "sha256": SHA},
        "curve": [curve_point(target, k, k in (0, 1, 2, 4)) for k in range(9)],
        "by_category": by_category,
        "costs": {
            "draft_step_ms": DRAFT_STEP_MS,
            "further_draft_step_ms": DRAFT_STEP_MS,
            "target_step_ms": steps,
            "cost_ratio": DRAFT_STEP_MS / STEP_MS[target],
            "verify_cost": {str(n): verify_cost(target, n) for n in range(1, 10)},
            "overhead_ms": OVERHEAD_MS,
            "context_tokens": 256,
        },
        "batches": [batch_point(target, batch) for batch in (1, 4, 16)],
        "best_draft_len": BEST_K[target],
        "best_reason": "made up",
        "blocks": {"run": 3, "disturbed": 0, "seconds": 60.0},
        "verdict": "OK",
        "reasons": [],
    }


def batch_point(target: str, batch: int) -> dict[str, Any]:
    """The more sequences, the less a drafted token gains: at 16 none does."""
    gains = {k: (1 + 0.1 * k) * (1.3 - 0.06 * batch) for k in (1, 2, 4)}
    return {
        "batch": batch,
        "plain_tok_per_s": 0.7 * batch * 1000 / STEP_MS[target],
        "gains": {str(k): around(gain) for k, gain in gains.items()},
        "draft_len": {1: BEST_K[target], 4: 1, 16: 0}[batch],
        "reason": "made up",
    }


def rank_drafts() -> dict[str, Any]:
    agreement = {"draft": 0.55, "quantized_draft": 0.5, "gptq": 0.9, "ngram": 0.2}
    cost = {"draft": 0.2, "quantized_draft": 0.18, "gptq": 0.8, "ngram": 0.001}

    def row(target: str, name: str) -> dict[str, Any]:
        lookup = name == "ngram"
        return {
            "candidate": name,
            "kind": "made up",
            "in_matrix": name == ("draft" if target == "base" else "quantized_draft"),
            "precision": "no weights" if lookup else "bfloat16",
            "weight_bytes": 0 if lookup else DRAFT_BYTES,
            "agreement": agreement[name],
            "tokens": 564,
            "cost_ratio": cost[name],
            "draft_len": 1,
            "mean_emitted_per_round": 1 + agreement[name],
            "predicted_speedup": around((1 + agreement[name]) / (cost[name] + 1.1), 0.06),
        }

    names = {"base": list(agreement)} | {t: ["draft", "quantized_draft", "ngram"] for t in ("gptq", "awq")}
    rows = {
        t: sorted((row(t, n) for n in own), key=lambda r: -r["predicted_speedup"]["value"]) for t, own in names.items()
    }
    return {"targets": rows, "reason": None}


def readback(target: str) -> dict[str, Any]:
    return {
        "engine": "made-up",
        "weights_dtype": "bfloat16",
        "activations_dtype": "bfloat16",
        "kernels": {"Linear": 211} if target == "base" else {"Int4Linear": 210, "Linear": 1},
        "threads": 2,
    }


def draft_readback(quantized: bool) -> dict[str, Any]:
    return {**readback("gptq" if quantized else "base"), "precision": "Int4Linear" if quantized else "bfloat16"}


def evaluate(target: str) -> dict[str, Any]:
    delta = math.log(PPL[target] / PPL["base"])
    against = {
        "delta_log_ppl": {"value": delta, "low": delta - 0.008, "high": delta + 0.009},
        "kl_nats_mean": 1.7 * delta,
        "kl_nats_mean_interval": {"value": 1.7 * delta, "low": 1.5 * delta, "high": 1.9 * delta},
        "kl_nats_median": 0.6 * delta,
        "kl_nats_p99": 14 * delta,
        "top1_agreement": 0.93,
        "acc_last_word": {"mcnemar_p": 0.55, "gained": 9, "lost": 12},
    }
    return {
        "tasks": {
            "prose_perplexity": {"word_perplexity": 2.6 * PPL[target], "byte_perplexity": 1.9, "bits_per_byte": 0.93},
            "code_perplexity": {"word_perplexity": 0.7 * PPL[target], "byte_perplexity": 1.5, "bits_per_byte": 0.61},
            "last_word": {"acc": ACCURACY[target], "acc_stderr": 0.0284, "items": 300},
        },
        "token_ppl": {
            "value": PPL[target],
            "tokens": 16_368,
            "documents": 40,
            "window_tokens": 512,
            "stride_tokens": 512,
            "by_category": {
                "code": {"value": 0.25 * PPL[target], "tokens": 8_184},
                "prose": {"value": 2.1 * PPL[target], "tokens": 8_184},
            },
        },
        "against_base": None if target == "base" else against,
        "acc_last_word": ACCURACY[target],
        "acc_last_word_stderr": 0.0284,
        "engine_difference": {"tokens": 1_536, "mean_nats": -0.0004, "mean_absolute_nats": 0.004},
        "baseline_logits_bytes": 2_133_012 if target == "base" else None,
        "task_hash": SHA,
        "alarms": [],
        "readback": {**readback(target), "engine": "hf"},
        "bos": {"added": False, "token": None, "rolling_prefix": None},
    }


def arm(name: str, quantized_draft_for: Sequence[str]) -> dict[str, Any]:
    target, speculative = name.removesuffix("_spec"), name.endswith("_spec")
    k = BEST_K[target] if speculative else 0
    plain = STEP_MS["base"] / STEP_MS[target]
    point = curve_point(target, k, timed=True)
    speed = plain * (point["measured"]["speedup"]["value"] if speculative else 1.0)
    tok_per_s = 1000 / STEP_MS["base"] * speed
    read_bytes = WEIGHT_BYTES[target] + 23_040 * 256
    draft_bytes = DRAFT_BYTES if speculative else None
    loaded = draft_readback(target in quantized_draft_for)
    return {
        "target": target,
        "draft": {"kind": "distill", "precision": loaded["precision"]} if speculative else None,
        "draft_len": k,
        "protocol": "natural",
        "readback": readback(target),
        "draft_readback": loaded if speculative else None,
        "memory": {
            "weight_bytes": WEIGHT_BYTES[target],
            "draft_weight_bytes": draft_bytes,
            "cache_bytes_per_token": 23_040,
            "draft_cache_bytes_per_token": 3_072 if speculative else None,
            "workspace_bytes": 41_000_000,
            "peak_memory_bytes": 620_000_000 + WEIGHT_BYTES[target] + (draft_bytes or 0),
            "peak_load_memory_bytes": 700_000_000 + 2 * WEIGHT_BYTES[target],
            "longest_context_tokens": {str(b): 8192 for b in PARAMS.benchmark.memory_budgets_bytes},
            "null_reasons": {},
        },
        "ttft_ms": around(TTFT_MS[target] + (60 if speculative else 0), 0.04),
        "tpot_ms": around(1000 / tok_per_s, 0.03),
        "decode_tok_per_s": around(tok_per_s, 0.03),
        "forced": {
            "tpot_ms": around(1000 / tok_per_s),
            "decode_tok_per_s": around(tok_per_s),
            "speedup": around(speed),
        },
        "speedup": around(speed, 0.0 if name == "base" else 0.015),
        "over_plain": around(speed / plain, 0.015) if speculative else None,
        **latency(name, target, tok_per_s, plain),
        "by_category": {c: category(target, k, f, tok_per_s, plain) for c, f in CATEGORY_FACTOR.items()},
        "acceptance_rate": point["acceptance_rate"],
        "mean_emitted_per_round": point["mean_emitted_per_round"] if speculative else None,
        "read_bytes_per_token": read_bytes,
        "ceiling_tok_per_s": 20e9 / read_bytes,
        "ceiling_share": tok_per_s / (20e9 / read_bytes),
        "lossless": {"grade": "exact" if speculative else None, "first_divergence": None},
        "degenerate": {"loop_share": 0.04, "compression_ratio": 2.1},
        "verdict": "OK",
        "reasons": [],
    }


def latency(name: str, target: str, tok_per_s: float, plain: float) -> dict[str, Any]:
    """Of answers of 48 tokens, their first one included."""
    speculative = name.endswith("_spec")
    first = TTFT_MS[target] + (60 if speculative else 0)
    answer, of_plain = first + 47 * 1000 / tok_per_s, TTFT_MS[target] + 47 * STEP_MS["base"] / plain
    of_base = TTFT_MS["base"] + 47 * STEP_MS["base"]
    return {
        "answer_ms": around(answer, 0.03),
        "answer_speedup": around(of_base / answer, 0.0 if name == "base" else 0.015),
        "answer_over_plain": around(of_plain / answer, 0.015) if speculative else None,
        "ttft_speedup": around(TTFT_MS["base"] / first, 0.0 if name == "base" else 0.015),
    }


def category(target: str, k: int, factor: float, tok_per_s: float, plain: float) -> dict[str, Any]:
    kept = KEPT[target] * factor
    speed = plain * predicted(target, k, kept) * (0.97 if k else 1)
    return {
        "decode_tok_per_s": around(1000 / STEP_MS["base"] * speed),
        "speedup": around(speed),
        "over_plain": around(speed / plain) if k else None,
        "acceptance_rate": sum(kept**j for j in range(1, k + 1)) / k if k else None,
        "mean_emitted_per_round": sum(kept**j for j in range(k + 1)) if k else None,
    }


def benchmark(quantized_draft_for: Sequence[str]) -> dict[str, Any]:
    arms = {name: arm(name, quantized_draft_for) for t in TARGETS for name in (t, f"{t}_spec")}

    def interaction(target: str) -> dict[str, float]:
        both = arms[f"{target}_spec"]["speedup"]["value"]
        return around(both / (arms[target]["speedup"]["value"] * arms["base_spec"]["speedup"]["value"]), 0.03)

    return {
        "protocols": {"natural": "made up", "forced": "made up"},
        "prompts": {"count": 4, "sha256": SHA},
        "bandwidth_bytes_per_s": around(20e9, 0.01),
        "arms": arms,
        "answer_tokens": 48,
        "noise_floor": {"value": 1.004, "low": 0.99, "high": 1.018},
        "noise_floor_by_category": {c: {"value": 1.004, "low": 0.99, "high": 1.018} for c in CATEGORY_FACTOR},
        "noise_floor_answer": {"value": 1.002, "low": 0.99, "high": 1.015},
        "interaction": {t: interaction(t) for t in ("gptq", "awq")},
        "interaction_control": {t: interaction(t) for t in ("gptq", "awq")},
        "blocks": {"run": 9, "disturbed": 1, "seconds": 212.0},
    }


def fetch_target() -> dict[str, Any]:
    return {"parameters": 134_515_008, "weight_bytes": WEIGHT_BYTES["base"], "layers": 30, "conversions": []}


def fetch_corpus() -> dict[str, Any]:
    half = {"documents": 40, "chars": 100_000}
    found = {
        "kept": 80,
        "dropped": {"empty": 0, "short": 3, "duplicate": 1},
        "calibration": half,
        "evaluation": half,
    }
    return {"corpora": dict.fromkeys(("prose", "verse", "code"), found), "documents": 240}


def calibrate() -> dict[str, Any]:
    return {
        "asked_rows": 16,
        "kept_rows": 16,
        "dropped_documents": {"empty": 0, "short": 0, "duplicate": 0},
        "tokens": 4096,
        "row_tokens": 256,
        "documents": 23,
        "overlap_share": {"code": 0.005, "prose": 0.0},
        "bos": False,
    }


def prompts() -> dict[str, Any]:
    kinds = {c: {"count": 16, "tokens": 2_400, "longest_tokens": 250} for c in CATEGORY_FACTOR}
    return {
        "count": 64,
        "sha256": SHA,
        "chat_template": True,
        "bos": False,
        "by_split": {"evaluation": kinds, "calibration": kinds},
    }


def draft() -> dict[str, Any]:
    def agreement(value: float) -> dict[str, Any]:
        kinds = {c: {"value": value * f, "tokens": 500} for c, f in CATEGORY_FACTOR.items()}
        return {"value": value, "tokens": 1_500, "by_category": kinds}

    return {
        "kind": "distill",
        "layers": [0, 1, 2, 29],
        "common_vocab_size": 49_152,
        "parameters": 42_000_000,
        "weight_bytes": 84_000_000,
        "agreement": {"before": agreement(0.004), "after": agreement(0.51)},
        "answers": {"prompts": 96, "held_out_prompts": 12, "tokens": 9_000, "seconds": 30.0},
        "training": {
            "steps": 70,
            "steps_asked": 80,
            "seconds": 300.0,
            "tokens": 70_000,
            "vocab": 4_096,
            "prompt_tokens": 64,
        },
    }


def quantize(key: str) -> dict[str, Any]:
    modules = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    scale = {"gptq": 1.0, "awq": 1.15, "draft": 1.3}[key]
    layers = [
        {
            "layer": layer,
            "module": module,
            "error": scale * (0.04 + 0.012 * i + 0.001 * (layer * 7 % 11)),
            "weight_error": 0.09,
            "fallback": None,
        }
        for layer in range(30 if key != "draft" else 4)
        for i, module in enumerate(modules)
    ]
    errors = sorted(row["error"] for row in layers)
    return {
        "format": "gptq",
        "weight_bytes": WEIGHT_BYTES.get(key, DRAFT_BYTES),
        "bits_per_weight": 6.8,
        "packed_bits_per_weight": 4.4,
        "tokens": 4096,
        "tokens_given": 4096,
        "ignored_modules": {"layers.1": ["model.layers.1.mlp.up_proj"]},
        "modules": len(layers),
        "fallbacks": 0,
        "error": {"median": errors[len(errors) // 2], "max": errors[-1], "max_module": "made up"},
        "calibration_rows": None,
        "error_rows": 4,
        "quantize_s": 50.0,
        "warnings": [],
        "recipe": {
            "arithmetic_dtype": "float32",
            "arithmetic_reason": "made up",
            "settings": provenance.finite(PARAMS.quantize[key]),
        },
        "layers": layers,
    }


ENVIRONMENT = {
    "cpu": "Made-Up CPU",
    "cpu_features": ["avx2"],
    "cores": 2,
    "threads": 2,
    "memory_gib": 24,
    "gpus": [],
    "system": "Linux x86_64",
    "python": "3.11.0",
    "compiler": "c++ 0.0 (made up)",
    "versions": {"torch": "0.0.made-up", "transformers": "0.0.made-up", "datasets": None},
}


def write_study(folder: Path, params: config.Params, **changes: Any) -> tuple[Path, Path]:
    """Write all records under folder/metrics and the fingerprint; returns both paths.

    `changes`: record name with its @ spelt __ -> function that edits the metrics in place.
    """
    records = copy.deepcopy(study(params))
    for name, change in changes.items():
        change(records[name.replace("__", "@")]["metrics"])
    results = folder / "metrics"
    results.mkdir(parents=True, exist_ok=True)
    for name, value in records.items():
        (results / f"{name}.json").write_text(json.dumps(value))
    environment = folder / "environment.json"
    environment.write_text(json.dumps(ENVIRONMENT))
    return results, environment


def sections_of(params: config.Params) -> dict[str, Any]:
    """The sections as report.run takes them."""
    taken = inspect.signature(report.run).parameters
    return {f.name: getattr(params, f.name) for f in dataclasses.fields(params) if f.name in taken}
