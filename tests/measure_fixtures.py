"""Tiny checkpoint folders, prompts and settings for the tests of measuring."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import torch

from pipeline.checkpoint.random_llama import make
from pipeline.config import Benchmark, Model, RandomLlama, Runtime, Sampling, Speculate, Timing, build
from pipeline.provenance import finite

SHAPE = RandomLlama(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=300,
    max_position_embeddings=256,
)


def checkpoint(folder: Path, seed: int) -> Path:
    """A random float32 Llama whose weights are large enough that its greedy answers do not stand still."""
    from safetensors.torch import load_file, save_file

    make(SHAPE, folder, dtype=torch.float32, seed=seed)
    weights = load_file(folder / "model.safetensors")
    spread = {n: t if t.ndim == 1 else 10 * t for n, t in weights.items()}
    save_file(spread, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def prompts_file(path: Path, per_category: int = 2) -> Path:
    rows = []
    for c, category in enumerate(("code", "prose")):
        for i in range(per_category):
            ids = [(7 * j + 13 * i + 29 * c) % 250 + 2 for j in range(9 + i)]
            rows.append(
                {"id": f"{category}/{i}", "split": "evaluation", "category": category, "text": "", "input_ids": ids}
            )
        rows.append(
            {"id": f"{category}/train", "split": "calibration", "category": category, "text": "", "input_ids": [3]}
        )
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def timing(**changes) -> Timing:
    values = {
        "block_prompts_per_category": 1,
        "min_blocks": 2,
        "max_blocks": 3,
        "time_budget_s": 2.0,
        "precision": 1.0,
        "max_load": 64.0,
    }
    return Timing(**(values | changes))


def speculate(**changes) -> Speculate:
    values = {
        "draft_lens": [0, 1, 2, 3, 4],
        "timed_draft_lens": [0, 1, 3],
        "prompts_per_category": 2,
        "max_new_tokens": 16,
        "sampling": Sampling(temperature=0.0, top_k=None, top_p=1.0),
        "cost_repeats": 3,
        "batch_sizes": [1, 3],
        "quantized_draft_for": ["gptq", "awq"],
        "lossless_gap": 0.25,
        "timing": timing(),
    }
    return Speculate(**(values | changes))


def benchmark(**changes) -> Benchmark:
    values = {
        "prompts_per_category": 2,
        "max_new_tokens": 12,
        "forced_new_tokens": 8,
        "max_loop_share": 1.0,
        "max_compression_ratio": 1000.0,
        "memory_budgets_bytes": [2**20, 2**34],
        "timing": timing(),
    }
    return Benchmark(**(values | changes))


def runtime(**changes) -> Runtime:
    values = {"device": "cpu", "dtype": "float32", "threads": 1, "seed": 5, "min_free_memory_bytes": 0}
    return Runtime(**(values | changes))


def model() -> Model:
    import yaml

    raw = yaml.safe_load(Path("conf/model/tiny_random.yaml").read_text())
    return build(Model, raw, "model")


class LocalWorker:
    """Stands in for worker.Worker without a process: the same commands, through JSON, in this one."""

    def __init__(self, name: str, spec) -> None:
        from pipeline.measure.arm import Arm
        from pipeline.measure.worker import bandwidth, commands_of

        self.commands = {"bandwidth": bandwidth} | (commands_of(Arm(spec)) if spec else {})
        self.process = SimpleNamespace(pid=os.getpid())

    def ready(self) -> None:
        pass

    def call(self, command: str, **arguments):
        answer = self.commands[command](**json.loads(json.dumps(arguments)))
        return json.loads(json.dumps(finite(answer)))

    def end_input(self):
        pass

    def close(self, grace_s=0.0) -> None:
        pass
