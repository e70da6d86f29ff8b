"""What an experiment will need, estimated from its config alone: memory per arm, disk, and what is missing here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from pipeline.config import Model, Params, QuantizeMethod

ARCHIVED = {"auto_gptq", "autoawq"}
QUANTIZERS_READY = Path("envs/quantizers/.venv/.ready")
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
GIB = 2**30


def archived_backends(params: Params) -> list[str]:
    """Backends of this experiment that run in envs/quantizers."""
    return sorted({q.backend for q in params.quantize.values()} & ARCHIVED)


def full_bytes(model: Model, dtype: str) -> float | None:
    return model.parameters * DTYPE_BYTES[dtype] if model.parameters else None


def packed_bytes(model: Model, q: QuantizeMethod, dtype: str) -> float | None:
    """Packed linear layers with a scale and a zero (16 bits each) a group; embedding, head and norms as in the file
    (`pack_head` takes less)."""
    if model.parameters is None or model.packable_parameters is None:
        return None
    bits = q.bits + (0 if q.group_size == -1 else 32 / q.group_size)
    rest = model.parameters - model.packable_parameters
    return model.packable_parameters * bits / 8 + rest * DTYPE_BYTES[dtype]


def plan(params: Params) -> str:
    """Markdown: estimated weight and cache memory of each arm, disk, and a list of what is missing. Fetches nothing."""
    from tabulate import tabulate

    rows = [[name, *(_gib(v) for v in sizes)] for name, *sizes in _arms(params)]
    missing = list(missing_here(params))
    return "\n".join(
        [
            f"# Plan: {params.name}",
            f"{params.model.name} on {params.runtime.device} in {params.runtime.dtype}; draft: {_draft_name(params)}. "
            "Estimates from parameter counts, nothing was fetched.",
            "",
            tabulate(
                rows,
                headers=["arm", "weights GiB, at most", "draft GiB", "cache GiB / 1000 tokens"],
                tablefmt="github",
                disable_numparse=True,
            ),
            "",
            f"Disk for checkpoints: about {_gib(_disk(params))} GiB "
            f"({_gib(shutil.disk_usage('.').free)} GiB free here). Quantizing holds the full-precision model once.",
            "",
            "Missing here: " + ("; ".join(missing) if missing else "nothing"),
        ]
    )  # fmt: skip


def missing_here(params: Params) -> Iterator[str]:
    """What must be provided before this experiment can run on this machine."""
    if params.runtime.device.startswith("cuda") and shutil.which("nvidia-smi") is None:
        yield f"a GPU (runtime.device is {params.runtime.device}, and there is no NVIDIA driver)"
    models = [m for m in (params.model, params.draft.model if params.draft.kind == "model" else None) if m]
    for model in models:
        if model.gated and not os.environ.get("HF_TOKEN"):
            yield f"HF_TOKEN in the environment, after accepting the licence at https://huggingface.co/{model.id}"
    if archived_backends(params) and not QUANTIZERS_READY.exists():
        yield f"envs/quantizers for {', '.join(archived_backends(params))} (`make setup-quantizers`)"
    if shutil.which("c++") is None:
        yield "a C++ compiler (only compiled kernels need it)"


def _arms(params: Params) -> Iterator[tuple[str, float | None, float | None, float | None]]:
    dtype = params.runtime.dtype
    values = params.model.cache_values_per_token
    cache = values * DTYPE_BYTES[dtype] * 1000 if values else None
    sizes = {"base": full_bytes(params.model, dtype)}
    sizes |= {name: packed_bytes(params.model, q, dtype) for name, q in params.quantize.items() if name != "draft"}
    for name, size in sizes.items():
        yield name, size, 0.0, cache
        yield f"{name}_spec", size, _draft_of(params, name), cache


def _draft_of(params: Params, target: str) -> float | None:
    full, packed = _draft_bytes(params)
    if params.draft.kind == "self":
        return packed if target == "base" else None
    return packed if target in params.speculate.quantized_draft_for else full


def _draft_bytes(params: Params) -> tuple[float | None, float | None]:
    """(full, packed); a distilled draft is sized when it is made, a lookup has no weights."""
    dtype = params.runtime.dtype
    if params.draft.kind == "ngram":
        return 0.0, 0.0
    if params.draft.kind == "self":
        return None, packed_bytes(params.model, params.quantize["draft"], dtype)
    if params.draft.model is None:
        return None, None
    return full_bytes(params.draft.model, dtype), packed_bytes(params.draft.model, params.quantize["draft"], dtype)


def _disk(params: Params) -> float | None:
    sizes = [size for name, size, _, _ in _arms(params) if not name.endswith("_spec")]
    known = [s for s in [*sizes, *_draft_bytes(params)] if s is not None]
    return sum(known) if None not in sizes else None


def _draft_name(params: Params) -> str:
    return params.draft.model.name if params.draft.model else params.draft.kind


def _gib(value: float | None) -> str:
    return "unknown" if value is None else f"{value / GIB:.2f}"
