"""The modules of the Llama shape, empty: a place for each tensor of a checkpoint, under the name that the files use.

Names and shapes only, on the meta device; `lean.LeanModel` takes the weights out and computes. transformers' own
classes have the same places, but importing them takes longer than loading a small model.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

ARCHITECTURES = {  # model_type -> class of transformers with these modules
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


SAID = {  # what config.json says itself, when nothing in it is left to be implied
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), int),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"), int),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), bool),
    "rms_norm_eps": float,
    "hidden_act": str,
    "architectures": list,
    "rope_parameters": dict,
}


class PlainConfig(SimpleNamespace):
    """The values of a config.json that needs no interpretation."""

    def get_text_config(self) -> PlainConfig:
        return self


def plain_config(values: dict[str, Any]) -> PlainConfig | None:
    """A Llama config as it stands in its file, or None when anything is implied, unusual or wrong in it: transformers
    is to read it then, which takes seconds to import."""
    typed = all(type(values.get(name)) is kind for name, kind in SAID.items())
    others = any(values.get(name) for name in ("auto_map", "rope_scaling", "per_layer_config"))
    if not typed or values.get("model_type") != "llama" or others:
        return None
    counts = [values[name] for name, kind in SAID.items() if kind is int]
    rope = values["rope_parameters"]
    usual = rope.get("rope_type") == "default" and type(rope.get("rope_theta")) is float
    if min(counts) < 1 or not usual or values["hidden_size"] % values["num_attention_heads"]:
        return None
    return PlainConfig(**values)


def head_dim(config: Any) -> int:
    """Width of one attention head, given or implied."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rotation(config: Any) -> tuple[torch.Tensor, float]:
    """Angle per position of each pair of dimensions, float32 of head_dim / 2, and the factor of cos and sin.

    Su et al. 2021 (RoFormer), section 3.2.2; scaled forms as transformers computes them.
    """
    parameters = config.rope_parameters
    if parameters["rope_type"] == "default":
        D = head_dim(config)
        return 1.0 / parameters["rope_theta"] ** (torch.arange(0, D, 2, dtype=torch.float32) / D), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, None)


class Scale(nn.Module):
    """The weight of an RMSNorm."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device="meta", dtype=dtype))


class Attention(nn.Module):
    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        D, H = config.hidden_size, head_dim(config)
        Q, KV = config.num_attention_heads * H, config.num_key_value_heads * H
        bias = config.model_type in ("llama", "qwen3") and config.attention_bias
        qkv_bias = bias or config.model_type == "qwen2"
        self.q_proj = _linear(D, Q, qkv_bias, dtype)
        self.k_proj, self.v_proj = _linear(D, KV, qkv_bias, dtype), _linear(D, KV, qkv_bias, dtype)
        self.o_proj = _linear(Q, D, bias, dtype)
        if config.model_type == "qwen3":
            self.q_norm, self.k_norm = Scale(H, dtype), Scale(H, dtype)


class Mlp(nn.Module):
    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        D, F = config.hidden_size, config.intermediate_size
        bias = config.model_type == "llama" and config.mlp_bias
        self.gate_proj, self.up_proj = _linear(D, F, bias, dtype), _linear(D, F, bias, dtype)
        self.down_proj = _linear(F, D, bias, dtype)


class Block(nn.Module):
    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = Scale(config.hidden_size, dtype)
        self.post_attention_layernorm = Scale(config.hidden_size, dtype)
        self.self_attn, self.mlp = Attention(config, dtype), Mlp(config, dtype)


class Body(nn.Module):
    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        table_VD = torch.empty(config.vocab_size, config.hidden_size, device="meta", dtype=dtype)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=table_VD)
        self.layers = nn.ModuleList(Block(config, dtype) for _ in range(config.num_hidden_layers))
        self.norm = Scale(config.hidden_size, dtype)


class Skeleton(nn.Module):
    """A causal LM's places. `config` of one of ARCHITECTURES; weights of `dtype`."""

    base_model_prefix = "model"
    _keys_to_ignore_on_load_unexpected = None

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.all_tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
        self.model = Body(config, dtype)
        self.lm_head = _linear(config.hidden_size, config.vocab_size, False, dtype)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def _linear(K: int, N: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
    return nn.Linear(K, N, bias, device="meta", dtype=dtype)
