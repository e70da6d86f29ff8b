"""Stage `benchmark`: the matrix, all arms in processes of their own, interleaved in blocks by one driver."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pipeline import provenance
from pipeline.config import Benchmark, Model, Runtime, Speculate
from pipeline.measure import memory
from pipeline.measure.answers import Answer
from pipeline.measure.blocks import Blocks, ProcessMeter, nvidia_state, run_blocks
from pipeline.measure.matrix import (
    CONTROL,
    FORCED,
    NATURAL,
    PROTOCOLS,
    TARGETS,
    Matrix,
    Row,
    Sample,
    distinct,
    joined,
    ratios_to_base,
    row_metrics,
    void_metrics,
)
from pipeline.measure.setup import (
    ArmSpec,
    Ask,
    DraftSpec,
    Prompt,
    PromptSet,
    arm_spec,
    draft_for,
    end_ids,
    read_prompts,
    refuse_beyond_context,
    refuse_unfit_draft,
)
from pipeline.measure.statistics import precise_enough
from pipeline.measure.verdict import LogitGaps
from pipeline.measure.worker import Worker, Workers


def run(
    benchmark: Benchmark,
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
    out: Path,
) -> dict[str, Any]:
    """Write blocks.jsonl (every timed generation) to `out`; the metrics hold a row for each arm.

    Speculative arms use the best K of their target's sweep (`speculate_*`: its metrics files). Raises ValueError
    before any weights load, OSError when a worker ends without an answer.
    """
    checkpoints = dict(zip(TARGETS, (base, gptq, awq), strict=True))
    records = dict(zip(TARGETS, (speculate_base, speculate_gptq, speculate_awq), strict=True))
    prompt_set = read_prompts(prompts, benchmark.prompts_per_category, "benchmark.prompts_per_category")
    longest_answer = max(benchmark.max_new_tokens, benchmark.forced_new_tokens)
    refuse_beyond_context(base, prompt_set, longest_answer, max(speculate.draft_lens), "benchmark")
    inputs = {"prompts": provenance.tree_sha256(prompts), "environment": provenance.tree_sha256(environment)}
    rows: dict[str, Row] = {}
    for target in TARGETS:
        rows[target] = Row(target, target, None, 0, None)
        chosen, no_draft = draft_for(target, draft, quantized_draft, speculate.quantized_draft_for)
        row = speculative_row(target, records[target], inputs, chosen, no_draft)
        rows[f"{target}_spec"] = row
        refuse_unfit_draft(checkpoints[target], row.draft, prompt_set, row.draft_len)
    rows[CONTROL] = Row(CONTROL, "base", None, 0, None)
    ends = end_ids(base)
    specs = {
        name: arm_spec(
            checkpoints[row.target], row.draft, runtime, ends=ends, trust_remote_code=model.trust_remote_code
        )
        for name, row in rows.items()
        if row.void is None
    }
    memory.refuse_too_little(runtime.min_free_memory_bytes)
    driver = Driver(benchmark, speculate, runtime, rows, specs, prompt_set)
    return driver.measure(base, out)


def speculative_row(
    target: str, record: Path, inputs: dict[str, str], draft: DraftSpec | None, no_draft: str | None
) -> Row:
    """The speculative row of a target, with the K of its sweep; where that says 0, the best K above 0 is shown."""
    row = Row(f"{target}_spec", target, draft, 0, no_draft)
    if no_draft is not None:
        return row
    sweep = provenance.read_json(record)
    for name, sha256 in sweep.get("provenance", {}).get("inputs", {}).items():
        if name in inputs and sha256 != inputs[name]:
            row.judgement.add("NOT COMPARABLE", f"its draft length was chosen with another {name} file")
    row.draft_len, note = draft_len_of(sweep["metrics"])
    if note is not None:
        row.judgement.note(note)
    return row


def draft_len_of(sweep: dict[str, Any]) -> tuple[int, str | None]:
    """(K, note) to show in the matrix: at least 1."""
    best = sweep.get("best_draft_len")
    if not isinstance(best, int):
        raise ValueError(f"best_draft_len of a speculate record is {best!r}; run `dvc repro speculate` again")
    if best >= 1:
        return best, None
    points = [p for p in sweep["curve"] if p["draft_len"] >= 1 and p["measured"]]
    values = {p["draft_len"]: p["measured"]["speedup"]["value"] for p in points}
    shown = max(values, key=lambda k: values[k] or 0.0) if values else 1
    return shown, f"the sweep's best draft length is 0 (plain decoding); shown with K = {shown}, the best above 0"


class Driver:
    """Runs the arms in their workers and turns their samples into rows."""

    def __init__(
        self,
        benchmark: Benchmark,
        speculate: Speculate,
        runtime: Runtime,
        rows: dict[str, Row],
        specs: dict[str, ArmSpec],
        prompts: PromptSet,
    ) -> None:
        self.settings, self.speculate, self.runtime = benchmark, speculate, runtime
        self.rows, self.specs, self.prompts = rows, specs, prompts
        self.resident, self.fit = fits_together(specs, runtime.device)

    def measure(self, tokenizer: Path, out: Path) -> dict[str, Any]:
        if not self.resident:
            print(f"benchmark: {self.fit}", file=sys.stderr)
        reader = Worker("bandwidth", None)
        with contextlib.closing(reader), Workers(self.resident, self.warm_up) as workers:
            self.load(workers)
            blocks = self.run_blocks(workers, reader)
            matrix = Matrix(self.rows, blocks, self.settings, self.runtime.seed)
            with provenance.whole_folder(out) as folder:
                provenance.write_text(folder / "blocks.jsonl", lines_of(blocks))
            return self.metrics(matrix, workers, decoder_of(tokenizer))

    def load(self, workers: Workers) -> None:
        """Plain arms first: what they measure about their kernels holds for the other arms of their target."""
        workers.load({t: self.specs[t] for t in TARGETS})
        fixed = {t: workers[t].call("dense_from") for t in TARGETS}
        self.specs = {n: replace(s, dense_from=fixed[self.rows[n].target]) for n, s in self.specs.items()}
        workers.specs |= {t: self.specs[t] for t in TARGETS}
        workers.load({n: s for n, s in self.specs.items() if n not in TARGETS})

    def ask(self, name: str, protocol: str) -> Ask:
        forced = protocol == FORCED
        tokens = self.settings.forced_new_tokens if forced else self.settings.max_new_tokens
        return Ask(self.rows[name].draft_len, tokens, forced, self.speculate.sampling)

    def answers(self, name: str, worker: Worker, prompt: Prompt) -> dict[str, Answer]:
        """By protocol, from one reading of the prompt. Plain rows answer at forced length as well."""
        protocols = [NATURAL] if self.rows[name].speculative else [NATURAL, FORCED]
        asks = [self.ask(name, protocol) for protocol in protocols]
        done = worker.call("answers", prompt_ids=prompt.ids, asks=[asdict(ask) for ask in asks])
        return {p: Answer.of(prompt, ask.draft_len, d) for p, ask, d in zip(protocols, asks, done, strict=True)}

    def warm_up(self, name: str, worker: Worker) -> None:
        """Once with the shapes to come; not timed."""
        self.answers(name, worker, self.prompts.all[0])

    def run_blocks(self, workers: Workers, reader: Worker) -> Blocks:
        """`reader` measures the memory's bandwidth once a turn; its first reading, like an arm's, does not count."""
        per_category = self.settings.timing.block_prompts_per_category
        cuda = self.runtime.device.startswith("cuda")

        def pids() -> list[int]:
            return [*workers.pids(), reader.process.pid]

        def bandwidth() -> float:
            return float(reader.call("bandwidth", device=self.runtime.device, threads=self.runtime.threads))

        bandwidth()
        # an arm that is loaded anew for each of its turns has all its prompts in one
        turns = len(self.prompts.block(0, per_category)) if self.resident else 1

        def timed(name: str) -> Callable[[int, int], Sample]:
            def sample(index: int, turn: int) -> Sample:
                worker, prompts = workers[name], self.prompts.block(index, per_category)[turn::turns]
                done = [self.answers(name, worker, prompt) for prompt in prompts]
                answers = {protocol: [own[protocol] for own in done] for protocol in done[0]}
                ledger = worker.call("ledger", budgets_bytes=self.settings.memory_budgets_bytes)
                return Sample(answers, worker.call("describe"), ledger, worker.call("read_bytes"))

            return sample

        return run_blocks(
            {name: timed(name) for name in self.specs},
            turns=turns,
            join=joined,
            timing=self.settings.timing,
            meter=ProcessMeter(pids, lambda: nvidia_state(pids()) if cuda else None),
            probe=bandwidth,
            precise=lambda found: precise_enough(
                ratios_to_base([b.samples for b in found], self.runtime.seed), self.settings.timing.precision
            ),
        )

    def metrics(self, matrix: Matrix, workers: Workers, decode: Callable[[tuple[int, ...]], str]) -> dict[str, Any]:
        def gaps_at(target: str, prompt_ids: list[int], answer_ids: list[int], plain: int, other: int) -> LogitGaps:
            asked = {"prompt_ids": prompt_ids, "answer_ids": answer_ids, "plain_token": plain, "other_token": other}
            return LogitGaps(**workers[target].call("gaps", **asked))

        arms = {}
        for name, row in self.rows.items():
            if name == CONTROL:
                continue
            if row.void is not None:
                arms[name] = void_metrics(row)
                continue
            greedy = row.speculative and self.speculate.sampling.temperature == 0
            graded = matrix.lossless(name, gaps_at, self.speculate.lossless_gap) if greedy else None
            texts = [decode(ids) for ids in distinct(matrix.answers(name, NATURAL))]
            arms[name] = row_metrics(matrix, name, texts, graded)
        return provenance.finite(
            {
                "protocols": PROTOCOLS,
                "prompts": {"count": len(self.prompts.all), "sha256": self.prompts.sha256},
                "bandwidth_bytes_per_s": matrix.bandwidth_bytes_per_s(),
                "arms": arms,
                "answer_tokens": self.settings.max_new_tokens,
                "noise_floor": matrix.noise_floor(None),
                "noise_floor_by_category": {c: matrix.noise_floor(c) for c in self.prompts.by_category},
                "noise_floor_answer": matrix.latency(CONTROL)["answer_speedup"],
                "interaction": {t: matrix.interaction(t, "base") for t in TARGETS if t != "base"},
                "interaction_control": {t: matrix.interaction(t, CONTROL) for t in TARGETS if t != "base"},
                "blocks": {**matrix.blocks.summary(), "resident": self.resident, "memory": self.fit},
            }
        )


def fits_together(specs: dict[str, ArmSpec], device: str) -> tuple[bool, str]:
    """Whether all arms can be loaded at once, by the size of their files, and a line that says why (not)."""
    needed = sum(
        memory.process_estimate_bytes([Path(s.target), *([Path(s.draft.folder)] if s.draft and s.draft.folder else [])])
        for s in specs.values()
    )
    free = memory.free_on_device_bytes(device)
    figures = f"{len(specs)} arms are estimated at {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
    if needed <= free:
        return True, f"{figures}: all loaded together"
    return False, f"{figures}: loaded one at a time, anew for each block"


def decoder_of(folder: Path) -> Callable[[tuple[int, ...]], str]:
    """Token ids to text, by the folder's tokenizer.json alone: transformers would take seconds to import."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True))


def lines_of(blocks: Blocks) -> str:
    """One JSON line for each timed generation, in the order they ran, with the disturbance of its block."""
    lines = []
    for i, block in enumerate(blocks.all):
        about = {"block": i, "kept": any(block is k for k in blocks.kept), "disturbed": block.disturbed}
        about |= asdict(block.disturbance) | {"bandwidth_bytes_per_s": block.readings}
        for arm in block.order:
            for protocol, answers in block.samples[arm].answers.items():
                lines += [{**about, "arm": arm, "protocol": protocol, **a.row(), "ids": a.ids} for a in answers]
    return "".join(json.dumps(provenance.finite(line)) + "\n" for line in lines)
