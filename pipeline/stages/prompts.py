"""Stage `prompts`: what is asked of the models, by category, templated and tokenized once for every later stage.

Categories: `code` (complete a function), `prose` (continue a passage), `summary` (of a passage). The evaluation split
comes from held-out documents; the calibration split, for distillation, from the others.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline import provenance
from pipeline.config import Prompts, Runtime
from pipeline.measure.quality import leading_tokens, load_tokenizer
from pipeline.readers import read_documents

CATEGORIES = ("code", "prose", "summary")
# What is asked, as a user's turn of a chat model and as text that a base model goes on from.
CHAT_FORMS = {
    "code": "Complete this Python function.\n\n```python\n{text}\n```",
    "prose": "Continue this text.\n\n{text}",
    "summary": "Summarize this passage in two sentences.\n\n{text}",
}
PLAIN_FORMS = {"code": "{text}", "prose": "{text}", "summary": "{text}\n\nIn short, this passage says that"}
SENTENCE_BREAK = re.compile(r"(?<=[a-z]{3}[.!?])\s+(?=[A-Z\"'(])")


CHARS_PER_TOKEN = 100  # no sentence has more on average, even with long runs of blanks


class PromptError(ValueError):
    """No prompt can be made of this corpus with this tokenizer and limit."""


class Piece(NamedTuple):
    """What goes into a prompt: a function's head, or a run of whole sentences."""

    id: str
    text: str


class Asker:
    """Turns pieces into token ids: instruction, chat template where asked for, and the tokenizer's own BOS rule."""

    def __init__(self, tokenizer: Any, chat: bool) -> None:
        if chat and not tokenizer.chat_template:
            raise PromptError(
                "prompts.chat_template: true, but the target's tokenizer has no chat template (a base model); "
                "use plain text (-S prompts=plain)"
            )
        self.tokenizer, self.chat = tokenizer, chat
        self.lead: list[int] = leading_tokens(tokenizer)

    def text(self, category: str, piece: str) -> str:
        form = (CHAT_FORMS if self.chat else PLAIN_FORMS)[category]
        asked = form.format(text=piece.strip() if self.chat else piece)
        if not self.chat:
            return asked
        from jinja2 import TemplateError

        turns = [{"role": "user", "content": asked}]
        try:
            return str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        except (TemplateError, TypeError) as e:
            raise PromptError(
                f"prompts.chat_template: true, but the target's chat template refuses a user's turn ({e}); correct "
                f"the template or use plain text (-S prompts=plain)"
            ) from None

    def ids(self, text: str) -> list[int]:
        """One BOS at the front when the tokenizer begins texts with one, whether or not the template wrote it too."""
        ids = list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        while self.lead and ids[:1] == self.lead:
            ids = ids[1:]
        return self.lead + ids

    def count(self, category: str, piece: str) -> int:
        return len(self.ids(self.text(category, piece)))


def run(prompts: Prompts, runtime: Runtime, *, corpus: Path, target: Path, out: Path) -> dict[str, Any]:
    """Write one JSON line a prompt: {id, split, category, text, input_ids}; returns counts, tokens and the file's hash.

    A category with fewer prompts than asked for gives all it has. Raises PromptError when there is none for evaluation.
    """
    asker = Asker(load_tokenizer(target), prompts.chat_template)
    documents = read_documents(corpus)
    generator = np.random.default_rng(runtime.seed)
    rows: list[dict[str, Any]] = []
    too_long: dict[str, int] = {}
    for split, asked in (("evaluation", prompts.per_category), ("calibration", prompts.train_per_category)):
        own = [d for d in documents if d["split"] == split]
        pieces, too_long[split] = pieces_of(own, asker, prompts.max_prompt_tokens, generator)
        for category in CATEGORIES:
            chosen = pieces[category][:asked]
            if len(chosen) < asked and split == "evaluation":
                short = f"prompts.per_category: {asked} asked, {len(chosen)} found of {category}"
                print(f"warning: {short}; enlarge the corpus or raise prompts.max_prompt_tokens", file=sys.stderr)
            rows += [_row(piece, split, category, asker) for piece in chosen]
    if not any(r["split"] == "evaluation" for r in rows):
        raise PromptError(
            f"prompts.max_prompt_tokens: {prompts.max_prompt_tokens} tokens leave no room for a text of {corpus}; "
            f"raise it, or add evaluation documents of category prose or code"
        )
    provenance.write_text(out, "".join(json.dumps(r) + "\n" for r in rows))
    return {
        "count": len(rows),
        "sha256": provenance.file_sha256(provenance.written(out)),
        "chat_template": prompts.chat_template,
        "bos": bool(asker.lead),
        "too_long": too_long,
        "by_split": {split: _summary([r for r in rows if r["split"] == split]) for split in too_long},
    }


def pieces_of(
    documents: list[dict[str, Any]], asker: Asker, limit: int, generator: np.random.Generator
) -> tuple[dict[str, list[Piece]], int]:
    """All pieces of each category that fit `limit` tokens, in random order, and how many functions did not fit.

    No passage serves two prompts: of the shuffled passages every other one is continued, the rest are summarized.
    """
    heads = [Piece(d["id"], d["prompt"]) for d in documents if d["prompt"]]
    code = [piece for piece in heads if asker.count("code", piece.text) <= limit]
    passages = [p for d in documents if d["category"] == "prose" for p in cut_passages(d, asker, limit)]
    code, passages = ([items[i] for i in generator.permutation(len(items))] for items in (code, passages))
    return {"code": code, "prose": passages[::2], "summary": passages[1::2]}, len(heads) - len(code)


def cut_passages(document: dict[str, Any], asker: Asker, limit: int) -> list[Piece]:
    """The document as consecutive runs of whole sentences, each as long as fits `limit` in its longest prompt form.

    Runs shorter than half the room (a long sentence follows, or the document ends) and beginnings without a capital
    (the column starts inside a sentence) are left out.
    """
    room = limit - max(asker.count(category, "") for category in ("prose", "summary"))
    passages: list[Piece] = []
    run_of: list[str] = []
    used = 0
    sentences = SENTENCE_BREAK.split(document["text"].strip())
    for sentence in sentences[0 if sentences[0][:1].isupper() else 1 :]:
        if len(sentence) > room * CHARS_PER_TOKEN:
            tokens = room + 1  # not worth counting: a file without a full stop is one sentence
        else:
            tokens = len(asker.tokenizer(" " + sentence, add_special_tokens=False, verbose=False).input_ids)
        if used + tokens > room:
            if 2 * used >= room:
                passages.append(Piece(f"{document['id']}#{len(passages)}", " ".join(run_of)))
            run_of, used = [], 0
        if tokens <= room:
            run_of.append(sentence)
            used += tokens
    return [p for p in passages if max(asker.count(c, p.text) for c in ("prose", "summary")) <= limit]


def _row(piece: Piece, split: str, category: str, asker: Asker) -> dict[str, Any]:
    text = asker.text(category, piece.text)
    return {
        "id": f"{category}:{piece.id}",
        "split": split,
        "category": category,
        "text": text,
        "input_ids": asker.ids(text),
    }


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Prompts and tokens of each category; 0 prompts where the corpus had nothing of the kind."""
    summary: dict[str, Any] = {}
    for category in CATEGORIES:
        lengths = [len(r["input_ids"]) for r in rows if r["category"] == category]
        longest = max(lengths, default=0)
        summary[category] = {"count": len(lengths), "tokens": sum(lengths), "longest_tokens": longest}
    return summary
