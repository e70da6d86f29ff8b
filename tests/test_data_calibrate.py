import json
import random
import time

import numpy as np
import pyarrow.parquet as pq
import pytest
from data_fixtures import RUNTIME, calibration_section, tiny_target, write_corpus

from pipeline.measure.quality import load_tokenizer
from pipeline.provenance import tree_sha256
from pipeline.stages import calibrate, prompts
from pipeline.stages.calibrate import CalibrationError

WORDS = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven", "islet", "jetty"]


def text(seed: int, words: int) -> str:
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) + str(chosen.randrange(100)) for _ in range(words))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def bos_target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("bos"), bos=True)


def documents(count=20, words=100):
    rows = [{"id": f"d{i:02d}", "text": text(i, words)} for i in range(count)]
    return [*rows, {"id": "e", "text": text(999, 60), "split": "evaluation"}]


def rows_of(folder):
    return pq.read_table(folder / "rows.parquet").to_pylist()


def test_long_rows_are_cut_not_skipped_and_the_rest_is_counted(tmp_path, target):
    """cases.md: 19 long rows, 1 short, 5 empty, 5 duplicates; 16 x 128 asked."""
    made = documents(19, words=100)
    extra = [{"id": "short", "text": "a few words only"}]
    extra += [{"id": f"empty{i}", "text": " \n" * i} for i in range(5)]
    extra += [{"id": f"again{i}", "text": made[i]["text"]} for i in range(5)]
    corpus = write_corpus(tmp_path / "c", made + extra)
    one = calibrate.run(calibration_section(pack=False), RUNTIME, corpus=corpus, target=target, out=tmp_path / "one")
    assert (one["asked_rows"], one["kept_rows"], one["tokens"]) == (16, 16, 16 * 128)
    assert one["dropped_documents"] == {"empty": 5, "short": 1, "duplicate": 5}
    assert one["candidate_rows"] == {"prose": 19}
    packed = calibrate.run(calibration_section(), RUNTIME, corpus=corpus, target=target, out=tmp_path / "packed")
    assert packed["dropped_documents"] == {"empty": 5, "short": 0, "duplicate": 5}
    assert packed["candidate_rows"]["prose"] > 19 * 2, "whole documents, not their beginnings, are packed"


def test_packed_rows_are_the_documents_one_after_the_other(tmp_path, target):
    from transformers import AutoTokenizer

    corpus = write_corpus(tmp_path / "c", documents(3, words=40))
    asked = calibration_section(rows=99, row_tokens=50)
    metrics = calibrate.run(asked, RUNTIME, corpus=corpus, target=target, out=tmp_path / "o")
    tokenizer = AutoTokenizer.from_pretrained(target)
    stream = [t for d in documents(3, words=40)[:3] for t in tokenizer.encode(d["text"], add_special_tokens=False)]
    expected = {tuple(stream[i : i + 50]) for i in range(0, len(stream) - 49, 50)}
    assert {tuple(r["input_ids"]) for r in rows_of(tmp_path / "o")} == expected
    assert metrics["kept_rows"] == len(stream) // 50 < 99
    spanning = [r["document"] for r in rows_of(tmp_path / "o") if "," in r["document"]]
    assert spanning and set(spanning) <= {"d00, d01", "d01, d02"}


def test_same_seed_same_bytes_other_seed_other_rows_spread_out(tmp_path, target):
    corpus = write_corpus(tmp_path / "c", documents(200, words=14))
    asked = calibration_section(rows=20, row_tokens=32, pack=False)

    def draw(seed, name):
        runtime = RUNTIME.__class__(**{**vars(RUNTIME), "seed": seed})
        np.random.seed(len(name))  # a library that reseeds the global generator must not matter
        random.seed(len(name))
        calibrate.run(asked, runtime, corpus=corpus, target=target, out=tmp_path / name)
        return tree_sha256(tmp_path / name), [int(r["document"][1:]) for r in rows_of(tmp_path / name)]

    (hash_a, rows_a), (hash_b, rows_b), (hash_c, rows_c) = draw(1, "a"), draw(1, "again"), draw(2, "other")
    assert (hash_a, rows_a) == (hash_b, rows_b)
    assert hash_c != hash_a and len(set(rows_a) & set(rows_c)) < 10
    for rows in (rows_a, rows_c):
        assert len(set(rows)) == 20
        assert min(rows) < 50 and max(rows) >= 150, "not the first rows of the stream"


def test_categories_take_turns(tmp_path, target):
    many = [{"id": f"v{i}", "text": text(i, 100), "category": "verse"} for i in range(30)]
    few = [{"id": "c0", "text": text(77, 100), "category": "code"}]
    corpus = write_corpus(tmp_path / "c", [*many, *few, *documents(0)])
    asked = calibration_section(rows=6, row_tokens=64)
    calibrate.run(asked, RUNTIME, corpus=corpus, target=target, out=tmp_path / "o")
    assert [r["document"] == "c0" for r in rows_of(tmp_path / "o")] == [True, False] * 3
    only = calibration_section(rows=6, row_tokens=64, categories=["verse"])
    calibrate.run(only, RUNTIME, corpus=corpus, target=target, out=tmp_path / "v")
    assert all(r["document"].startswith("v") for r in rows_of(tmp_path / "v"))
    with pytest.raises(CalibrationError, match="no news in the corpus; it has code, prose, verse"):
        wrong = calibration_section(categories=["news"])
        calibrate.run(wrong, RUNTIME, corpus=corpus, target=target, out=tmp_path / "n")


@pytest.mark.parametrize("pack", [True, False])
def test_each_row_begins_with_exactly_one_bos_where_the_tokenizer_adds_one(tmp_path, target, bos_target, pack):
    corpus = write_corpus(tmp_path / "c", documents(6))
    asked = calibration_section(rows=5, row_tokens=64, pack=pack)
    with_bos = calibrate.run(asked, RUNTIME, corpus=corpus, target=bos_target, out=tmp_path / "b")
    without = calibrate.run(asked, RUNTIME, corpus=corpus, target=target, out=tmp_path / "n")
    assert with_bos["bos"] and not without["bos"]
    for row in rows_of(tmp_path / "b"):
        assert len(row["input_ids"]) == 64 and row["input_ids"][0] == 0 and row["input_ids"].count(0) == 1
    assert all(row["input_ids"].count(0) == 0 for row in rows_of(tmp_path / "n"))


def test_a_corpus_shorter_than_a_row_is_refused_with_numbers(tmp_path, target):
    corpus = write_corpus(tmp_path / "c", documents(2, words=5))
    for pack in (True, False):
        asked = calibration_section(row_tokens=512, pack=pack)
        with pytest.raises(
            CalibrationError, match=r"row_tokens: 512, but 2 calibration documents of \d+ tokens in all"
        ):
            calibrate.run(asked, RUNTIME, corpus=corpus, target=target, out=tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_overlap_is_the_share_of_13_grams_and_refused_above_the_limit(tmp_path, target):
    leaked = documents(4, words=100)
    leaked[-1]["text"] = leaked[0]["text"]
    corpus = write_corpus(tmp_path / "c", leaked)
    asked = calibration_section(rows=99, row_tokens=64, max_overlap=0.5)
    with pytest.raises(CalibrationError, match=r"of the 13-grams of evaluation category prose .* limit of 50\.00%"):
        calibrate.run(asked, RUNTIME, corpus=corpus, target=target, out=tmp_path / "o")
    assert not (tmp_path / "o").exists()

    rows = [calibrate.Row(["d"], list(range(20)))]
    held_out = [{"text": "", "category": "x"}]
    by_hand = lambda *args, **kwargs: type("Ids", (), {"input_ids": [*range(5, 20), 99]})()  # noqa: E731
    # 16 tokens hold 4 13-grams, of which the 3 without token 99 are in the row.
    assert calibrate.overlap_share(rows, held_out, by_hand) == {"x": 3 / 4}


def test_fewer_tokens_than_input_channels_warns_and_fewer_rows_than_asked_too(tmp_path, target, capsys):
    corpus = write_corpus(tmp_path / "c", documents(1, words=50))
    asked = calibration_section(rows=1, row_tokens=64)
    calibrate.run(asked, RUNTIME, corpus=corpus, target=target, out=tmp_path / "o")
    (warning,) = capsys.readouterr().err.splitlines()
    assert "64 tokens, fewer than the 128 input channels" in warning and "Ask for 2x" in warning
    calibrate.run(calibration_section(rows=50), RUNTIME, corpus=corpus, target=target, out=tmp_path / "o")
    assert "calibration.rows: 50 asked, 2 found" in capsys.readouterr().err


def test_the_lock_pins_rows_tokens_tokenizer_and_source(tmp_path, target):
    import hashlib

    corpus = write_corpus(tmp_path / "c", documents(4))
    asked = calibration_section(rows=3, row_tokens=64)
    metrics = calibrate.run(asked, RUNTIME, corpus=corpus, target=target, out=tmp_path / "o")
    lock = json.loads((tmp_path / "o/lock.json").read_text())
    tokens = [r["input_ids"] for r in rows_of(tmp_path / "o")]
    assert lock["tokens_sha256"] == metrics["tokens_sha256"]
    assert lock["tokens_sha256"] == hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
    assert lock["tokenizer_sha256"] == hashlib.sha256((target / "tokenizer.json").read_bytes()).hexdigest()
    assert lock["sources"] == {"c": {"revision": "r"}}
    assert [", ".join(names) for names in lock["rows"]] == [r["document"] for r in rows_of(tmp_path / "o")]


def test_a_long_text_is_tokenized_in_pieces_with_the_tokens_of_the_whole(target, monkeypatch):
    """Cut before a blank where there is one; a line without any is cut at the bound."""
    tokenizer = load_tokenizer(target)
    monkeypatch.setattr(calibrate, "PIECE_CHARS", 1000)
    asked = []

    def seen(piece, **told):
        asked.append(piece)
        return tokenizer(piece, **told)

    prose = text(0, 500)
    assert calibrate.token_ids(seen, prose) == tokenizer(prose, add_special_tokens=False).input_ids
    assert len(asked) > 3 and max(map(len, asked)) <= 1000 and "".join(asked) == prose
    asked.clear()
    line = "x1" * 5000
    assert tokenizer.decode(calibrate.token_ids(seen, line)) == line
    assert [len(piece) for piece in asked] == [1000] * 10
    assert calibrate.token_ids(tokenizer, "") == []


def test_rows_are_cut_from_a_long_document_in_linear_time():
    """Two million tokens: seconds in all, where a copy of the rest for each row took minutes."""
    ids, rows = list(range(2_000_000)), []
    started = time.monotonic()
    names, rest = calibrate._pack((["before"], [-1]), "long", ids, 128, [], rows)
    assert time.monotonic() - started < 5
    assert [i for row in rows for i in row.ids_T] + rest == [-1, *ids]
    assert (rows[0].documents, rows[1].documents, names) == (["before", "long"], ["long"], ["long"])


@pytest.mark.slow
def test_a_file_of_one_line_without_blanks_gives_rows_and_no_prompt(tmp_path, target):
    line = "".join(random.Random(0).choices("abcdefghij", k=3_000_000))
    made = [{"id": "line", "text": line}, *documents(20)]
    corpus = write_corpus(tmp_path / "c", made)
    found = calibrate.run(calibration_section(), RUNTIME, corpus=corpus, target=target, out=tmp_path / "out")
    assert found["kept_rows"] == 16


def test_a_sentence_too_long_for_a_prompt_is_not_tokenized(target):
    asker = prompts.Asker(load_tokenizer(target), chat=False)
    asked = []
    tokenizer = asker.tokenizer

    def seen(piece, **told):
        asked.append(len(piece))
        return tokenizer(piece, **told)

    asker.tokenizer = seen
    spoken = "The river was low that summer. "
    document = {"id": "d", "text": spoken * 40 + "A" + "x" * 1_000_000 + ". " + spoken * 40}
    passages = prompts.cut_passages(document, asker, 200)
    assert passages and all("xxx" not in p.text for p in passages)
    assert max(asked) < 200 * prompts.CHARS_PER_TOKEN
