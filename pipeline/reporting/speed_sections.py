"""Sections on speed: the trade-off, kinds of prompt, and what limits each row."""

from __future__ import annotations

from typing import Any

from pipeline.measure.statistics import Interval, differs_from_one
from pipeline.reporting import markdown, numbers, sweeps
from pipeline.reporting.numbers import fixed, interval, interval_of, na, number, ratio, share
from pipeline.reporting.recommendation import answer_ms
from pipeline.reporting.records import TARGETS
from pipeline.reporting.study import Study


def trade_off(study: Study) -> str:
    chosen, tokens = study.recommendation, study.config.benchmark.max_new_tokens
    front = ", ".join(f"`{n}`" for n in chosen.pareto_front) or "empty: no OK row has all three"
    rows = [
        [
            f"**`{name}`**" if name == chosen.choice else f"`{name}`",
            number(answer_ms(row, tokens), row.verdict),
            ratio(chosen.gains.get(name), row.verdict),
            "; ".join(chosen.failures[name]) if name in chosen.failures else "yes",
        ]
        for name, row in study.rows.items()
    ]
    headers = ["row", f"answer of {tokens} tokens, ms", f"gain over `base` ({chosen.objective})", "meets every limit"]
    return markdown.section(
        "Quality, speed and memory",
        markdown.picture(study.figures, "trade-off", "Speed, weights held and perplexity of the six rows"),
        f"Open marks are plain decoding, filled ones speculative; bold is the recommendation. On the front (\\*), "
        f"where no other row is at least as good in all three and better in one: {front}.",
        markdown.table(headers, rows, left=1),
    )


def categories(study: Study) -> str:
    """Speculation lives on predictable text, so its gain is shown for each kind of prompt."""
    names = sorted({c for arm in study.arms.values() for c in arm["by_category"]})
    rows = [
        [category if i == 0 else "", f"`{name}`", *_category(study, name, category)]
        for category in names
        for i, name in enumerate(study.rows)
    ]
    headers = ["prompts", "row", "decode, tok/s", "speedup over `base`", "over plain", "kept", "tokens a round"]
    return markdown.section(
        "By kind of prompt and at equal length", markdown.table(headers, rows, left=2), advice(study), forced(study)
    )


def advice(study: Study) -> str:
    """For which kinds of prompt speculation pays, by its gain over plain decoding of the same target."""
    lines = []
    for target in TARGETS:
        row = study.rows[f"{target}_spec"]
        if row.over_plain is None:
            lines.append(f"`{target}`: {na(row.verdict)}.")
            continue
        kinds: dict[str, list[str]] = {"speculate for": [], "not for": [], "no difference shown for": []}
        for category, found in study.arms[row.name]["by_category"].items():
            gained = interval_of(found["over_plain"])
            if gained is None or not differs_from_one(gained, study.floor):
                kind = "no difference shown for"
            else:
                kind = "speculate for" if gained.value > 1 else "not for"
            kinds[kind].append(f"{category} ({ratio(gained)})")
        told = "; ".join(f"{what} {', '.join(names)}" for what, names in kinds.items() if names)
        lines.append(f"`{target}`, K = {row.draft_len}: {told}.")
    return "**When to speculate**, by the gain over plain decoding of the same target:\n\n" + markdown.bullets(lines)


def forced(study: Study) -> str:
    """Precision alone is compared at equal length, where no row gains by stopping early."""
    tokens = study.config.benchmark.forced_new_tokens
    speedups = {
        name: interval_of((study.arms[name]["forced"] or {}).get("speedup")) if study.rows[name].speedup else None
        for name in TARGETS[1:]
    }
    found = ", ".join(f"`{name}` {ratio(iv, study.rows[name].verdict)}" for name, iv in speedups.items())
    return f"Decode speed over `base` when every answer is forced to {tokens} tokens (end token ignored): {found}."


def _category(study: Study, name: str, category: str) -> list[str]:
    row, found = study.rows[name], study.arms[name]["by_category"].get(category)
    if found is None or row.decode_tok_per_s is None:
        return [na(row.verdict)] * 5
    speedup = interval_of(found["speedup"]) if row.speedup else None
    return [
        interval(interval_of(found["decode_tok_per_s"])),
        "1" if name == "base" else ratio(speedup, row.verdict),
        ratio(interval_of(found["over_plain"]) if row.over_plain else None, row.verdict) if row.speculative else "–",
        share(found["acceptance_rate"]) if row.speculative else "–",
        number(found["mean_emitted_per_round"]) if row.speculative else "–",
    ]


def limits(study: Study) -> str:
    return markdown.section(
        "What limits each row",
        "A step must read all weights and the cache, so memory bandwidth sets a **ceiling**: bandwidth "
        f"({number(_gigabytes(study))} GB/s, measured in the same run) over the bytes to read for a token (`_spec`: of "
        "the target once and the draft K times, for the tokens of a round). A row far below its ceiling is bound by "
        "arithmetic or overhead, not by memory.",
        ceilings(study),
        "Speculation is bound by other things: what a draft step costs (**c**, in steps of the target), what checking "
        "K + 1 tokens costs (**v**, in steps of one token) and how many tokens a round yields (**τ**). Predicted "
        "speedup = τ / (K c + v + overhead); **to break even**: share of drafted tokens to keep for a speedup of 1.",
        markdown.picture(study.figures, "costs", "Cost of checking n tokens; share of rounds that keep each position"),
        curve(study),
        sweeps.misses(study),
        interactions(study),
        batches(study),
    )


def _gigabytes(study: Study) -> float | None:
    bandwidth = study.records.metrics("benchmark").get("bandwidth_bytes_per_s")
    return bandwidth / 1e9 if numbers.is_finite(bandwidth) else None


def ceilings(study: Study) -> str:
    rows = []
    for name, row in study.rows.items():
        arm = study.arms[name]
        rows.append(
            [
                f"`{name}`",
                loaded(arm["readback"], row.verdict),
                numbers.size(arm["read_bytes_per_token"], row.verdict),
                number(arm["ceiling_tok_per_s"], row.verdict),
                interval(row.decode_tok_per_s, row.verdict),
                share(arm["ceiling_share"], row.verdict, places=1),
            ]
        )
    headers = ["row", "weights; modules, as loaded", "read a token", "ceiling, tok/s", "reached, tok/s", "share"]
    return markdown.table(headers, rows, left=2)


def loaded(readback: dict[str, Any] | None, verdict: str) -> str:
    if readback is None:
        return na(verdict)
    return f"{readback['weights_dtype']}; {', '.join(f'{n} {kernel}' for kernel, n in readback['kernels'].items())}"


def curve(study: Study) -> str:
    """Predicted against measured at every timed K."""
    rows = []
    for target, speculation in study.records.per_target("speculate").items():
        costs = speculation["costs"]
        for point in speculation["curve"]:
            if not point["measured"] or not point["draft_len"]:
                continue
            k = point["draft_len"]
            rows.append(
                [
                    f"`{target}`",
                    str(k),
                    share(point["acceptance_rate"]),
                    break_even(point["break_even_acceptance"]),
                    number(point["mean_emitted_per_round"]),
                    number(costs["cost_ratio"], digits=2),
                    fixed(costs["verify_cost"].get(str(k + 1)), 2),
                    fixed(point["predicted_speedup"], 2),
                    ratio(interval_of(point["measured"]["speedup"])),
                    (point["measured"]["lossless"] or {}).get("grade") or na("sampling"),
                ]
            )
    headers = ["target", "K", "kept", "to break even", "τ", "c", "v(K + 1)", "predicted", "measured", "lossless"]
    return markdown.table(headers, rows)


def break_even(rate: Any) -> str:
    """The share of drafted tokens to be kept; a round that costs more than all of them give never pays."""
    return share(rate) if not numbers.is_finite(rate) or 0 <= rate <= 1 else "never" if rate > 1 else "always"


def batches(study: Study) -> str:
    """Large batches use the arithmetic that verification lives on, so the K that pays falls as they grow."""
    found = {target: s["batches"] for target, s in study.records.per_target("speculate").items()}
    told = {target: points for target, points in found.items() if not isinstance(points, str)}
    reasons = [f"`{target}`: {numbers.na(why)}." for target, why in found.items() if isinstance(why, str)]
    lens = sorted({int(k) for points in told.values() for p in points for k in p["gains"]})
    rows = [
        [
            f"`{target}`" if i == 0 else "",
            str(p["batch"]),
            number(p["plain_tok_per_s"]),
            *(ratio(interval_of(p["gains"].get(str(k)))) for k in lens),
            str(p["draft_len"]),
        ]
        for target, points in told.items()
        for i, p in enumerate(points)
    ]
    headers = ["target", "batch", "plain, tok/s", *(f"gain at K = {k}" for k in lens), "K to use"]
    intro = (
        "**When sequences are decoded together**, they share each reading of the weights, which is what speculation "
        "lives on too. Gain = τ t(1) / (K d + t(K + 1)), with the times of a step of the target (t) and of the draft "
        "(d) measured for the whole batch after the longest prompt; predicted, not decoded."
    )
    table = markdown.table(headers, rows) if rows else ""
    return "\n\n".join(filter(None, [intro, table, markdown.bullets(reasons)]))


def interactions(study: Study) -> str:
    """Whether the two gains multiply, and which factor of the prediction keeps them from it."""
    lines = []
    for target in TARGETS[1:]:
        iv = interval_of(study.records.metrics("benchmark")["interaction"].get(target))
        four = [study.rows[n] for n in ("base", "base_spec", target, f"{target}_spec")]
        if bad := [r for r in four if r.verdict != "OK"]:
            lines.append(f"`{target}`: {na(', '.join(f'`{r.name}` is {r.verdict}' for r in bad))}.")
        else:
            lines.append(f"`{target}`: {ratio(iv)}: {_reading(iv, study)}{cause(study, target)}")
    return (
        "**Do the gains multiply?** Interaction = speedup of quantized and speculative together over the product of "
        "both alone; 1 = they multiply.\n\n" + markdown.bullets(lines)
    )


def _reading(iv: Interval | None, study: Study) -> str:
    if iv is None:
        return "not known."
    if not differs_from_one(iv, study.floor):
        return "no departure from 1 beyond the noise floor."
    return "together they gain more than the product." if iv.value > 1 else "together they gain less than the product."


def cause(study: Study, target: str) -> str:
    """Each factor of the target's prediction put alone into base's: how far it moves base's predicted speedup."""
    draft_len = study.rows[f"{target}_spec"].draft_len
    ours, base = (_factors(study.records.metrics(f"speculate@{t}"), draft_len) for t in (target, "base"))
    if ours is None or base is None or not draft_len:
        return ""
    whole = predicted(draft_len, **base)
    names = {"emitted": "tokens a round", "cost_ratio": "draft cost", "verify": "checking", "overhead": "overhead"}
    moved = {names[f]: predicted(draft_len, **{**base, f: ours[f]}) / whole for f in names}
    return f" At K = {draft_len}, its value put alone into `base`'s prediction: " + ", ".join(
        f"{name} × {fixed(factor, 2)}" for name, factor in moved.items()
    ) + "."  # fmt: skip


def predicted(draft_len: int, emitted: float, cost_ratio: float, verify: float, overhead: float) -> float:
    """tau / (K c + v(K + 1) + overhead), all costs in steps of the target over one token."""
    return emitted / (draft_len * cost_ratio + verify + overhead)


def _factors(speculation: dict[str, Any], draft_len: int) -> dict[str, float] | None:
    costs = speculation["costs"]
    step_ms = costs["target_step_ms"].get("1")
    emitted = next((p["mean_emitted_per_round"] for p in speculation["curve"] if p["draft_len"] == draft_len), None)
    found = {
        "emitted": emitted,
        "cost_ratio": costs["cost_ratio"],
        "verify": costs["verify_cost"].get(str(draft_len + 1)),
        "overhead": costs["overhead_ms"] / step_ms if step_ms and costs["overhead_ms"] is not None else None,
    }
    return found if all(numbers.is_finite(v) for v in found.values()) else None
