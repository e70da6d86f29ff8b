"""Models given by path, their config and tokenizer, and pairs of target and draft."""

from __future__ import annotations

from typing import Any

from bad_input.world import Plant, Row, bytes_of, each, edit, params, put, remove, write

TOKENIZER, CONFIG = "source/tokenizer.json", "source/config.json"


def fetched(name: str, plant: Plant, names: str, way_out: str) -> Row:
    return Row(name, "fetch_target", plant, names, way_out)


def drafted(name: str, plant: Plant, names: str, way_out: str) -> Row:
    """The source folder as a draft for the target, whose files are the same until spoilt."""

    def take(tree: Any) -> None:
        tree["draft"] |= {"kind": "model", "model": tree["model"]}

    return Row(name, "draft", each(params(take), plant), names, way_out)


def swap_ids(tokenizer: dict[str, Any]) -> None:
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


ROWS = [
    fetched("no folder", put("model.path", "nowhere"), r"model\.path: nowhere", "give one in Hugging Face form"),
    fetched("a file", put("model.path", "params.yaml"), r"model\.path: params\.yaml", "give one in Hugging Face form"),
    fetched(
        "an empty folder", remove("source/model.safetensors"), "source holds no weights", r"give a model with .saf"
    ),
    fetched(
        "pickled weights only",
        each(remove("source/model.safetensors"), write("source/pytorch_model.bin", b"\x80")),
        r"pytorch_model\.bin",
        r"give a model with \.safetensors",
    ),
    fetched("config.json: absent", remove(CONFIG), r"no config\.json", "give a model"),
    fetched("config.json: cut", bytes_of(CONFIG, lambda raw: raw[:100]), r"config\.json: not readable JSON", "again"),
    fetched("config.json: a list", write(CONFIG, "[]"), r"config\.json: holds list", "again"),
    fetched("config.json: not UTF-8", write(CONFIG, b'{"a": "\xff"}'), r"config\.json: not readable", "again"),
    fetched("config.json: nested beyond measure", write(CONFIG, "[" * 100_000), r"config\.json: not readable", "again"),
    fetched(
        "config.json: names no layers",
        edit(CONFIG, lambda c: c.pop("num_hidden_layers") and None),
        r"config\.json has no num_hidden_layers",
        "give a causal language model",
    ),
    fetched(
        "config.json: a width in words",
        edit(CONFIG, lambda c: c.update(hidden_size="64")),
        r"config\.json has no hidden_size",
        "give a causal language model",
    ),
    fetched(
        "config.json: no architecture",
        edit(CONFIG, lambda c: c.update(architectures=[])),
        r"config\.json has no architectures",
        "give a causal language model",
    ),
    fetched(
        "quantized already",
        edit(CONFIG, lambda c: c.update(quantization_config={"quant_method": "gptq"})),
        "tiny-random-llama is quantized already",
        "give the full-precision model",
    ),
    fetched(
        "brings code",
        edit(CONFIG, lambda c: c.update(auto_map={"AutoModelForCausalLM": "m.M"})),
        r"model\.trust_remote_code: false",
        "read it, then set it to true",
    ),
    fetched("tokenizer.json: absent", remove(TOKENIZER), r"no tokenizer\.json", "fast tokenizer"),
    fetched("tokenizer.json: cut", bytes_of(TOKENIZER, lambda raw: raw[:500]), r"tokenizer\.json: not JSON", "again"),
    fetched("tokenizer.json: another object", write(TOKENIZER, '{"model": 7}'), r"tokenizer\.json: not a tok", "again"),
    fetched("tokenizer.json: a list", write(TOKENIZER, "[]"), r"tokenizer\.json: holds list", "again"),
    fetched(
        "tokenizer.json: no vocabulary",
        edit(TOKENIZER, lambda t: t["model"].pop("vocab") and None),
        r"tokenizer\.json: not a tokenizer",
        "again",
    ),
    fetched(
        "tokenizer.json: merges of tokens it lacks",
        edit(TOKENIZER, lambda t: t["model"].update(merges=["q zz"])),
        r"tokenizer\.json: not a tokenizer",
        "again",
    ),
    fetched(
        "vocab_size: no number", edit(CONFIG, lambda c: c.update(vocab_size=None)), "no vocab_size", "give a causal"
    ),
    fetched(
        "weights: cut",
        bytes_of("source/model.safetensors", lambda raw: raw[:-100]),
        r"model\.safetensors: not a whole safetensors file",
        "again",
    ),
    fetched(
        "weights: a shard is missing",
        each(put("model.path", "sharded"), remove("sharded/model-00002-of-00002.safetensors")),
        r"model-00002-of-00002\.safetensors: listed in the index but missing",
        "fetch the folder again",
    ),
    fetched(
        "weights: an index that leaves the folder",
        each(
            put("model.path", "sharded"),
            edit(
                "sharded/model.safetensors.index.json",
                lambda i: i["weight_map"].update({"model.norm.weight": "../../etc/passwd"}),
            ),
        ),
        r"index\.json: model\.norm\.weight lies in '\.\./\.\./etc/passwd'",
        "use plain file names",
    ),
    Row(
        "target: its tokenizer was damaged since",
        "calibrate",
        write("model/tokenizer.json", "{}"),
        "model: its tokenizer cannot be read",
        "fetch the model again",
    ),
    Row(
        "target: its tokenizer is gone",
        "prompts",
        remove("model/tokenizer.json"),
        r"model/tokenizer\.json: not found",
        "fast tokenizer",
    ),
    Row(
        "target: no chat template",
        "prompts",
        remove("model/chat_template.jinja"),
        r"prompts\.chat_template: true",
        "use plain text",
    ),
    Row(
        "target: a template that is none",
        "prompts",
        write("model/chat_template.jinja", "{% for %}"),
        r"prompts\.chat_template: true",
        "use plain text",
    ),
    Row(
        "target: a template that refuses",
        "prompts",
        write("model/chat_template.jinja", "{{ raise_exception('system first') }}"),
        "refuses.*system first",
        "plain text",
    ),
    Row(
        "target: a config without widths",
        "calibrate",
        edit("model/config.json", lambda c: c.pop("hidden_size") and None),
        r"model/config\.json",
        "fetch the model again",
    ),
    Row(
        "quantize: a family that is not checked",
        "quantize@gptq",
        each(
            put("quantize.gptq.backend", "llmcompressor"),
            put("quantize.gptq.true_sequential", False),
            edit("model/config.json", lambda c: c.update(model_type="gpt2", architectures=["GPT2LMHeadModel"])),
        ),
        "gpt2: its Conv1D layers",
        "not supported here",
    ),
    Row(
        "quantize: a group that does not divide",
        "quantize@gptq model=model",
        each(put("quantize.gptq.backend", "llmcompressor"), put("quantize.gptq.group_size", 48)),
        r"quantize\.gptq\.group_size: 48 does not divide model\.layers\.0",
        "use 64 or 32 or 16",
    ),
    Row(
        "quantize: a pattern that matches nothing",
        "quantize@gptq model=model",
        each(put("quantize.gptq.backend", "llmcompressor"), put("quantize.gptq.ignore", ["lm_hed"])),
        r"quantize\.gptq\.ignore: 'lm_hed' matches no linear module",
        "they end in",
    ),
    Row(
        "quantize: a pattern that is none",
        "quantize@gptq model=model",
        each(put("quantize.gptq.backend", "llmcompressor"), put("quantize.gptq.ignore", ["("])),
        r"quantize\.gptq\.ignore: '\(' is not a regular expression",
        "correct it",
    ),
    drafted("draft: other tokens", edit(TOKENIZER, swap_ids), "draft source: id", "distil one from the target"),
    drafted("draft: no tokenizer", remove(TOKENIZER), r"source/tokenizer\.json: not found", "save the model's fast"),
    drafted("draft: a tokenizer that is none", write(TOKENIZER, "{}"), r"source/tokenizer\.json: not a tok", "again"),
    *(
        Row(
            f"quantize: a config {name}",
            "quantize@gptq model=model",
            each(
                put("quantize.gptq.backend", "llmcompressor"),
                put("quantize.gptq.true_sequential", False),
                plant,
            ),
            r"model/config\.json: ",
            "correct it|again",
        )
        for name, plant in {
            "that is no JSON": write("model/config.json", "{"),
            "that is a list": write("model/config.json", "[]"),
            "without heads": edit("model/config.json", lambda c: c.update(num_attention_heads=0)),
            "of negative width": edit("model/config.json", lambda c: c.update(intermediate_size=-1)),
            "with a width in words": edit("model/config.json", lambda c: c.update(hidden_size="64")),
            "of a model that is not known": edit("model/config.json", lambda c: c.update(model_type="llama9")),
        }.items()
    ),
    drafted(
        "draft: an embedding that is too small",
        edit(CONFIG, lambda c: c.update(vocab_size=64)),
        "draft source: .*vocab_size 64",
        "distil one from the target",
    ),
]
