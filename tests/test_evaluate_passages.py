"""The rule that picks last-word items, and the cutting of documents."""

from __future__ import annotations

import pytest

from pipeline.measure import passages

FILLER = "There was once a man who lived in a house near the sea with his dog and who never went far from it. "


def items(text):
    return passages.last_word_rows([{"id": "d", "text": text}], 100, seed=0)


def test_last_word_must_have_been_used_before():
    found = items(FILLER + "Nobody saw the man or the dog leave the house.")
    assert [(i["word"], i["context"].endswith("leave the")) for i in found] == [("house", True)]
    assert items(FILLER + "Nobody saw the man or the dog leave the garden.") == []


@pytest.mark.parametrize("ending", ["the Dog.", "the dog.", "the house", "house2.", "sea--"])
def test_last_word_is_long_lower_case_and_ends_a_clause(ending):
    assert items(FILLER + f"Nobody saw the man leave {ending}") == []


def test_context_starts_at_a_sentence_and_has_20_to_49_words():
    text = FILLER * 5 + "Nobody saw the man or the dog leave the house."
    context = items(text)[-1]["context"]
    assert context.startswith("There was once") and context.count("There was once") == 1
    assert 20 <= len(context.split()) <= 49
    assert items("Nobody saw the man or the house, leave the house.") == []  # too short


def test_bibliographies_are_left_out():
    noise = (
        "Ed. 8vo. 1767 P. E. (IO) vols. sm. 1773*75 W. 1790 4to. folio 1862, 1863, I84$ 17th ed. house 99 & 12 XII. "
    )
    assert items(noise + "Nobody saw the old house.") == []


def test_items_are_drawn_by_seed_alone():
    text = "\n\n".join(FILLER + f"Nobody saw the man{'n' * i} or the dog leave the house." for i in range(20))
    documents = [{"id": "b", "text": text}, {"id": "a", "text": text}]
    first = passages.last_word_rows(documents, 5, seed=1)
    assert first == passages.last_word_rows(documents[::-1], 5, seed=1) and len(first) == 5
    assert first != passages.last_word_rows(documents, 5, seed=2)
    assert len({i["id"] for i in passages.last_word_rows(documents, 99, seed=1)}) == 40


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("one\ntwo\nthree", 9, "one\ntwo"),
        ("one two three", 9, "one two"),
        ("onetwothree", 4, "onet"),
        ("short", 9, "short"),
        ("long " * 9, None, "long " * 9),
    ],
)
def test_cut_at_a_line_or_a_word(text, limit, expected):
    assert passages.cut(text, limit) == expected


def test_perplexity_rows_choose_documents_by_seed():
    documents = [{"id": str(i), "text": f"text {i}"} for i in range(9)]
    chosen = passages.perplexity_rows(documents, 4, None, seed=5)
    assert chosen == passages.perplexity_rows(documents[::-1], 4, None, seed=5)
    assert len(chosen) == 4 and chosen != passages.perplexity_rows(documents, 4, None, seed=6)
