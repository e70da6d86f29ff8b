"""Small corpora, models and config sections for the tests of the data stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint import random_llama
from pipeline.config import Calibration, Corpus, Model, Prompts, RandomLlama, Runtime

RUNTIME = Runtime(device="cpu", dtype="float32", threads=1, seed=7, min_free_memory_bytes=0)
SHAPE = RandomLlama(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=320,
    max_position_embeddings=512,
)


def model_section(**changed: Any) -> Model:
    absent = dict.fromkeys(("id", "revision", "package", "version", "file", "sha256", "path", "parameters"))
    absent |= dict.fromkeys(("packable_parameters", "cache_values_per_token"))
    plain = {"name": "m", "source": "random", "random": SHAPE, "license": "Apache-2.0", "gated": False, "note": "n"}
    return Model(**{**absent, **plain, "trust_remote_code": False, **changed})


def corpus_section(**changed: Any) -> Corpus:
    absent = dict.fromkeys(
        ("id", "subset", "split", "revision", "package", "version", "file", "sha256", "path", "text_field")
    )
    plain = {"source": "path", "reader": "text", "category": "prose", "max_documents": None, "min_chars": 0}
    return Corpus(**{**absent, **plain, "evaluation_documents": ["e*"], "license": "x", **changed})


def calibration_section(**changed: Any) -> Calibration:
    plain = {"rows": 16, "row_tokens": 128, "categories": [], "pack": True, "max_overlap": 1.0}
    return Calibration(**{**plain, **changed})


def prompts_section(**changed: Any) -> Prompts:
    plain = {"per_category": 2, "train_per_category": 2, "max_prompt_tokens": 224, "chat_template": True}
    return Prompts(**{**plain, **changed})


def tiny_target(folder: Path, *, bos: bool = False, template: str | None = random_llama.CHAT_TEMPLATE) -> Path:
    """A random model's folder; with `bos`, its tokenizer begins every text with id 0."""
    from tokenizers.processors import TemplateProcessing

    random_llama.make(SHAPE, folder, dtype=torch.float32, seed=7)
    tokenizer = random_llama.make_tokenizer(SHAPE.vocab_size, SHAPE.max_position_embeddings)
    tokenizer.chat_template = template
    if bos:
        tokenizer.bos_token = random_llama.TURN_START
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{random_llama.TURN_START} $A", special_tokens=[(random_llama.TURN_START, 0)]
        )
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    return folder


def write_corpus(folder: Path, documents: list[dict[str, Any]]) -> Path:
    """A fetched corpus; each document needs id and text."""
    usual = {"corpus": "c", "category": "prose", "split": "calibration", "prompt": None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "documents.jsonl").write_text("".join(json.dumps(usual | d) + "\n" for d in documents))
    (folder / "source.json").write_text(json.dumps({"c": {"revision": "r", "source": "path"}}))
    return folder
