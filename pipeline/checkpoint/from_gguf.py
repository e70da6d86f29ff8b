"""A GGUF file of the Llama family as a clean Hugging Face folder (safetensors), checked against the file itself.

transformers dequantizes the weights and undoes the row permutation of q and k. Its tokenizer is not used: for these
files it leaves out the pre-tokenizer's digit splitting and mistakes the end token, so the tokenizer is built here from
the vocabulary, merges and flags in the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

# llama.cpp's name of a pre-tokenizer -> longest run of digits it leaves together; all split further as GPT-2 does.
DIGITS_TOGETHER = {"gpt-2": None, "smollm": 1}
CONTROL_TOKEN = 3
SAMPLE = 'In 1984,  "12345" tokens\n    return x[10] == 3.25  # naïve café\n'


class ConversionError(ValueError):
    """The file cannot be converted, or the folder made from it disagrees with the file."""


def read_metadata(path: Path) -> dict[str, Any]:
    """All key-value pairs of the file. Raises ConversionError when it is not a Llama GGUF with a known tokenizer."""
    import gguf

    try:
        metadata = {name: f.contents() for name, f in gguf.GGUFReader(path).fields.items()}
    except (ValueError, IndexError) as e:
        raise ConversionError(f"{path.name}: not a GGUF file ({e})") from None
    for name, known in (
        ("general.architecture", ("llama",)),
        ("tokenizer.ggml.model", ("gpt2",)),
        ("tokenizer.ggml.pre", tuple(DIGITS_TOGETHER)),
    ):
        if metadata.get(name) not in known:
            raise ConversionError(
                f"{path.name}: {name} is {metadata.get(name)!r}, but only {', '.join(known)} can be converted; "
                f"use the original safetensors model (source: hub or path)"
            )
    return metadata


def convert(path: Path, folder: Path, dtype: torch.dtype) -> list[str]:
    """Write config, weights in `dtype`, generation config and tokenizer to `folder`; returns what was changed.

    Raises ConversionError when the result, read back, disagrees with the file.
    """
    metadata = read_metadata(path)
    _save_model(path, folder, dtype, metadata)
    build_tokenizer(metadata).save_pretrained(folder)
    # The class has two names: every version of transformers reads this one.
    config_path = folder / "tokenizer_config.json"
    settings = json.loads(config_path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config_path.write_text(json.dumps(settings, indent=2) + "\n")
    check_tokenizer(metadata, folder)
    check_config(metadata, folder)
    check_weights(path, folder, dtype)
    return [
        f"weights dequantized from {path.name} to {str(dtype).removeprefix('torch.')}",
        f"tokenizer built from the file's vocabulary, merges and flags ({metadata['tokenizer.ggml.pre']} splitting)",
    ]


def _save_model(path: Path, folder: Path, dtype: torch.dtype, metadata: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    config = loaded.config
    # A model that remembers its GGUF quantization refuses to be saved.
    del config.quantization_config
    config._name_or_path = str(metadata.get("general.name", ""))
    clean = AutoModelForCausalLM.from_config(config, dtype=dtype)
    clean.load_state_dict(loaded.state_dict())
    clean.generation_config.update(**special_ids(metadata), do_sample=False)
    clean.save_pretrained(folder)


def special_ids(metadata: dict[str, Any]) -> dict[str, int | None]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {ours: metadata.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in names.items()}


def build_tokenizer(metadata: dict[str, Any]) -> Any:
    """The byte-level BPE tokenizer that the metadata describes, as a PreTrainedTokenizerFast."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ", 1)) for m in metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] * (DIGITS_TOGETHER[metadata["tokenizer.ggml.pre"]] == 1)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    backend.decoder = decoders.ByteLevel()
    control = [
        t for t, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == CONTROL_TOKEN
    ]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    special = {name.removesuffix("_id"): tokens[i] for name, i in special_ids(metadata).items() if i is not None}
    if metadata.get("tokenizer.ggml.add_bos_token"):
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    if "tokenizer.ggml.unknown_token_id" in metadata:
        special["unk_token"] = tokens[metadata["tokenizer.ggml.unknown_token_id"]]
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **special,
    )
    made.chat_template = metadata.get("tokenizer.chat_template")
    return made


def check_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """Raises ConversionError when the saved tokenizer differs from the file's in any table, flag or split."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    pieces = [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a1234567")]
    tokens = metadata["tokenizer.ggml.tokens"]
    first_ids = tokenizer("a").input_ids
    _equal("vocabulary size", len(tokenizer), len(tokens))
    for i, (ours, theirs) in enumerate(
        zip(tokenizer.convert_ids_to_tokens([*range(len(tokens))]), tokens, strict=True)
    ):
        _equal(f"token {i}", ours, theirs)
    _equal("merges", [" ".join(m) for m in backend["model"]["merges"]], metadata["tokenizer.ggml.merges"])
    _equal(
        "BOS added", first_ids[0] == tokenizer.bos_token_id, bool(metadata.get("tokenizer.ggml.add_bos_token", False))
    )
    longest = max(len(p) for p in pieces if p.isdigit())
    _equal("digits kept together", longest, DIGITS_TOGETHER[metadata["tokenizer.ggml.pre"]] or 7)
    for name, token_id in special_ids(metadata).items():
        _equal(f"tokenizer {name}", getattr(tokenizer, name), token_id)
    _equal("text after a round trip", tokenizer.decode(tokenizer(SAMPLE, add_special_tokens=False).input_ids), SAMPLE)
    _equal("chat template", tokenizer.chat_template, metadata.get("tokenizer.chat_template"))


def check_config(metadata: dict[str, Any], folder: Path) -> None:
    """Raises ConversionError when config.json or generation_config.json disagrees with the file."""
    config = json.loads((folder / "config.json").read_text())
    generation = json.loads((folder / "generation_config.json").read_text())
    for name, theirs in {
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "max_position_embeddings": "context_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    }.items():
        _equal(name, config[name], metadata[f"llama.{theirs}"])
    _equal("vocab_size", config["vocab_size"], len(metadata["tokenizer.ggml.tokens"]))
    _equal("rope_theta", config["rope_parameters"]["rope_theta"], metadata.get("llama.rope.freq_base", 10000.0))
    for name, token_id in special_ids(metadata).items():
        _equal(f"config {name}", config.get(name), token_id)
        _equal(f"generation_config {name}", generation.get(name), token_id)


def check_weights(path: Path, folder: Path, dtype: torch.dtype) -> None:
    """Raises ConversionError: another dtype, a wrong head, or values unlike gguf's own dequantization.

    The embedding and every down projection are compared: tensors whose rows GGUF leaves in order, one a layer.
    """
    import gguf
    from safetensors import safe_open

    theirs = {t.name: t for t in gguf.GGUFReader(path).tensors}
    tied = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    _equal("tie_word_embeddings", tied, "output.weight" not in theirs)
    with safe_open(folder / "model.safetensors", framework="pt") as ours:
        _equal("tensors", len(ours.keys()), len(theirs) - ("rope_freqs.weight" in theirs))
        _equal("a stored head", "lm_head.weight" in ours.keys(), not tied)  # noqa: SIM118 (not a dict)
        for name in ours.keys():  # noqa: SIM118
            _equal(f"dtype of {name}", ours.get_tensor(name).dtype, dtype)
        layers = sum(name.endswith("ffn_down.weight") for name in theirs)
        pairs = {"token_embd.weight": "model.embed_tokens.weight"}
        pairs |= {f"blk.{i}.ffn_down.weight": f"model.layers.{i}.mlp.down_proj.weight" for i in range(layers)}
        for gguf_name, name in pairs.items():
            values = gguf.dequantize(theirs[gguf_name].data, theirs[gguf_name].tensor_type)
            same = torch.equal(torch.from_numpy(values.copy()).to(dtype), ours.get_tensor(name))
            _equal(f"values of {name} equal", same, True)


def _equal(what: str, ours: Any, theirs: Any) -> None:
    if ours != theirs:
        raise ConversionError(
            f"{what}: the conversion gives {str(ours)[:80]!r}, the GGUF file says {str(theirs)[:80]!r}"
        )
