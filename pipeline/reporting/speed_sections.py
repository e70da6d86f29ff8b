"""Sections on speed: the trade-off, kinds of prompt, and what limits each row."""

from __future__ import annotations

from typing import Any

from pipeline.measure.statistics import Interval, differs_from_one
from pipeline.reporting import figures, markdown, numbers, sweeps
from pipeline.reporting.numbers import count, fixed, interval, interval_of, na, number, ratio, share
from pipeline.reporting.records import TARGETS
from pipeline.reporting.study import Study


def trade_off(study: Study) -> str:
    chosen, tokens = study.recommendation, study.config.benchmark.max_new_tokens
    front = ", ".join(f"`{n}`" for n in chosen.pareto_front) or "empty: no OK row has all three"
    rows = [
        [
            f"**`{name}`**" if name == chosen.choice else f"`{name}`",
            number(row.answer_ms and row.answer_ms.value, row.verdict),
            "1" if name == "base" else ratio(row.ttft_speedup, row.verdict),
            ratio(chosen.gains.get(name), row.verdict),
            "; ".join(chosen.failures[name]) if name in chosen.failures else "yes",
        ]
        for name, row in study.rows.items()
    ]
    headers = [
        "row", f"answer of {tokens} tokens, ms ({protocol(study)})", "first token over `base`",
        f"gain over `base` ({chosen.objective})", "meets every limit",
    ]  # fmt: skip
    return markdown.section(
        "Quality, speed and memory",
        markdown.picture(study.figures, "trade-off", "Speed, weights held and perplexity of the six rows"),
        "Open marks are plain decoding, filled ones speculative; bold is the recommendation. The front (\\*) leaves "
        "out a row when another holds no more weights (draft included), has no higher perplexity, decodes no slower "
        "and is better in one of them; speeds that their intervals and the noise floor do not tell apart count as "
        f"equal, the other two as they are. Only OK rows take part. On it: {front}.",
        f"An answer takes the time to its first token and that of {tokens - 1} more. **First token** (above 1: sooner) "
        "and **gain** are medians of ratios within blocks, and so not the ratios of the medians beside them.",
        markdown.table(headers, rows, left=1),
    )


def protocol(study: Study) -> str:
    """natural (answers end where the model ends them): of every number but those that say forced."""
    return str(study.arms["base"]["protocol"])


def categories(study: Study) -> str:
    """Speculation lives on predictable text, so its gain is shown for each kind of prompt."""
    names = sorted({c for arm in study.arms.values() for c in arm["by_category"]})
    rows = [
        [category if i == 0 else "", f"`{name}`", *_category(study, name, category)]
        for category in names
        for i, name in enumerate(study.rows)
    ]
    how = protocol(study)
    headers = [
        "prompts", "row", f"decode, tok/s ({how})", f"speedup over `base` ({how})", "over plain", "kept",
        "tokens a round",
    ]  # fmt: skip
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
            if gained is None or not differs_from_one(gained, study.category_floor(category)):
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
    rows = []
    for name in TARGETS:
        row = study.rows[name]
        found = (study.arms[name]["forced"] or {}) if row.speedup else {}
        speeds = [interval_of(found.get(n)) for n in ("decode_tok_per_s", "speedup")]
        over = "1" if name == "base" and speeds[1] else ratio(speeds[1], row.verdict)
        rows.append([f"`{name}`", interval(speeds[0], row.verdict), over])
    table = markdown.table(["row", "decode, tok/s (forced)", "speedup over `base` (forced)"], rows)
    return f"Every answer forced to {tokens} tokens (end token ignored), precision alone compared:\n\n{table}"


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
    bandwidth = interval_of(study.records.metrics("benchmark")["bandwidth_bytes_per_s"])
    return markdown.section(
        "What limits each row",
        "A step must read all weights and the cache, so memory bandwidth sets a **ceiling**: bandwidth "
        f"({numbers.gigabytes_per_s(bandwidth)}, measured between the timed answers) over the bytes to read for a "
        "token (`_spec`: of the target once and the draft K times, for the tokens of a round). A row far below its "
        "ceiling is bound by arithmetic or overhead, not by memory.",
        ceilings(study),
        "Speculation is bound by other things: what a draft step costs (**c**, in steps of the target, on average over "
        "the K of a round: the first finds the target's weights in the caches, the others the draft's), what checking "
        "K + 1 tokens costs (**v**, in steps of one token) and how many tokens a round yields (**τ**). Predicted "
        "speedup = τ / (K c + v + overhead); **to break even**: share of drafted tokens to keep for a predicted "
        "speedup of 1, so it comes from this formula with the measured c and v and is no measurement of its own.",
        markdown.picture(study.figures, "costs", "Cost of checking n tokens; share of rounds that keep each position"),
        marginal_lens(study),
        curve(study),
        sweeps.divergences(study),
        sweeps.misses(study),
        interactions(study),
        batches(study),
    )


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
    headers = [
        "row",
        "weights; modules, as loaded",
        "read a token",
        "ceiling, tok/s",
        f"reached, tok/s ({protocol(study)})",
        "share",
    ]
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
                    number(point["cost_ratio"], digits=2),
                    fixed(costs["verify_cost"].get(str(k + 1)), 2),
                    fixed(point["predicted_speedup"], 2),
                    ratio(interval_of(point["measured"]["speedup"])),
                    (point["measured"]["lossless"] or {}).get("grade") or na("sampling"),
                ]
            )
    headers = [
        "target",
        "K",
        "kept",
        "to break even",
        "τ",
        "c",
        "v(K + 1)",
        "predicted",
        "measured (natural)",
        "lossless",
    ]
    return markdown.table(headers, rows)


def marginal_lens(study: Study) -> str:
    """The right panel of the figure of costs is one point of each curve: the longest K."""
    lens = {t: figures.longest(s)["draft_len"] for t, s in study.records.per_target("speculate").items()}
    shown = ", ".join(f"`{t}` {k}" for t, k in lens.items()) if len(set(lens.values())) > 1 else f"{max(lens.values())}"
    return f"Right panel: rounds at the longest K of each curve, K = {shown}."


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
        "(d) measured for the whole batch after the longest prompt, "
        f"{count(study.config.speculate.cost_repeats)} times; predicted, not decoded."
    )
    table = markdown.table(headers, rows) if rows else ""
    return "\n\n".join(filter(None, [intro, table, markdown.bullets(reasons)]))


def interactions(study: Study) -> str:
    """Whether the two gains multiply, and which factor of the prediction keeps them from it."""
    lines = []
    for target in TARGETS[1:]:
        measured = study.records.metrics("benchmark")
        iv, control = (
            interval_of(measured.get(name, {}).get(target)) for name in ("interaction", "interaction_control")
        )
        four = [study.rows[n] for n in ("base", "base_spec", target, f"{target}_spec")]
        if bad := [r for r in four if r.verdict != "OK"]:
            lines.append(f"`{target}`: {na(', '.join(f'`{r.name}` is {r.verdict}' for r in bad))}.")
        else:
            both = f"{ratio(iv)}, with the control {ratio(control)}"
            lines.append(f"`{target}`: {both}: {_reading(iv, control)}{cause(study, target)}")
    return (
        "**Do the gains multiply?** Interaction = speedup of quantized and speculative together over the product of "
        "both alone; 1 = they multiply. Four rows enter it, so the control is the same number with the second copy of "
        "`base` in its place: a departure from 1 is claimed where both show it. The factors put into the prediction "
        "come from the sweeps, which ran at other times than these blocks and than each other.\n\n"
        + markdown.bullets(lines)
    )


def _reading(iv: Interval | None, control: Interval | None) -> str:
    if iv is None or control is None:
        return "not known."
    if not all(differs_from_one(i, None) for i in (iv, control)) or (iv.value > 1) != (control.value > 1):
        return "no departure from 1 that both show."
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
    point: dict[str, Any] = next((p for p in speculation["curve"] if p["draft_len"] == draft_len), {})
    found = {
        "emitted": point.get("mean_emitted_per_round"),
        "cost_ratio": point.get("cost_ratio"),
        "verify": costs["verify_cost"].get(str(draft_len + 1)),
        "overhead": costs["overhead_ms"] / step_ms if step_ms and costs["overhead_ms"] is not None else None,
    }
    return found if all(numbers.is_finite(v) for v in found.values()) else None
