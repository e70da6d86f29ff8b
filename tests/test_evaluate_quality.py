"""token_ppl, compact logits and KL against sums done by hand. Legend as in pipeline/measure/quality.py."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from evaluate_fixtures import BOS_ID, SHAPE, bos_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint import random_llama
from pipeline.measure import quality


def test_perplexity_is_per_token_not_a_mean_of_windows():
    assert quality.perplexity(10 * 1.0 + 1 * 5.0, 11) == pytest.approx(3.9103, abs=1e-4)  # mean of means: 20.1


def test_perplexity_overflow_is_infinite_and_nan_stays_nan():
    assert quality.perplexity(1e6, 1) == math.inf
    assert math.isnan(quality.perplexity(math.nan, 3))


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, []),
        (1, []),
        (2, [(0, 1, 0)]),
        (8, [(0, 7, 0)]),  # length = window: 7 tokens to score
        (9, [(0, 8, 0)]),  # window + 1: the window just holds all inputs
        (10, [(0, 8, 0), (8, 9, 0)]),
    ],
)
def test_windows_at_the_edges(length, expected):
    assert quality.windows(length, 8, 8) == expected


def test_windows_that_overlap_skip_what_is_scored():
    assert quality.windows(14, 8, 4) == [(0, 8, 0), (4, 12, 4), (8, 13, 4)]


@given(st.integers(0, 60), st.integers(1, 20), st.data())
def test_every_token_but_the_first_is_scored_once(length, window, data):
    stride = data.draw(st.integers(1, window))
    plan = quality.windows(length, window, stride)
    targets = [t for w in plan for t in range(w.begin + w.skip + 1, w.end + 1)]
    assert targets == list(range(1, length))
    for w in plan[1:]:
        assert w.end - w.begin <= window
        assert w.skip == window - stride  # the least context that a token gets, less its own input


def table_model(table_VV):
    """Next-token log-probabilities that depend on the last token alone."""
    return lambda ids_BN: table_VV[ids_BN]


@pytest.mark.parametrize("stride", [8, 4, 1])
def test_fixed_table_total_is_known(stride):
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 7, 45)
    p = generator.random((7, 7)) + 0.1
    p /= p.sum(axis=1, keepdims=True)
    by_hand = -sum(math.log(p[a, b]) for a, b in itertools.pairwise(ids))
    seen = []

    def logits_of(ids_BN):
        seen.append(tuple(ids_BN.shape))
        return table_model(torch.tensor(np.log(p), dtype=torch.float32))(ids_BN)

    plan = quality.windows(len(ids), 8, stride)
    scores = quality.score_stream(logits_of, torch.from_numpy(ids), plan, 3, 4, None)
    assert len(scores.nll_nats_S) == 44
    assert scores.nll_nats_S.astype(np.float64).sum() == pytest.approx(by_hand, rel=1e-5)
    assert max(n for _, n in seen) == 8 and max(b for b, _ in seen) == 3


def test_context_crosses_windows_only_by_overlap():
    """A model that counts its context: with stride 4 of window 8 no scored token after the first window has less
    than 5 inputs, with disjoint windows the first of each window has one."""

    def scored_contexts(stride):
        contexts = []
        for w in quality.windows(30, 8, stride):
            contexts += range(w.skip + 1, w.end - w.begin + 1)
        return contexts

    assert scored_contexts(8)[8:16] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert min(scored_contexts(4)[8:]) == 5
    assert set(scored_contexts(1)[8:]) == {8}


@pytest.fixture(scope="module")
def model_logits(make_decoder):
    """(base, other) log-probabilities of a small model and of itself with perturbed weights, float32."""
    base, other = make_decoder(seed=3), make_decoder(seed=3, noise=0.3)
    ids = torch.randint(0, 128, (1, 200), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return [d.module(input_ids=ids).logits[0].float().log_softmax(-1) for d in (base, other)]


def exact_kl(p_V, q_V):
    return sum(math.exp(a) * (a - b) for a, b in zip(p_V.tolist(), q_V.tolist(), strict=True))


@pytest.mark.parametrize("top_k", [4, 16, 128, 1000])
def test_kl_from_compact_logits_is_a_lower_bound_with_the_stated_error(model_logits, top_k):
    base_SV, other_SV = model_logits
    compact = quality.compact(base_SV, top_k)
    found_S = quality.kl_nats(compact, other_SV)
    for s in range(0, 200, 7):
        p_V, q_V = base_SV[s].double(), other_SV[s].double()
        exact = exact_kl(p_V, q_V)
        kept = compact.ids_SK[s].long()
        ratio_mass = float((p_V.exp() * (p_V - q_V).abs()).sum())
        rounding = 2.2 * float(p_V[kept].abs().max()) / 2048 * ratio_mass + 1e-5
        tail = torch.ones_like(p_V, dtype=torch.bool)
        tail[kept] = False
        missed = 0.0
        if tail.any():
            p_tail, q_tail = p_V[tail], q_V[tail]
            mass = math.exp(float(p_tail.logsumexp(0)))
            missed = mass * exact_kl(p_tail - p_tail.logsumexp(0), q_tail - q_tail.logsumexp(0))
        assert float(found_S[s]) == pytest.approx(exact - missed, abs=rounding)
        assert -1e-9 <= float(found_S[s]) <= exact + rounding
    assert float(quality.kl_nats(compact, base_SV).abs().max()) < 1e-4  # of the model to itself: rounding only


def test_kl_keeps_a_tail_that_subtraction_would_lose():
    logits_SV = torch.zeros(1, 50)
    logits_SV[0, 0] = 40.0
    compact = quality.compact(logits_SV.log_softmax(-1), 1)
    assert float(compact.log_tail_S[0]) == pytest.approx(math.log(49) - 40, abs=1e-4)


def test_nan_logits_give_nan_not_zero():
    base_SV = torch.zeros(1, 8).log_softmax(-1)
    assert math.isnan(float(quality.kl_nats(quality.compact(base_SV, 4), torch.full((1, 8), math.nan))[0]))


def test_agreement_counts_equal_argmax():
    table_VV = torch.eye(4) * 5
    ids_T = torch.tensor([0, 1, 2, 3, 0, 1])
    plan = quality.windows(6, 4, 4)
    base = quality.score_stream(table_model(table_VV), ids_T, plan, 1, 2, None).compact
    moved = table_VV.clone()
    moved[3] = torch.tensor([9.0, 0, 0, 0])
    scores = quality.score_stream(table_model(moved), ids_T, plan, 1, 2, base)
    assert scores.agree_S.tolist() == [True, True, True, False, True]


def test_by_document_splits_the_total():
    stream = quality.Stream("x", ["a", "b", "c"], np.arange(6), np.array([0, 0, 0, 1, 1, 1]))
    rows = quality.by_document(stream, np.array([1.0, 2.0, 4.0, 8.0, 16.0]))
    assert [(r["document"], r["nll_nats"], r["tokens"]) for r in rows] == [("a", 3.0, 2), ("b", 28.0, 3)]


def test_stream_has_exactly_one_bos_iff_the_tokenizer_adds_one():
    texts = [("a", "the cat"), ("b", "the hen")]
    plain = random_llama.make_tokenizer(SHAPE.vocab_size, SHAPE.max_position_embeddings)
    with_bos = quality.concatenate("prose", texts, bos_tokenizer(), None).ids_T.tolist()
    without = quality.concatenate("prose", texts, plain, None).ids_T.tolist()
    assert with_bos[0] == BOS_ID and with_bos.count(BOS_ID) == 1
    assert without == with_bos[1:]
    assert plain.decode(without) == "the cat\n\nthe hen"


def test_stream_is_cut_and_knows_its_documents():
    plain = random_llama.make_tokenizer(SHAPE.vocab_size, SHAPE.max_position_embeddings)
    first = len(plain.encode("the cat"))
    stream = quality.concatenate("prose", [("a", "the cat"), ("b", "the hen"), ("c", "x")], plain, first + 2)
    assert stream.document_T.tolist() == [0] * first + [1, 1]
    with pytest.raises(ValueError, match="category code: no tokens to score"):
        quality.concatenate("code", [("a", "")], plain, None)
