"""Corpora: files to be fetched, and what a hand or a cut can do to documents, calibration rows and prompts."""

from __future__ import annotations

import gzip
import json

from bad_input.world import Plant, Row, bytes_of, each, edit, params, put, remove, row_of, write

DOCUMENTS, FUNCTIONS = "corpus/documents.jsonl", "texts/functions.jsonl"
PACKED = gzip.compress(b'{"text": "a"}\n' * 1000)


def prose(name: str, plant: Plant, names: str, way_out: str) -> Row:
    return Row(f"prose: {name}", "fetch_corpus", plant, names, way_out)


def read_as(reader: str, file: str, content: str | bytes) -> Plant:
    """Corpus `prose` from one file, by another reader."""
    change = {"reader": reader, "path": file, "text_field": "text", "evaluation_documents": ["*0"]}
    return each(params(lambda t: t["corpus"]["prose"].update(change)), write(file, content))


def documents(name: str, plant: Plant, names: str, way_out: str = "run `dvc repro`|correct or remove") -> Row:
    return Row(f"documents: {name}", "calibrate", plant, names, way_out)


ROWS = [
    prose(
        "no folder",
        put("corpus.prose.path", "nowhere"),
        r"corpus\.prose\.path: nowhere",
        "give a text file or a folder",
    ),
    prose(
        "an empty folder",
        each(remove("texts/prose"), lambda f: (f / "texts/prose").mkdir()),
        "corpus.prose: no file",
        "choose another reader or source",
    ),
    prose(
        "no file of the kind", put("corpus.prose.path", "results"), "corpus.prose: no file", "another reader or source"
    ),
    prose(
        "binary", write("texts/prose/a.txt", bytes(range(256))), r"prose/a\.txt: holds NUL", "remove it.*or convert it"
    ),
    prose(
        "not UTF-8",
        write("texts/prose/a.txt", "caf\u00e9 au lait".encode("latin-1")),
        r"a\.txt: not UTF-8 at byte 3",
        "iconv",
    ),
    prose("UTF-16", write("texts/prose/a.txt", "text".encode("utf-16")), r"a\.txt", "convert it"),
    prose(
        "empty files only",
        each(remove("texts/prose"), write("texts/prose/bridge.txt", " \n")),
        r"corpus\.prose\.evaluation_documents: no document is left",
        "change the patterns or",
    ),
    prose("all too short", put("corpus.prose.min_chars", 10**9), r"corpus\.prose", r"corpus\.prose\.min_chars"),
    prose(
        "all held out",
        put("corpus.prose.evaluation_documents", ["*"]),
        "no document is left for calibration",
        "change the patterns",
    ),
    prose(
        "none held out",
        put("corpus.prose.evaluation_documents", ["zzz*"]),
        "no document is left for evaluation",
        "change the patterns",
    ),
    prose(
        "rows that are no JSON",
        read_as("rows", "r.jsonl", "text\n"),
        r"r\.jsonl: line 1 is not JSON",
        "correct or remove",
    ),
    prose(
        "rows cut in the middle",
        read_as("rows", "r.jsonl", '{"text": "a"}\n{"text": "b'),
        r"r\.jsonl: line 2",
        "correct or",
    ),
    prose(
        "rows that are lists", read_as("rows", "r.jsonl", '["text"]\n'), r"r\.jsonl: line 1 holds list", "correct or"
    ),
    prose(
        "rows without the column",
        read_as("rows", "r.jsonl", '{"body": "a"}\n'),
        "row 1: no text in 'text'",
        "set text_field",
    ),
    prose(
        "rows with a number as text", read_as("rows", "r.jsonl", '{"text": 5}\n'), "row 1: no text in", "set text_field"
    ),
    prose(
        "rows with half a character",
        read_as("rows", "r.jsonl", '{"text": "\\ud800"}\n'),
        r"line 1 cannot be read",
        "correct or",
    ),
    prose(
        "rows nested beyond measure", read_as("rows", "r.jsonl", "[" * 100_000), r"line 1 cannot be read", "correct or"
    ),
    prose(
        "gzip: not packed", read_as("rows", "r.jsonl.gz", b"text"), r"r\.jsonl\.gz: not a whole gzip", "fetch it again"
    ),
    prose(
        "gzip: truncated",
        read_as("rows", "r.jsonl.gz", PACKED[:-12]),
        r"r\.jsonl\.gz: not a whole gzip",
        "fetch it again",
    ),
    prose(
        "gzip: damaged",
        read_as("rows", "r.jsonl.gz", PACKED[:30] + b"\xff" * 9 + PACKED[39:]),
        "not a whole gzip",
        "again",
    ),
    Row(
        "code: a problem without a solution",
        "fetch_corpus",
        row_of(FUNCTIONS, lambda r: r.pop("canonical_solution") and None),
        "row 1 has no canonical_solution",
        "it has task_id",
    ),
    Row(
        "code: a prompt that is a list",
        "fetch_corpus",
        row_of(FUNCTIONS, lambda r: r.update(prompt=[1])),
        "row 1: prompt",
        "correct it",
    ),
    documents("absent", remove(DOCUMENTS), r"documents\.jsonl: not found"),
    documents("empty", write(DOCUMENTS, ""), r"row_tokens: 64, but 0 calibration documents", "enlarge the corpus"),
    documents(
        "cut in the middle of a line", bytes_of(DOCUMENTS, lambda raw: raw[:-40]), r"documents\.jsonl: line \d+ is not"
    ),
    documents(
        "a row without a split", row_of(DOCUMENTS, lambda r: r.pop("split") and None), "line 1 has no text in split"
    ),
    documents("a text that is null", row_of(DOCUMENTS, lambda r: r.update(text=None), 2), "line 3 has no text in text"),
    documents("a row that is a number", row_of(DOCUMENTS, lambda r: 5), r"line 1 holds int"),
    documents("NUL bytes", bytes_of(DOCUMENTS, lambda raw: raw[:50] + b"\0\0" + raw[52:]), "holds NUL", "remove it"),
    documents(
        "a category that is not there",
        put("calibration.categories", ["poems"]),
        r"calibration\.categories: no poems",
        "it has code, prose",
    ),
    documents(
        "rows longer than all text",
        put("calibration.row_tokens", 10**7),
        r"calibration\.row_tokens: 10000000",
        "shorten the rows",
    ),
    documents(
        "too much overlap", put("calibration.max_overlap", 0.0), r"calibration\.max_overlap", "separate the documents"
    ),
    Row(
        "documents: their source is a list",
        "calibrate",
        write("corpus/source.json", "[1]"),
        r"corpus/source\.json",
        "dvc repro",
    ),
    Row(
        "documents: their source is no JSON",
        "calibrate",
        write("corpus/source.json", "{"),
        r"source\.json: not JSON",
        "dvc repro",
    ),
    Row(
        "documents: none held out",
        "evaluate@base",
        write(
            DOCUMENTS,
            json.dumps(
                {"id": "a", "corpus": "c", "category": "prose", "split": "calibration", "text": "t", "prompt": None}
            )
            + "\n",
        ),
        r"documents\.jsonl: none of 1",
        "widen corpus",
    ),
    Row(
        "documents: no prose held out",
        "evaluate@base",
        write(
            DOCUMENTS,
            json.dumps(
                {"id": "a", "corpus": "c", "category": "verse", "split": "evaluation", "text": "t", "prompt": None}
            )
            + "\n",
        ),
        r"evaluate\.tasks: \w+ finds no held-out text",
        "or drop the task",
    ),
    Row(
        "prompts: no room", "prompts", put("prompts.max_prompt_tokens", 8), r"prompts\.max_prompt_tokens: 8", "raise it"
    ),
    Row(
        "prompts: none for a draft",
        "speculate@base",
        put("speculate.prompts_per_category", 99),
        r"speculate\.prompts_per_category: 99",
        "lower it or raise",
    ),
    Row(
        "prompts: all of the other split",
        "speculate@base",
        write(
            "prompts.jsonl",
            json.dumps({"id": "a", "split": "calibration", "category": "code", "text": "", "input_ids": [1]}) + "\n",
        ),
        r"prompts\.jsonl: no prompt is in the evaluation split",
        "widen corpus",
    ),
    Row(
        "prompts: an answer beyond the context",
        "speculate@base",
        put("speculate.max_new_tokens", 5000),
        r"speculate\.max_new_tokens",
        "lower",
    ),
    Row(
        "window: beyond the context",
        "evaluate@base",
        put("evaluate.window_tokens", 100_000),
        r"evaluate\.window_tokens: 100000",
        "give at most 512",
    ),
    Row(
        "draft: its note is no JSON",
        "quantize@draft model=draft",
        write("draft/draft.json", "{"),
        r"draft\.json: not JSON",
        "dvc repro",
    ),
    Row(
        "draft: a copy of a target that is not given",
        "quantize@draft model=draft",
        write("draft/draft.json", '{"kind": "self"}'),
        r"draft\.json: the draft is the target itself",
        "give target=PATH",
    ),
    Row(
        "calibration rows: gone",
        "quantize@gptq model=model",
        each(
            put("quantize.gptq.backend", "llmcompressor"),
            put("quantize.gptq.true_sequential", False),
            remove("calibration/rows.parquet"),
        ),
        r"rows\.parquet: not found",
        "dvc repro",
    ),
    Row(
        "calibration rows: of a larger vocabulary",
        "quantize@gptq model=model",
        each(
            put("quantize.gptq.backend", "llmcompressor"),
            put("quantize.gptq.true_sequential", False),
            edit("model/config.json", lambda c: c.update(vocab_size=40)),
        ),
        r"rows\.parquet: token id \d+",
        "calibrate with this",
    ),
]
