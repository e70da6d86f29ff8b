"""A draft has to mean the same text by the same ids: tables, rules and padding, on made-up tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.tokenizer import TokenizerMismatch, check_same_tokens

WORDS = ["<unk>", "<s>", "</s>", "the", "cat", "sat", "on", "mat"]


def folder(where: Path, words: list[str] = WORDS, vocab_size: int | None = None, **changed: Any) -> Path:
    """A model folder without weights: a word-level tokenizer over `words`; `changed` replaces parts of the files."""
    where.mkdir()
    special = [i for i, word in enumerate(words) if word.startswith("<")]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": words[i], "special": True, **flags} for i in special],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "model": {"type": "WordLevel", "vocab": {w: i for i, w in enumerate(words)}, "unk_token": "<unk>"},
    }
    settings = changed.pop("settings", {"tokenizer_class": "PreTrainedTokenizerFast"})
    (where / "tokenizer.json").write_text(json.dumps(tokenizer | changed))
    (where / "tokenizer_config.json").write_text(json.dumps(settings))
    (where / "config.json").write_text(json.dumps({"vocab_size": vocab_size or len(words)}))
    return where


def bos(word: str, i: int) -> dict[str, Any]:
    begin = {"SpecialToken": {"id": word, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    known = {word: {"id": word, "ids": [i], "tokens": [word]}}
    pair = [begin, text, {"Sequence": {"id": "B", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": [begin, text], "pair": pair, "special_tokens": known}


def test_equal_tables_give_the_common_size_without_weights(tmp_path):
    assert check_same_tokens(folder(tmp_path / "a"), folder(tmp_path / "b")) == 8


@pytest.mark.parametrize(("ours", "theirs", "common"), [(136, 128, 128), (128, 136, 128)])
def test_other_padding_is_a_valid_pair(tmp_path, ours, theirs, common):
    target, draft = folder(tmp_path / "a", vocab_size=ours), folder(tmp_path / "b", vocab_size=theirs)
    assert check_same_tokens(target, draft) == common


def test_permuted_table_of_equal_size_is_refused_with_both_tokens(tmp_path):
    permuted = [*WORDS[:4], "sat", "cat", *WORDS[6:]]
    with pytest.raises(TokenizerMismatch, match=r"id 4 is 'sat', but 'cat' .*draft=distill"):
        check_same_tokens(folder(tmp_path / "a"), folder(tmp_path / "b", permuted))


def test_unrelated_tables_are_refused_at_their_first_difference(tmp_path):
    """As TinyLlama (32000 SentencePiece tokens) and Llama 3 (128256 byte-level ones) part at id 0."""
    llama3 = ["!", '"', "#", "<|begin|>", *(f"w{i}" for i in range(20))]
    with pytest.raises(TokenizerMismatch, match=r"id 0 is '<unk>', but '!' .*tables of 8 and 24 tokens"):
        check_same_tokens(folder(tmp_path / "a", llama3), folder(tmp_path / "b"))


def test_token_that_one_side_lacks_is_refused(tmp_path):
    with pytest.raises(TokenizerMismatch, match=r"id 8 is not a token, but 'hat'"):
        check_same_tokens(folder(tmp_path / "a", [*WORDS, "hat"]), folder(tmp_path / "b"))


def test_reserved_places_may_be_named_on_one_side_only(tmp_path):
    """As Llama 3 and 3.2: <|reserved_special_token_2|> became <|finetune_right_pad_id|>."""
    held = folder(tmp_path / "held", [*WORDS, "<reserved_2>"])
    named = folder(tmp_path / "named", [*WORDS, "<pad>"])
    other = folder(tmp_path / "other", [*WORDS, "<eom>"])
    word = folder(tmp_path / "word", [*WORDS, "reserved"])
    assert check_same_tokens(held, named) == check_same_tokens(named, held) == 9
    for draft in (other, word):
        with pytest.raises(TokenizerMismatch, match="id 8"):
            check_same_tokens(named, draft)


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"normalizer": {"type": "Lowercase"}}, 'normalizer .*"type": "Lowercase"'),
        (
            {"pre_tokenizer": {"type": "WhitespaceSplit"}},
            'pre_tokenizer .*type: "WhitespaceSplit", target "Whitespace"',
        ),
        ({"post_processor": bos("<s>", 1)}, r"frame around a text \(BOS, EOS\)"),
        ({"model": {"type": "WordLevel", "vocab": {w: i for i, w in enumerate(WORDS)}, "unk_token": "cat"}}, "model"),
    ],
)
def test_other_rules_over_the_same_table_are_refused(tmp_path, changed, rule):
    with pytest.raises(TokenizerMismatch, match=f"same id -> token table .*another {rule}"):
        check_same_tokens(folder(tmp_path / "a"), folder(tmp_path / "b", **changed))


def test_bos_switched_off_in_the_settings_is_refused(tmp_path):
    on, off = (folder(tmp_path / str(value), settings={"add_bos_token": value}) for value in (True, False))
    with pytest.raises(TokenizerMismatch, match="add_bos_token"):
        check_same_tokens(on, off)
    assert check_same_tokens(on, folder(tmp_path / "silent")) == 8


def test_other_merges_are_refused_and_both_spellings_of_equal_ones_accepted(tmp_path):
    def bpe(merges: list) -> dict[str, Any]:
        vocab = {t: i for i, t in enumerate(["a", "b", "c", "ab", "bc", "abc"])}
        return {"model": {"type": "BPE", "vocab": vocab, "merges": merges}, "added_tokens": []}

    old = folder(tmp_path / "old", WORDS[:6], **bpe(["a b", "b c", "ab c"]))
    new = folder(tmp_path / "new", WORDS[:6], **bpe([["a", "b"], ["b", "c"], ["ab", "c"]]))
    other = folder(tmp_path / "other", WORDS[:6], **bpe(["b c", "a b", "ab c"]))
    assert check_same_tokens(old, new) == 6
    with pytest.raises(TokenizerMismatch, match=r"model \(merges: \[0\]"):
        check_same_tokens(old, other)


def test_wrapping_that_does_nothing_is_no_difference(tmp_path):
    wrapped = {"normalizer": {"type": "Sequence", "normalizers": []}}
    wrapped["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}]}
    assert check_same_tokens(folder(tmp_path / "a"), folder(tmp_path / "b", **wrapped)) == 8


def test_tokens_beyond_a_models_embedding_are_refused(tmp_path):
    with pytest.raises(TokenizerMismatch, match=r"up to id 7, but config.json gives vocab_size 6 \(target 8\)"):
        check_same_tokens(folder(tmp_path / "a"), folder(tmp_path / "b", vocab_size=6))


def test_missing_tokenizer_is_named(tmp_path):
    (tmp_path / "b").mkdir()
    with pytest.raises(TokenizerMismatch, match=r"b/tokenizer.json: not found"):
        check_same_tokens(folder(tmp_path / "a"), tmp_path / "b")
