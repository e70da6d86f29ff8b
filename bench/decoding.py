"""`python -m bench.decoding`: this engine beside transformers' generate, on the default experiment's artifacts.

All arms are loaded in one process and take turns in blocks (A B C, C B A, ...) over the same code prompts, a forced
number of tokens each; ratios are paired within blocks, with 95 % bootstrap intervals. Writes reports/bench/.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.arms import Ours, Peer, Timed, Transformers, fetch_gguf, load, python_of
from pipeline import provenance
from pipeline.engine.batch import generate_batch
from pipeline.engine.decoder import Decoder
from pipeline.engine.generate import logits_along
from pipeline.engine.lean import LeanDecoder
from pipeline.engine.replay import kept_from_hits, replay
from pipeline.measure.blocks import order_of
from pipeline.measure.costs import read_bandwidth_bytes_per_s
from pipeline.measure.memory import read_bytes_per_step
from pipeline.measure.setup import prompt_rows
from pipeline.measure.speculation import Costs
from pipeline.measure.statistics import Interval, Total, block_ratios, median, median_interval, paired_ratio

ARTIFACTS, REPORTS = Path("artifacts"), Path("reports/bench")
BATCHES, BATCH_DRAFT_LENS, BATCH_PROMPT_TOKENS, BATCH_NEW_TOKENS = (1, 2, 4, 8, 16), (0, 1, 2), 32, 16
CURVE_LENS = range(17)
UNKNOWN = Interval(float("nan"), float("nan"), float("nan"))
WARM_START = """
import time; started = time.perf_counter()
import os; os.environ.setdefault("KERNELS_DIR", "artifacts/kernels")
from pathlib import Path
from bench.arms import Ours, load
Ours(load(Path("artifacts/target"))).run(list(range(5, 69)), 1)
print(time.perf_counter() - started)
"""
# name -> (what, at least, aim, unit); the bounds of a share or a ratio are lower ones, of seconds and costs upper ones
BOUNDS: dict[str, tuple[str, float, float, str]] = {
    "bf16_plain_vs_transformers": ("bf16 plain / transformers generate", 2.0, 3.0, "x"),
    "int4_plain_vs_llamacpp": ("int4 plain / llama.cpp Q4_1, heads of 8 bits", 1.0, 1.3, "x"),
    "int4_plain_vs_bf16_plain": ("int4 plain / bf16 plain", 1.5, 2.5, "x"),
    "bf16_spec_vs_bf16_plain": ("bf16 with the quantized draft / bf16 plain, code", 1.2, 1.6, "x"),
    "bf16_spec_vs_transformers_assisted": (
        "bf16 with bf16 draft / transformers assisted, same pair and K",
        2.0,
        4.0,
        "x",
    ),
    "int4_spec_vs_bf16_plain": ("int4 with its best K / bf16 plain", 1.5, 3.0, "x"),
    "int4_best_vs_transformers": ("the best int4 arm / transformers generate in bf16", 4.0, 7.0, "x"),
    "bf16_plain_ceiling_share": ("bf16 plain / what the measured bandwidth allows", 0.5, 0.7, "share"),
    "int4_plain_ceiling_share": ("int4 plain / what the measured bandwidth allows", 0.3, 0.5, "share"),
    "predicted_vs_measured": ("worst predicted / measured speedup over K, off by", 0.10, 0.05, "share, upper"),
    "curve_cost_runs": ("the curve K = 0..16 by replay, in plain runs", 3.0, 1.5, "runs, upper"),
    "prefill_vs_transformers": ("prefill of 512 tokens / transformers", 1.0, 1.3, "x"),
    "start_to_first_token_s": ("start of the process to the first token, kernels compiled", 10.0, 5.0, "s, upper"),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.decoding", description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=2, help="code prompts a block")
    args = parser.parse_args(argv)
    missing = [p for p in ("target", "draft", "quantized/awq", "quantized/draft") if not (ARTIFACTS / p).exists()]
    if missing:
        print(f"error: artifacts/{missing[0]}: not found; run `make repro` first", file=sys.stderr)
        return 2
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    os.environ.setdefault("KERNELS_DIR", str(Path("artifacts/kernels").resolve()))
    try:
        gguf = fetch_gguf(ARTIFACTS / "peers") if python_of("llamacpp").exists() else None
    except ValueError as e:
        print(f"error: {e}; remove {python_of('llamacpp').parents[1]} to do without", file=sys.stderr)
        return 2
    study = Study(args.blocks, args.tokens, args.prompts, gguf)
    try:
        records = study.measure()
    finally:
        study.close()
    provenance.write_json(REPORTS / "ratios.json", records)
    study.batches = study.measure_batches()
    provenance.write_text(REPORTS / "bench.md", markdown(records, study))
    print((REPORTS / "bench.md").read_text())
    return 0


class Study:
    """Loads what is compared and measures it; `notes` says what a reader must know."""

    def __init__(self, blocks: int, tokens: int, prompts: int, gguf: Path | None) -> None:
        self.blocks, self.tokens, self.per_block = blocks, tokens, prompts
        rows = prompt_rows(ARTIFACTS / "prompts.jsonl")
        self.prompts = [r["input_ids"] for r in rows if r["split"] == "evaluation" and r["category"] == "code"]
        self.target, self.int4 = load(ARTIFACTS / "target"), load(ARTIFACTS / "quantized/awq")
        vocab = ARTIFACTS / "draft/draft_vocab.json"
        self.draft = load(ARTIFACTS / "quantized/draft", vocab=vocab)
        targets = {"base": self.target, "awq": self.int4}
        self.draft_lens = {key: self._best_draft_len(key, target) for key, target in targets.items()}
        self.theirs, self.their_draft = (Transformers.load(ARTIFACTS / n) for n in ("target", "draft"))
        self.arms: dict[str, Any] = {
            "transformers": Transformers(self.theirs),
            "transformers_assisted": Transformers(self.theirs, self.their_draft, self.draft_lens["base"]),
            "bf16": Ours(self.target),
            "bf16_spec": Ours(self.target, self.draft, self.draft_lens["base"]),
            "bf16_spec_bf16": Ours(self.target, load(ARTIFACTS / "draft", vocab=vocab), self.draft_lens["base"]),
            "int4": Ours(self.int4),
            "int4_spec": Ours(self.int4, self.draft, self.draft_lens["awq"]),
            "int4_bf16_head": Ours(load(ARTIFACTS / "quantized/awq", full_head=True)),
        }
        if gguf is not None:
            self.arms["llamacpp"] = Peer("llamacpp", gguf, torch.get_num_threads())
        if python_of("vllm").exists():
            self.arms["vllm"] = Peer("vllm", ARTIFACTS / "target", torch.get_num_threads())
        self.rates: dict[str, Interval] = {}
        self.over_transformers: dict[str, Interval] = {}
        self.batches: list[dict[str, Any]] = []

    def close(self) -> None:
        """End what runs beside this process."""
        for arm in self.arms.values():
            if isinstance(arm, Peer):
                arm.close()

    def measure(self) -> list[dict[str, Any]]:
        """One record a row of BOUNDS."""
        totals = self._blocks()
        self.rates = {name: median_interval([t[name].rate for t in totals], 0) for name in self.arms}

        def ratio(over: str, under: str) -> Interval:
            return paired_ratio(totals, [over], [under], 0)

        self.over_transformers = {name: ratio(name, "transformers") for name in self.arms if name != "transformers"}

        best = max((name for name in self.arms if "int4" in name), key=lambda name: self.rates[name].value)
        found = {
            "bf16_plain_vs_transformers": ratio("bf16", "transformers"),
            "int4_plain_vs_llamacpp": ratio("int4", "llamacpp") if "llamacpp" in self.arms else UNKNOWN,
            "int4_plain_vs_bf16_plain": ratio("int4", "bf16"),
            "bf16_spec_vs_bf16_plain": ratio("bf16_spec", "bf16"),
            "bf16_spec_vs_transformers_assisted": ratio("bf16_spec_bf16", "transformers_assisted"),
            "int4_spec_vs_bf16_plain": ratio("int4_spec", "bf16"),
            "int4_best_vs_transformers": ratio(best, "transformers"),
            "bf16_plain_ceiling_share": self._share("bf16", self.target),
            "int4_plain_ceiling_share": self._share("int4", self.int4),
            "predicted_vs_measured": predicted_vs_measured(),
            "curve_cost_runs": self._curve_cost(),
            "prefill_vs_transformers": self._prefill(),
            "start_to_first_token_s": start_to_first_token(),
        }
        return [record(name, found[name]) for name in BOUNDS]

    def _blocks(self) -> list[dict[str, Total]]:
        for arm in self.arms.values():
            arm.run(self.prompts[0], 8)
        totals, bandwidth = [], []
        for index in range(self.blocks):
            bandwidth.append(read_bandwidth_bytes_per_s("cpu"))
            chosen = [self.prompts[(index * self.per_block + i) % len(self.prompts)] for i in range(self.per_block)]
            spent: dict[str, list[Timed]] = {}
            for name in order_of(list(self.arms), index):
                spent[name] = [self.arms[name].run(prompt, self.tokens) for prompt in chosen]
            totals.append({n: Total(sum(t.tokens for t in s), sum(t.seconds for t in s)) for n, s in spent.items()})
        self.bandwidth = median(bandwidth)
        return totals

    def _share(self, name: str, decoder: Decoder) -> Interval:
        """Of the bandwidth measured in this run, cache left out (some percent of the weights here)."""
        step_bytes, rate = read_bytes_per_step(decoder.module), self.rates[name]
        share = lambda value: value * step_bytes / self.bandwidth  # noqa: E731
        return Interval(share(rate.value), share(rate.low), share(rate.high))

    def _curve_cost(self) -> Interval:
        """(plain answer + one pass of the draft over it + the replay of every K) / plain answer."""
        costs = []
        for prompt in self.prompts[: self.blocks]:
            started = time.perf_counter()
            answer = greedy(self.target, prompt, self.tokens)
            plain_s = time.perf_counter() - started
            started = time.perf_counter()
            hits = self._hits(prompt, answer)
            for k in CURVE_LENS:
                replay([(len(answer), kept_from_hits(hits))], k)
            costs.append((plain_s + time.perf_counter() - started) / plain_s)
        return median_interval(costs, 0)

    def _hits(self, prompt: list[int], answer: list[int]) -> list[bool]:
        """Whether the draft would have said each token of the answer."""
        columns = logits_along(self.draft, prompt, answer[:-1]).argmax(-1)
        ids = columns if self.draft.vocab_ids_U is None else self.draft.vocab_ids_U[columns]
        return [a == b for a, b in zip(ids.tolist(), answer, strict=True)]

    def _best_draft_len(self, key: str, target: Decoder) -> int:
        """K above 0 with the best predicted speedup: what the draft keeps of this bench's answers, replayed, and the
        costs that the target's sweep measured."""
        costs = Costs.from_json(provenance.read_json(ARTIFACTS / f"metrics/speculate@{key}.json")["metrics"]["costs"])
        answers = [(prompt, greedy(target, prompt, self.tokens)) for prompt in self.prompts]
        kept = [(len(answer), kept_from_hits(self._hits(prompt, answer))) for prompt, answer in answers]
        predicted = {
            k: costs.predicted_speedup(replay(kept, k).mean_emitted_per_round, k)
            for k in range(1, max(costs.target_step_ms))
        }
        return max(predicted, key=lambda k: predicted[k] or 0.0)

    def _prefill(self) -> Interval:
        ids = [i for p in self.prompts for i in p][:512]
        totals = []
        for index in range(self.blocks):
            spent = {}
            for name in order_of(["transformers", "bf16"], index):
                spent[name] = Total(len(ids), self.arms[name].run(ids, 2).ttft_s)
            totals.append(spent)
        return median_interval(block_ratios(totals, ["bf16"], ["transformers"]), 0)

    def measure_batches(self) -> list[dict[str, Any]]:
        """Tokens a second of every batch size and draft length, bf16 and int4; medians over interleaved rounds."""
        pairs = {"bf16": (self.target, self.draft), "int4": (self.int4, self.draft)}
        rows = []
        for batch in BATCHES:
            chosen = [self.prompts[i % len(self.prompts)][:BATCH_PROMPT_TOKENS] for i in range(batch)]
            spent: dict[tuple[str, int], list[float]] = {}
            for index in range(3):
                for name, k in order_of([(n, k) for n in pairs for k in BATCH_DRAFT_LENS], index):  # type: ignore[misc, type-var]
                    target, draft = pairs[name]
                    assert isinstance(target, LeanDecoder) and isinstance(draft, LeanDecoder)
                    own = {"draft": draft if k else None, "draft_len": k}
                    done = generate_batch(target, chosen, max_new_tokens=BATCH_NEW_TOKENS, **own)
                    spent.setdefault((name, k), []).append(batch * (BATCH_NEW_TOKENS - 1) / done.decode_s)
            for name in pairs:
                rates = {k: median(spent[name, k]) for k in BATCH_DRAFT_LENS}
                rows.append(
                    {
                        "precision": name,
                        "batch": batch,
                        "decode_tok_per_s": rates,
                        "best": max(rates, key=rates.__getitem__),
                    }
                )
        return rows


def greedy(decoder: Decoder, prompt: list[int], tokens: int) -> list[int]:
    from pipeline.engine.generate import generate
    from pipeline.engine.sample import GREEDY

    ask = {"end_ids": frozenset(), "sampling": GREEDY, "generator": None, "ignore_end": True}
    return generate(decoder, prompt, max_new_tokens=tokens, proposer=None, draft_len=0, **ask).ids  # type: ignore[arg-type]


def predicted_vs_measured() -> Interval:
    """Largest |predicted / measured - 1| over the timed K of all three sweeps; no interval of its own."""
    off = []
    for key in ("base", "gptq", "awq"):
        curve = provenance.read_json(ARTIFACTS / f"metrics/speculate@{key}.json")["metrics"]["curve"]
        for p in curve:
            if p["draft_len"] and p["measured"] and p["predicted_speedup"]:
                off.append(abs(p["predicted_speedup"] / p["measured"]["speedup"]["value"] - 1))
    return Interval(max(off), float("nan"), float("nan"))


def start_to_first_token() -> Interval:
    """In fresh processes, after one that compiles the kernels if need be."""
    run: Callable[[], float] = lambda: float(  # noqa: E731
        subprocess.run([sys.executable, "-c", WARM_START], capture_output=True, text=True, check=True).stdout
    )
    gc.collect()
    run()
    return median_interval([run() for _ in range(5)], 0)


def record(name: str, found: Interval) -> dict[str, Any]:
    what, at_least, aim, unit = BOUNDS[name]
    finite = provenance.finite({"value": found.value, "low": found.low, "high": found.high})
    reached: bool | None = found.value <= at_least if "upper" in unit else found.value >= at_least
    if math.isnan(found.value):
        reached = None
    return {"name": name, "what": what, **finite, "unit": unit, "at_least": at_least, "aim": aim, "reached": reached}


def markdown(records: Sequence[dict[str, Any]], study: Study) -> str:
    from tabulate import tabulate

    def show(r: dict[str, Any]) -> list[Any]:
        if r["reached"] is None:
            return [f"`{r['name']}`", r["what"], "not installed: `make bench-peers`", r["at_least"], r["aim"], "–"]
        ends = "" if r["low"] is None else f" ({r['low']:.2f}–{r['high']:.2f})"
        return [
            f"`{r['name']}`",
            r["what"],
            f"{r['value']:.2f}{ends}",
            r["at_least"],
            r["aim"],
            "yes" if r["reached"] else "**no**",
        ]

    head = ["name", "what", "value (95 %)", "at least", "aim", "reached"]
    over = {n: f"{i.value:.2f} ({i.low:.2f}–{i.high:.2f})" for n, i in study.over_transformers.items()}
    rates = [[f"`{n}`", f"{i.value:.1f} ({i.low:.1f}–{i.high:.1f})", over.get(n, "")] for n, i in study.rates.items()]
    batch = [
        [r["precision"], r["batch"], *(f"{v:.0f}" for v in r["decode_tok_per_s"].values()), r["best"]]
        for r in study.batches
    ]
    return "\n".join(
        [
            "# Decoding speed of the engine",
            "",
            f"Default target and draft, {torch.get_num_threads()} threads, {study.blocks} interleaved blocks of "
            f"{study.per_block} code prompts, {study.tokens} tokens each; K = {study.draft_lens['base']} (bf16), "
            f"{study.draft_lens['awq']} (int4), the best predicted for these answers. Quantized copies hold head and "
            "embedding as their recipes say (`pack_head`), `int4_bf16_head` in bf16; drafts are the quantized copy, "
            "in `bf16_spec_bf16` and for transformers the bf16 one. Memory is read at "
            f"{study.bandwidth / 1e9:.1f} GB/s in the same run.",
            "",
            tabulate([show(r) for r in records], head, tablefmt="github", disable_numparse=True),
            "",
            tabulate(
                rates,
                ["arm", "decode, tok/s (95 %)", "over `transformers` (95 %)"],
                tablefmt="github",
                disable_numparse=True,
            ),
            "",
            "Batches: tokens a second over all sequences, by draft length; `best` is the K to use at that batch.",
            "",
            tabulate(
                batch,
                ["", "batch", *(f"K = {k}" for k in BATCH_DRAFT_LENS), "best"],
                tablefmt="github",
                disable_numparse=True,
            ),
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
