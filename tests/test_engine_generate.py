"""Speculative decoding against plain decoding and transformers' own greedy search, token for token in float32."""

import pytest
import torch
from scipy.stats import chisquare

from pipeline.engine.cache import ContextFull
from pipeline.engine.generate import generate, read, room_for
from pipeline.engine.propose import ModelProposer, NgramProposer, Proposal
from pipeline.engine.replay import kept_from_hits, replay
from pipeline.engine.sample import GREEDY, Sampling, distribution

PROMPT = [5, 17, 99, 3, 42]


def run(target, proposer=None, draft_len=0, max_new_tokens=40, end_ids=frozenset(), prompt=PROMPT, **more):
    options = {"sampling": GREEDY, "generator": None, "ignore_end": False} | more
    return generate(
        target,
        prompt,
        max_new_tokens=max_new_tokens,
        end_ids=frozenset(end_ids),
        proposer=proposer,
        draft_len=draft_len,
        **options,
    )


class Scripted:
    """Proposes from a known answer, wrong at every position in `wrong` (counted from the first new token)."""

    def __init__(self, answer, prompt_len, wrong):
        self.answer, self.prompt_len, self.wrong = answer, prompt_len, wrong

    def start(self, prompt_ids, capacity):
        pass

    def room(self, committed):
        return 99

    def propose(self, committed, k, sampling, generator):
        at = len(committed) - self.prompt_len
        ids = [(self.answer + [0] * 99)[i] ^ (1 if self.wrong(i) else 0) for i in range(at, at + k)]
        return Proposal(torch.tensor(ids), None)


def test_plain_equals_transformers_generate(make_decoder):
    target = make_decoder(3)
    expected = target.module.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, 5), max_new_tokens=40, do_sample=False
    )
    assert run(target).ids == expected[0, len(PROMPT) :].tolist()


WRONG = {"always right": lambda i: False, "always wrong": lambda i: True, "mixed": lambda i: i % 3 == 2}


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("kind", WRONG)
def test_speculative_equals_plain(make_decoder, kind, k):
    target = make_decoder(3)
    plain = run(target).ids
    spec = run(target, Scripted(plain, len(PROMPT), WRONG[kind]), k)
    assert spec.ids == plain
    assert all(r.drafted == k for r in spec.rounds)
    hits = [not WRONG[kind](i) for i in range(len(plain))]
    again = replay([(len(plain), kept_from_hits(hits))], k)
    assert (again.rounds, again.drafted, again.accepted) == (
        len(spec.rounds),
        sum(r.drafted for r in spec.rounds),
        sum(r.accepted for r in spec.rounds),
    )


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_replay_of_one_draft_pass_equals_real_runs(make_decoder, k):
    target, draft = make_decoder(3), make_decoder(3, noise=0.05)
    answers, real = [], []
    for first in range(6):
        prompt = [first, *PROMPT]
        plain = run(target, prompt=prompt).ids
        logits_TV = draft.forward(torch.tensor(prompt + plain), draft.new_cache(len(prompt) + len(plain)))
        choices = logits_TV.argmax(-1)[len(prompt) - 1 : -1].tolist()
        answers.append((len(plain), kept_from_hits([a == b for a, b in zip(choices, plain, strict=True)])))
        spec = run(target, ModelProposer(draft, target.vocab_size), k, prompt=prompt)
        assert spec.ids == plain
        real += spec.rounds
    again = replay(answers, k)
    assert 0 < again.accepted < again.drafted, "the draft must be neither perfect nor useless for this test"
    assert again.rounds == len(real)
    assert again.accepted == sum(r.accepted for r in real)
    assert again.kept_at_position == tuple(sum(r.accepted > j for r in real) for j in range(k))
    assert again.mean_emitted_per_round == pytest.approx(1 + sum(again.accept_marginal))


def test_same_counts_whatever_the_order_of_draft_lens(make_decoder):
    target, proposer = make_decoder(3), ModelProposer(make_decoder(3, noise=0.05), 128)
    up = {k: run(target, proposer, k).rounds for k in (2, 4, 8)}
    down = {k: run(target, proposer, k).rounds for k in (8, 4, 2)}
    assert up == down
    assert all({r.drafted for r in rounds} == {k} for k, rounds in up.items())


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, None, 1.0)])
def test_answers_from_one_reading_are_those_of_readings_of_their_own(make_decoder, sampling):
    target, draft = make_decoder(3), make_decoder(3, noise=0.05)

    def answers(reading, proposer):
        for k in (0, 4, 2, 0, 3):
            generator = None if sampling.greedy else torch.Generator().manual_seed(7)
            own = proposer or ModelProposer(draft, target.vocab_size)
            yield run(target, own if k else None, k, sampling=sampling, generator=generator, reading=reading)

    proposer = ModelProposer(draft, target.vocab_size)
    reading = read(target, PROMPT, room_for(40, 4), proposer)
    alone = [(a.ids, a.rounds) for a in answers(None, None)]
    shared = list(answers(reading, proposer))
    assert [(a.ids, a.rounds) for a in shared] == alone and any(r.accepted for r in alone[1][1])
    assert all(a.ttft_s >= reading.seconds > 0 for a in shared)


def test_a_reading_of_another_prompt_or_without_room_is_not_used(make_decoder):
    target = make_decoder(3)
    for prompt, room in (([1, *PROMPT], 99), (PROMPT, room_for(40, 0) - 1)):
        with pytest.raises(AssertionError):
            run(target, reading=read(target, prompt, room, None))


def test_end_token_inside_the_drafted_tokens(make_decoder):
    target = make_decoder(3)
    plain = run(target).ids
    end = plain[3]
    first = plain.index(end)
    own = ModelProposer(make_decoder(3), 128)
    spec = run(target, own, 5, end_ids={end})
    assert spec.ids == plain[: first + 1] and spec.stop == "end"
    several = run(target, own, 5, end_ids={end, plain[1]})
    assert several.ids == plain[: min(first, plain.index(plain[1])) + 1]
    assert run(target, own, 8, max_new_tokens=4).ids == plain[:4]
    assert run(target, own, 5, end_ids={end}, ignore_end=True).ids == plain
    assert run(target, own, 5, end_ids={plain[0]}).ids == plain[:1]
    one = run(target, max_new_tokens=1)
    assert one.ids == plain[:1] and one.rounds == [] and one.stop == "length"


def test_accounting_of_a_cut_round_by_hand(make_decoder):
    target = make_decoder(3)
    plain = run(target, max_new_tokens=4).ids
    spec = run(target, ModelProposer(make_decoder(3), 128), 8, max_new_tokens=4)
    # prompt's token, then one round of 8 drafted of which 3 fit
    assert spec.ids == plain
    assert [(r.drafted, r.accepted) for r in spec.rounds] == [(8, 3)] and spec.cut == 1


@pytest.mark.parametrize("target_max,draft_max", [(24, 256), (256, 24), (20, 22)])
def test_near_the_context_limit(make_decoder, target_max, draft_max):
    target = make_decoder(3, max_position_embeddings=target_max)
    draft = make_decoder(3, noise=0.02, max_position_embeddings=draft_max)
    plain = run(target, max_new_tokens=60)
    spec = run(target, ModelProposer(draft, 128), 6, max_new_tokens=60)
    assert spec.ids == plain.ids and spec.stop == plain.stop
    # the last token needs no room of its own: it is never fed
    assert len(plain.ids) == min(60, target_max - len(PROMPT) + 1)
    with pytest.raises(ContextFull, match="leaves no room"):
        run(target, prompt=list(range(target_max)))
    with pytest.raises(ValueError, match="empty"):
        run(target, prompt=[])


@pytest.mark.parametrize("target_vocab,draft_vocab", [(136, 128), (128, 136)])
def test_padded_vocabularies(make_decoder, target_vocab, draft_vocab):
    target = make_decoder(3, vocab_size=target_vocab)
    if target_vocab == 136:  # drive the target to an id that the draft does not have
        head = target.module.lm_head
        head.bias = torch.nn.Parameter(torch.zeros(136))
        head.bias.data[130] = 2.0
    draft = make_decoder(4, vocab_size=draft_vocab)
    plain = run(target).ids
    if target_vocab == 136:
        assert 130 in plain
    assert run(target, ModelProposer(draft, target_vocab), 4).ids == plain
    sampled = run(
        target,
        ModelProposer(draft, target_vocab),
        4,
        sampling=Sampling(1.0, None, 1.0),
        generator=torch.Generator().manual_seed(0),
    )
    assert len(sampled.ids) == 40 and max(sampled.ids) < target_vocab


def test_ngram_lookup_by_hand():
    ngram = NgramProposer(3, 128, torch.device("cpu"))
    text = [1, 2, 3, 9, 8, 1, 2, 3, 7, 6, 1, 2, 3]
    assert ngram.lookup(text, 4) == [7, 6, 1, 2]  # the latest earlier occurrence wins
    assert ngram.lookup([4, 5, 4], 3) == [5, 4]
    assert ngram.lookup([1, 2, 3], 3) == [] and ngram.lookup([1], 3) == []


@pytest.mark.parametrize("k", [1, 3, 6])
def test_ngram_equals_plain(make_decoder, k):
    target = make_decoder(3)
    prompt = PROMPT * 3
    spec = run(target, NgramProposer(3, 128, target.device), k, prompt=prompt)
    assert spec.ids == run(target, prompt=prompt).ids
    assert sum(r.drafted for r in spec.rounds) > 0


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(1.0, None, 1.0), Sampling(0.7, 5, 0.9)], ids=["plain", "filtered"])
@pytest.mark.parametrize("k", [1, 4])
def test_sampling_end_to_end(make_decoder, k, sampling):
    """Second and third new tokens given the first: counts over many runs against the target's exact probabilities."""
    shape = {"vocab_size": 8, "num_hidden_layers": 1, "initializer_range": 0.5, "max_position_embeddings": 32}
    target, draft = make_decoder(5, **shape), make_decoder(5, noise=0.5, **shape)
    prompt, runs = [1, 2, 3], 500
    generator = torch.Generator().manual_seed(k)
    proposer = ModelProposer(draft, 8)
    counts = torch.zeros(8, 8)
    accepted = 0
    for _ in range(runs):
        out = run(target, proposer, k, max_new_tokens=3, prompt=prompt, sampling=sampling, generator=generator)
        accepted += sum(r.accepted for r in out.rounds)
        counts[out.ids[1], out.ids[2]] += 1
    assert accepted > 0
    exact = torch.zeros(8, 8)
    first_V = distribution(target.forward(torch.tensor(prompt), target.new_cache(32), last_only=True), sampling)[0]
    for a in range(8):
        cache = target.new_cache(32)
        second_V = distribution(target.forward(torch.tensor([*prompt, a]), cache, last_only=True), sampling)[0]
        for b in range(8):
            third_V = distribution(target.forward(torch.tensor([b]), cache, last_only=True), sampling)[0]
            exact[b] += first_V[a] * second_V[b] * third_V
            cache.rollback(4)
    assert counts[exact == 0].sum() == 0
    common = exact * runs >= 5
    observed = [*counts[common].tolist(), float(counts[~common].sum())]
    expected = [*(exact[common] * runs).tolist(), float(exact[~common].sum() * runs)]
    pairs = [(o, e) for o, e in zip(observed, expected, strict=True) if e > 0]
    assert chisquare([o for o, _ in pairs], [e for _, e in pairs], sum_check=False).pvalue > 1e-3
