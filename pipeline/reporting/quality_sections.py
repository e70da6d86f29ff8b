"""Sections on quality: perplexity and tasks, what each quantizer did, and the draft."""

from __future__ import annotations

import itertools
from typing import Any

from pipeline.reporting import markdown, numbers
from pipeline.reporting.numbers import count, fixed, interval, number, share, signed_interval
from pipeline.reporting.records import METHODS
from pipeline.reporting.study import Study

WORST_MODULES = 5


def quality(study: Study) -> str:
    evaluated = study.records.per_target("evaluate")
    ppl = evaluated["base"]["token_ppl"]
    return markdown.section(
        "Quality",
        f"Over {count(ppl['tokens'])} scored tokens of held-out text, windows of {count(ppl['window_tokens'])} moved "
        f"by {count(ppl['stride_tokens'])}, each token but the first scored once{cut(study)}. The change has a paired "
        f"bootstrap interval over the {count(ppl['documents'])} documents that hold these tokens; agreement: how often "
        "the most likely next token is `base`'s.",
        divergence_bound(study, evaluated["base"]),
        perplexities(study, evaluated),
        "Tasks, run by lm-eval on the loaded checkpoint; its word ppl is per word of raw text, **bits per byte** the "
        "loss in bits over the bytes of the text, whatever the tokenizer.",
        tasks(evaluated),
        other_engine(evaluated),
        mcnemar(evaluated),
        alarms(study, evaluated),
    )


def cut(study: Study) -> str:
    limit = study.config.evaluate.max_document_chars
    return "" if limit is None else f"; of each document its first {count(limit)} characters are used"


def divergence_bound(study: Study, base: dict[str, Any]) -> str:
    """What is kept of the baseline's distribution decides what KL can see."""
    return (
        f"KL is taken over `base`'s {count(study.config.evaluate.baseline_top_k)} most likely tokens at each position "
        f"and one bin for all others ({numbers.size(base['baseline_logits_bytes'], 'size not recorded')} kept of it), "
        "which makes it a lower bound on the KL over the whole vocabulary."
    )


def perplexities(study: Study, evaluated: dict[str, Any]) -> str:
    categories = sorted(evaluated["base"]["token_ppl"]["by_category"])
    rows = []
    for target, found in evaluated.items():
        ppl, against = found["token_ppl"], found["against_base"] or {}
        spread = [number(against.get(f"kl_nats_{q}"), digits=2) for q in ("median", "p99")]
        rows.append(
            [
                f"`{target}`",
                number(ppl["value"], digits=4),
                *(number(ppl["by_category"].get(c, {}).get("value"), digits=4) for c in categories),
                *(
                    ["–"] * 4
                    if target == "base"
                    else [
                        signed_interval(study.rows[target].ppl_increase_pct, "%"),
                        interval(numbers.interval_of(against.get("kl_nats_mean_interval"))),
                        " / ".join(spread),
                        share(against.get("top1_agreement"), places=1),
                    ]
                ),
            ]
        )
    per_category = [f"of {c}" for c in categories]
    headers = ["", "token ppl", *per_category, "change", "KL mean, nats", "KL median / p99, nats", "agreement"]
    return markdown.table(headers, rows)


TASK_METRICS = {"word_perplexity": "word ppl", "bits_per_byte": "bits per byte"}


def tasks(evaluated: dict[str, Any]) -> str:
    rows = []
    for task, scores in evaluated["base"]["tasks"].items():
        metrics = ["acc"] if "acc" in scores else [m for m in TASK_METRICS if m in scores]
        for metric in metrics:
            cells = [_score(found["tasks"].get(task, {}), metric) for found in evaluated.values()]
            unit = "accuracy, %" if metric == "acc" else TASK_METRICS[metric]
            rows.append([task, f"{unit}", count(scores.get("items")), *cells])
    return markdown.table(["task", "score", "items", *(f"`{t}`" for t in evaluated)], rows, left=2)


def _score(scores: dict[str, Any], metric: str) -> str:
    if metric != "acc" or not numbers.is_finite(scores.get("acc")):
        return number(scores.get(metric), digits=4)
    error = scores.get("acc_stderr")
    return fixed(100 * scores["acc"], 1) + (f" ± {fixed(100 * error, 1)}" if numbers.is_finite(error) else "")


def other_engine(evaluated: dict[str, Any]) -> str:
    """Tasks run in transformers' modules around the same linear layers, the rest in the engine that is timed."""
    found = {target: e["engine_difference"] for target, e in evaluated.items() if e["engine_difference"]}
    if not found:
        return ""
    means = ", ".join(f"`{target}` {fixed(d['mean_nats'], 4, sign=True)}" for target, d in found.items())
    tokens = next(iter(found.values()))["tokens"]
    return (
        "Token ppl and KL are of the engine that is timed; lm-eval runs in transformers' modules around the same "
        f"linear layers, whose loss on {count(tokens)} of these tokens differs by {means} nats a token."
    )


def mcnemar(evaluated: dict[str, Any]) -> str:
    lines = []
    for target in METHODS:
        found = (evaluated[target]["against_base"] or {}).get("acc_last_word")
        if found:
            p = found["mcnemar_p"]
            reading = "a difference" if numbers.is_finite(p) and p < 0.05 else "no difference shown"
            lines.append(
                f"`{target}` against `base`, last words item by item: {found['gained']} gained, {found['lost']} lost "
                f"(exact McNemar p = {number(p, digits=2)}: {reading})."
            )
    return markdown.bullets(lines)


def alarms(study: Study, evaluated: dict[str, Any]) -> str:
    lines = [f"`{target}`: {alarm}" for target, found in evaluated.items() for alarm in found["alarms"]]
    lines += same_scores(study)
    if not lines:
        return "No alarms: no implausible gain, and no two checkpoints with the same scores."
    return "**Alarms**\n\n" + markdown.bullets(lines)


def same_scores(study: Study) -> list[str]:
    """Two copies with other weights and one score; each against `base` is compared where it is evaluated."""
    found = {m: study.records.by_name[f"evaluate@{m}"] for m in METHODS}
    return [
        f"`{a}` and `{b}`: identical scores for different weights: one checkpoint may have been scored twice"
        for a, b in itertools.combinations(METHODS, 2)
        if all(found[a]["metrics"][name] == found[b]["metrics"][name] for name in ("token_ppl", "tasks"))
        and found[a]["provenance"]["inputs"]["checkpoint"] != found[b]["provenance"]["inputs"]["checkpoint"]
    ]


def quantization(study: Study) -> str:
    found = {key: study.records.metrics(f"quantize@{key}") for key in (*METHODS, "draft")}
    quantized = {key: m for key, m in found.items() if m["layers"]}
    return markdown.section(
        "Quantization",
        "Sizes are read from the written files. **Error** of a module: relative error of its output on `base`'s "
        f"own inputs, over {quantized['gptq']['error_rows']} calibration rows. **Fallback**: a module that "
        "the method could not solve and only rounded. **Groups of** N: so many weights in a row share one scale; "
        "**asymmetric**: and a zero point, so that the range need not be centred on 0.",
        summaries(study, quantized),
        markdown.picture(study.figures, "layer-error", "Output error of every quantized module, by layer"),
        worst_modules({k: m for k, m in quantized.items() if k in METHODS}),
        warnings(quantized),
    )


def summaries(study: Study, quantized: dict[str, Any]) -> str:
    rows = []
    for key, m in quantized.items():
        method = study.config.quantize[key]
        group = "whole rows" if method.group_size == -1 else f"groups of {method.group_size}"
        head = "; head held at 8 bits" if method.pack_head else ""
        kind = "symmetric" if method.sym or (method.method == "awq" and not method.zero_point) else "asymmetric"
        rows.append(
            [
                f"`{key}`",
                f"{method.method} by {method.backend}; {method.bits} bits, {group}, {kind}{head}",
                numbers.size(m["weight_bytes"]),
                f"{number(m['bits_per_weight'])} / {number(m['packed_bits_per_weight'])}",
                f"{count(m['modules'])} / {sum(map(len, m['ignored_modules'].values()))}",
                count(m["fallbacks"]),
                f"{share(m['error']['median'], places=1)} / {share(m['error']['max'], places=1)}",
                f"{count(m['tokens'])} of {count(m['tokens_given'])}",
            ]
        )
    headers = [
        "", "how", "file", "bits per weight: all / packed", "modules packed / left", "fallbacks",
        "error median / worst", "calibration tokens used",
    ]  # fmt: skip
    return markdown.table(headers, rows, left=2)


def worst_modules(quantized: dict[str, Any]) -> str:
    """The modules with the largest error, side by side."""
    ranked = {
        key: sorted((r for r in m["layers"] if numbers.is_finite(r["error"])), key=lambda r: -r["error"])
        for key, m in quantized.items()
    }
    rows = []
    for i in range(min(WORST_MODULES, *(len(r) for r in ranked.values()))):
        cells = [(f"{r[i]['layer']}.{r[i]['module']}", share(r[i]["error"], places=1)) for r in ranked.values()]
        rows.append([str(i + 1), *(c for pair in cells for c in pair)])
    headers = ["worst", *(h for key in ranked for h in (f"`{key}`: layer.module", "error"))]
    return markdown.table(headers, rows)


def warnings(quantized: dict[str, Any]) -> str:
    lines = [f"`{key}`: {warning}." for key, m in quantized.items() for warning in m["warnings"]]
    lines += [f"`{key}`: {m['recipe']['arithmetic_dtype']} arithmetic: {m['recipe']['arithmetic_reason']}."
              for key, m in quantized.items()]  # fmt: skip
    return markdown.bullets(lines)
