"""reports/serve/: the choice as a command for vLLM, a script for transformers, and JSON with its evidence."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from pipeline import provenance
from pipeline.reporting import headline, summary, transformers_script
from pipeline.reporting.deployment import Deployment, Weights, deployment, unlike_measured
from pipeline.reporting.rows import Row
from pipeline.reporting.study import Study

CHOICE, VLLM, TRANSFORMERS = "choice.json", "vllm.sh", "transformers_generate.py"


def write(study: Study, folder: Path) -> None:
    chosen = deployment(study)
    provenance.write_json(folder / CHOICE, choice(study, chosen))
    provenance.write_text(folder / VLLM, vllm(study, chosen))
    provenance.write_text(folder / TRANSFORMERS, transformers_script.render(study, chosen))


def choice(study: Study, chosen: Deployment) -> dict[str, Any]:
    """The decision, what to serve, why, and what it rests on. With `fallback` nothing was shown to be better."""
    config, found, row = study.config, study.recommendation, chosen.row
    benchmark = study.records.by_name["benchmark"]["provenance"]
    hashes = benchmark["inputs"]
    weights = {"target": chosen.target, "draft": chosen.draft}
    return {
        "decision": chosen.decision,
        "verdict": headline.plain_verdict(study),
        "fallback": chosen.fallback,
        "serve": {
            "row": row.name,
            **{n: _weights(w, hashes) for n, w in weights.items()},
            "draft_len": row.draft_len,
            "draft_len_by_batch": draft_len_by_batch(study, row),
            "ngram_max": chosen.ngram_max,
            "device": config.runtime.device,
            "dtype": config.runtime.dtype,
            "sampling": config.speculate.sampling,
            "unlike_measured": " ".join(unlike_measured(study, chosen)) or None,
        },
        "constraints": config.report,
        "evidence": {
            "row": summary.arm(row, study.rows["base"]),
            "base": summary.arm(study.rows["base"], study.rows["base"]),
            "gain": summary.ends("gain", found.gains.get(row.name)),
            "noise_floor": summary.ends("ratio", study.noise_floor),
            "reasons": found.reasons,
            "alternative": found.alternative,
            "alternative_reason": found.alternative_reason,
            "failures": found.failures,
            "pareto_front": found.pareto_front,
        },
        "made_with": {
            "git": benchmark["git"],
            "sections_sha256": benchmark["sections_sha256"],
            "inputs_sha256": {n: hashes.get(n) for n in ("prompts", "environment")},
            "results_sha256": {n: o["metrics_sha256"] for n, o in summary.origins(study.records).items()},
            "versions": benchmark["versions"],
            "machine": {n: study.records.environment[n] for n in ("cpu", "threads", "gpus")},
        },
    }


def _weights(weights: Weights | None, hashes: dict[str, str]) -> dict[str, str | None] | None:
    if weights is None:
        return None
    return {"folder": weights.folder, "format": weights.format, "sha256": hashes.get(weights.input)}


def vllm(study: Study, chosen: Deployment) -> str:
    config = study.config
    command = [["vllm", "serve", chosen.target.folder], ["--host", "127.0.0.1"], ["--dtype", vllm_dtype(study, chosen)]]
    if config.model.trust_remote_code:
        command.append(["--trust-remote-code"])
    command.append(["--override-generation-config", json.dumps(_vllm_sampling(study))])
    if chosen.row.speculative:
        command.append(["--speculative-config", json.dumps(vllm_speculation(study, chosen))])
    lines = [
        "#!/bin/sh",
        f"# {chosen.subject}. From the repository's root.",
        "# vLLM was not part of the study: its kernels differ from those that were measured, so measure again.",
        *(f"# {line}" for line in unlike_measured(study, chosen)),
        *(["# GPTQ with zero points has no Marlin kernel in vLLM, and its other one takes float16 only."]
          if _asymmetric_gptq(study, chosen) else []),
    ]  # fmt: skip
    return "\n".join([*lines, "exec " + " \\\n  ".join(shlex.join(part) for part in command) + ' "$@"']) + "\n"


def vllm_dtype(study: Study, chosen: Deployment) -> str:
    return "float16" if _asymmetric_gptq(study, chosen) else str(study.config.runtime.dtype)


def _asymmetric_gptq(study: Study, chosen: Deployment) -> bool:
    return chosen.target.format == "gptq" and not study.config.quantize[chosen.row.target].sym


def draft_len_by_batch(study: Study, row: Row) -> dict[int, int] | None:
    """Batch size -> K; alone, a sequence gets the K that was timed. None for plain rows and where it was not told."""
    points = study.records.metrics(f"speculate@{row.target}")["batches"]
    if not row.speculative or isinstance(points, str):
        return None
    return {p["batch"]: row.draft_len if p["batch"] == 1 else min(p["draft_len"], row.draft_len) for p in points}


def vllm_schedule(by_batch: dict[int, int]) -> dict[str, int]:
    """As vLLM's `num_speculative_tokens_per_batch_size`: inclusive ranges of batch sizes; beyond the last one, its K.

    A K holds from the batch that it was measured at to the next one.
    """
    ranges: list[list[int]] = []  # first, last, K
    for batch, k in sorted(by_batch.items()):
        if ranges:
            ranges[-1][1] = batch - 1
        if not ranges or ranges[-1][2] != k:
            ranges.append([batch, batch, k])
    if ranges:
        ranges[-1][1] = max(by_batch)
    return {f"{first}-{last}": k for first, last, k in ranges}


def vllm_speculation(study: Study, chosen: Deployment) -> dict[str, Any]:
    if chosen.draft is None:
        assert chosen.ngram_max is not None
        how: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": chosen.ngram_max, "prompt_lookup_min": 1}
    else:
        how = {"method": "draft_model", "model": chosen.draft.folder}
    by_batch = draft_len_by_batch(study, chosen.row)
    varies = by_batch is not None and set(by_batch.values()) != {chosen.row.draft_len}
    schedule = {"num_speculative_tokens_per_batch_size": vllm_schedule(by_batch)} if by_batch and varies else {}
    return {**how, "num_speculative_tokens": chosen.row.draft_len, **schedule}


def _vllm_sampling(study: Study) -> dict[str, Any]:
    """What a request that says nothing gets; -1 is vLLM's "all"."""
    sampling = study.config.speculate.sampling
    return {"temperature": sampling.temperature, "top_k": sampling.top_k or -1, "top_p": sampling.top_p}
