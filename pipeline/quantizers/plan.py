"""Which modules will be quantized, read off the model's config alone: every refusal comes before weights load.

Shapes: N out_features, K in_features of a linear layer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline.config import QuantizeMethod
from pipeline.quantizers import QuantizationError

LAYER = re.compile(r"^(?P<layer>.*\blayers\.(?P<index>\d+))\.(?P<module>.+)$")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`shapes[name]` = (N, K) of each module to quantize; `ignored[pattern]` = the modules it left alone."""

    family: str
    shapes: dict[str, tuple[int, int]]
    ignored: dict[str, list[str]]
    vocab_size: int

    @property
    def ignored_modules(self) -> list[str]:
        return sorted({name for names in self.ignored.values() for name in names})


def make_plan(model: Path, method: QuantizeMethod, section: str, backend: ModuleType) -> Plan:
    """Raises QuantizationError when the family, a shape or an ignore pattern does not fit."""
    skeleton = _skeleton(model)
    family = skeleton.config.model_type
    _refuse_family(skeleton, family, method, backend)
    linears = {n: (m.out_features, m.in_features) for n, m in skeleton.named_modules() if hasattr(m, "in_features")}
    ignored = {pattern: match(pattern, linears, section) for pattern in method.ignore}
    skipped = {name for names in ignored.values() for name in names}
    shapes = {name: shape for name, shape in linears.items() if LAYER.match(name) and name not in skipped}
    if not shapes:
        raise QuantizationError(f"{section}.ignore: {method.ignore} leaves nothing to quantize; drop a pattern")
    plan = Plan(family=family, shapes=shapes, ignored=ignored, vocab_size=skeleton.config.vocab_size)
    _refuse_group_size(plan, method, section)
    backend.check(plan, method, section)
    return plan


def match(pattern: str, names: Any, section: str) -> list[str]:
    """Names that hold `pattern` as whole dotted components: `layers.1` is layer 1, not layer 10 as well."""
    try:
        whole = re.compile(rf"(^|\.)(?:{pattern})(\.|$)")
    except re.error as e:
        raise QuantizationError(
            f"{section}.ignore: {pattern!r} is not a regular expression ({e}); correct it"
        ) from None
    found = [name for name in names if whole.search(name)]
    if not found:
        known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
        raise QuantizationError(f"{section}.ignore: {pattern!r} matches no linear module; they end in {known}")
    return found


def _skeleton(model: Path) -> Any:
    """The model without memory for weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from pipeline.checkpoint.files import read_object

    if not (model / "config.json").is_file():
        raise QuantizationError(f"{model}: no config.json there; run `dvc repro` to produce the model")
    if read_object(model / "config.json").get("quantization_config") is not None:
        raise QuantizationError(f"{model}: already quantized; give the full-precision checkpoint")
    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception as e:  # whatever transformers and torch make of impossible sizes
        why = " ".join(f"{type(e).__name__}: {e}".split())[:300]
        raise QuantizationError(f"{model / 'config.json'}: transformers refuses it ({why}); correct it") from e


def _refuse_family(skeleton: Any, family: str, method: QuantizeMethod, backend: ModuleType) -> None:
    if any(type(m).__name__ == "Conv1D" for m in skeleton.modules()):
        raise QuantizationError(f"{family}: its Conv1D layers store transposed weights, which is not supported here")
    if family not in backend.FAMILIES:
        known = ", ".join(backend.FAMILIES)
        raise QuantizationError(f"{family}: not among the model types checked with {method.backend} ({known})")


def _refuse_group_size(plan: Plan, method: QuantizeMethod, section: str) -> None:
    group = method.group_size
    for name, (_, k) in plan.shapes.items():
        if group > 0 and k % group:
            fitting = [g for g in (128, 64, 32, 16) if all(K % g == 0 for _, K in plan.shapes.values())]
            way_out = f"use {' or '.join(map(str, fitting))}" if fitting else "use -1, or ignore this module"
            raise QuantizationError(f"{section}.group_size: {group} does not divide {name}'s {k} inputs; {way_out}")


def refuse_multiple(plan: Plan, multiple: int, backend: str, *, of_inputs: bool) -> None:
    """Refuse widths that a backend's packing would silently cut off: it packs `multiple` values at a time."""
    for name, (n, k) in plan.shapes.items():
        for what, size in (("outputs", n), ("inputs", k if of_inputs else multiple)):
            if size % multiple:
                raise QuantizationError(
                    f"{name}: {size} {what} are not a multiple of {multiple}, which {backend} needs; "
                    f"ignore this module or use backend llmcompressor"
                )
