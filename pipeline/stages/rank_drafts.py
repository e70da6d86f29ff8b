"""Stage `rank_drafts`: which draft a target should have, from one teacher-forced pass of each over recorded answers.

The answers are those of the target's own sweep, so nothing is decoded: a candidate costs a pass over some hundreds of
tokens and a few timed steps, whatever its number of layers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import provenance
from pipeline.config import Model, RankDrafts, Runtime, Speculate
from pipeline.measure import memory
from pipeline.measure.answers import Answer
from pipeline.measure.setup import (
    TARGETS,
    DraftSpec,
    PromptSet,
    arm_spec,
    draft_for,
    pack_head,
    read_prompts,
    refuse_unfit_draft,
)
from pipeline.measure.speculation import Costs, best_predicted, curve_point, replay_all
from pipeline.measure.statistics import paired_mean_difference

if TYPE_CHECKING:
    from pipeline.measure.arm import Arm
from pipeline.progress import bar


def run(
    rank_drafts: RankDrafts,
    speculate: Speculate,
    runtime: Runtime,
    model: Model,
    *,
    base: Path,
    gptq: Path,
    awq: Path,
    draft: Path,
    quantized_draft: Path,
    prompts: Path,
    environment: Path,
    speculate_base: Path,
    speculate_gptq: Path,
    speculate_awq: Path,
) -> dict[str, Any]:
    """Candidates of each target, the best prediction first; `speculate_*`: the folders that hold each sweep's trace.

    `environment` is the machine's fingerprint: hashed into the record, not read. Raises ValueError for a candidate
    that is not there, has other tokens or is too short for the prompts, before any weights load.
    """
    checkpoints = dict(zip(TARGETS, (base, gptq, awq), strict=True))
    sweeps = dict(zip(TARGETS, (speculate_base, speculate_gptq, speculate_awq), strict=True))
    if speculate.sampling.temperature:
        return {"targets": {}, "reason": "sampling: a teacher-forced pass tells greedy acceptance only"}
    prompt_set = read_prompts(prompts, speculate.prompts_per_category, "speculate.prompts_per_category")
    folders = {"draft": draft, "quantized_draft": quantized_draft, "gptq": gptq, "awq": awq}
    chosen = {key: candidates(rank_drafts, key, folders) for key in TARGETS}
    for key, specs in chosen.items():
        for spec in specs.values():
            refuse_unfit_draft(checkpoints[key], spec, prompt_set, max(speculate.draft_lens))
    answers = {key: recorded(sweeps[key] / "trace.json", prompt_set) for key in TARGETS}
    memory.refuse_too_little(runtime.min_free_memory_bytes)

    from pipeline.measure.arm import Arm

    lens = sorted(k for k in speculate.draft_lens if k)
    found: dict[str, list[dict[str, Any]]] = {}
    with bar("candidate drafts", sum(map(len, chosen.values())), "candidate") as shown:
        for key, specs in chosen.items():
            used, _ = draft_for(key, draft, quantized_draft, speculate.quantized_draft_for)
            costs = Costs.from_json(provenance.read_json(sweeps[key] / "costs.json"))
            rows: list[dict[str, Any]] = []
            arm = Arm(arm_spec(checkpoints[key], None, runtime, ends=[], trust_remote_code=model.trust_remote_code))
            for name, spec in specs.items():
                arm.draft_with(spec)
                about = {"candidate": name, "kind": spec.kind, "in_matrix": spec == used}
                rows.append(about | measured(arm, answers[key], costs, lens, rank_drafts.cost_repeats, runtime.seed))
                shown.update()
            found[key] = sorted(rows, key=lambda row: -row["predicted_speedup"]["value"])
    return {"targets": found, "reason": None}


def candidates(settings: RankDrafts, key: str, folders: dict[str, Path]) -> dict[str, DraftSpec]:
    """What may draft for target `key`, by name. A quantized target has no cheaper copy of itself."""
    kind, vocab = _distilled(folders["draft"])
    specs: dict[str, DraftSpec] = {}
    for name in settings.candidates:
        if name == "ngram":
            specs[name] = DraftSpec("ngram", None, settings.ngram_max, pack_head=False)
        elif name in ("gptq", "awq") and key == "base":
            specs[name] = DraftSpec("self", str(folders[name]), None, pack_head(folders[name]))
        elif name in ("draft", "quantized_draft") and (folders[name] / "config.json").exists():
            specs[name] = DraftSpec(kind, str(folders[name]), None, pack_head(folders[name]), vocab)
    for folder in settings.folders:
        if not (Path(folder) / "config.json").exists():
            raise ValueError(f"rank_drafts.folders: {folder} is no model folder (no config.json); fetch it there first")
        specs[folder] = DraftSpec("model", folder, None, pack_head(Path(folder)))
    return specs


def _distilled(draft: Path) -> tuple[Any, str | None]:
    """(kind, file of the ids it can say) of the graph's own draft, as `draft_for` finds them for the base target."""
    spec, _ = draft_for("base", draft, draft, [])
    assert spec is not None
    return spec.kind, spec.vocab


def recorded(trace: Path, prompts: PromptSet) -> list[Answer]:
    """The target's greedy answers to `prompts`, read back. Raises ValueError when the trace is of other prompts."""
    by_id = {row["prompt"]: row for row in provenance.read_json(trace)}
    if set(by_id) != {p.id for p in prompts.all}:
        raise ValueError(f"{trace}: made with other prompts than prompts.jsonl holds; run `dvc repro`")
    return [
        Answer(p, 0, by_id[p.id]["ids"], [(0, 0)] * (len(by_id[p.id]["ids"]) - 1), 0.0, 0.0, by_id[p.id]["stop"])
        for p in prompts.all
    ]


def measured(
    arm: Arm, answers: list[Answer], recorded_costs: Costs, draft_lens: list[int], repeats: int, seed: int
) -> dict[str, Any]:
    """The loaded candidate's agreement, cost and prediction; the interval resamples prompts, not costs.

    Only its step is timed, beside the target's: what checking costs is the sweep's, the same for all candidates.
    """
    from pipeline.engine.replay import replay

    kept_ats = []
    for answer in answers:
        hits = arm.hits(answer.prompt.ids, answer.ids) if arm.draft else None
        kept_ats.append((len(answer.ids), arm.kept_at(answer.prompt.ids, answer.ids, hits)))
    context = max((answer.prompt.ids for answer in answers), key=len)
    ratios = arm.draft_cost_ratios(context, max(draft_lens), repeats)
    first_ms, further_ms = (ratio * recorded_costs.target_step_ms[1] for ratio in ratios)
    costs = replace(recorded_costs, draft_step_ms=first_ms, further_draft_step_ms=further_ms)
    curve = [curve_point(counts, k, costs) for k, counts in replay_all(kept_ats, draft_lens).items()]
    best = best_predicted(curve)
    rounds = [r for r in (replay([own], best) for own in kept_ats) if r.rounds]
    kept = paired_mean_difference([r.accepted for r in rounds], [r.rounds for r in rounds], seed)
    firsts = [kept_at(position, 1)[1] for tokens, kept_at in kept_ats for position in range(1, tokens)]
    about = arm.describe()["draft"]
    return {
        "precision": about["precision"],
        "weight_bytes": about["weight_bytes"],
        "agreement": sum(firsts) / len(firsts) if firsts else None,
        "tokens": len(firsts),
        "cost_ratio": costs.cost_ratio(max(best, 1)),
        "draft_len": best,
        "mean_emitted_per_round": 1 + kept.value,
        "predicted_speedup": {
            name: costs.predicted_speedup(1 + mean, best)
            for name, mean in (("value", kept.value), ("low", kept.low), ("high", kept.high))
        },
    }
