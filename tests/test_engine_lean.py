"""The lean decoder against transformers' own forward, its kernels against their torch form, and what it refuses."""

import copy

import pytest
import torch
from checkpoint_fixtures import saved, tiny

from pipeline.checkpoint.files import CheckpointError
from pipeline.checkpoint.load import load_decoder
from pipeline.engine import few_rows, native, step
from pipeline.engine.batch import generate_batch
from pipeline.engine.cache import ContextFull, StaticCache
from pipeline.engine.generate import generate, logits_along
from pipeline.engine.lean import LeanDecoder, LeanModel
from pipeline.engine.linear import FullLinear, joined
from pipeline.engine.propose import ModelProposer
from pipeline.engine.sample import GREEDY, Sampling
from pipeline.engine.skeleton import Skeleton

needs_kernels = pytest.mark.skipif(native.refusal() is not None, reason=f"no kernels here: {native.refusal()}")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "yarn-rope": ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "qwen2-biases": ("qwen2", {}),
    "qwen2-some-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3-norms": ("qwen3", {"head_dim": 32}),
}


def lean_of(decoder, dtype=torch.float32):
    """The lean decoder of a copy of its module."""
    module = copy.deepcopy(decoder.module).to(dtype)
    for name, layer in list(module.named_modules()):
        if isinstance(layer, torch.nn.Linear):
            bias = None if layer.bias is None else layer.bias.data
            module.set_submodule(name, FullLinear(torch.nn.Parameter(layer.weight.data, requires_grad=False), bias))
    return LeanDecoder(module, decoder.max_positions)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(make_decoder, family):
    kind, config = FAMILIES[family]
    theirs = make_decoder(3, kind, **config)
    with torch.no_grad():
        for name, parameter in theirs.module.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    ids_T = torch.randint(0, 128, (80,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = theirs.module(ids_T[None]).logits[0]
    ours = lean_of(theirs)
    cache = ours.new_cache(96)
    many, few = ids_T[:70], ids_T[70:76]  # many rows, few rows, single rows: each has its own kernels
    got = [ours.forward(many, cache), ours.forward(few, cache), *(ours.forward(i[None], cache) for i in ids_T[76:])]
    assert (torch.cat(got) - expected).abs().max() <= 1e-5 * expected.abs().max()
    cache.rollback(3)
    again = ours.forward(ids_T[3:20], cache)
    assert (again - expected[3:20]).abs().max() <= 1e-5 * expected.abs().max()


@needs_kernels
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("T", "D"), [(4, 48), (150, 32)])  # a part of a block of queries, and several of them
def test_the_attention_kernel_equals_its_torch_form(dtype, window, norms, T, D):
    B, H, G, S = 3, 6, 2, 36 + T
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(B * T, (H + 2 * G) * D, generator=generator)
    cache = [torch.randn(B, G, S, D, generator=generator).to(dtype) for _ in range(2)]
    weights = [torch.rand(D, generator=generator).to(dtype) for _ in range(2)] if norms else [None, None]
    angle = torch.rand(S, D // 2, generator=generator) * 6
    start = torch.tensor([0, 7, 36])
    results = []
    for op in (torch.ops.step, step.TORCH):
        keys, values = (t.clone() for t in cache)
        out = op.attention(qkv.clone(), *weights, 1e-5, angle.cos(), angle.sin(), start, keys, values, window)
        results.append((out, keys.float(), values.float()))
    for kernel, torchs in zip(*results, strict=True):
        # a key may be rounded to the neighbouring bfloat16
        torch.testing.assert_close(kernel, torchs, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


@needs_kernels
@pytest.mark.usefixtures("two_threads")
def test_the_other_kernels_equal_their_torch_form():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(70, 64, generator=generator) * 30 for _ in range(2))
    for weight in (torch.rand(64, generator=generator), torch.rand(64, generator=generator).bfloat16()):
        one, two = x.clone(), x.clone()
        torch.testing.assert_close(torch.ops.step.add_norm(one, y, weight, 1e-5), step.add_norm(two, y, weight, 1e-5))
        assert torch.equal(one, two)
    gate_up = torch.randn(5, 128, generator=generator) * 30
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -87.0])  # beyond what e^x holds
    torch.testing.assert_close(torch.ops.step.silu_mul(gate_up), step.silu_mul(gate_up), rtol=1e-6, atol=1e-30)
    assert torch.ops.step.silu_mul(torch.full((1, 32), float("nan"))).isnan().all()


def with_kernels(decoder, form) -> LeanModel:
    """A lean model of its module whose layers are bfloat16 or 4-bit codes in groups of 32."""
    module = copy.deepcopy(decoder.module).bfloat16()
    for name, layer in list(module.named_modules()):
        if isinstance(layer, torch.nn.Linear):
            weight, bias = torch.nn.Parameter(layer.weight.data, requires_grad=False), layer.bias
            bias = None if bias is None else bias.data
            if form == "int4" and name != "lm_head":
                codes = torch.randint(0, 16, weight.shape, dtype=torch.uint8)
                groups = weight.shape[0], weight.shape[1] // 32
                linear = few_rows.FewRowsInt4Linear(codes, torch.rand(groups) / 50, torch.full(groups, 7.0), bias)
            else:
                linear = few_rows.FewRowsLinear(weight, bias)
            module.set_submodule(name, linear)
    return LeanModel(module)


@needs_kernels
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("form", ["bfloat16", "int4"])
@pytest.mark.parametrize("family", ["llama-biases", "mistral-window", "qwen2-some-windows", "qwen3-norms"])
def test_all_layers_in_one_call_give_the_bits_of_layer_by_layer(make_decoder, family, form):
    kind, config = FAMILIES[family]
    torch.manual_seed(0)
    model = with_kernels(make_decoder(3, kind, **config), form)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "bias" in name or "norm" in name:
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
    assert model.fused is not None
    fused, results, tables = model.fused, [], torch.rand(2, 48, model.head_dim // 2)
    for model.fused in (fused, None):
        cache = StaticCache(2, (3, 2, 48, model.head_dim), torch.bfloat16, *tables)
        hidden, at = [], torch.tensor([0, 3, 9])
        for tokens in (5, 1, 10):
            ids_M = torch.arange(3 * tokens) % 128
            hidden.append(model.hidden(ids_M, at, cache, torch.float32))
            at = at + tokens
        results.append([*hidden, *cache.keys, *cache.values])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert results[0][0].std() > 0.1 and results[0][-1].abs().sum() > 0


@needs_kernels
def test_which_layers_run_in_one_call(make_decoder, monkeypatch):
    model = with_kernels(make_decoder(3), "bfloat16")
    fused = model.fused
    assert fused.below == few_rows.MANY_ROWS and lean_of(make_decoder(3)).module.fused is None  # float32: no kernel
    model.layers[1].down.dense_from_rows = 8
    del model.fused
    assert model.fused.below == 8
    called = []
    monkeypatch.setattr(
        model.layers[1], "products", [lambda x, p=p: called.append(1) or p(x) for p in model.layers[1].products]
    )
    cache = StaticCache(2, (1, 2, 48, 16), torch.bfloat16, torch.rand(48, 8), torch.rand(48, 8))
    model.hidden(torch.arange(7), torch.tensor([0]), cache, torch.float32)
    assert called == []
    model.hidden(torch.arange(8), torch.tensor([7]), cache, torch.float32)
    assert called == [1] * 4
    model.layers[0].o.input_order_K = torch.arange(64)  # act-order
    model.layers[0].o.settle()
    del model.fused
    assert model.fused is None
    moved = with_kernels(make_decoder(3), "bfloat16")
    assert moved.fused.weights[0].dtype == torch.bfloat16 and moved.float().fused.weights[0].dtype == torch.float32
    x, tables, lengths = torch.zeros(1, 64), torch.rand(2, 48, 8), torch.tensor([0])
    with pytest.raises(RuntimeError, match="lists of different lengths"):
        torch.ops.step.layers(
            x, fused.weights[1:], fused.outputs, [0, 0], 1e-5, *tables, lengths, cache.keys, cache.values
        )


@needs_kernels
@pytest.mark.usefixtures("two_threads")
def test_a_position_beyond_the_cache_is_refused_by_the_kernel():
    qkv, table, cache = torch.zeros(2, 3 * 16), torch.zeros(64, 8), torch.zeros(1, 1, 8, 16)
    with pytest.raises(RuntimeError, match="beyond the cache"):
        torch.ops.step.attention(qkv, None, None, 1e-5, table, table, torch.tensor([7]), cache, cache.clone(), 0)


@pytest.mark.parametrize("operations", [step.TORCH, pytest.param(torch.ops.step, marks=needs_kernels)])
@pytest.mark.parametrize(("tokens", "head_dim"), [(90, 16), (180, 64)])
def test_room_in_the_cache_changes_no_bit(tokens, head_dim, operations):
    """Plain and speculative decoding ask for caches of different size; a prompt's answer must not hang on it."""
    H, G, generator = 3, 1, torch.Generator().manual_seed(0)
    qkv = torch.randn(tokens, (H + 2 * G) * head_dim, generator=generator)
    angle = torch.randn(tokens + 64, head_dim // 2, generator=generator)

    def mixed(room: int) -> torch.Tensor:
        keys, values = (torch.zeros(1, G, tokens + room, head_dim, dtype=torch.bfloat16) for _ in range(2))
        start = torch.tensor([0])
        return operations.attention(qkv.clone(), None, None, 1e-5, angle.cos(), angle.sin(), start, keys, values, 0)

    due = mixed(0)
    assert all(torch.equal(mixed(room), due) for room in (1, 2, 7, 16, 49, 50, 57, 64))


@needs_kernels
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("window", [0, 40])
def test_a_token_attends_among_others_as_it_does_alone(window):
    H, G, D, tokens, generator = 6, 2, 32, 90, torch.Generator().manual_seed(0)
    qkv = torch.randn(tokens, (H + 2 * G) * D, generator=generator)
    angle = torch.randn(tokens, D // 2, generator=generator)

    def mixed(together: int) -> torch.Tensor:
        keys, values = (torch.zeros(1, G, tokens, D, dtype=torch.bfloat16) for _ in range(2))
        tables = angle.cos(), angle.sin()
        parts = [
            torch.ops.step.attention(
                rows.clone(), None, None, 1e-5, *tables, torch.tensor([i * together]), keys, values, window
            )
            for i, rows in enumerate(qkv.split(together))
        ]
        return torch.cat(parts)

    alone = mixed(1)
    assert all(torch.equal(mixed(together), alone) for together in (2, 3, 7, 33, 64, 90))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", range(1, 9))
def test_speculation_gives_the_plain_answer(tmp_path, k, dtype):
    model = tiny("Llama")
    saved(model, tmp_path / "target")
    for parameter in model.parameters():
        parameter.data += 0.3 * parameter.std() * torch.randn_like(parameter)
    saved(model, tmp_path / "draft")
    options = {"device": "cpu", "dtype": dtype, "pack_head": False, "trust_remote_code": False}
    target, draft = (load_decoder(tmp_path / name, **options) for name in ("target", "draft"))
    assert target.engine == "lean" and target.describe()["activations_dtype"] == "float32"
    ask = {"max_new_tokens": 40, "end_ids": frozenset(), "sampling": GREEDY, "generator": None, "ignore_end": True}
    plain = generate(target, [5, 17, 99], proposer=None, draft_len=0, **ask)
    for decoder in (draft, target):  # a draft that is often wrong and one that is always right
        done = generate(target, [5, 17, 99], proposer=ModelProposer(decoder, 128), draft_len=k, **ask)
        assert done.ids == plain.ids
        accepted, drafted = (sum(getattr(r, n) for r in done.rounds) for n in ("accepted", "drafted"))
        assert accepted < drafted if decoder is draft else all(r.accepted == r.drafted for r in done.rounds[:-1])


def test_rows_of_different_length_do_not_touch_each_other(make_decoder):
    ours = lean_of(make_decoder(3))
    prompts = [[5, 17, 99, 3], [8, 9], [1, 2, 3, 4, 5, 6, 7]]
    cache = ours.new_cache(24, batch=3)
    for b, prompt in enumerate(prompts):
        row = cache.rows(b, b + 1)
        ours.forward(torch.tensor(prompt), row)
        cache.lengths[b] = row.length
    fed = torch.tensor([[11, 12, 13], [21, 22, 23], [31, 32, 33]])
    together = ours.forward_rows(fed, cache)
    assert cache.lengths == [7, 5, 10]
    for b, prompt in enumerate(prompts):
        alone = ours.new_cache(24)
        ours.forward(torch.tensor(prompt), alone)
        torch.testing.assert_close(together[b], ours.forward(fed[b], alone), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("intermediate", [96, 100])  # 100: no kernel between the products takes such rows
def test_a_batch_in_the_kernels_for_few_rows(tmp_path, intermediate):
    saved(tiny("Llama", intermediate_size=intermediate), tmp_path)
    options = {"device": "cpu", "dtype": torch.bfloat16, "pack_head": False, "trust_remote_code": False}
    ours = load_decoder(tmp_path, dense_from={"FewRowsLinear": None}, **options)
    fed = torch.tensor([[11, 12, 13], [21, 22, 23]])
    together = ours.forward_rows(fed, ours.new_cache(8, batch=2), last_only=True)
    for b in range(2):
        alone = ours.forward(fed[b], ours.new_cache(8), last_only=True)
        assert torch.equal(together[b], alone)


@needs_kernels
def test_a_prompt_in_bfloat16_products_leaves_decoding_exact(tmp_path, monkeypatch):
    monkeypatch.setattr(few_rows, "bfloat16_from_rows", lambda: 32)
    folders = [tmp_path / name for name in ("target", "draft")]
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        saved(tiny("Llama"), folder)
    options = {"device": "cpu", "dtype": torch.bfloat16, "pack_head": False, "trust_remote_code": False}
    target, draft = (load_decoder(folder, dense_from={"FewRowsLinear": None}, **options) for folder in folders)
    prompt = [i * 37 % 120 for i in range(40)]
    ids_T = torch.tensor(prompt)
    all_TV = target.forward(ids_T, target.new_cache(40))
    alone, row = target.new_cache(40), target.new_cache(40, batch=2)
    read_1V = target.prefill(ids_T, alone)
    assert not torch.equal(read_1V, all_TV[-1:]), "nothing was rounded"
    torch.testing.assert_close(read_1V, all_TV[-1:], rtol=0.05, atol=0.05 * float(all_TV.abs().max()))
    target.read_prompt(prompt, row, 1)
    assert all(torch.equal(a[0], b[1]) for a, b in zip(alone.keys, row.keys, strict=True))
    step_cache = target.new_cache(40)
    each_TV = torch.cat([target.forward(i, step_cache) for i in ids_T[:, None]])
    assert torch.equal(each_TV, all_TV), "what verifies tokens is not rounded, however many"
    ask = {"max_new_tokens": 30, "end_ids": frozenset(), "sampling": GREEDY, "generator": None, "ignore_end": True}
    plain = generate(target, prompt, proposer=None, draft_len=0, **ask).ids
    assert torch.equal(logits_along(target, prompt, plain[:-1]).argmax(-1), torch.tensor(plain))
    for k in (1, 4, 36):  # 36: a verification has as many rows as a prompt
        proposer = ModelProposer(draft, target.vocab_size)
        assert generate(target, prompt, proposer=proposer, draft_len=k, **ask).ids == plain


def test_joined_layers_are_the_layers_side_by_side():
    parts = [FullLinear(torch.nn.Parameter(torch.randn(n, 16), requires_grad=False), None) for n in (8, 24)]
    parts[1].bias = torch.randn(24)
    whole, x = joined(parts), torch.randn(3, 16)
    assert whole.out_features == 32
    torch.testing.assert_close(whole.rows(x), torch.cat([p.rows(x) for p in parts], 1))
    assert parts[0].out_features == 8 and parts[0].bias is None, "the parts stay as they were"
    parts[1].input_order_K = torch.arange(16).flip(0)
    assert joined(parts) is None, "act-order: each part permutes its input"


def test_other_families_run_in_transformers_and_say_so(tmp_path):
    options = {"device": "cpu", "dtype": torch.float32, "pack_head": False, "trust_remote_code": False}
    saved(tiny("GPT2"), tmp_path)
    about = load_decoder(tmp_path, **options).describe()
    assert about["engine"] == "hf" and "GPT2LMHeadModel is not one of" in about["engine_reason"]
    with pytest.raises(ValueError, match="use engine hf"):
        LeanDecoder(load_decoder(tmp_path, **options).module, 64)


def test_rotations_that_depend_on_the_text_are_left_to_transformers(make_decoder):
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="type dynamic changes with the length"):
        LeanDecoder(make_decoder(0, rope_parameters=dynamic).module, 256)


def test_a_full_cache_is_an_error_that_changes_nothing(make_decoder):
    ours = lean_of(make_decoder(3))
    cache = ours.new_cache(4)
    ours.forward(torch.tensor([1, 2, 3]), cache)
    with pytest.raises(ContextFull, match=r"3 \+ 2 tokens do not fit"):
        ours.forward(torch.tensor([1, 2]), cache)
    assert cache.length == 3
    with pytest.raises(ContextFull, match="context of 256"):
        ours.new_cache(257)


def test_a_draft_that_can_say_few_ids_changes_no_answer(tmp_path):
    saved(tiny("Llama"), tmp_path)
    options = {"device": "cpu", "dtype": torch.float32, "pack_head": False, "trust_remote_code": False}
    target = load_decoder(tmp_path, **options)
    ask = {"max_new_tokens": 30, "end_ids": frozenset(), "generator": None, "ignore_end": True}
    plain = generate(target, [5, 17, 99], proposer=None, draft_len=0, sampling=GREEDY, **ask)
    said = sorted(set(plain.ids))
    assert len(said) > 4
    draft = load_decoder(tmp_path, vocab_ids=said[2:], **options)
    full, few = (d.forward(torch.tensor([5, 17]), d.new_cache(2)) for d in (target, draft))
    torch.testing.assert_close(few, full[:, said[2:]])  # torch sums a shorter product in another order
    proposer = ModelProposer(draft, 128)
    done = generate(target, [5, 17, 99], proposer=proposer, draft_len=3, sampling=GREEDY, **ask)
    assert done.ids == plain.ids and 0 < sum(r.accepted for r in done.rounds) < sum(r.drafted for r in done.rounds)
    proposer.start([5, 17, 99], 20)
    proposal = proposer.propose([5, 17, 99, 3], 4, Sampling(1.0, None, 1.0), torch.Generator().manual_seed(0))
    assert proposal.probs_KV.shape == (4, 128) and set(proposal.ids_K.tolist()) <= set(said[2:])
    torch.testing.assert_close(proposal.probs_KV.sum(1), torch.ones(4))
    with pytest.raises(CheckpointError, match=r"draft_vocab\.json: its ids do not fit"):
        load_decoder(tmp_path, vocab_ids=[128], **options)


@pytest.mark.parametrize("k", [0, 1, 3, 6])
def test_a_batch_gives_each_sequence_its_own_answer(make_decoder, k):
    target = lean_of(make_decoder(3))
    draft = lean_of(make_decoder(3, noise=0.05))
    prompts = [[5, 17, 99, 3], [8], [1, 2, 3, 4, 5, 6, 7]]
    done = generate_batch(target, prompts, max_new_tokens=30, draft=draft if k else None, draft_len=k)
    ask = {"end_ids": frozenset(), "sampling": GREEDY, "generator": None, "ignore_end": True}
    alone = [generate(target, p, max_new_tokens=30, proposer=None, draft_len=0, **ask).ids for p in prompts]
    assert done.ids == alone
    if k == 0:
        assert (done.rounds, done.drafted, done.accepted) == (29, 0, 0)
        return
    spec = [
        generate(target, p, max_new_tokens=30, proposer=ModelProposer(draft, 128), draft_len=k, **ask) for p in prompts
    ]
    assert done.rounds == max(len(s.rounds) for s in spec) < 29
    assert done.accepted == sum(r.accepted for s in spec for r in s.rounds)
    assert done.drafted == sum(r.drafted for s in spec for r in s.rounds)


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_step_on_a_gpu_asks_the_host_for_nothing(make_decoder, tokens):
    """With tensors that have a device and no values: whatever would wait for one raises."""
    skeleton = Skeleton(make_decoder(0).config, torch.bfloat16)  # on the meta device
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
