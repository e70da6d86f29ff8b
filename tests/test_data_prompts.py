import json

import pytest
from data_fixtures import RUNTIME, prompts_section, tiny_target, write_corpus

from pipeline.checkpoint import random_llama
from pipeline.provenance import file_sha256
from pipeline.stages import prompts
from pipeline.stages.prompts import PromptError

SENTENCES = [
    f"The {a} stood beside the {b} all night."
    for a in ("mill", "barn", "pier", "inn", "shed")
    for b in ("lake", "road", "hill", "wood", "ford")
]
PROSE = " ".join(SENTENCES)
CODE = 'def twice(n):\n    """Twice n."""\n'


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    long_code = "def f():\n    '''" + "A long story. " * 60 + "'''\n"
    rows = []
    for split in ("calibration", "evaluation"):
        rows += [
            {"id": f"{split}{i}", "split": split, "text": PROSE.replace("stood", ["stood", "waited", "lay"][i])}
            for i in range(3)
        ]
        rows += [
            {"id": f"{split}-code{i}", "split": split, "category": "code", "text": p + "    pass\n", "prompt": p}
            for i, p in enumerate([CODE, long_code])
        ]
    rows.append({"id": "verse", "split": "evaluation", "category": "verse", "text": PROSE})
    return write_corpus(tmp_path_factory.mktemp("corpus"), rows)


def run(tmp_path, corpus, target, **changed):
    metrics = prompts.run(prompts_section(**changed), RUNTIME, corpus=corpus, target=target, out=tmp_path / "p.jsonl")
    return metrics, [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]


def passage_of(row):
    return row["text"].split("\n\n", 1)[1].split(random_llama.TURN_END)[0]


def test_prompts_come_from_their_own_split_and_fit_the_limit(tmp_path, corpus, target):
    metrics, rows = run(tmp_path, corpus, target)
    assert [(r["split"], r["category"]) for r in rows] == [
        (split, category)
        for split in ("evaluation", "calibration")
        for category in ("code", "prose", "prose", "summary", "summary")
    ]
    for row in rows:
        assert row["id"].split(":")[1].startswith(row["split"])
        assert len(row["input_ids"]) <= 224
    assert metrics["too_long"] == {"evaluation": 1, "calibration": 1}
    assert metrics["count"] == 10
    assert metrics["by_split"]["evaluation"]["code"]["tokens"] == len(rows[0]["input_ids"])


def test_passages_are_whole_sentences_and_none_serves_twice(tmp_path, corpus, target):
    _, rows = run(tmp_path, corpus, target, per_category=99)
    passages = [passage_of(r) for r in rows if r["category"] != "code" and r["split"] == "evaluation"]
    assert len(passages) > 4 and len(set(passages)) == len(passages)
    for passage in passages:
        pieces = prompts.SENTENCE_BREAK.split(passage)
        assert all(p.startswith("The ") and p.endswith(".") for p in pieces)


def test_instruction_and_template_stay_whole(tmp_path, corpus, target):
    _, rows = run(tmp_path, corpus, target)
    code = next(r for r in rows if r["category"] == "code")["text"]
    body = f"Complete this Python function.\n\n```python\n{CODE.strip()}\n```"
    assert code == f"<|im_start|>user\n{body}<|im_end|>\n<|im_start|>assistant\n"
    for row in rows:
        assert row["text"].startswith("<|im_start|>user\n") and row["text"].endswith("<|im_start|>assistant\n")


def test_two_runs_are_identical_to_the_byte_and_the_hash_is_the_files(tmp_path, corpus, target):
    metrics, _ = run(tmp_path, corpus, target)
    first = (tmp_path / "p.jsonl").read_bytes()
    again, _ = run(tmp_path, corpus, target)
    assert (tmp_path / "p.jsonl").read_bytes() == first
    assert metrics == again and metrics["sha256"] == file_sha256(tmp_path / "p.jsonl")


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("written", [True, False])
def test_exactly_one_bos_whether_or_not_the_template_writes_it(tmp_path, corpus, chat, written):
    template = random_llama.CHAT_TEMPLATE.replace("<|im_start|>", "")
    bos = "{{ bos_token }}" if written else ""
    target = tiny_target(tmp_path / "t", bos=True, template=bos + template)
    metrics, rows = run(tmp_path, corpus, target, chat_template=chat)
    assert metrics["bos"]
    for row in rows:
        ids = row["input_ids"]
        assert ids[0] == 0 and ids.count(0) == 1


def test_a_turn_mark_that_happens_to_be_the_bos_token_stays_when_none_is_added(tmp_path, corpus, target):
    _, rows = run(tmp_path, corpus, target)
    assert all(row["input_ids"][0] == 0 and row["input_ids"].count(0) == 2 for row in rows)


def test_plain_text_for_base_models(tmp_path, corpus):
    base = tiny_target(tmp_path / "t", template=None)
    with pytest.raises(PromptError, match=r"no chat template \(a base model\); use plain text \(-S prompts=plain\)"):
        run(tmp_path, corpus, base)
    _, rows = run(tmp_path, corpus, base, chat_template=False)
    assert rows[0]["text"] == CODE
    assert all(row["input_ids"][0] != 0 for row in rows)


def test_a_limit_that_fits_nothing_is_refused_and_a_short_category_warns(tmp_path, corpus, target, capsys):
    with pytest.raises(PromptError, match=r"prompts\.max_prompt_tokens: 20 tokens leave no room"):
        run(tmp_path, corpus, target, max_prompt_tokens=20)
    assert not (tmp_path / "p.jsonl").exists()
    capsys.readouterr()
    metrics, _ = run(tmp_path, corpus, target, per_category=9, train_per_category=9)
    assert "prompts.per_category: 9 asked, 1 found of code" in capsys.readouterr().err
    assert metrics["by_split"]["evaluation"]["code"]["count"] == 1


def test_a_passage_does_not_start_inside_a_sentence(target):
    from transformers import AutoTokenizer

    asker = prompts.Asker(AutoTokenizer.from_pretrained(target), chat=True)
    document = {"id": "d", "text": "continued from the last column. " + PROSE}
    first = prompts.cut_passages(document, asker, 224)[0].text
    assert first.startswith(SENTENCES[0])
