"""params.yaml: keys, types, ranges, rules across keys, what a hand can do to the file. All known at once."""

from __future__ import annotations

from typing import Any

from bad_input.world import Plant, Row, bytes_of, each, params, put, remove, replace, write

TYPE_WAY_OUT = r"set it in conf/ or with -S"
SEED = "  seed: "


def value(key: str, bad: object, way_out: str = TYPE_WAY_OUT, names: str | None = None) -> Row:
    return Row(f"{key}={str(bad)[:30]}", "environment", put(key, bad), names or rf"\b{key}\b", way_out)


def file(name: str, plant: Plant, way_out: str = "run `make params`", names: str = r"params\.yaml") -> Row:
    return Row(name, "environment", plant, names, way_out)


def nested(depth: int) -> str:
    """Lists of lists that double in size at each level when written out."""
    levels = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, depth))]
    return "\n".join(levels) + "\n"


def reference_bomb(folder: Any) -> None:
    path = folder / "params.yaml"
    path.write_text(nested(60) + path.read_text().replace("  device: cpu", "  device: *a59"))


ROWS = [
    value("runtime.seed", "1"),
    value("runtime.seed", 1.0),
    value("runtime.seed", True),
    value("runtime.seed", None),
    value("runtime.seed", [1]),
    value("runtime.seed", {"value": 1}),
    value("runtime.seed", -1, "give at least 0"),
    value("runtime.seed", 2**32, f"give at most {2**32 - 1}"),
    value("runtime.dtype", "int8", "one of bfloat16, float16, float32"),
    value("runtime.dtype", ["float32"], "one of bfloat16, float16, float32"),
    value("runtime.threads", 0, "give at least 1"),
    value("runtime.device", "tpu", "cpu, cuda or cuda:N; use one"),
    value("runtime.device", "cuda:-1", "cpu, cuda or cuda:N; use one"),
    value("runtime.min_free_memory_bytes", "2 GB"),
    value("name", 7),
    value("name", "two\0parts", "control character; retype"),
    value("calibration.rows", 0, "give at least 1"),
    value("calibration.pack", "yes"),
    value("calibration.max_overlap", 1.01, "give at most 1"),
    value("calibration.max_overlap", float("nan"), "not a finite number; give one"),
    value("calibration.categories", "prose", r"a list, such as \[1, 2\]"),
    value("calibration.categories", [None], TYPE_WAY_OUT, r"calibration\.categories\[0\]"),
    value("prompts.max_prompt_tokens", 7, "give at least 8"),
    value("model.source", "s3", "one of hub, pypi, path, random"),
    value("model.source", "hub", "give id, revision"),
    value("model.source", "pypi", "give package, version, file, sha256", r"model\.package"),
    value("model.path", None, "give path"),
    value("model.parameters", 0, "give at least 1"),
    value("model.trust_remote_code", 1),
    Row(
        "model: a branch instead of a commit",
        "environment",
        params(lambda t: t["model"].update(source="hub", id="a/b", revision="main")),
        r"model\.revision: 'main'",
        "pin",
    ),
    Row(
        "model: a hash that is none",
        "environment",
        params(lambda t: t["model"].update(source="pypi", package="p", version="1", file="f", sha256="abc")),
        r"model\.sha256: 'abc'",
        "64 hex digits.*copy it",
    ),
    Row(
        "model: random, heads that do not divide",
        "environment",
        params(
            lambda t: t["model"].update(
                source="random",
                random={
                    "hidden_size": 66,
                    "intermediate_size": 8,
                    "num_hidden_layers": 1,
                    "vocab_size": 258,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 4,
                    "max_position_embeddings": 16,
                },
            )
        ),
        r"model\.random\.hidden_size: 66",
        "change one",
    ),
    Row(
        "model: random, key heads that do not divide",
        "environment",
        params(
            lambda t: t["model"].update(
                source="random",
                random={
                    "hidden_size": 64,
                    "intermediate_size": 8,
                    "num_hidden_layers": 1,
                    "vocab_size": 258,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 3,
                    "max_position_embeddings": 16,
                },
            )
        ),
        r"model\.random\.num_key_value_heads: 3",
        "give a divisor",
    ),
    value("corpus", {}, "name at least one"),
    value("corpus", {1: {}}, TYPE_WAY_OUT),
    value("corpus.prose.source", "random", "use hub, pypi or path"),
    value("corpus.prose.reader", "pdf", "one of shakespeare, britannica, humaneval, text, rows"),
    value("corpus.prose.reader", "rows", "name the column", r"corpus\.prose\.text_field"),
    value("corpus.prose.evaluation_documents", [], "give patterns"),
    value("corpus.prose.min_chars", -5, "give at least 0"),
    value("draft.kind", "medusa", "one of distill, self, ngram, model"),
    value("draft.kind", "model", "name a source", r"draft\.model: null"),
    value("draft.ngram_max", 0, "give at least 1"),
    value("draft.distill.learning_rate", 0, "greater than 0; raise it"),
    value("draft.distill.learning_rate", "1e-3"),
    value("draft.distill.layers", [0, "last"], TYPE_WAY_OUT, r"draft\.distill\.layers\[1\]"),
    value("quantize", {}, "name at least one"),
    Row(
        "bits that a library cannot pack",
        "environment",
        params(lambda t: t["quantize"]["gptq"].update(bits=5, backend="auto_gptq", true_sequential=False)),
        r"quantize\.gptq\.bits: 5",
        "it packs 2, 3, 4 or 8 bits",
    ),
    value("quantize.gptq.bits", "08"),
    value("quantize.gptq.group_size", 0, "give a positive size, or -1"),
    value("quantize.gptq.damp_percent", float("inf"), "give one"),
    value("quantize.gptq.backend", "exllama", "one of auto_gptq, autoawq, llmcompressor"),
    value("quantize.gptq.backend", "autoawq", "use one of auto_gptq, llmcompressor"),
    value("quantize.awq.method", "rtn", "one of gptq, awq"),
    value("quantize.awq.ignore", "lm_head", r"a list, such as"),
    value("evaluate.tasks", [], "name at least one"),
    value("evaluate.tasks", ["last_word", "last_word"], "list each once"),
    value("evaluate.stride_tokens", 65, "give at most the window"),
    value("evaluate.limit", 0, "give at least 1"),
    value("speculate.draft_lens", [1, 2], r"lacks 0 \(plain decoding, the comparison\); add it"),
    value("speculate.draft_lens", [0, 2, 2], "list each once"),
    value("speculate.draft_lens", [0, -1], "give at least 0"),
    Row(
        "a draft longer than the answer",
        "environment",
        params(lambda t: t["speculate"].update(draft_lens=[0, 500], timed_draft_lens=[0])),
        r"speculate\.draft_lens: 500",
        "shorten the draft",
    ),
    value("speculate.timed_draft_lens", [0, 77], "add them"),
    value("speculate.sampling.top_p", 1.5, "give at most 1"),
    value("speculate.sampling.temperature", -1, "give at least 0"),
    value("benchmark.timing.max_blocks", 1, "give at least 2"),
    value("benchmark.memory_budgets_bytes", [0], "give at least 1"),
    value("report.objective", "cost", "one of latency, throughput, memory"),
    value("track.uri", " ", "give a name"),
    value("track.uri", "https://user:hunter2@mlflow.example.org", "MLFLOW_TRACKING_PASSWORD.* in the environment"),
    value("model.note", "token hf_abcdefghijklmnopqrstuvwxyz", "HF_TOKEN.* in the environment"),
    value("sweep.stages", "quantize", r"a list, such as"),
    Row(
        "an unknown key",
        "environment",
        params(lambda t: t["quantize"]["gptq"].update(groupsize=4)),
        r"quantize\.gptq\.groupsize",
        r"did you mean group_size\?",
    ),
    Row(
        "an unknown section", "environment", params(lambda t: t.update(trak={})), "trak: unknown", "did you mean track"
    ),
    Row(
        "a missing key",
        "environment",
        params(lambda t: t["speculate"]["timing"].pop("precision")),
        r"speculate\.timing\.precision: missing",
        "run `make params`",
    ),
    Row("a missing section", "environment", params(lambda t: t.pop("report")), "report: missing", "add it to conf/"),
    value("benchmark", [], "a mapping with the keys of Benchmark"),
    Row("a GPU that is not here", "calibrate", put("runtime.device", "cuda"), r"runtime\.device: cuda", "use cpu"),
    file("params.yaml: absent", remove("params.yaml")),
    file("params.yaml: a folder", each(remove("params.yaml"), lambda f: (f / "params.yaml").mkdir())),
    file("params.yaml: empty", write("params.yaml", ""), "a mapping with the keys of Params"),
    file("params.yaml: a list", write("params.yaml", "- 1\n"), "a mapping with the keys of Params"),
    file("params.yaml: not YAML", write("params.yaml", "a: [1,\nb: }")),
    file("params.yaml: a tab for indentation", replace("params.yaml", SEED, "\tseed: ")),
    file("params.yaml: Latin-1", write("params.yaml", "name: caf\u00e9".encode("latin-1"))),
    file("params.yaml: NUL bytes", bytes_of("params.yaml", lambda raw: raw[:200] + b"\0" * 100 + raw[300:])),
    file("params.yaml: nested beyond measure", write("params.yaml", "a: " + "[" * 1100)),
    file(
        "params.yaml: a key twice",
        replace("params.yaml", SEED, "  seed: 1\n  seed: "),
        "keep one",
        r"runtime\.seed stands there twice",
    ),
    file(
        "params.yaml: an object of Python",
        replace("params.yaml", SEED, "  seed: !!python/object/apply:os.getpid []\n  x: "),
    ),
    file(
        "params.yaml: references that multiply", reference_bomb, "cpu, cuda|unknown key|a string is due", "a0|runtime"
    ),
    file("params.yaml: a date that is none", replace("params.yaml", "name: smoke", "name: 2026-13-45")),
    file("params.yaml: a merge conflict", replace("params.yaml", SEED, "<<<<<<< HEAD\n  seed: ")),
]
