"""Decoding at the cost of reading the weights: the Llama shape and its relatives without transformers' modules.

The weights are taken out of a filled `skeleton.Skeleton` (so every checkpoint format comes along), with q/k/v and
gate/up joined where their layouts allow. Activations are float32 on a CPU, where products are formed in float32 anyway,
and in the weights' dtype elsewhere. Legend: B sequences, T new tokens of each, M = B T rows, D hidden size, V
vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeline.engine import native, skeleton, step
from pipeline.engine.cache import CachePool, ContextFull, StaticCache
from pipeline.engine.compiled import CompiledSteps
from pipeline.engine.decoder import Decoder
from pipeline.engine.few_rows import MANY_ROWS
from pipeline.engine.linear import PackedWeight, joined

FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")  # others depend on the length of the text


def refusal(config: Any) -> str | None:
    """Why a causal LM of this transformers config cannot be decoded here; None when it can."""
    if config.model_type not in skeleton.ARCHITECTURES:
        name = (config.architectures or [config.model_type])[0]
        return f"{name} is not one of {', '.join(skeleton.ARCHITECTURES.values())}"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act}, not silu"
    kind = config.rope_parameters["rope_type"]
    if kind not in FIXED_ROTATIONS:
        return f"rotary embedding of type {kind} changes with the length of the text"
    if 2 * len(skeleton.rotation(config)[0]) != skeleton.head_dim(config):
        return "rotary embedding of a part of each head"
    return None


def activations(device: str, dtype: torch.dtype) -> torch.dtype:
    """float32 on a CPU, the weights' dtype elsewhere."""
    return torch.float32 if torch.device(device).type == "cpu" else dtype


Products = Callable[[torch.Tensor], torch.Tensor]


class Joined(nn.Module):
    """Several linear layers of one input as one, or one after the other where their layouts do not join."""

    def __init__(self, *parts: PackedWeight) -> None:
        super().__init__()
        self.whole = whole = joined(list(parts))
        self.parts = nn.ModuleList(parts if whole is None else [])
        self.rows: Products = whole.rows if whole else self._each([part.rows for part in parts])
        self.prompt_rows: Products = whole.prompt_rows if whole else self._each([part.prompt_rows for part in parts])

    @staticmethod
    def _each(products: list[Products]) -> Products:
        return lambda x_MK: torch.cat([product(x_MK) for product in products], -1)


class Layer(nn.Module):
    """One transformer block's weights."""

    def __init__(self, layer: Any, window: int) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.window = window
        self.input_norm, self.output_norm = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        self.q_norm = attention.q_norm.weight if hasattr(attention, "q_norm") else None
        self.k_norm = attention.k_norm.weight if hasattr(attention, "k_norm") else None
        self.qkv, self.o = Joined(attention.q_proj, attention.k_proj, attention.v_proj), attention.o_proj
        self.gate_up, self.down = Joined(mlp.gate_proj, mlp.up_proj), mlp.down_proj
        # a module's attributes are looked up slowly: a hundred of them are a tenth of a small model's step
        self.norms = self.input_norm, self.output_norm, self.q_norm, self.k_norm
        linears = self.qkv, self.o, self.gate_up, self.down
        self.products = tuple(linear.rows for linear in linears)
        self.prompt_products = tuple(linear.prompt_rows for linear in linears)


@dataclass(frozen=True)
class Fused:
    """The layers as kernels/layers.cpp takes them, for forwards of fewer than `below` rows."""

    weights: list[torch.Tensor | None]
    outputs: list[int]
    windows: list[int]
    below: int

    @classmethod
    def of(cls, layers: Iterable[Any]) -> Fused | None:
        """None where a product has no kernel there."""
        weights: list[torch.Tensor | None] = []
        outputs, windows, below = [], [], MANY_ROWS
        for layer in layers:
            weights += layer.norms
            windows.append(layer.window)
            for part in (layer.qkv, layer.o, layer.gate_up, layer.down):
                linear: PackedWeight | None = part.whole if isinstance(part, Joined) else part
                if linear is None or linear.kernel_tensors is None or linear.input_order_K is not None:
                    return None
                weights += [*linear.kernel_tensors, linear.bias]
                outputs.append(linear.out_features)
                below = min(below, linear.dense_from_rows or below)
        return cls(weights, outputs, windows, below)


class LeanModel(nn.Module):
    """The weights of a causal LM in the order of use, taken out of a Skeleton (or transformers' module of the same
    names), which is emptied."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        config = module.config
        self.config, self.architecture = config, skeleton.ARCHITECTURES[config.model_type]
        self.eps: float = config.rms_norm_eps
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = skeleton.head_dim(config)
        self.widths = config.hidden_size, config.intermediate_size
        self.embedding, self.norm, self.head = module.model.embed_tokens, module.model.norm.weight, module.lm_head
        self.frequency_D, self.rotation_scale = skeleton.rotation(config)
        self.layers = nn.ModuleList()
        for i, layer in enumerate(module.model.layers):
            self.layers.append(Layer(layer, window_of(config, i)))
            module.model.layers[i] = nn.Identity()  # frees what was joined before the next layer is
        for linear in self.modules():
            if isinstance(linear, PackedWeight):
                linear.settle()

    @functools.cached_property
    def fused(self) -> Fused | None:
        return Fused.of(self.layers)

    def _apply(self, *args: Any, **options: Any) -> LeanModel:
        self.__dict__.pop("fused", None)  # it holds the tensors themselves
        return super()._apply(*args, **options)  # type: ignore[no-untyped-call,no-any-return]

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def hidden(
        self,
        ids_M: torch.Tensor,
        start_B: torch.Tensor,
        cache: StaticCache,
        activations: torch.dtype,
        prompt: bool = False,
    ) -> torch.Tensor:
        """x_MD after the last norm; writes the cache at `start_B` and following. `prompt`: nothing is verified here."""
        x_MD = self.embedding(ids_M).to(activations)
        op = step.operations(x_MD.device, self.head_dim, self.widths, cache.keys[0].dtype)
        add_norm, attention, silu_mul = op.add_norm, op.attention, op.silu_mul
        eps, cos, sin = self.eps, cache.cos_PD, cache.sin_PD
        fused = self.fused if op is torch.ops.step else None
        if fused is not None and len(x_MD) < fused.below:
            weights = fused.weights, fused.outputs, fused.windows
            y_MD = op.layers(x_MD, *weights, eps, cos, sin, start_B, cache.keys, cache.values)
        else:
            y_MD = torch.zeros_like(x_MD)
            layer: Any
            for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
                input_norm, output_norm, q_norm, k_norm = layer.norms
                qkv, o, gate_up, down = layer.prompt_products if prompt else layer.products
                q_k_v = qkv(add_norm(x_MD, y_MD, input_norm, eps))
                y_MD = o(attention(q_k_v, q_norm, k_norm, eps, cos, sin, start_B, keys, values, layer.window))
                y_MD = down(silu_mul(gate_up(add_norm(x_MD, y_MD, output_norm, eps))))
        hidden_MD: torch.Tensor = add_norm(x_MD, y_MD, self.norm, eps)
        return hidden_MD


def window_of(config: Any, layer: int) -> int:
    """Positions that a layer looks back; 0 = all. Keys of other families are of no account, as in transformers."""
    if config.model_type == "llama":
        return 0
    if config.model_type != "mistral" and config.layer_types[layer] != "sliding_attention":
        return 0
    return config.sliding_window or 0


class LeanDecoder(Decoder):
    """A LeanModel behind the interface of `Decoder`; raises ValueError from `refusal`'s reasons."""

    engine = "lean"
    module: LeanModel

    def __init__(self, module: Any, max_positions: int) -> None:
        reason = refusal(module.config)
        if reason is not None:
            raise ValueError(f"engine lean: {reason}; use engine hf")
        super().__init__(LeanModel(module), max_positions)
        self.activations = activations(str(self.device), self.dtype)
        self.steps: CompiledSteps | None = None
        if self.device.type != "cpu":
            self.compile_steps()

    def compile_steps(self) -> None:
        """From here on forwards of few tokens of one sequence run as compiled graphs, where that can be had."""
        self.steps = CompiledSteps(self._step, self.module)
        self.pool = CachePool(self.steps.cache_from(lambda positions: self._cache(positions, 1)), self.max_positions)

    def new_cache(self, capacity: int, batch: int = 1) -> StaticCache:  # type: ignore[override]
        self.refuse_capacity(capacity)
        return self._cache(capacity, batch) if self.steps is None or batch > 1 else self.pool.lease(capacity)

    def _cache(self, capacity: int, batch: int) -> StaticCache:
        model = self.module
        shape = (batch, model.kv_heads, capacity, model.head_dim)
        angle_PD = torch.arange(capacity, device=self.device)[:, None] * model.frequency_D.to(self.device)
        scale = model.rotation_scale
        return StaticCache(len(model.layers), shape, self.dtype, angle_PD.cos() * scale, angle_PD.sin() * scale)

    def forward(self, ids_T: torch.Tensor, cache: StaticCache, last_only: bool = False) -> torch.Tensor:  # type: ignore[override]
        return self.forward_rows(ids_T[None], cache, last_only)[0]

    @torch.inference_mode()
    def forward_rows(self, ids_BT: torch.Tensor, cache: StaticCache, last_only: bool = False) -> torch.Tensor:
        """Append T tokens to each of B sequences; returns logits_BTV (logits_B1V with `last_only`).

        Raises ContextFull, with the cache unchanged, when they do not fit.
        """
        start_B = self._room(ids_BT, cache)
        steps = self.steps
        step = steps if steps is not None and steps.takes(ids_BT.shape[1], cache) else self._step
        logits_BTV = step(ids_BT, start_B, cache, last_only)
        cache.lengths = [length + ids_BT.shape[1] for length in cache.lengths]
        return logits_BTV

    def _step(self, ids_BT: torch.Tensor, start_B: torch.Tensor, cache: StaticCache, last_only: bool) -> torch.Tensor:
        hidden_MD = self.module.hidden(ids_BT.reshape(-1), start_B, cache, self.activations)
        hidden_BTD = hidden_MD.view(*ids_BT.shape, -1)
        if last_only:
            hidden_BTD = hidden_BTD[:, -1:].contiguous()
        logits_MV = self.module.head.rows(hidden_BTD.reshape(-1, hidden_BTD.shape[-1]))
        return logits_MV.view(*hidden_BTD.shape[:2], -1)

    def _room(self, ids_BT: torch.Tensor, cache: StaticCache) -> torch.Tensor:
        """start_B. Raises ContextFull when the tokens do not fit."""
        T = ids_BT.shape[1]
        if max(cache.lengths) + T > cache.capacity:
            raise ContextFull(f"{max(cache.lengths)} + {T} tokens do not fit in a cache of {cache.capacity}")
        return torch.tensor(cache.lengths, device=self.device)

    @torch.inference_mode()
    def prefill(self, ids_T: torch.Tensor, cache: StaticCache) -> torch.Tensor:  # type: ignore[override]
        hidden_1TD = self.hidden_rows(ids_T[None], cache, prompt=True)
        return self.module.head.rows(hidden_1TD[0, -1:].contiguous())

    @torch.inference_mode()
    def hidden_rows(self, ids_BT: torch.Tensor, cache: StaticCache, prompt: bool = False) -> torch.Tensor:
        """As `forward_rows` (`prompt`: `prefill`), but the final hidden states, hidden_BTD, which the head makes logits
        of."""
        start_B = self._room(ids_BT, cache)
        hidden_MD = self.module.hidden(ids_BT.reshape(-1), start_B, cache, self.activations, prompt)
        cache.lengths = [length + ids_BT.shape[1] for length in cache.lengths]
        return hidden_MD.view(*ids_BT.shape, -1)

    def read_prompt(self, ids: list[int], cache: StaticCache, b: int) -> torch.Tensor:
        """Fill row b of an empty batch; returns the final hidden states, hidden_TD."""
        row = cache.rows(b, b + 1)
        hidden_1TD = self.hidden_rows(torch.tensor([ids], device=self.device), row, prompt=True)
        cache.lengths[b] = row.length
        return hidden_1TD[0]

    @property
    def made(self) -> int:
        return 0 if self.steps is None else self.steps.made

    def describe(self) -> dict[str, Any]:
        between = "kernels/step.cpp" if self.device.type == "cpu" and native.refusal() is None else "torch"
        steps = {} if self.steps is None else {"steps": self.steps.describe()}
        return {**super().describe(), "architecture": self.module.architecture, "between_linears": between, **steps}
