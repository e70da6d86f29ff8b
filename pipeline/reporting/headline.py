"""The first screen: one verdict sentence, the six rows, what the columns mean."""

from __future__ import annotations

from pipeline.measure.statistics import differs_from_one
from pipeline.reporting import markdown, numbers, tradeoff_section
from pipeline.reporting.numbers import fixed, interval, na, number, ratio, share, signed_interval, stacked
from pipeline.reporting.rows import Row
from pipeline.reporting.study import Study

OBJECTIVES = {
    "latency": "latency (time of one answer: ttft, then tpot for each further token)",
    "throughput": "decode speed of one stream",
    "memory": "bytes of weights held (target and draft)",
}


def verdict(study: Study) -> str:
    """One sentence: what to deploy, what it gains, what it costs, whether speculation pays."""
    row = study.choice
    if row is None:
        failures = study.recommendation.failures
        return "**Nothing qualifies**: " + "; ".join(f"`{n}`: {', '.join(why)}" for n, why in failures.items()) + "."
    act = "Deploy" if decided(study) else "No decision, keep"
    return f"**{act} `{row.target}`, {decoding(row)}**: {'; '.join([*gains(row, study), speculation(row, study)])}."


def decided(study: Study) -> bool:
    """False when base stands alone because no other row's measurement holds."""
    others = [r for r in study.rows.values() if r.name != "base"]
    return study.recommendation.choice != "base" or any(r.verdict == "OK" for r in others)


def plain_verdict(study: Study) -> str:
    """The sentence without Markdown, for a terminal."""
    return verdict(study).replace("*", "").replace("`", "")


def decoding(row: Row) -> str:
    return f"speculative decoding with K = {row.draft_len}" if row.speculative else "plain decoding"


def gains(row: Row, study: Study) -> list[str]:
    base = study.rows["base"]
    if row.name == "base":
        return [unbeaten(study)]
    parts = []
    if row.speedup is not None:
        parts.append(f"{ratio(row.speedup)} times the decode speed of `base`{unless_claimed(row, study)}")
    if row.resident_bytes and base.resident_bytes:
        draft = ", draft included" if row.speculative else ""
        parts.append(f"{number(row.resident_bytes / base.resident_bytes, digits=2)} times its weight bytes{draft}")
    if row.target != "base":
        parts.append(f"token perplexity {signed_interval(row.ppl_increase_pct, '%')}")
    return parts


def unbeaten(study: Study) -> str:
    failures = study.recommendation.failures
    if len(failures) < len(study.rows) - 1:
        return f"no other row that qualifies is better in {study.recommendation.objective} beyond the noise floor"
    reasons: dict[str, list[str]] = {}
    for name, why in failures.items():
        reasons.setdefault(why[0], []).append(f"`{name}`")
    found = ", ".join(f"{', '.join(names)} ({reason})" for reason, names in reasons.items())
    return f"no other row qualifies: {found}"


def unless_claimed(row: Row, study: Study) -> str:
    assert row.speedup is not None
    return "" if differs_from_one(row.speedup, study.floor) else ", within the noise floor"


def speculation(row: Row, study: Study) -> str:
    """Whether speculative decoding pays for this target, against plain decoding of the same target."""
    plain, spec = study.rows[row.target], study.rows[f"{row.target}_spec"]
    gained = spec.over_plain
    if spec.verdict != "OK" or gained is None or plain.speedup is None:
        return f"whether speculation pays is not known (`{spec.name}` is {spec.verdict})"
    shown = f"{ratio(gained)} times the speed of plain decoding at K = {spec.draft_len}"
    if not differs_from_one(gained, study.floor):
        return f"speculation makes no difference beyond the noise floor: {shown}"
    if gained.value < 1:
        return f"speculation does not pay here: {shown}"
    whole = spec.answer_over_plain
    if study.recommendation.objective == "latency" and whole and not differs_from_one(whole, study.answer_floor):
        decoded = f"speculation decodes {ratio(gained)} times as fast at K = {spec.draft_len}"
        gain = f"what an answer gains, its prompt's reading included, is within the noise floor ({ratio(whole)})"
        return f"{decoded}, but {gain}"
    if spec is study.choice and spec.target == "base":  # its decode speed over plain decoding's is said already
        shown = f"K = {spec.draft_len}" if whole is None else f"an answer comes {ratio(whole)} times as fast"
    elif whole is not None:
        shown += f", {ratio(whole)} for an answer"
    return f"speculation pays: {shown}" + (", its prompt's reading included" if whole is not None else "")


def context(study: Study) -> str:
    """Objective and limits, the losing alternative, the noise floor, the setting: one short line each."""
    lines = [
        setting(study),
        f"Objective: {OBJECTIVES[study.recommendation.objective]}{answer_times(study)}. Limits: {limits(study)}.",
    ]
    if study.choice and study.recommendation.reasons:
        lines.append(f"Why: {'; '.join(study.recommendation.reasons)}.")
    if name := study.recommendation.alternative:
        lines.append(f"Strongest alternative: `{name}`: {study.recommendation.alternative_reason}.")
    if other := tradeoff_section.within_reach(study):
        lines.append(other)
    lines.append(noise(study))
    return "About the verdict:\n\n" + markdown.bullets(lines)


def setting(study: Study) -> str:
    machine, prompts = study.records.environment, study.records.metrics("benchmark")["prompts"]
    where = "; ".join(machine["gpus"]) or f"{machine['cpu']}, {machine['threads']} threads"
    kinds = ", ".join(sorted(study.arms["base"]["by_category"]))
    temperature = study.config.speculate.sampling.temperature
    how = "greedy" if temperature == 0 else f"sampling at temperature {temperature:g}"
    return f"Setting: {where}; one stream, {how}; {prompts['count']} prompts ({kinds})."


def answer_times(study: Study) -> str:
    if study.choice is None or study.recommendation.objective != "latency":
        return ""
    tokens = study.config.benchmark.max_new_tokens
    ours, base = (r.answer_ms and r.answer_ms.value for r in (study.choice, study.rows["base"]))
    against = "" if study.choice.name == "base" else f" against {number(base)} ms for `base`"
    return f"; {tokens} tokens take {number(ours)} ms{against}"


def limits(study: Study) -> str:
    report = study.config.report
    stated = {
        "peak memory": report.max_memory_bytes and numbers.size(report.max_memory_bytes),
        "perplexity increase": _with_unit(report.max_ppl_increase_pct, "%"),
        "accuracy drop": _with_unit(report.max_accuracy_drop_points, "points"),
    }
    parts = [f"{name} at most {limit}" for name, limit in stated.items() if limit is not None]
    if report.min_decode_tok_per_s is not None:
        parts.append(f"decode speed at least {number(report.min_decode_tok_per_s)} tok/s")
    return ", ".join(parts) or "none"


def _with_unit(value: float | None, unit: str) -> str | None:
    return None if value is None else f"{value:g} {unit}"


def noise(study: Study) -> str:
    control = "Noise floor: a second copy of `base` ran as a control"
    if study.noise_floor is None or not study.noise_floor.known:
        return f"{control}, but gave no interval: no difference in speed is claimed."
    floors = {"speed": study.floor, "the time of an answer": study.answer_floor}
    beyond = [f"in {what} below {number(100 * (f.high - 1), digits=2)} %" for what, f in floors.items() if f.known]
    return (
        f"{control}: {interval(study.noise_floor, places=3)} times the first; no difference {' or '.join(beyond)} is "
        "claimed."
    )


HEADERS = (
    "row, verdict", "K", "held, MiB", "ttft, ms", "tpot, ms", "decode, tok/s", "speedup", "token ppl", "acc., %",
    "KL, nats", "kept, lossless",
)  # fmt: skip


def matrix(study: Study) -> str:
    """The six rows; a speculative row has its target's quality by construction."""
    return markdown.table(HEADERS, [_cells(row, study) for row in study.rows.values()])


def _cells(row: Row, study: Study) -> list[str]:
    held = numbers.mib(row.weight_bytes)
    if row.speculative:
        draft = numbers.mib(row.draft_weight_bytes, row.why_null("draft_weight_bytes"))
        held += f"<br><sub>+{numbers.NBSP}{draft}</sub>"
    ttft, speed = (stacked(interval(iv, row.verdict)) for iv in (row.ttft_ms, row.decode_tok_per_s))
    tpot = number(row.tpot_ms.value if row.tpot_ms else None, row.verdict)
    speedup = "1" if row.name == "base" and row.speedup else stacked(ratio(row.speedup, row.verdict))
    name = f"**`{row.name}`**" if row.name == study.recommendation.choice else f"`{row.name}`"
    kept = "–"
    if row.speculative:
        kept = f"{share(row.acceptance_rate, row.verdict)}<br><sub>{row.lossless or na('not graded')}</sub>"
    cells = [str(row.draft_len), held, ttft, tpot, speed, speedup, *_quality(row), kept]
    return [f"{name}<br>{row.verdict}", *cells]


def _quality(row: Row) -> list[str]:
    if row.speculative:
        return [f"={numbers.NBSP}target", "=", "="]
    accuracy = na("no such task") if row.accuracy is None else fixed(100 * row.accuracy, 1)
    if row.accuracy_stderr is not None:
        accuracy += f"<br><sub>± {fixed(100 * row.accuracy_stderr, 1)}</sub>"
    kl = "–" if row.target == "base" else number(row.kl_nats_mean, digits=2)
    return [number(row.token_ppl, digits=4), accuracy, kl]


def row_notes(study: Study) -> str:
    """Why a row is not OK, and what else its measurement has to say; rows that say the same share a line."""
    saying: dict[str, list[str]] = {}
    for row in study.rows.values():
        for reason in row.reasons:
            saying.setdefault(reason.replace("+-", "±"), []).append(f"`{row.name}`")
    lines = [f"{', '.join(names)}: {reason}." for reason, names in saying.items()]
    return "About the rows:\n\n" + markdown.bullets(lines) if lines else ""


def terms(study: Study) -> str:
    """The columns, each explained once."""
    window = study.config.evaluate.window_tokens
    shown = {"gptq": "`gptq`", "awq": "`awq`", "draft": "quantized draft"}
    packed = [shown[name] for name, method in study.config.quantize.items() if method.pack_head]
    heads = f" ({', '.join(packed)}: head, with an embedding tied to it, held at 8 bits)" if packed else ""
    lines = [
        f"**row**: `base` is the full-precision model, `gptq` and `awq` are quantized copies of it{heads}; `_spec` "
        "adds speculative decoding: a draft proposes **K** tokens a round and one step of the target checks them.",
        "Small figures are 95 % intervals; under **held** (weights in memory) the "
        "draft's, under **acc.** one standard error.",
        "**ttft**: time to the first token (reading the prompt). **tpot**: time of each token after it. **decode**: "
        "its inverse. One stream; answers end where the model ends them; the same prompts for all rows.",
        "**speedup**: decode speed over `base`'s, paired within interleaved blocks, median of the blocks.",
        f"**token ppl**: perplexity, exp of the mean loss a token, on held-out text in windows of {window} tokens. "
        "**acc.**: last words of passages guessed right. **KL**: mean divergence of the next-token distribution from "
        "`base`'s on the same tokens; 0 = the same. A draft never scores, so a `_spec` row's quality **= target**'s.",
        "**kept** (acceptance rate): share of drafted tokens that the target kept. **lossless**, below it: answers "
        "against plain decoding of the same target: exact, or numeric where they part at a near tie only.",
        "**verdict**: OK; UNDECIDED: interval too wide; VOID: the measurement says nothing; NOT COMPARABLE: made under "
        "other conditions. Only OK rows can be recommended.",
    ]
    return "How to read the table:\n\n" + markdown.bullets(lines)
