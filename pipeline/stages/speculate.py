"""Stage `speculate@KEY`: for one target, how often its draft is right, what a round costs, which draft length pays."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline import provenance
from pipeline.config import Model, Runtime, Speculate
from pipeline.measure import memory
from pipeline.measure.answers import Acceptance
from pipeline.measure.blocks import Blocks
from pipeline.measure.draft_sweep import DraftSweep, answers_of, judge
from pipeline.measure.setup import (
    DraftSpec,
    arm_spec,
    draft_for,
    end_ids,
    read_prompts,
    refuse_beyond_context,
    refuse_unfit_draft,
)
from pipeline.measure.speculation import Costs, best_measured, best_predicted, curve_point
from pipeline.measure.statistics import Interval
from pipeline.measure.verdict import BrokenOutput

NO_DRAFT = "there is no draft to speculate with"


def run(
    speculate: Speculate,
    runtime: Runtime,
    model: Model,
    *,
    key: str,
    checkpoint: Path,
    draft: Path,
    quantized_draft: Path,
    prompts: Path,
    environment: Path,
    out: Path,
) -> dict[str, Any]:
    """Write trace.json, costs.json and runs.json to `out`; the metrics hold the curve over K and the best K.

    `environment` is the machine's fingerprint: hashed into the record, not read. Raises ValueError before any weights
    load (prompts, tokenizers), and BrokenOutput, with the folder written, when speculative answers differ where the
    target left no doubt.
    """
    chosen, no_draft = draft_for(key, draft, quantized_draft, speculate.quantized_draft_for)
    prompt_set = read_prompts(prompts, speculate.prompts_per_category, "speculate.prompts_per_category")
    refuse_beyond_context(checkpoint, prompt_set, speculate.max_new_tokens, max(speculate.draft_lens), "speculate")
    refuse_unfit_draft(checkpoint, chosen, prompt_set, max(speculate.draft_lens))
    memory.refuse_too_little(runtime.min_free_memory_bytes)
    spec = arm_spec(checkpoint, chosen, runtime, ends=end_ids(checkpoint), trust_remote_code=model.trust_remote_code)

    from pipeline.measure.arm import Arm

    sweep = DraftSweep(Arm(spec), prompt_set, speculate, runtime.seed)
    metrics, blocks = measure(sweep, key, chosen)
    if no_draft is not None:
        metrics |= {"verdict": "VOID", "reasons": [no_draft, *metrics["reasons"]]}
    with provenance.whole_folder(out) as folder:
        provenance.write_json(folder / "trace.json", trace(sweep))
        provenance.write_json(folder / "costs.json", metrics["costs"])
        provenance.write_json(folder / "runs.json", runs(blocks))
    refuse_broken(metrics, speculate.lossless_gap)
    return metrics


def measure(sweep: DraftSweep, key: str, draft: DraftSpec | None) -> tuple[dict[str, Any], Blocks]:
    """The whole sweep: metrics, and the blocks that were timed."""
    settings, readback = sweep.settings, sweep.arm.describe()
    greedy = settings.sampling.temperature == 0
    lens = sorted(settings.draft_lens) if draft else [0]
    if greedy:
        sweep.trace()
    timed_costs = sweep.time_costs(max(lens))
    first = best_predicted(sweep.curve(lens, Costs.from_json(timed_costs.as_json()), None))
    timed_lens = sorted({*set(settings.timed_draft_lens) & set(lens), first})
    blocks = sweep.time(timed_lens, timed_costs)
    measured_costs = timed_costs.as_json()
    costs = Costs.from_json(measured_costs)
    curve = sweep.curve(lens, costs, None)
    if not greedy:
        curve = [curve_point(Acceptance.of(answers_of(blocks, k), k), k, costs) for k in timed_lens]
    speedups = {}
    for point in (p for p in curve if p["draft_len"] in timed_lens):
        point["measured"] = sweep.measured(blocks, point["draft_len"], readback["target"]["weights_dtype"])
        speedups[point["draft_len"]] = Interval(**point["measured"]["speedup"])
    best, best_reason = best_measured(speedups)
    judgement = judge(settings, curve, best, blocks)
    if not greedy:
        judgement.note("sampling: acceptance comes from the timed runs; replay and lossless grade hold for greedy only")
    names = ("draft_len", "acceptance_rate", "mean_emitted_per_round", "predicted_speedup")
    metrics = {
        "target": key,
        "draft": draft_summary(draft, readback["draft"]),
        "readback": readback["target"],
        "draft_readback": readback["draft"],
        "prompts": {"count": len(sweep.prompts.all), "sha256": sweep.prompts.sha256},
        "curve": curve,
        "by_category": {
            c: [{n: p[n] for n in names} for p in sweep.curve(lens, costs, c)] for c in sweep.prompts.by_category
        },
        "costs": {**measured_costs, **costs.as_json()},
        "batches": sweep.batches(curve) if draft else NO_DRAFT,
        "best_draft_len": best,
        "best_reason": best_reason,
        "blocks": blocks.summary(),
        "verdict": judgement.verdict,
        "reasons": judgement.reasons,
    }
    return metrics, blocks


def draft_summary(draft: DraftSpec | None, readback: dict[str, Any] | None) -> dict[str, Any] | None:
    """Kind, precision (read back) and bytes of the draft; null without one."""
    if draft is None or readback is None:
        return None
    return {"kind": draft.kind, "precision": readback["precision"], "weight_bytes": readback["weight_bytes"]}


def trace(sweep: DraftSweep) -> list[dict[str, Any]]:
    """Per prompt: the target's greedy answer and the draft's hits on it (null for a lookup: it has none)."""
    return [
        {**t.answer.row(), "prompt_tokens": len(t.answer.prompt.ids), "ids": t.answer.ids, "hits": t.hits}
        for t in sweep.traced
    ]


def runs(blocks: Blocks) -> list[dict[str, Any]]:
    """Every block: its disturbance and every timed generation in the order they ran."""
    return [
        {
            "block": i,
            "disturbed": b.disturbed,
            "kept": any(b is k for k in blocks.kept),
            "seconds": b.seconds,
            **asdict(b.disturbance),
            "answers": [a.row() for arm in b.order for a in b.samples[arm]],
        }
        for i, b in enumerate(blocks.all)
    ]


def refuse_broken(metrics: dict[str, Any], tolerance: float) -> None:
    """Raises BrokenOutput, one line, for the first K whose answers are not the target's."""
    for point in metrics["curve"]:
        graded = (point["measured"] or {}).get("lossless") or {"grade": "exact"}
        if graded["grade"] == "broken":
            where = graded["first_divergence"]
            raise BrokenOutput(
                f"speculate@{metrics['target']}: draft length {point['draft_len']} leaves plain decoding at token "
                f"{where['position']} of prompt {where['prompt']}, where the target's top-2 gap is "
                f"{where['top2_gap']:.3g} (speculate.lossless_gap={tolerance:g}); the kernel or the engine is wrong"
            )
