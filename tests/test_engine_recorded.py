"""Recorded steps (CUDA graphs), as far as a CPU can tell: the memory they are bound to, and nothing they may not do."""

import gc

import pytest
import torch

from pipeline.checkpoint.load import load_decoder
from pipeline.engine.batch import generate_batch
from pipeline.engine.cache import StaticCache
from pipeline.engine.generate import generate
from pipeline.engine.lean import LeanDecoder, LeanModel
from pipeline.engine.linear import FullLinear
from pipeline.engine.propose import ModelProposer
from pipeline.engine.recorded import CAPACITY_STEP, MAX_ROWS, MAX_TOKENS
from pipeline.engine.sample import GREEDY, Sampling
from pipeline.engine.skeleton import Skeleton

PROMPT = [5, 17, 99, 3, 42] * 4


def replaying(run):
    """As a CUDA graph does: replays what was recorded, with its result in the same memory each time."""
    out = run()

    def replay():
        out.copy_(run())
        return out

    return replay


@pytest.fixture
def loaded(make_decoder, tmp_path):
    """loaded(seed, count, **config): the same model, loaded `count` times."""

    def load(seed, count=1, **config):
        folder = tmp_path / f"{seed}-{len(list(tmp_path.iterdir()))}"
        make_decoder(seed, **config).module.save_pretrained(folder)
        options = {"device": "cpu", "dtype": torch.float32, "pack_head": False, "trust_remote_code": False}
        decoders = [load_decoder(folder, dense_from={}, **options) for _ in range(count)]
        assert all(isinstance(d, LeanDecoder) for d in decoders)
        return decoders

    return load


@pytest.fixture
def pair(loaded):
    """The same model computed directly and by recordings."""

    def make(seed=0, **config):
        decoders = loaded(seed, 2, **config)
        decoders[1].record_steps(replaying)
        return decoders

    return make


def answer(target, proposer=None, draft_len=0, prompt=PROMPT, sampling=GREEDY):
    generator = None if sampling.greedy else torch.Generator().manual_seed(3)
    return generate(
        target, prompt, max_new_tokens=40, end_ids=frozenset(), proposer=proposer, draft_len=draft_len,
        sampling=sampling, generator=generator, ignore_end=True,
    ).ids  # fmt: skip


@pytest.mark.parametrize("batch", [1, 3])
def test_recorded_logits_are_the_computed_ones_after_rollbacks_and_in_used_caches(pair, batch):
    direct, recorded = pair()
    for _ in range(2):  # the second time in a cache that held the first
        caches = [d.new_cache(60, batch) for d in (direct, recorded)]
        for tokens, length in ((4, 0), (1, 4), (3, 5), (1, 3), (4, 4), (2, 1)):
            ids_BT = torch.randint(0, 128, (batch, tokens))
            for cache in caches:
                cache.rollback_rows([length] * batch)
            kept = [d.forward_rows(ids_BT, cache) for d, cache in zip((direct, recorded), caches, strict=True)]
            again = recorded.forward_rows(ids_BT[:, :1] * 0, caches[1])  # another step must not change these logits
            assert again.shape == (batch, 1, 128)
            torch.testing.assert_close(kept[1], kept[0], rtol=0, atol=1e-5)
        del caches, cache
    assert len(recorded.recorded.steps) == 4 and len(recorded.pool.free) == 1


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, top_k=20, top_p=0.9)])
def test_answers_are_the_same_and_later_ones_record_nothing(pair, sampling):
    direct, recorded = pair(1)
    draft = pair(1, noise=0.05)[1]
    expected = answer(direct, sampling=sampling)
    assert answer(recorded, sampling=sampling) == expected
    proposer = ModelProposer(draft, 128)
    counts = []
    for prompt in (PROMPT, PROMPT[:18], PROMPT * 3):
        spoken = answer(recorded, proposer, 3, prompt, sampling)
        if sampling.greedy:
            assert spoken == answer(direct, prompt=prompt)
        counts.append(len(recorded.recorded.steps) + len(draft.recorded.steps))
    assert counts[0] == counts[1] == counts[2], "a recording was made during a later answer"


def test_batches_are_decoded_by_recordings(pair):
    direct, recorded = pair(2)
    draft_direct, draft = pair(2, noise=0.05)
    prompts = [PROMPT, PROMPT[:2], PROMPT * 2]
    for k in (0, 2):
        own = {"max_new_tokens": 12, "draft_len": k}
        expected = generate_batch(direct, prompts, draft=draft_direct if k else None, **own)
        assert generate_batch(recorded, prompts, draft=draft if k else None, **own).ids == expected.ids
    assert recorded.recorded.steps and draft.recorded.steps


@pytest.mark.parametrize(("batch", "tokens"), [(1, MAX_TOKENS + 1), (MAX_ROWS + 1, 1)])
def test_prompts_and_large_batches_are_computed(pair, batch, tokens):
    _, recorded = pair()
    cache = recorded.new_cache(200, batch)
    recorded.forward_rows(torch.ones(batch, tokens, dtype=torch.long), cache)
    assert not recorded.recorded.steps and cache.lengths == [tokens] * batch


def broken(run):
    def replay():
        return run() + 1.0

    return replay


def impossible(run):
    raise RuntimeError("operation not permitted\nwhen stream is capturing")


@pytest.mark.parametrize(("record", "why"), [(broken, "logits 1 away"), (impossible, "not permitted when stream")])
def test_a_recording_that_fails_is_refused_and_steps_are_computed(loaded, record, why):
    direct, recorded = loaded(4, 2)
    recorded.record_steps(record)
    assert recorded.describe()["compiled"]
    assert answer(recorded) == answer(direct)
    assert why in recorded.recorded.refusal and not recorded.recorded.steps
    assert not recorded.describe()["compiled"] and why in recorded.describe()["compile_refusal"]


def test_a_cache_that_is_held_is_not_given_out_again(pair):
    _, recorded = pair()
    first = recorded.new_cache(10)
    view = first.rows(0, 1)
    memory = first.keys[0].data_ptr()
    assert recorded.new_cache(10).keys[0].data_ptr() != memory
    del first
    gc.collect()
    assert recorded.new_cache(10).keys[0].data_ptr() != memory, "its rows are still in use"
    view.keys[0].fill_(float("nan"))
    del view
    again = [recorded.new_cache(10) for _ in range(2)]
    assert memory in {cache.keys[0].data_ptr() for cache in again}
    assert all(bool((t == 0).all()) for cache in again for t in (*cache.keys, *cache.values))
    assert again[0].capacity == CAPACITY_STEP and again[0].lengths == [0]
    assert recorded.cache_bytes_per_token() == 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, float32


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_step_on_a_gpu_asks_the_host_for_nothing(loaded, tokens):
    """With tensors that have a device and no values: whatever would wait for one (and end a recording) raises."""
    (decoder,) = loaded(0)
    skeleton = Skeleton(decoder.config, torch.bfloat16)  # on the meta device
    for name, layer in list(skeleton.named_modules()):
        if isinstance(layer, torch.nn.Linear):
            skeleton.set_submodule(name, FullLinear(layer.weight, None))
    model = LeanModel(skeleton)
    with torch.device("meta"):
        cache = StaticCache(2, (2, 2, 64, 16), torch.bfloat16, torch.empty(64, 8), torch.empty(64, 8))
        ids_M, start_B = torch.empty(2 * tokens, dtype=torch.long), torch.empty(2, dtype=torch.long)
    logits = model.head.rows(model.hidden(ids_M, start_B, cache, torch.bfloat16))
    assert (logits.shape, logits.device.type, logits.dtype) == ((2 * tokens, 128), "meta", torch.bfloat16)
    with pytest.raises(RuntimeError, match="meta"):
        int(logits.argmax())  # what such a tensor does where a value is asked for
