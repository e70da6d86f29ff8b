"""Section on the draft: where proposals come from, what it cost to make and how often it says what the target says."""

from __future__ import annotations

from typing import Any

from pipeline.reporting import markdown, numbers
from pipeline.reporting.numbers import count, interval_of, number, ratio, share
from pipeline.reporting.study import Study


def draft(study: Study) -> str:
    found = study.records.metrics("draft")
    describe = {"distill": distilled, "model": fetched, "self": itself, "ngram": lookup}
    return markdown.section("Draft", describe[found["kind"]](found), used(study), ranking(study))


def distilled(found: dict[str, Any]) -> str:
    training, answers = found["training"], found["answers"]
    layers = f"layer{'s' * (len(found['layers']) > 1)} {', '.join(map(str, found['layers']))}"
    short = training["steps"] < training["steps_asked"]
    read = training["prompt_tokens"]
    ends = f", each after the last {count(read)} tokens of its prompt" if read else ""
    asked = f" of {count(training['steps_asked'])} asked for (time budget)" if short else ""
    return (
        f"Made of {layers} of the target under its own embedding and norm and a head of its own "
        f"({number(found['parameters'] / 1e6)} M parameters): the target's head behind a linear map, fitted by least "
        f"squares, that leads from the draft's last hidden states to the target's. Then layers and map were trained "
        f"to give the target's next-token distribution on {count(answers['tokens'])} tokens of its own greedy answers "
        f"to {count(answers['prompts'])} prompts{ends}: {count(training['steps'])} steps{asked}, "
        f"{number(training['seconds'])} s, after {number(answers['seconds'])} s of answering."
        f"{proposable(found)}\n\n{agreement(found)}"
    )


def proposable(found: dict[str, Any]) -> str:
    """A distilled draft may know only the likeliest tokens; the rows of its head for the others are not read."""
    vocab, whole = found["training"]["vocab"], found["common_vocab_size"]
    if vocab >= whole:
        return ""
    return (
        f" It proposes among {count(vocab)} of the {count(whole)} token ids only, so its head reads the rows of those: "
        "fewer bytes a step, and no hit on any other token."
    )


def agreement(found: dict[str, Any]) -> str:
    """On answers to prompts that were not trained on, before the draft is quantized."""
    before, after = found["agreement"]["before"], found["agreement"]["after"]
    rows = [["all", before, after], *([c, before["by_category"][c], a] for c, a in after["by_category"].items())]
    cells = [[kind, share(b["value"]), share(a["value"]), count(a["tokens"])] for kind, b, a in rows]
    headers = ["held-out prompts", "agreement with the map fitted", "after training", "tokens"]
    return (
        "**Agreement**: share of the target's greedy tokens that are also the draft's (before it is quantized), given "
        "the target's text before them.\n\n" + markdown.table(headers, cells)
    )


def fetched(found: dict[str, Any]) -> str:
    return (
        f"{found['name']} ({number(found['parameters'] / 1e6)} M parameters), with the target's tokenizer: "
        f"{count(found['common_vocab_size'])} token ids in common."
    )


def itself(found: dict[str, Any]) -> str:
    return "The target's own quantized weights draft for it."


def lookup(found: dict[str, Any]) -> str:
    return f"No model: the longest suffix (up to {count(found['ngram_max'])} tokens) that stood before is continued."


MEASURED_BY = {
    "ngram": "dvc exp run -S draft=ngram",
    "draft": "dvc exp run -S speculate.quantized_draft_for=[]",
    "quantized_draft": "dvc exp run -S speculate.quantized_draft_for=[base,gptq,awq]",
}
CANDIDATES = {
    "draft": "the draft",
    "quantized_draft": "the draft, quantized",
    "gptq": "`gptq`, a copy of the target",
    "awq": "`awq`, a copy of the target",
    "ngram": "lookup in the text so far",
}


def shown(candidate: str) -> str:
    """What a candidate is; a folder of the user's by its path."""
    return CANDIDATES.get(candidate, f"`{candidate}`")


def ranking(study: Study) -> str:
    """Every candidate for every target, the best prediction first."""
    found = study.records.metrics("rank_drafts")
    if found["reason"]:
        return f"Candidate drafts: {numbers.na(found['reason'])}."
    rows = []
    for target, candidates in found["targets"].items():
        for i, c in enumerate(candidates):
            name = shown(c["candidate"])
            rows.append(
                [
                    f"`{target}`" if i == 0 else "",
                    f"**{name}**" if c["in_matrix"] else name,
                    numbers.size(c["weight_bytes"]),
                    share(c["agreement"]),
                    number(c["cost_ratio"], digits=2),
                    str(c["draft_len"]),
                    number(c["mean_emitted_per_round"]),
                    ratio(interval_of(c["predicted_speedup"])),
                ]
            )
    prompts = study.records.metrics("speculate@base")["prompts"]["count"]
    headers = ["target", "candidate", "size", "agreement", "c", "best K", "τ", "predicted speedup"]
    intro = (
        "**Which draft?** Each candidate read the target's recorded answers once (teacher-forced: nothing is decoded); "
        "agreement as above, **c**: cost of its step in steps of the target. The prediction's interval is over "
        f"{count(prompts)} prompts; bold is the one in the matrix."
    )
    return "\n\n".join(filter(None, [intro, markdown.table(headers, rows, left=2), better(found)]))


def better(found: dict[str, Any]) -> str:
    """Candidates whose prediction lies wholly above that of the draft in the matrix: worth a measurement."""
    lines = []
    for target, candidates in found["targets"].items():
        best, used = candidates[0], next((c for c in candidates if c["in_matrix"]), None)
        if used is None or best["in_matrix"]:
            continue
        ours, theirs = interval_of(best["predicted_speedup"]), interval_of(used["predicted_speedup"])
        if ours is not None and theirs is not None and ours.low > theirs.high:
            how = f": `{MEASURED_BY[best['candidate']]}` measures it" if best["candidate"] in MEASURED_BY else ""
            lines.append(
                f"`{target}`: {shown(best['candidate'])} is predicted to be better than the draft in the matrix{how}."
            )
    return markdown.bullets(lines) if lines else ""


def used(study: Study) -> str:
    """Read back from what the matrix loaded."""
    rows = []
    for name, row in study.rows.items():
        if not row.speculative:
            continue
        arm = study.arms[name]
        about = arm["draft"] or {}
        size = numbers.size(row.draft_weight_bytes, row.why_null("draft_weight_bytes"))
        rows.append([f"`{name}`", about.get("precision") or numbers.na(row.verdict), size, share(row.acceptance_rate)])
    headers = ["row", "draft, as loaded", "size", "kept"]
    return markdown.table(headers, rows, left=2)
