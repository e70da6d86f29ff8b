"""Rows of the local lm-eval tasks, made from held-out documents: perplexity passages and last-word items.

A task file under evals/ names its builder (`metadata.rows`) and the categories it draws from (`metadata.categories`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

PASSAGE_WORDS = range(20, 50)  # words before the last one; LAMBADA's passages have 75, ours are shorter for a CPU
LAST_WORD = re.compile(r"([a-z]{4,})[.!?;:,]")
SENTENCE_END = re.compile(r".*[.!?][\"')\]]?")
PLAIN_WORD = re.compile(r"[A-Z]?[a-z]+(?:['’-][a-z]+)*[.,;:!?]?")
MIN_PLAIN_SHARE = 0.8  # below it a passage is a bibliography, a table or damaged by scanning


def shuffled(documents: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """A seeded order that depends on nothing but the ids."""
    ordered = sorted(documents, key=lambda d: d["id"])
    random.Random(seed).shuffle(ordered)
    return ordered


def cut(text: str, max_chars: int | None) -> str:
    """The text up to the last line end (else the last space) within `max_chars` characters."""
    if max_chars is None or len(text) <= max_chars:
        return text
    head = text[:max_chars]
    end = head.rfind("\n") if "\n" in head.strip() else head.rfind(" ")
    return head[:end] if end > 0 else head


def perplexity_rows(documents: list[dict[str, Any]], count: int, max_chars: int | None, seed: int) -> list[dict]:
    """The first `max_chars` characters of `count` documents chosen by seed: {id, text}."""
    return [{"id": d["id"], "text": cut(d["text"], max_chars)} for d in shuffled(documents, seed)[:count]]


def last_word_rows(documents: list[dict[str, Any]], count: int, seed: int) -> list[dict[str, str]]:
    """At most `count` items chosen by seed, in text order: {id, context, word}; " " + word is to be predicted.

    LAMBADA's idea (Paperno et al. 2016, section 2) with a rule in place of human judges: the last word of a clause
    that the passage has used before, so that the passage, not only the clause, tells it. evals/README.md has the rule.
    """
    items = [item for d in sorted(documents, key=lambda d: d["id"]) for item in _items_of(d)]
    chosen = random.Random(seed).sample(range(len(items)), min(count, len(items)))
    return [items[i] for i in sorted(chosen)]


def _items_of(document: dict[str, Any]) -> Iterator[dict[str, str]]:
    for number, paragraph in enumerate(re.split(r"\n\s*\n", document["text"])):
        words = paragraph.split()
        for last, word in enumerate(words):
            match = LAST_WORD.fullmatch(word)
            context = _passage_before(words, last) if match else None
            if match and context and _asks_for(match[1], context):
                name = f"{document['id']}#{number}.{last}"
                yield {"id": name, "context": " ".join(context), "word": match[1]}


def _passage_before(words: list[str], last: int) -> list[str] | None:
    """The shortest run of whole sentences before `last` of PASSAGE_WORDS length; None when there is none."""
    for length in PASSAGE_WORDS:
        first = last - length
        if first < 0:
            return None
        if first == 0 or (SENTENCE_END.fullmatch(words[first - 1]) and words[first][0].isupper()):
            return words[first:last]
    return None


def _asks_for(word: str, context: list[str]) -> bool:
    seen = {re.sub(r"\W", "", w).lower() for w in context}
    plain = sum(PLAIN_WORD.fullmatch(w) is not None for w in context)
    return word in seen and plain >= MIN_PLAIN_SHARE * len(context)
