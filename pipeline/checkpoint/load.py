"""From a checkpoint folder of any format to a Decoder whose linear layers are ours.

The model's modules are built empty, each linear layer is replaced as its weights are read, one tensor at a time, and
every tensor of the file must find its place: a missing, left-over or misshapen one is an error that names it.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from pipeline.checkpoint.files import CheckpointError
from pipeline.checkpoint.packed import PackedLinear
from pipeline.checkpoint.read import Checkpoint, located, read
from pipeline.checkpoint.whole import RECOMPUTED
from pipeline.engine import few_rows, lean, native
from pipeline.engine.decoder import Decoder
from pipeline.engine.few_rows import FewRowsInt4Linear, FewRowsInt8Linear, FewRowsLinear
from pipeline.engine.linear import (
    HEAD_ROWS,
    FullLinear,
    Int8Embedding,
    Int8Linear,
    PackedWeight,
    clearly_faster,
    measure_dense_from,
)
from pipeline.engine.linear4 import quantized_linear
from pipeline.engine.skeleton import Skeleton, plain_config

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES = 2**30  # no tensor between the layers is larger

DenseFrom = Mapping[str, int | None]  # class of PackedWeight -> its `dense_from_rows`


def load_decoder(
    folder: Path,
    *,
    device: str,
    dtype: torch.dtype,
    pack_head: bool,
    trust_remote_code: bool,
    dense_from: DenseFrom | None = None,
    engine: Literal["lean", "hf"] = "lean",
    vocab_ids: list[int] | None = None,
) -> Decoder:
    """A decoder in eval mode on `device`, unquantized weights in `dtype`.

    `engine`: lean where the architecture allows it (`Decoder.engine_reason` says why not), or transformers' own modules
    (hf). `pack_head` rounds a full-precision output head to 8 bits, and an embedding that is tied to it or much larger
    (the head was cut down). `dense_from` fixes
    which classes of linear layer are used and from how many rows each uses a plain GEMM; None takes what was measured
    on this machine, or measures it (some ms). `vocab_ids` cuts the head down to those ids (a draft need not be able to
    say everything). Raises CheckpointError for whatever in the folder does not fit together.
    """
    checkpoint = read(folder)
    with located(folder):
        module, reason = empty_module(checkpoint, dtype, trust_remote_code, engine)
        activations = dtype if reason else lean.activations(device, dtype)
        classes = (
            chosen_classes(checkpoint, module, dtype, activations, device) if dense_from is None else set(dense_from)
        )
        _Filling(checkpoint, module, dtype, device, classes).fill()
        max_positions = getattr(module.config.get_text_config(), "max_position_embeddings", None)
        if max_positions is None:
            raise CheckpointError("config.json: no max_position_embeddings; add the longest context of the model")
        tied = getattr(module.get_output_embeddings(), "weight", None) is module.get_input_embeddings().weight
        if vocab_ids is not None:
            _cut_head(module, vocab_ids)
        if pack_head:
            _pack_head(module, tied or vocab_ids is not None, activations, classes)
    decoder = Decoder(module, max_positions) if reason else lean.LeanDecoder(module, max_positions)
    decoder.engine_reason = reason
    decoder.vocab_ids_U = None if vocab_ids is None else torch.tensor(vocab_ids, device=device)
    set_dense_from(
        decoder.module, measured_dense_from(decoder.module, activations) if dense_from is None else dense_from
    )
    _keep_freed_memory()
    return decoder


def empty_module(
    checkpoint: Checkpoint, dtype: torch.dtype, trust_remote_code: bool, engine: Literal["lean", "hf"]
) -> tuple[Any, str | None]:
    """The causal LM of config.json with parameters on the meta device: the lean engine's places, or transformers'
    modules (buffers computed) and the reason why."""
    try:
        plain = plain_config(checkpoint.config) if engine == "lean" else None
        if plain is not None and lean.refusal(plain) is None:
            return Skeleton(plain, dtype), None

        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=trust_remote_code)
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # transformers is not to look for the quantizer
        reason = "asked for" if engine == "hf" else lean.refusal(config)
        if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
            reason = "its code comes with the checkpoint"
        if reason is None:
            return Skeleton(config, dtype), None

        from accelerate import init_empty_weights
        from transformers import AutoModelForCausalLM

        with init_empty_weights(include_buffers=False):
            module = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=trust_remote_code
            )
        return module, reason
    except Exception as e:  # an impossible shape fails wherever it is first used
        why = " ".join(f"{type(e).__name__}: {e}".split())[:200]
        path = checkpoint.folder / "config.json"
        raise CheckpointError(f"{path}: no model can be made of it ({why}); correct it") from e


class _Filling:
    """One pass over an empty module and a checkpoint's tensors, keeping account of those that found a place."""

    def __init__(self, checkpoint: Checkpoint, module: Any, dtype: torch.dtype, device: str, classes: set[str]) -> None:
        self.checkpoint, self.module, self.dtype, self.device = checkpoint, module, dtype, device
        self.classes = classes
        self.unused = {*checkpoint.tensors, *checkpoint.linears}
        self.base = f"{module.base_model_prefix}."
        tied = module.all_tied_weights_keys
        self.tied: dict[str, str] = tied if module.config.get_text_config().tie_word_embeddings else {}

    def fill(self) -> None:
        for name, layer in list(self.module.named_modules()):
            if type(layer) is nn.Linear and f"{name}.weight" not in self.tied:
                self.module.set_submodule(name, self._linear(name, layer))
                _return_freed_memory()
            elif self._stored(name) in self.checkpoint.linears:
                raise CheckpointError(
                    f"{name}: quantized, but a {type(layer).__name__}, whose weight is transposed or tied, is read in "
                    f"full precision only; leave such layers out when quantizing"
                )
        for name, place in list(self.module.state_dict(keep_vars=True).items()):
            in_file = self._stored(name) in self.unused  # a persistent buffer may be in the file or computed
            if name not in self.tied and (place.device.type == "meta" or in_file):
                self._assign(name, self._tensor(name, tuple(place.shape), place.dtype))
        self._tie()
        ignored = [RECOMPUTED, *(self.module._keys_to_ignore_on_load_unexpected or [])]
        left = sorted(n for n in self.unused if not any(re.search(pattern, n) for pattern in ignored))
        if left:
            raise CheckpointError(
                f"{left[0]}: in the file, but {type(self.module).__name__} has no such tensor "
                f"({len(left)} left over); check config.json"
            )
        self.module.to(self.device)

    def _stored(self, name: str) -> str:
        """The name in the file, which may lack the base model's prefix."""
        known = (self.checkpoint.tensors, self.checkpoint.linears)
        return name if any(name in k for k in known) else name.removeprefix(self.base)

    def _linear(self, name: str, layer: nn.Linear) -> PackedWeight:
        stored = self._stored(name)
        if stored in self.checkpoint.linears:
            self.unused.discard(stored)
            return self._packed(stored, self.checkpoint.linears[stored], layer)
        weight_NK = self._tensor(f"{name}.weight", tuple(layer.weight.shape), self.dtype)
        bias_N = self._tensor(f"{name}.bias", (layer.out_features,), self.dtype) if layer.bias is not None else None
        return self._full(nn.Parameter(weight_NK, requires_grad=False), bias_N)

    def _full(self, weight_NK: nn.Parameter, bias_N: torch.Tensor | None) -> FullLinear:
        chosen = FewRowsLinear.__name__ in self.classes
        few = chosen and few_rows.takes_full(weight_NK.shape[1], self.dtype, self.device)
        return (FewRowsLinear if few else FullLinear)(weight_NK, bias_N)

    def _packed(self, name: str, packed: PackedLinear, layer: nn.Linear) -> PackedWeight:
        due = (layer.out_features, layer.in_features)
        if tuple(packed.codes_NK.shape) != due:
            raise CheckpointError(f"{name}: {list(packed.codes_NK.shape)} codes, config.json implies {list(due)}")
        bias_N = packed.bias_N
        if layer.bias is None and bias_N is not None and bias_N.any():
            raise CheckpointError(f"{name}.bias: in the file, but the model has none there; check config.json")
        if layer.bias is not None and bias_N is None:
            raise CheckpointError(f"{name}.bias: missing, but the model has one there; export the checkpoint again")
        return quantized_linear(
            packed.codes_NK,
            packed.scales_NG,
            packed.zeros_NG,
            packed.group_index_K,
            packed.bits,
            packed.group_size,
            bias_N if layer.bias is not None else None,
            self.dtype,
            self.device,
            FewRowsInt4Linear.__name__ in self.classes,
        )

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        stored = self._stored(name)
        if stored not in self.checkpoint.tensors:
            hint = (
                "is the head tied? then set tie_word_embeddings to true" if self._is_head(name) else "export it again"
            )
            raise CheckpointError(f"{name}: not in the file; {hint}")
        found = self.checkpoint.tensors.shape(stored)
        if found != shape:
            raise CheckpointError(
                f"{name}: shape {list(found)}, but config.json implies {list(shape)}; they do not match"
            )
        self.unused.discard(stored)
        tensor = self.checkpoint.tensors[stored]
        return tensor.to(self.device, dtype if tensor.is_floating_point() else None)

    def _is_head(self, name: str) -> bool:
        head = self.module.get_output_embeddings()
        return head is not None and self.module.get_submodule(name.rpartition(".")[0]) is head

    def _assign(self, name: str, tensor: torch.Tensor) -> None:
        owner_name, _, leaf = name.rpartition(".")
        owner = self.module.get_submodule(owner_name)
        if leaf in owner._parameters:
            owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        else:
            owner._buffers[leaf] = tensor

    def _tie(self) -> None:
        """Share tied weights; a copy in the file must equal its source, or the flag contradicts the file."""
        for name, source in self.tied.items():
            weight = self.module.get_parameter(source)
            stored = self._stored(name)
            if stored in self.checkpoint.tensors:
                copy = self._tensor(name, tuple(weight.shape), weight.dtype)
                if not torch.equal(copy, weight):
                    raise CheckpointError(
                        f"config.json: tie_word_embeddings is true, but {name} differs from {source}; set it to false"
                    )
            owner_name, _, leaf = name.rpartition(".")
            owner = self.module.get_submodule(owner_name)
            if type(owner) is nn.Linear:
                self.module.set_submodule(owner_name, self._full(weight, self._tied_bias(owner_name, owner)))
            else:
                owner._parameters[leaf] = weight

    def _tied_bias(self, name: str, layer: nn.Linear) -> torch.Tensor | None:
        if layer.bias is None:
            return None
        return self._tensor(f"{name}.bias", (layer.out_features,), self.dtype)


def _return_freed_memory() -> None:
    """glibc keeps what unpacking a layer freed, scattered between what stays: five times a small checkpoint's size."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _keep_freed_memory() -> None:
    """glibc gives large tensors back as they are freed, and the next one costs a page fault for each 4 KiB of it: a
    third of the time in which a prompt is read. From here on they stay with the process; what loading took does not. No
    such call, no change."""
    _return_freed_memory()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            mallopt(option, KEPT_BYTES)


def _cut_head(module: Any, ids: list[int]) -> None:
    """Keep the rows of `ids` of a full-precision output head; the embedding keeps all of its own."""
    head = module.get_output_embeddings()
    if not isinstance(head, FullLinear) or not 0 <= min(ids) <= max(ids) < head.out_features:
        raise CheckpointError(f"draft_vocab.json: its ids do not fit the output head, {head}; make the draft again")
    weight = nn.Parameter(head.weight[ids].clone(), requires_grad=False)
    _replace(module, head, type(head)(weight, None if head.bias is None else head.bias[ids]))


def _pack_head(module: Any, with_embedding: bool, activations: torch.dtype, classes: set[str]) -> None:
    """Replace a full-precision output head by 8-bit codes; an embedding tied to it reads the same ones, another
    (`with_embedding`) its own."""
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    if not isinstance(head, FullLinear):
        return
    chosen = FewRowsInt8Linear.__name__ in classes
    few = chosen and few_rows.takes_int8(head.in_features, activations, head.device.type)
    packed = (FewRowsInt8Linear if few else Int8Linear)(head.weight, head.bias)
    try:
        packed(torch.zeros(1, head.in_features, dtype=activations, device=head.device))
    except RuntimeError as e:
        raise CheckpointError(f"pack_head: torch has no int8 kernel here ({e}); set pack_head to false") from None
    _replace(module, head, packed)
    if with_embedding and type(embedding) is nn.Embedding:
        module.config.get_text_config().tie_word_embeddings = False  # or transformers looks for weights to tie again
        whole = packed if head.weight is embedding.weight else type(packed)(embedding.weight, None)
        _replace(module, embedding, Int8Embedding(whole, embedding.weight.dtype))


def _replace(module: nn.Module, old: nn.Module, new: nn.Module) -> None:
    module.set_submodule(next(name for name, m in module.named_modules() if m is old), new)


def chosen_classes(
    checkpoint: Checkpoint, module: nn.Module, dtype: torch.dtype, activations: torch.dtype, device: str
) -> set[str]:
    """Which few_rows classes beat torch's kernels on this machine: timed on a layer of the module's commonest size."""
    shapes = [(m.out_features, m.in_features) for m in module.modules() if isinstance(m, nn.Linear)]
    N, K = max(shapes, key=lambda shape: (shapes.count(shape), shape[0] * shape[1]), default=(0, 1))
    weight = nn.Parameter(torch.ones(N, K, dtype=dtype), requires_grad=False)
    pairs: list[tuple[PackedWeight, PackedWeight]] = []
    if N and few_rows.takes_full(K, dtype, device):
        pairs.append((FewRowsLinear(weight, None), FullLinear(weight, None)))
    if N and few_rows.takes_int8(K, activations, device):
        pairs.append((FewRowsInt8Linear(weight, None), Int8Linear(weight, None)))
    first = next(iter(checkpoint.linears.values()), None)
    grouped = "" if first is None else f" in groups of {first.group_size}"
    if first is not None and K % first.group_size == 0:
        codes = torch.ones(N, K, dtype=torch.uint8)
        groups = torch.ones(N, K // first.group_size)
        parts = (codes, groups, groups, None, first.bits, first.group_size, None, dtype, device)
        ours = quantized_linear(*parts, True)
        if isinstance(ours, FewRowsInt4Linear):
            pairs.append((ours, quantized_linear(*parts, False)))
    chosen = set()
    for ours, torchs in pairs:
        name = type(ours).__name__
        layer = f"{name} {N} x {K}{grouped if isinstance(ours, FewRowsInt4Linear) else ''}"
        question = f"{layer} beats {type(torchs).__name__}, {dtype} weights, {activations} activations"
        with torch.inference_mode():
            if native.remembered(question, lambda: clearly_faster(ours, torchs, activations)):  # noqa: B023
                chosen.add(name)
    return chosen


def measured_dense_from(module: nn.Module, activations: torch.dtype) -> dict[str, int | None]:
    """class -> rows, measured on the largest layer of each class that is not the head (or on the head)."""
    head = module.get_output_embeddings()  # type: ignore[operator]
    size: Callable[[PackedWeight], tuple[bool, int]] = lambda m: (m is not head, m.out_features * m.in_features)  # noqa: E731
    largest: dict[str, PackedWeight] = {}
    for layer in module.modules():
        if isinstance(layer, PackedWeight):
            name = type(layer).__name__
            largest[name] = max(largest.get(name, layer), layer, key=size)
    found = {}
    for name, layer in sorted(largest.items()):
        groups = f" in groups of {layer.group_size}" if hasattr(layer, "group_size") else ""
        question = (
            f"{name} {layer.out_features} x {layer.in_features}{groups} dense from rows, {activations} activations"
        )
        with torch.inference_mode():
            sample = _sample(layer) if layer is head else layer
            found[name] = native.remembered(question, lambda: measure_dense_from(sample, activations))  # noqa: B023
    return found


def _sample(head: PackedWeight) -> PackedWeight:
    """Its first rows as a layer of the same class: a head is the largest layer by far, too slow to time whole."""
    if not isinstance(head, FullLinear | Int8Linear):
        return head
    rows_NK = head.tile(0, min(HEAD_ROWS, head.out_features))
    if isinstance(head, Int8Linear):
        return type(head)(rows_NK, None)
    return type(head)(nn.Parameter(rows_NK.to(head.weight.dtype), requires_grad=False), None)


def set_dense_from(module: nn.Module, dense_from: DenseFrom) -> None:
    for layer in module.modules():
        if isinstance(layer, PackedWeight):
            layer.dense_from_rows = dense_from.get(type(layer).__name__) if layer.tiled else None


def dense_from_of(decoder: Decoder) -> dict[str, int | None]:
    """What a loaded decoder uses, to be given to `load_decoder` in another process."""
    layers = (m for m in decoder.module.modules() if isinstance(m, PackedWeight))
    return {type(m).__name__: m.dense_from_rows for m in layers}
