"""Is a full-precision folder whole? Names and shapes from the headers first, then every value, read once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint.files import CheckpointError
from pipeline.checkpoint.read import Checkpoint, located, read
from pipeline.engine.skeleton import ARCHITECTURES, Skeleton, plain_config

RECOMPUTED = re.compile(r"rotary_emb\.inv_freq$")  # buffers older exports stored and every model computes
AGAIN = "fetch or export the model again"


def check_whole(folder: Path) -> None:
    """Raises CheckpointError for a folder that could not be loaded.

    A tensor that is missing, left over or not of the shape that config.json implies (for the architectures of the lean
    engine), or that holds NaN or infinity.
    """
    checkpoint = read(folder)
    with located(folder):
        module = _places(checkpoint)
        if module is not None:
            _check_headers(checkpoint, module)
        for name in checkpoint.tensors:
            checkpoint.tensors[name]  # checks on the way


def _places(checkpoint: Checkpoint) -> Skeleton | None:
    """None for a model that only transformers' modules, or code of its own, can be."""
    values = checkpoint.config
    if values.get("model_type") not in ARCHITECTURES or values.get("auto_map") or checkpoint.linears:
        return None
    layers, held = values.get("num_hidden_layers"), len(checkpoint.tensors)
    if isinstance(layers, int) and layers > held:  # modules of a billion would be made for hours
        raise CheckpointError(f"config.json: num_hidden_layers: {layers}, but {held} tensors are there; correct it")
    try:
        config: Any = plain_config(values)
        if config is None:
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(checkpoint.folder)
        return Skeleton(config, torch.float32)
    except Exception as e:  # an impossible shape fails wherever it is first used
        why = " ".join(f"{type(e).__name__}: {e}".split())[:200]
        raise CheckpointError(f"config.json: no model can be made of it ({why}); correct it") from e


def _check_headers(checkpoint: Checkpoint, module: Skeleton) -> None:
    tensors, left = checkpoint.tensors, set(checkpoint.tensors)
    tied = module.all_tied_weights_keys if module.config.tie_word_embeddings else {}
    for name, place in module.state_dict(keep_vars=True).items():
        stored = name if name in tensors else name.removeprefix(f"{module.base_model_prefix}.")
        if stored not in tensors:
            if name in tied:
                continue
            head = "is the head tied? then set tie_word_embeddings to true, or " if name == "lm_head.weight" else ""
            raise CheckpointError(f"{name}: not in the file; {head}{AGAIN}")
        found, due = list(tensors.shape(stored)), list(place.shape)
        if found != due:
            file = tensors.files.entries[stored].file
            raise CheckpointError(f"{file}: {name}: shape {found}, but config.json implies {due}; {AGAIN}")
        left.discard(stored)
    over = sorted(name for name in left if not RECOMPUTED.search(name))
    if over:
        raise CheckpointError(
            f"{over[0]}: in the file, but {ARCHITECTURES[module.config.model_type]} has no such tensor "
            f"({len(over)} left over); check config.json"
        )
