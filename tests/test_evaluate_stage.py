"""Stage evaluate without lm-eval: what it refuses before any model loads, comparison and alarms."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from evaluate_fixtures import SHAPE, documents, settings, write_corpus

from pipeline.checkpoint import random_llama
from pipeline.config import ConfigError
from pipeline.measure import baseline as reference
from pipeline.measure import harness, quality
from pipeline.stages import evaluate


@pytest.mark.parametrize(("key", "baseline"), [("base", "x"), ("gptq", None)])
def test_baseline_is_given_to_all_but_base(tmp_path, key, baseline):
    with pytest.raises(ConfigError, match=f"evaluate@{key}: .*baseline="):
        evaluate.check_key(key, baseline and tmp_path / baseline)


def test_window_beyond_the_context_names_both(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 128}))
    evaluate.check_window(128, tmp_path)
    with pytest.raises(ConfigError, match=r"evaluate.window_tokens: 129 is beyond the context of 128 .* at most 128"):
        evaluate.check_window(129, tmp_path)


def test_no_held_out_documents(tmp_path):
    rows = [d | {"split": "calibration"} for d in documents()]
    with pytest.raises(harness.NothingToEvaluate, match="none of 6 documents is in the evaluation split"):
        evaluate.held_out(write_corpus(tmp_path, rows))


def test_category_without_documents_names_task_and_categories():
    with pytest.raises(harness.NothingToEvaluate, match=r"code_perplexity finds .* category code .*\(.*has: prose\)"):
        harness.build_rows(documents(code=0), settings(tasks=["code_perplexity"]), 0)


def test_every_local_task_can_be_built():
    for name, config in harness.local_tasks().items():
        made = [d | {"category": config["metadata"]["categories"][0]} for d in documents(code=0)]
        rows = harness.build_rows(made, settings(tasks=[name]), 0)[name]
        assert rows and all(r["id"] for r in rows)


def scored(nll, kl=None, agree=None):
    return quality.StreamScores(np.array(nll, dtype=float), None, kl and np.array(kl), agree and np.array(agree))


def rows(nll, tokens=10):
    return [{"document": f"d{i}", "category": "prose", "nll_nats": x, "tokens": tokens} for i, x in enumerate(nll)]


def answers(*correct):
    return [{"task": "last_word", "doc_id": i, "filter": "none", "correct": c} for i, c in enumerate(correct)]


def base(nll, *correct, weights="a", tokens=10):
    return reference.Baseline({}, rows(nll, tokens), answers(*correct), weights)


def test_comparison_with_the_baseline():
    against = reference.compare(
        base([10.0, 20.0], True, False, True, tokens=2),
        {"prose": scored([1.0], [0.0, 0.1, 0.2, 5.0], [True, True, True, False])},
        rows([11.0, 24.0], tokens=2),
        answers(True, True, False),
        seed=0,
    )
    assert against["delta_log_ppl"]["value"] == pytest.approx(5 / 4)
    assert against["kl_nats_mean"] == pytest.approx(5.3 / 4) and against["kl_nats_median"] == pytest.approx(0.15)
    of_documents = {"value": 5.3 / 4, "low": 0.1 / 2, "high": 5.2 / 2}  # one document drawn twice, or the other
    assert against["kl_nats_mean_interval"] == pytest.approx(of_documents)
    assert against["top1_agreement"] == 0.75
    assert against["acc_last_word"] == {"mcnemar_p": 1.0, "gained": 1, "lost": 1}
    assert against["by_category"]["prose"]["kl_nats_mean"] == against["kl_nats_mean"]


def test_other_items_than_the_baseline_are_refused():
    with pytest.raises(reference.BaselineMismatch, match="last_word"):
        reference.paired(answers(True), answers(True, False), "last_word")


def alarms_of(before, after, delta, change=None, weights="b"):
    against = {"delta_log_ppl": delta, "mcnemar": {"last_word": change} if change else {}}
    return reference.alarms(before, against, rows(after), weights)


def test_alarms():
    rising, falling = ({"value": s, "low": s - 0.01, "high": s + 0.01} for s in (0.05, -0.05))
    unknown = {"value": -0.05, "low": math.nan, "high": math.nan}
    assert alarms_of(base([1.0]), [1.1], rising) == []
    assert alarms_of(base([1.0]), [0.9], unknown) == []
    assert "implausible gain" in alarms_of(base([1.0]), [0.9], falling)[0]
    lucky = {"gained": 20, "lost": 2, "mcnemar_p": 1e-4}
    assert "gains 20 items" in alarms_of(base([1.0]), [1.1], rising, lucky)[0]
    assert alarms_of(base([1.0]), [1.1], rising, lucky | {"gained": 2, "lost": 20}) == []


def test_identical_scores_for_different_weights_raise_an_alarm():
    same = {"value": 0.0, "low": 0.0, "high": 0.0}
    assert "identical scores" in alarms_of(base([1.0, 2.0]), [1.0, 2.0], same, weights="b")[0]
    assert alarms_of(base([1.0, 2.0]), [1.0, 2.0], same, weights="a") == []


def test_non_finite_likelihoods_are_counted():
    scores = {"code": scored([1.0, math.nan, math.inf]), "prose": scored([1.0])}
    assert evaluate.non_finite(scores) == ["2 tokens of code have a log-likelihood that is not finite"]


def test_token_ppl_is_total_over_total():
    table = [
        {"document": "a", "category": "prose", "nll_nats": 10.0, "tokens": 10},
        {"document": "b", "category": "code", "nll_nats": 5.0, "tokens": 1},
    ]
    found = evaluate.token_ppl(table, settings())
    assert found["value"] == pytest.approx(math.exp(15 / 11)) and found["tokens"] == 11
    assert found["by_category"]["code"] == {"value": pytest.approx(math.exp(5)), "tokens": 1, "documents": 1}
    assert (found["window_tokens"], found["stride_tokens"]) == (32, 16)


def test_baseline_of_other_tokens_is_refused(tmp_path):
    compact = quality.compact(torch.zeros(3, 8).log_softmax(-1), 4)
    scores = {"prose": quality.StreamScores(np.zeros(3), compact, None, None)}
    reference.write_logits(tmp_path, scores, {"stream_sha256": "1", "weights_sha256": "w"})
    reference.write_nll(tmp_path, rows([1.0]))
    (tmp_path / "samples.jsonl").write_text(json.dumps(answers(True)[0]) + "\n")
    read = reference.read(tmp_path, "1")
    assert read.weights_sha256 == "w" and read.documents == rows([1.0]) and read.samples == answers(True)
    assert all(torch.equal(a, b) for a, b in zip(read.logits["prose"], compact, strict=True))
    with pytest.raises(reference.BaselineMismatch, match="run evaluate@base again"):
        reference.read(tmp_path, "2")
    with pytest.raises(reference.BaselineMismatch, match="not found"):
        reference.read(tmp_path / "none", "1")


def test_streams_depend_on_the_seed_and_not_on_the_order_of_documents():
    tokenizer = random_llama.make_tokenizer(SHAPE.vocab_size, SHAPE.max_position_embeddings)
    texts = documents(prose=9, code=9)

    def identity(rows, seed):
        return evaluate.streams_sha256(evaluate.build_streams(rows, tokenizer, settings(), seed), settings())

    assert identity(texts, 1) == identity(texts[::-1], 1) != identity(texts, 2)
