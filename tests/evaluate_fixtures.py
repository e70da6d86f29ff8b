"""A tiny checkpoint with and without a BOS, settings, documents: what the evaluation's tests share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.config import Evaluate, RandomLlama, build

SHAPE = RandomLlama(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=300,
    max_position_embeddings=128,
)
BOS_ID = 0  # the turn start of the made-up tokenizer
PROSE = (
    "The keeper of the tower kept a small lamp in the window for the boats. "
    "Every night the boats came home and the men in them looked up to the lamp. "
    "When the storm broke the glass the keeper held his coat before the lamp, "
    "and nobody in the boats ever knew how close they had been to losing it.\n\n"
)
CODE = 'def add(a, b):\n    """Sum of a and b."""\n    return a + b\n\n'


def settings(**changes: Any) -> Evaluate:
    values = {
        "tasks": ["prose_perplexity", "last_word"],
        "limit": None,
        "num_fewshot": None,
        "batch_size": 2,
        "window_tokens": 32,
        "stride_tokens": 16,
        "max_ppl_tokens": 200,
        "max_document_chars": 400,
        "perplexity_documents": 2,
        "last_word_items": 4,
        "baseline_top_k": 16,
    }
    return build(Evaluate, values | changes, "evaluate")


def documents(prose: int = 3, code: int = 3) -> list[dict[str, Any]]:
    made = [("prose", f"p/{i}", PROSE.replace("keeper", f"keeper{'s' * i}")) for i in range(prose)]
    made += [("code", f"c/{i}", CODE.replace("add", f"add{i}")) for i in range(code)]
    return [{"id": i, "corpus": c, "category": c, "split": "evaluation", "text": t} for c, i, t in made]


def write_corpus(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "documents.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def write_checkpoint(folder: Path, seed: int) -> Path:
    import torch

    from pipeline.checkpoint import random_llama

    random_llama.make(SHAPE, folder, dtype=torch.float32, seed=seed)
    return folder


def bos_tokenizer() -> Any:
    """The made-up tokenizer, with a BOS put before every text."""
    from tokenizers.processors import TemplateProcessing

    from pipeline.checkpoint import random_llama

    made = random_llama.make_tokenizer(SHAPE.vocab_size, SHAPE.max_position_embeddings)
    made.bos_token = random_llama.TURN_START
    mark = random_llama.TURN_START
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{mark} $A", pair=f"{mark} $A {mark} $B", special_tokens=[(mark, BOS_ID)]
    )
    assert made.encode("a")[0] == BOS_ID
    return made
