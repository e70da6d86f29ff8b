"""Tiny full-precision checkpoints on disk (hidden 64, 2 layers, 4 heads, vocab 128, float32) and calibration rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.config import QuantizeMethod, Runtime

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
METHOD = {
    "method": "gptq",
    "backend": "llmcompressor",
    "bits": 4,
    "group_size": 16,
    "sym": False,
    "desc_act": False,
    "damp_percent": 0.01,
    "true_sequential": False,
    "zero_point": True,
    "clip": False,
    "duo_scaling": True,
    "calibration_rows": None,
    "error_rows": 2,
    "ignore": [],
    "pack_head": False,
}
TOKENIZER_FILES = {"tokenizer.json": '{"é": 1}', "tokenizer_config.json": "{ }", "merges.txt": "a b\r\n"}


def method(**changes: Any) -> QuantizeMethod:
    return QuantizeMethod(**{**METHOD, **changes})


def runtime(**changes: Any) -> Runtime:
    values = {"device": "cpu", "dtype": "float32", "threads": 1, "seed": 1, "min_free_memory_bytes": 0}
    return Runtime(**{**values, **changes})


def make_model(folder: Path, family: str = "llama", seed: int = 0, **config: Any) -> Any:
    """Save a random model (biases of 5 where the family has them) with stand-ins for tokenizer files; returns it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SHAPE, **config}), dtype=torch.float32)
    for name, parameter in made.named_parameters():
        if name.endswith("_proj.bias"):
            torch.nn.init.constant_(parameter, 5.0)
    made.save_pretrained(folder)
    for name, text in TOKENIZER_FILES.items():
        (folder / name).write_bytes(text.encode())
    return made.eval()


def make_rows(folder: Path, lengths: tuple[int, ...] = (48,) * 8, vocab_size: int = 128) -> list[list[int]]:
    """Write rows.parquet as `calibrate` does: text-like ids, so that some channels matter more than others."""
    import numpy as np
    import pandas as pd

    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(3)
    rows = [(generator.zipf(1.5, n) % vocab_size).astype("int32").tolist() for n in lengths]
    table = pd.DataFrame({"row": range(len(rows)), "document": ["d"] * len(rows), "input_ids": rows})
    table.to_parquet(folder / "rows.parquet")
    return rows


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
