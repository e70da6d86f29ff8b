"""Acceptance rules: greedy prefixes by hand, sampling against the exact target distribution."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from pipeline.engine.accept import accept_greedy, accept_sampled
from pipeline.engine.sample import Sampling, distribution, draw

P = (0.5, 0.3, 0.2)
Q = (0.6, 0.3, 0.1)


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), min_size=9, max_size=9))
def test_greedy_equals_the_obvious_loop(drafted, choices):
    choices = choices[: len(drafted) + 1]
    expected = 0
    for ours, theirs in zip(drafted, choices, strict=False):
        if ours != theirs:
            break
        expected += 1
    assert accept_greedy(drafted, choices) == (expected, choices[expected])


def first_tokens(draft_probs_V, target_probs_V, k, runs, seed, draft_draws=True):
    """Counts of the first emitted token over `runs` rounds of k drafted tokens, all positions alike."""
    generator = torch.Generator().manual_seed(seed)
    vocab = len(target_probs_V)
    counts = [0] * vocab
    for _ in range(runs):
        q_KV = draft_probs_V.expand(k, -1)
        drafted_K = draw(q_KV, generator) if draft_draws else q_KV.argmax(-1)
        uniforms_K = torch.rand(k, generator=generator)
        accepted, token = accept_sampled(drafted_K, q_KV, target_probs_V.expand(k + 1, -1), uniforms_K, generator)
        counts[int(drafted_K[0]) if accepted else token] += 1
    return counts


ONE_HOT = (1.0, 0.0, 0.0)
DRAFTS = {
    "sampled": torch.tensor(Q),
    "greedy": torch.tensor(ONE_HOT),
    "top-2": distribution(torch.tensor([Q]).log(), Sampling(1.0, 2, 1.0))[0],
    "temperature 0.5": distribution(torch.tensor([Q]).log(), Sampling(0.5, None, 1.0))[0],
    "top-p 0.9": distribution(torch.tensor([Q]).log(), Sampling(1.0, None, 0.9))[0],
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_output_follows_the_target(draft, k):
    runs = 4000
    counts = first_tokens(DRAFTS[draft], torch.tensor(P), k, runs, seed=k)
    assert chisquare(counts, [runs * p for p in P]).pvalue > 1e-3


def test_the_check_would_catch_a_greedy_draft_tested_as_if_it_sampled():
    """Always drafting token 0 but testing it against Q gives (.83, .00, .17): the chi-square must reject that."""
    generator = torch.Generator().manual_seed(0)
    counts = [0, 0, 0]
    for _ in range(4000):
        accepted, token = accept_sampled(
            torch.tensor([0]), torch.tensor([Q]), torch.tensor([P, P]), torch.rand(1, generator=generator), generator
        )
        counts[0 if accepted else token] += 1
    assert counts[1] == 0 and abs(counts[0] / 4000 - 0.8333) < 0.03
    assert chisquare([c + 1e-9 for c in counts], [4000 * p for p in P], sum_check=False).pvalue < 1e-6


def test_equal_distributions_accept_everything():
    p_V = torch.tensor(P)
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        drafted_K = draw(p_V.expand(4, -1), generator)
        uniforms_K = torch.rand(4, generator=generator)
        assert accept_sampled(drafted_K, p_V.expand(4, -1), p_V.expand(5, -1), uniforms_K, generator)[0] == 4


def test_filters_by_hand():
    logits_1V = torch.tensor([[4.0, 3.0, 2.0, 1.0]]).log()
    torch.testing.assert_close(distribution(logits_1V, Sampling(1.0, None, 1.0))[0], torch.tensor([0.4, 0.3, 0.2, 0.1]))
    # temperature 0.5 squares the odds: 16, 9, 4, 1 of 30
    squared_V = torch.tensor([16 / 30, 9 / 30, 4 / 30, 1 / 30])
    torch.testing.assert_close(distribution(logits_1V, Sampling(0.5, None, 1.0))[0], squared_V)
    torch.testing.assert_close(distribution(logits_1V, Sampling(1.0, 2, 1.0))[0], torch.tensor([4 / 7, 3 / 7, 0, 0]))
    # the smallest set with mass >= 0.65 is {0.4, 0.3}
    nucleus_V = torch.tensor([4 / 7, 3 / 7, 0, 0])
    torch.testing.assert_close(distribution(logits_1V, Sampling(1.0, None, 0.65))[0], nucleus_V)
    torch.testing.assert_close(distribution(logits_1V, Sampling(0.0, None, 1.0))[0], torch.tensor([1.0, 0, 0, 0]))
