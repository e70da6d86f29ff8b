"""lm-eval over our modules: what each model sees, what comes back, what is kept."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from evaluate_fixtures import BOS_ID, SHAPE, bos_tokenizer, documents, settings, write_checkpoint, write_corpus

from pipeline.checkpoint import random_llama
from pipeline.config import Model, Runtime
from pipeline.measure import harness
from pipeline.progress import Bar
from pipeline.stages import evaluate

pytestmark = pytest.mark.slow  # importing lm-eval takes seconds


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return [write_checkpoint(tmp_path_factory.mktemp("models") / str(seed), seed) for seed in (1, 2)]


def watched(module):
    """The rows of ids that `module` is given from now on, without lm-eval's padding (zeros at the end)."""
    seen: list[list[int]] = []

    def note(_, args, kwargs):
        for row in (args[0] if args else kwargs["input_ids"]).tolist():
            while row[-1] == 0:
                row.pop()
            seen.append(row)

    module.register_forward_pre_hook(note, with_kwargs=True)
    return seen


def scores_of(module, tokenizer, workdir, **changes):
    asked = settings(**changes)
    rows = harness.build_rows(documents(), asked, seed=0)
    return rows, harness.evaluate_tasks(module, tokenizer, rows, asked, 0, workdir)


def test_two_models_differ_and_each_sees_requests_at_one_cache_location(checkpoints, tmp_path):
    tokenizer = random_llama.make_tokenizer(SHAPE.vocab_size, SHAPE.max_position_embeddings)
    found = []
    for folder in checkpoints:
        module = load(folder)
        seen = watched(module)
        _, raw = scores_of(module, tokenizer, tmp_path)
        assert len(seen) >= 2 + 4
        found.append([r["loglikelihood"] for r in harness.sample_rows(raw)])
    assert len(found[0]) == len(found[1]) >= 3
    assert all(a != b for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("adds_bos", [True, False])
def test_exactly_one_bos_on_every_path_iff_the_tokenizer_adds_one(checkpoints, tmp_path, adds_bos):
    plain = random_llama.make_tokenizer(SHAPE.vocab_size, SHAPE.max_position_embeddings)
    tokenizer = bos_tokenizer() if adds_bos else plain
    module = load(checkpoints[0])
    seen = watched(module)
    scores_of(module, tokenizer, tmp_path, window_tokens=128, stride_tokens=128, max_document_chars=100)
    assert seen
    assert {row.count(BOS_ID) for row in seen} == {int(adds_bos)}
    if adds_bos:
        assert {row[0] for row in seen} == {BOS_ID}


def test_rolling_score_is_the_documents_likelihood(checkpoints, tmp_path):
    """One window: the sum of float64 log-probabilities of all tokens after the prefix."""
    module, tokenizer = load(checkpoints[0]), bos_tokenizer()
    rows, raw = scores_of(
        module, tokenizer, tmp_path, tasks=["prose_perplexity"], max_document_chars=100, window_tokens=128
    )
    by_id = {r["doc_id"]: r for r in harness.sample_rows(raw)}
    for row in rows["prose_perplexity"]:
        ids = tokenizer.encode(row["text"])
        with torch.inference_mode():
            log_probs = module(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        by_hand = sum(float(log_probs[t, ids[t + 1]]) for t in range(len(ids) - 1))
        assert by_id[row["id"]]["loglikelihood"] == pytest.approx(by_hand, rel=1e-5)
        assert by_id[row["id"]]["bytes"] == len(row["text"].encode())
    total = sum(r["loglikelihood"] for r in by_id.values())
    metrics = harness.task_metrics(raw, list(by_id.values()))["prose_perplexity"]
    length = sum(r["bytes"] for r in by_id.values())
    assert metrics["byte_perplexity"] == pytest.approx(math.exp(-total / length))
    assert metrics["bits_per_byte"] == pytest.approx(-total / length / math.log(2))
    assert metrics["items"] == 2


class Constant(torch.nn.Module):
    """Always continues with one token."""

    def __init__(self, module, token, logit):
        super().__init__()
        self.module, self.token, self.logit = module, token, logit
        self.config, self.device = module.config, module.device

    def tie_weights(self):
        pass

    def forward(self, ids):
        out = torch.zeros(*ids.shape, SHAPE.vocab_size)
        out[..., self.token] = self.logit
        return type("Output", (), {"logits": out})


def test_last_word_is_right_only_when_greedy(tmp_path):
    """A model that always continues with one token is right exactly where the target is that token."""
    tokenizer = random_llama.make_tokenizer(SHAPE.vocab_size, SHAPE.max_position_embeddings)

    target = " the"
    (token,) = tokenizer.encode(target)
    rows = {"last_word": [{"id": w, "context": "and then", "word": w} for w in ("the", "river")]}
    module = Constant(load(write_checkpoint(tmp_path / "m", 1)), token, logit=3.0)
    raw = harness.evaluate_tasks(module, tokenizer, rows, settings(tasks=["last_word"]), 0, tmp_path)
    samples = list(harness.sample_rows(raw))
    assert [(s["doc_id"], s["target"], s["is_greedy"], s["correct"]) for s in samples] == [
        ("the", " the", True, True),
        ("river", " river", False, False),
    ]
    metrics = harness.task_metrics(raw, samples)["last_word"]
    assert (metrics["acc"], metrics["items"]) == (0.5, 2)
    assert metrics["acc_stderr"] == pytest.approx(math.sqrt(0.5 * 0.5 / 2))


def test_a_model_beyond_numbers_is_named_broken(checkpoints, tmp_path):
    tokenizer = random_llama.make_tokenizer(SHAPE.vocab_size, SHAPE.max_position_embeddings)
    with pytest.raises(harness.BrokenModel, match="prose_perplexity overflows"):
        scores_of(Constant(load(checkpoints[0]), 5, logit=1e5), tokenizer, tmp_path, tasks=["prose_perplexity"])


def test_bfloat16_models_are_scored_in_float32(checkpoints):
    module = load(checkpoints[0]).bfloat16()
    lm = harness.language_model(module, bos_tokenizer(), settings(), Bar("", None, ""))
    assert lm.softmax_dtype == torch.float32


def test_unknown_task_is_one_line_with_near_matches(monkeypatch):
    harness.check_tasks(["last_word"])  # without lm-eval's index, which takes long to read
    local = harness.task_manager(with_defaults=False)
    assert set(local.all_tasks) == set(harness.local_tasks())
    monkeypatch.setattr(harness, "task_manager", lambda with_defaults: local)
    with pytest.raises(harness.UnknownTask, match=r"'last_wrod' is neither .*near matches: last_word") as e:
        harness.check_tasks(["last_word", "last_wrod"])
    assert "\n" not in str(e.value)


@pytest.fixture(scope="module")
def runs(checkpoints, tmp_path_factory):
    """The stage on a model (twice), and on another model against it."""
    work = tmp_path_factory.mktemp("runs")
    corpus = write_corpus(work / "corpus", documents())
    asked = settings(tasks=["prose_perplexity", "code_perplexity", "last_word"])
    runtime = Runtime(device="cpu", dtype="float32", threads=1, seed=0, min_free_memory_bytes=0)
    model = Model(**dict.fromkeys(Model.__dataclass_fields__) | {"trust_remote_code": False})  # type: ignore[arg-type]

    def run(name, key, checkpoint, baseline=None):
        return evaluate.run(
            asked, model, runtime, key=key, checkpoint=checkpoint, corpus=corpus, out=work / name, baseline=baseline
        )

    metrics = {n: run(n, "base", checkpoints[0]) for n in ("base", "again")}
    metrics["other"] = run("other", "gptq", checkpoints[1], work / "base")
    metrics["self"] = run("self", "awq", checkpoints[0], work / "base")
    return work, metrics


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_stage_is_deterministic_and_carries_no_path_or_date(runs):
    work, metrics = runs
    assert files(work / "base") == files(work / "again")
    assert metrics["base"] == metrics["again"]
    text = (work / "base" / "results.json").read_text()
    for absolute in (str(work), "/tmp", str(harness.LOCAL_TASKS_DIR.parent), "site-packages", '"date"'):
        assert absolute not in text
    assert json.loads(text)["results"]["last_word"]["acc,none"] == metrics["base"]["acc_last_word"]


def test_stage_compares_with_the_baseline(runs):
    work, metrics = runs
    assert set(files(work / "base")) - set(files(work / "other")) == {"baseline_logits.safetensors"}
    assert metrics["base"]["against_base"] is None and metrics["base"]["baseline_logits_bytes"] > 0
    other, itself = metrics["other"]["against_base"], metrics["self"]["against_base"]
    log_ppl = {n: math.log(m["token_ppl"]["value"]) for n, m in metrics.items()}
    assert other["delta_log_ppl"]["value"] == pytest.approx(log_ppl["other"] - log_ppl["base"], abs=1e-9)
    assert other["delta_log_ppl"]["low"] <= other["delta_log_ppl"]["value"] <= other["delta_log_ppl"]["high"]
    assert other["kl_nats_mean"] > 1e-4 and other["top1_agreement"] < 1
    assert itself["delta_log_ppl"]["value"] == 0 and itself["kl_nats_mean"] < 1e-4 and itself["top1_agreement"] == 1
    assert metrics["self"]["alarms"] == []  # equal scores of equal weights are no surprise
    assert {m["task_hash"] for m in metrics.values()} == {metrics["base"]["task_hash"]}


def test_stage_scores_in_the_engine_that_serves_and_says_how_far_that_of_the_tasks_is(runs):
    _, metrics = runs
    assert metrics["base"]["readback"]["engine"] == "lean" and metrics["base"]["tasks_readback"]["engine"] == "hf"
    found = metrics["other"]["engine_difference"]
    assert found["tokens"] >= 64 and abs(found["mean_nats"]) <= found["mean_absolute_nats"] < 1e-5, "float32 in both"


def test_stage_scores_every_token_but_the_first_of_each_category(runs):
    import pandas as pd

    work, metrics = runs
    table = pd.read_parquet(work / "base" / "token_nll.parquet")
    ppl = metrics["base"]["token_ppl"]
    assert ppl["tokens"] == int(table["tokens"].sum()) == sum(c["tokens"] for c in ppl["by_category"].values())
    assert max(c["tokens"] for c in ppl["by_category"].values()) == 199  # max_ppl_tokens less the first
    assert ppl["value"] == pytest.approx(math.exp(table["nll_nats"].sum() / ppl["tokens"]))
    assert ppl["value"] == pytest.approx(SHAPE.vocab_size, rel=0.2)  # a random model knows nothing
