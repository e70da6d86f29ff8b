"""Compiled steps: their graphs on a CPU against the steps that they are made from, when they are not taken, the trace
that a GPU would be given, and the caches that they are bound to.

Legend: B sequences, T tokens of each, M = B T rows.
"""

import re

import measure_fixtures
import pytest
import torch
from test_engine_lean import lean_of

from pipeline.config import Sampling as SamplingConfig
from pipeline.engine import compiled, linear4, native, step
from pipeline.engine.cache import CachePool, StaticCache
from pipeline.engine.compiled import graphs_compiled
from pipeline.engine.generate import generate
from pipeline.engine.lean import LeanDecoder
from pipeline.engine.linear import FullLinear
from pipeline.engine.linear4 import Int4Linear
from pipeline.engine.propose import ModelProposer
from pipeline.engine.sample import GREEDY
from pipeline.engine.skeleton import Skeleton
from pipeline.measure.arm import ATTEMPTS, Arm
from pipeline.measure.setup import Ask, DraftSpec, arm_spec

inductor = pytest.mark.skipif(native.refusal() is not None, reason=f"nothing compiles here: {native.refusal()}")
PROMPT = [5, 17, 99, 3]


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The operations of other devices than a CPU: static shapes, no kernels."""
    torch._dynamo.reset()
    monkeypatch.setattr(step, "operations", lambda *_: step.STATIC)


def with_compiled_steps(decoder) -> LeanDecoder:
    decoder.compile_steps()
    return decoder


# What is compiled computes what it was made from


@inductor
@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_gpu")
def test_logits_of_compiled_steps_equal_transformers(make_decoder):
    theirs = make_decoder(3, "qwen3", head_dim=32)
    ids_T = torch.randint(0, 128, (80,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = theirs.module(ids_T[None]).logits[0]
    ours = with_compiled_steps(lean_of(theirs))
    before = graphs_compiled()
    for _ in range(2):  # the second time around everything is there
        at, made = 0, ours.made
        cache = ours.new_cache(96)
        for tokens in (40, 1, 2, 5, 1, 3, 2, 1):  # 40 are more than a compiled step is asked for
            got = ours.forward(ids_T[at : at + tokens], cache)
            assert (got - expected[at : at + tokens]).abs().max() <= 1e-5 * expected.abs().max()
            at += tokens
        cache.rollback(50)
        again = ours.forward(ids_T[50:55], cache, last_only=True)
        assert (again - expected[54]).abs().max() <= 1e-5 * expected.abs().max()
        del cache
    assert ours.made == made, "something was compiled for a position or a cache that had been there"
    assert ours.steps.reason is None and ours.steps.worst <= 1e-5
    # one token; any other number; the last of any other number
    assert graphs_compiled() - before == 3
    assert ours.describe()["steps"].startswith("torch.compile (tokens: 1, 2, 3, 5; logits within ")


@inductor
@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_gpu")
def test_speculation_with_compiled_steps_gives_the_plain_answer(make_decoder):
    target, draft = lean_of(make_decoder(3)), lean_of(make_decoder(3, noise=0.05))
    ask = {"max_new_tokens": 30, "end_ids": frozenset(), "sampling": GREEDY, "generator": None, "ignore_end": True}
    plain = generate(target, PROMPT, proposer=None, draft_len=0, **ask)
    target, draft = with_compiled_steps(target), with_compiled_steps(draft)
    for k in (1, 2, 3, 4):
        done = generate(target, PROMPT, proposer=ModelProposer(draft, 128), draft_len=k, **ask)
        assert done.ids == plain.ids
        assert 0 < sum(r.accepted for r in done.rounds) < sum(r.drafted for r in done.rounds)
    assert target.steps.reason is None and draft.steps.reason is None
    assert {tokens for tokens, _, _ in target.steps.uses} >= {2, 3, 4, 5}


@inductor
@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_gpu")
def test_an_answer_is_timed_when_nothing_is_compiled_in_it_any_more(tmp_path, monkeypatch):
    folder = measure_fixtures.checkpoint(tmp_path / "base", seed=1)
    draft = DraftSpec("model", str(folder), None, pack_head=False)
    arm = Arm(arm_spec(folder, draft, measure_fixtures.runtime(), ends=[], trust_remote_code=False))
    with_compiled_steps(arm.target), with_compiled_steps(arm.draft)
    runs, inner = [], arm._generate

    def counted(*args):
        before = arm._made()
        done = inner(*args)
        runs.append(arm._made() - before)
        return done

    monkeypatch.setattr(arm, "_generate", counted)
    ask = Ask(3, 12, True, SamplingConfig(temperature=0.0, top_k=None, top_p=1.0))
    first = arm.generate(PROMPT, ask)
    assert runs[0] > 0 and runs[-1] == 0 and len(runs) < ATTEMPTS
    runs.clear()
    assert arm.generate(PROMPT, ask).ids == first.ids and runs == [0]
    # a step that is compiled anew each time is no step to time
    monkeypatch.setattr(arm, "_made", iter(range(1000)).__next__)
    monkeypatch.setattr(arm, "_generate", inner)
    with pytest.raises(RuntimeError, match="still compiled in attempt 8"):
        arm.generate(PROMPT, ask)


# When it is not taken


@pytest.mark.usefixtures("as_on_a_gpu")
def test_torch_says_that_nothing_is_to_be_compiled(make_decoder):
    expected, ids_T = lean_of(make_decoder(3)), torch.tensor(PROMPT)
    with torch._dynamo.config.patch(disable=True):  # as TORCH_COMPILE_DISABLE=1 sets it
        ours = with_compiled_steps(lean_of(make_decoder(3)))
    got, plain = (d.forward(ids_T, d.new_cache(8)) for d in (ours, expected))
    torch.testing.assert_close(got, plain)  # masked positions of a larger cache: sums in another order
    assert ours.describe()["steps"] == "kernel by kernel: TORCH_COMPILE_DISABLE is set"


def test_what_compiling_needs_is_missing(monkeypatch):
    monkeypatch.setattr(native, "refusal", lambda: "no C++ compiler")
    assert compiled.refusal(torch.device("cpu")) == "no C++ compiler"
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    assert compiled.refusal(torch.device("cuda")) == "no Triton for this GPU"


@inductor
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("graph break", r"kernel by kernel: compiling failed \(Unsupported: .+\)"),
        ("wrong", r"kernel by kernel: the compiled step's logits for 4 tokens are \S+ of the largest off"),
        ("nan", r"kernel by kernel: the compiled step's logits for 4 tokens are nan of the largest off"),
    ],
)
@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_compiled_step_that_fails_or_is_wrong_is_not_taken(make_decoder, monkeypatch, fault, reason):
    ours = lean_of(make_decoder(3))
    right = ours._step

    def wrong(*args):
        if fault == "graph break":
            torch._dynamo.graph_break()
        logits = right(*args)
        if torch.compiler.is_compiling():
            logits = logits * {"wrong": 1.001, "nan": float("nan")}.get(fault, 1.0)
        return logits

    eager = torch.compile  # the same trace, run by torch's own kernels: the fault is in the trace
    monkeypatch.setattr(torch, "compile", lambda fn, **_: eager(fn, backend="eager", fullgraph=True))
    ours._step = wrong
    ours.compile_steps()
    expected = lean_of(make_decoder(3))
    ids_T = torch.tensor(PROMPT)
    cache, theirs = ours.new_cache(16), expected.new_cache(16)
    for _ in range(2):
        torch.testing.assert_close(ours.forward(ids_T, cache), expected.forward(ids_T, theirs))
    assert cache.length == 8
    assert re.fullmatch(reason, ours.describe()["steps"])
    made = ours.made
    ours.forward(ids_T, cache)
    assert ours.made == made


# What a GPU would be given: traced for a device whose tensors have no values


def meta_model(make_decoder, weights: str) -> Skeleton:
    skeleton = Skeleton(make_decoder(0).config, torch.bfloat16)  # on the meta device
    for name, layer in list(skeleton.named_modules()):
        if isinstance(layer, torch.nn.Linear):
            full = weights == "bfloat16" or name == "lm_head"
            skeleton.set_submodule(name, FullLinear(layer.weight, None) if full else int4(*layer.weight.shape))
    return skeleton


def int4(N: int, K: int) -> Int4Linear:
    """A layer in the layout of torch's CUDA kernel."""
    groups, codes_NK = torch.ones(N, K // 32), torch.zeros(N, K, dtype=torch.uint8)
    linear = Int4Linear(codes_NK, groups, groups, 32, None, torch.bfloat16, "cpu").to("meta")
    linear.packed = linear4._packed_int4(codes_NK, "meta")
    return linear


@pytest.mark.parametrize("weights", ["bfloat16", "int4"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_the_step_of_another_device_is_one_graph_over_fixed_addresses(make_decoder, monkeypatch, weights, tokens):
    """A CUDA graph replays without Python: nothing may ask for a value, and only token ids and positions are copied."""
    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "refusal", lambda _device: None)
    ours = LeanDecoder(meta_model(make_decoder, weights), 256)
    assert ours.steps is not None and ours.steps.takes(tokens, ours.new_cache(64))
    graphs = []

    def spy(graph, _inputs):
        graphs.append(graph)
        return lambda *_: [torch.empty(0) for _ in graph.graph.output_node().args[0]]  # traced, not run

    ids_BT, cache = torch.empty(1, tokens, dtype=torch.long, device="meta"), ours.new_cache(64)
    with torch.inference_mode():
        torch.compile(ours.steps.step, backend=spy, fullgraph=True)(ids_BT, ours._room(ids_BT, cache), cache, False)
    (graph,) = graphs
    logits = graph.graph.output_node().args[0][0].meta["example_value"]
    assert (logits.shape, logits.device.type, logits.dtype) == ((1, tokens, 128), "meta", torch.bfloat16)
    products = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert any("int4pack_mm" in name for name in products) == (weights == "int4")
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    copied = [n.name for n in inputs if "_dynamo_static_input_type" not in n.meta.get("tensor_dict", {})]
    assert len(copied) == 2 and len(inputs) > 20, copied


# The caches that steps are bound to


def small(positions: int) -> StaticCache:
    return StaticCache(2, (1, 2, positions, 16), torch.float32, torch.zeros(positions, 8), torch.zeros(positions, 8))


def test_buffers_of_a_pool_are_used_again_when_nobody_holds_them():
    pool = CachePool(small, 600)
    one, two = pool.lease(10), pool.lease(256)
    assert (one.capacity, one.positions, two.positions, pool.lease(257).positions, pool.lease(600).positions) == (
        10,
        256,
        256,
        512,
        600,
    )
    first, second = one.keys[0].data_ptr(), two.keys[0].data_ptr()
    assert first != second
    one.lengths = [7]
    row = one.rows(0, 1)
    del one
    assert pool.lease(20).keys[0].data_ptr() not in (first, second), "a view still holds it"
    del row
    again = pool.lease(30)
    assert again.keys[0].data_ptr() == first and (again.capacity, again.length) == (30, 0)


def test_a_leased_cache_counts_the_positions_asked_for():
    # 2 layers, keys and values, 2 heads of 16, 4 bytes
    assert CachePool(small, 600).lease(10).nbytes == 10 * 2 * 2 * 2 * 16 * 4
