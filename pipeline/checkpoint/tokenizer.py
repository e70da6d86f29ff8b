"""May this draft speak for this target? Their tokenizers compared from the files alone, before any weights are read.

A drafted id is only right when it means the same text to both models, so the id -> token tables have to be equal:
sizes and names say nothing (Llama-2 and TinyLlama share a size with strangers, Qwen pads one table to two sizes). The
rules that cut text into tokens have to be equal as well, or the draft was trained on other sequences than it will see.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

WAY_OUT = "choose a draft with the target's tokenizer, distil one from the target (draft=distill) or use draft=ngram"
# Token flags that decide where an added token is found in text.
MATCHING_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")

# What transformers may change about it, compared where both sides say it.
FRAME_SETTINGS = ("add_bos_token", "add_eos_token")


class TokenizerMismatch(ValueError):
    """Draft and target do not mean the same text by the same ids."""


class Tokens(NamedTuple):
    """A tokenizer as files say it: `table` id -> token, `special` ids that plain text never gives, `rules` by name."""

    table: dict[int, str]
    special: frozenset[int]
    rules: dict[str, Any]
    vocab_size: int


def check_same_tokens(target: Path, draft: Path) -> int:
    """The number of ids both models know: the smaller of the two `vocab_size`s, which may differ by padding.

    Compares the id -> token tables of `tokenizer.json` (added tokens included) and the rules that cut text: normalizer,
    pre-tokenizer, merges and other fields of the model, matching of added tokens, what is put around a text (BOS).
    Special tokens may differ where one side only holds a reserved place, as between releases of one family (Llama 3 and
    3.2): no text and no training gives such an id. Raises TokenizerMismatch with the first differing id and both its
    tokens, or the first differing rule.
    """
    ours, theirs = read_tokens(target), read_tokens(draft)
    for i in sorted(ours.table.keys() | theirs.table.keys()):
        a, b = ours.table.get(i), theirs.table.get(i)
        if a != b and not _reserved(i, ours, theirs):
            raise TokenizerMismatch(
                f"draft {draft}: id {i} is {_shown(b)}, but {_shown(a)} in the target {target} (tables of "
                f"{len(theirs.table)} and {len(ours.table)} tokens); {WAY_OUT}"
            )
    for name in [n for n in ours.rules if n in theirs.rules]:
        if ours.rules[name] != theirs.rules[name]:
            difference = _first_difference(ours.rules[name], theirs.rules[name])
            raise TokenizerMismatch(
                f"draft {draft}: same id -> token table as the target {target}, but another {name} ({difference}), so "
                f"the same text gives other ids; {WAY_OUT}"
            )
    common = min(ours.vocab_size, theirs.vocab_size)
    if max(ours.table) >= common:
        raise TokenizerMismatch(
            f"draft {draft}: the tables go up to id {max(ours.table)}, but config.json gives vocab_size "
            f"{theirs.vocab_size} (target {ours.vocab_size}), so a model lacks tokens; {WAY_OUT}"
        )
    return common


def _reserved(i: int, *sides: Tokens) -> bool:
    """Special on both sides, and a place held open for later use on at least one."""
    return all(i in t.special for t in sides) and any("reserved" in t.table[i] for t in sides)


def _shown(token: str | None) -> str:
    return "not a token" if token is None else repr(token)


def read_tokens(folder: Path) -> Tokens:
    """Read `tokenizer.json`, `tokenizer_config.json` (if there is one) and `config.json`.

    Raises TokenizerMismatch when a file that is needed is absent or damaged: what is not known cannot be called equal.
    """
    tokenizer, config = _json(folder / "tokenizer.json"), _json(folder / "config.json")
    settings = _json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    try:
        return _tokens(folder, tokenizer, config, settings)
    except Exception as e:  # the tokenizers library raises Exception itself
        raise TokenizerMismatch(
            f"{folder / 'tokenizer.json'}: not a tokenizer that fits its config.json ({type(e).__name__}: {e}); fetch "
            f"the model again"
        ) from e


def _tokens(folder: Path, tokenizer: dict[str, Any], config: dict[str, Any], settings: dict[str, Any]) -> Tokens:
    model = dict(tokenizer["model"])
    vocab = model.pop("vocab")
    # Unigram keeps [token, score] in id order; the scores decide how text is cut.
    pairs = vocab.items() if isinstance(vocab, dict) else ((entry[0], i) for i, entry in enumerate(vocab))
    table = {i: token for token, i in pairs}
    model["scores"] = None if isinstance(vocab, dict) else [entry[1] for entry in vocab]
    model["merges"] = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges") or []]
    added = {int(i): token for i, token in settings.get("added_tokens_decoder", {}).items()}
    added |= {token["id"]: token for token in tokenizer.get("added_tokens") or []}
    table |= {i: token["content"] for i, token in added.items()}
    special = frozenset(i for i, token in added.items() if token["special"])
    model = {name: value for name, value in model.items() if value not in (None, "") and value is not False}
    rules = {
        "normalizer": _plain(tokenizer.get("normalizer")),
        "pre_tokenizer": _plain(tokenizer.get("pre_tokenizer")),
        "model": model,
        "matching of added tokens": {
            token["content"]: [token[flag] for flag in MATCHING_FLAGS] for i, token in added.items() if i not in special
        },
        "frame around a text (BOS, EOS)": _frame(folder / "tokenizer.json"),
        **{name: settings[name] for name in FRAME_SETTINGS if isinstance(settings.get(name), bool)},
    }
    return Tokens(table, special, rules, int(config.get("text_config", config)["vocab_size"]))


def _json(path: Path) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TokenizerMismatch(
            f"{path}: not found, so the tokenizers cannot be compared; save the model's fast tokenizer there "
            f"(AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        ) from None
    except (ValueError, RecursionError) as e:
        raise TokenizerMismatch(
            f"{path}: not JSON ({e}), so the tokenizers cannot be compared; fetch it again"
        ) from None
    if not isinstance(read, dict):
        raise TokenizerMismatch(f"{path}: holds {type(read).__name__}, an object is due; fetch it again")
    return read


def _plain(rule: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer without wrapping that does nothing: converters write an empty sequence for null."""
    if rule is None or rule["type"] != "Sequence":
        return rule
    (name,) = rule.keys() - {"type"}
    steps = [step for step in map(_plain, rule[name]) if step is not None]
    return None if not steps else steps[0] if len(steps) == 1 else {**rule, name: steps}


def _frame(tokenizer_json: Path) -> list[int]:
    """Ids that the tokenizer puts around a text: those of an empty one."""
    from tokenizers import Tokenizer

    return list(Tokenizer.from_file(str(tokenizer_json)).encode("").ids)


def _first_difference(a: Any, b: Any, where: str = "") -> str:
    """Where two JSON values part, in a few words."""
    if isinstance(a, dict) and isinstance(b, dict):
        name = next(n for n in sorted(a.keys() | b.keys(), key=lambda n: (n != "type", n)) if a.get(n) != b.get(n))
        return _first_difference(a.get(name), b.get(name), f"{where}{name}: ")
    if isinstance(a, list) and isinstance(b, list):
        i = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        return _first_difference(a[i] if i < len(a) else None, b[i] if i < len(b) else None, f"{where}[{i}] ")
    return f"{where}{json.dumps(b)[:80]}, target {json.dumps(a)[:80]}"
