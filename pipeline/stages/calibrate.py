"""Stage `calibrate`: token rows that the quantizers see, drawn by their own generator, and a lock file that pins them.

Shapes: T = row_tokens.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline import progress, provenance
from pipeline.config import Calibration, Runtime
from pipeline.measure.quality import leading_tokens, load_tokenizer
from pipeline.readers import read_documents

PIECE_CHARS = 1_000_000  # of a text that is tokenized at once: longer ones take gigabytes and say nothing for minutes
NGRAM_TOKENS = 13  # the length GPT-3 used to find overlap (Brown et al. 2020, appendix C)


class CalibrationError(ValueError):
    """The corpus cannot give the rows that were asked for, or they overlap with the evaluation text."""


class Row(NamedTuple):
    documents: list[str]
    ids_T: list[int]


def run(calibration: Calibration, runtime: Runtime, *, corpus: Path, target: Path, out: Path) -> dict[str, Any]:
    """Write rows.parquet (row, document, input_ids) and lock.json; returns asked, kept, dropped, tokens and overlap.

    Raises CalibrationError: no full row in the corpus, or more than max_overlap of the 13-grams of an evaluation
    category found in the rows.
    """
    tokenizer = load_tokenizer(target)
    documents = read_documents(corpus)
    warn_few_tokens(calibration, target)
    chosen = calibration_documents(documents, calibration.categories)
    with progress.bar("calibrate: rows", sum(len(d["text"]) for d in chosen), "char") as shown:
        candidates, dropped = cut_rows(chosen, calibration, tokenizer, shown)
    rows = draw(candidates, calibration.rows, np.random.default_rng(runtime.seed))
    if not rows:
        raise CalibrationError(_no_row(documents, calibration, tokenizer, dropped))
    held_out = [d for d in documents if d["split"] == "evaluation"]
    with progress.bar("calibrate: overlap", sum(len(d["text"]) for d in held_out), "char") as shown:
        overlap = overlap_share(rows, held_out, tokenizer, shown)
    check_overlap(overlap, calibration.max_overlap)
    if len(rows) < calibration.rows:
        asked = f"calibration.rows: {calibration.rows} asked"
        print(f"warning: {asked}, {len(rows)} found; enlarge the corpus or shorten row_tokens", file=sys.stderr)
    lock = write(rows, out, target, corpus)
    return {
        "asked_rows": calibration.rows,
        "kept_rows": len(rows),
        "dropped_documents": dropped,
        "candidate_rows": {category: len(found) for category, found in sorted(candidates.items())},
        "tokens": sum(len(r.ids_T) for r in rows),
        "row_tokens": calibration.row_tokens,
        "documents": len({name for r in rows for name in r.documents}),
        "overlap_share": overlap,
        "bos": bool(leading_tokens(tokenizer)),
        "tokens_sha256": lock["tokens_sha256"],
    }


def calibration_documents(documents: list[dict[str, Any]], categories: list[str]) -> list[dict[str, Any]]:
    """Documents of the calibration split in the categories named; none named = all. Raises on an unknown name."""
    known = sorted({d["category"] for d in documents})
    for name in categories:
        if name not in known:
            raise CalibrationError(f"calibration.categories: no {name} in the corpus; it has {', '.join(known)}")
    return [d for d in documents if d["split"] == "calibration" and d["category"] in (categories or known)]


def warn_few_tokens(calibration: Calibration, target: Path) -> None:
    """One line on stderr when there are fewer tokens than input channels: a Hessian of them cannot have full rank."""
    config = provenance.read_json(target / "config.json")
    try:
        channels = max(config["hidden_size"], config["intermediate_size"])
    except (KeyError, TypeError) as e:
        raise CalibrationError(f"{target / 'config.json'}: no width to be read ({e}); fetch the model again") from None
    tokens = calibration.rows * calibration.row_tokens
    if tokens < channels:
        print(
            f"warning: calibration.rows x calibration.row_tokens = {tokens} tokens, fewer than the {channels} input "
            f"channels of the widest layer; GPTQ then leans on its dampening. Ask for {-(-channels // tokens)}x that",
            file=sys.stderr,
        )


def cut_rows(
    documents: list[dict[str, Any]], calibration: Calibration, tokenizer: Any, shown: progress.Bar | None = None
) -> tuple[dict[str, list[Row]], dict[str, int]]:
    """All full rows of each category, and the documents that gave none, by reason.

    Packed: documents one after the other without special tokens, cut every T tokens. Otherwise the first T tokens of
    each document. A tokenizer that begins texts with BOS gets it at the front of each row, within T.
    """
    lead = leading_tokens(tokenizer)
    size = calibration.row_tokens - len(lead)
    rows: dict[str, list[Row]] = defaultdict(list)
    rest: dict[str, tuple[list[str], list[int]]] = {}
    dropped = Counter({"empty": 0, "short": 0, "duplicate": 0})
    seen: set[str] = set()
    for document in documents:
        category, text = document["category"], document["text"]
        if not text.strip() or text in seen:
            dropped["duplicate" if text.strip() else "empty"] += 1
            continue
        seen.add(text)
        ids = token_ids(tokenizer, text, shown)
        if calibration.pack:
            rest[category] = _pack(rest.get(category, ([], [])), document["id"], ids, size, lead, rows[category])
        elif len(ids) >= size:
            rows[category].append(Row([document["id"]], lead + ids[:size]))
        else:
            dropped["short"] += 1
    return dict(rows), dict(dropped)


def _pack(
    rest: tuple[list[str], list[int]], name: str, ids: list[int], size: int, lead: list[int], rows: list[Row]
) -> tuple[list[str], list[int]]:
    """Append to `rows` what is full after `ids` follow the rest; returns the new rest (document ids, tokens)."""
    names, stream = [*rest[0], name], rest[1] + ids
    full = len(stream) - len(stream) % size
    for begin in range(0, full, size):
        rows.append(Row(names, lead + stream[begin : begin + size]))
        names = [name]
    return (names, stream[full:]) if stream[full:] else ([], [])


def token_ids(tokenizer: Any, text: str, shown: progress.Bar | None = None) -> list[int]:
    """Without special tokens. A text of more than PIECE_CHARS is cut there, before a blank where there is one."""
    ids: list[int] = []
    begin = 0
    while begin < len(text) or not begin:
        end = begin + PIECE_CHARS
        if end < len(text):
            blank = max(text.rfind(mark, begin + PIECE_CHARS // 2, end) for mark in " \n")
            end = blank if blank > 0 else end
        ids += tokenizer(text[begin:end], add_special_tokens=False, verbose=False).input_ids
        if shown is not None:
            shown.update(len(text[begin:end]))
        begin = end
    return ids


def draw(candidates: dict[str, list[Row]], count: int, generator: np.random.Generator) -> list[Row]:
    """`count` rows, or all there are: categories take turns, so that none crowds out another, each in random order."""
    queues = []
    for _, rows in sorted(candidates.items()):
        queues.append([rows[i] for i in generator.permutation(len(rows))])
    taken: list[Row] = []
    while any(queues) and len(taken) < count:
        taken += [queue.pop() for queue in queues if queue][: count - len(taken)]
    return taken


def overlap_share(
    rows: list[Row], evaluation: list[dict[str, Any]], tokenizer: Any, shown: progress.Bar | None = None
) -> dict[str, float]:
    """For each evaluation category, the share of its 13-grams (of token ids) that occur in the rows."""
    grams = {gram for row in rows for gram in _ngrams(row.ids_T)}
    found: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for document in evaluation:
        ids = token_ids(tokenizer, document["text"], shown)
        total[document["category"]] += max(0, len(ids) - NGRAM_TOKENS + 1)
        found[document["category"]] += sum(gram in grams for gram in _ngrams(ids))
    return {category: found[category] / count for category, count in sorted(total.items()) if count}


def _ngrams(ids_T: list[int]) -> Iterator[tuple[int, ...]]:
    return (tuple(ids_T[i : i + NGRAM_TOKENS]) for i in range(len(ids_T) - NGRAM_TOKENS + 1))


def check_overlap(overlap: dict[str, float], limit: float) -> None:
    for category, share in overlap.items():
        if share > limit:
            raise CalibrationError(
                f"calibration.max_overlap: {share:.2%} of the {NGRAM_TOKENS}-grams of evaluation category {category} "
                f"are in the calibration rows, above the limit of {limit:.2%}; separate the documents "
                f"(corpus.*.evaluation_documents)"
            )


def _no_row(documents: list[dict[str, Any]], calibration: Calibration, tokenizer: Any, dropped: dict[str, int]) -> str:
    texts = [d["text"] for d in documents if d["split"] == "calibration"]
    tokens = sum(len(token_ids(tokenizer, t)) for t in texts)
    return (
        f"calibration.row_tokens: {calibration.row_tokens}, but {len(texts)} calibration documents of {tokens} tokens "
        f"in all (dropped {dropped}) fill no row; shorten the rows, set calibration.pack=true or enlarge the corpus"
    )


def write(rows: list[Row], out: Path, target: Path, corpus: Path) -> dict[str, Any]:
    """rows.parquet and lock.json in `out`; returns the lock."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    ids = np.array([r.ids_T for r in rows], dtype=np.int32)
    sources = provenance.read_json(corpus / "source.json")
    if not isinstance(sources, dict) or not all(isinstance(s, dict) for s in sources.values()):
        raise CalibrationError(f"{corpus / 'source.json'}: not an object for each corpus; run `dvc repro` to write it")
    revision = ("package", "version", "id", "revision", "sha256")
    lock = {
        "tokens_sha256": hashlib.sha256(json.dumps(ids.tolist()).encode()).hexdigest(),
        "tokenizer_sha256": provenance.file_sha256(target / "tokenizer.json"),
        "documents_sha256": provenance.file_sha256(corpus / "documents.jsonl"),
        "sources": {name: {k: s[k] for k in revision if k in s} for name, s in sources.items()},
        "rows": [r.documents for r in rows],
    }
    table = pa.table(
        {
            "row": pa.array(range(len(rows)), pa.int32()),
            "document": pa.array([", ".join(r.documents) for r in rows], pa.string()),
            "input_ids": pa.array(ids.tolist(), pa.list_(pa.int32())),
        }
    )
    with provenance.whole_folder(out) as folder:
        pq.write_table(table, folder / "rows.parquet")
        provenance.write_json(folder / "lock.json", lock)
    return lock
