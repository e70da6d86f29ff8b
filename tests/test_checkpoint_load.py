"""load_decoder: logits of every format and family equal transformers'; what does not fit together is named."""

import ctypes
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from checkpoint_fixtures import edit_config, quantized, rewrite, saved, tiny
from safetensors.torch import load_file

from pipeline.checkpoint.files import CheckpointError, TensorFiles
from pipeline.checkpoint.load import dense_from_of, load_decoder
from pipeline.checkpoint.whole import check_whole
from pipeline.engine import native
from pipeline.engine.linear import ROW_CANDIDATES
from pipeline.engine.skeleton import SAID, plain_config
from pipeline.measure.memory import read_bytes_per_step, weight_bytes

NEVER: dict[str, int | None] = {}
IDS = torch.tensor([[1, 5, 99, 17, 64, 3, 3, 127, 40]])


def load(folder, dtype=torch.float32, pack_head=False, dense_from=NEVER, engine="hf"):
    options = {"device": "cpu", "dtype": dtype, "pack_head": pack_head, "trust_remote_code": False}
    return load_decoder(folder, dense_from=dense_from, engine=engine, **options)


@torch.inference_mode()
def logits_of(module):
    return module(input_ids=IDS).logits[0]


def check_logits(folder, expected, relative=1e-5, dense_from=NEVER):
    """By both engines; returns the decoder over transformers' modules."""
    for engine in ("lean", "hf"):
        decoder = load(folder, dense_from=dense_from, engine=engine)
        got = decoder.forward(IDS[0], decoder.new_cache(16))
        assert (got - expected).abs().max() <= relative * expected.abs().max()
    return decoder


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Mistral", "Qwen3", "GPT2"])
def test_full_precision_equals_from_pretrained(tmp_path, kind, tie):
    saved(tiny(kind, tie), tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    decoder = check_logits(tmp_path, logits_of(theirs))
    biases = {n for n, _ in theirs.named_parameters() if n.endswith("bias")}
    assert {n for n, t in decoder.module.state_dict().items() if n.endswith("bias")} == biases
    head = decoder.module.get_output_embeddings().weight
    assert (head is decoder.module.get_input_embeddings().weight) == (tie or kind == "GPT2")


@pytest.mark.parametrize("dense_from", [NEVER, {"Int4Linear": 1, "FullLinear": 1}])
@pytest.mark.parametrize(
    ("method", "act_order"),
    [("gptq", False), ("gptq", True), ("gptq_v2", False), ("awq", False), ("compressed-tensors", True)],
)
def test_quantized_equals_the_dequantized_weights(tmp_path, method, act_order, dense_from):
    model = tiny("Qwen2")
    quantized(model, tmp_path, method, act_order=act_order)
    decoder = check_logits(tmp_path, logits_of(model), dense_from=dense_from)
    assert sum(n for k, n in decoder.describe()["kernels"].items() if k.startswith("Int4Linear")) == 14


@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (3, 32), (8, 32), (4, 16)])
def test_widths_and_groups_without_a_kernel_say_so(tmp_path, bits, group_size):
    model = tiny("Qwen2")
    quantized(model, tmp_path, "gptq", bits=bits, group_size=group_size)
    kernels = check_logits(tmp_path, logits_of(model)).describe()["kernels"]
    fallen = {k: n for k, n in kernels.items() if k.startswith("DequantLinear")}
    assert sum(fallen.values()) == 14 and all(f"{bits}-bit: no kernel for" in k for k in fallen)


@pytest.mark.parametrize("group_size", [64, -1])
def test_a_short_last_group_runs_in_the_int4_kernel(tmp_path, group_size):
    model = tiny("Llama")
    quantized(model, tmp_path, "gptq", group_size=group_size)
    assert check_logits(tmp_path, logits_of(model)).describe()["kernels"]["Int4Linear"] == 14


@pytest.mark.slow  # two interpreters that import transformers
def test_act_order_gives_equal_logits_after_two_reloads_in_fresh_processes(tmp_path):
    quantized(tiny("Llama"), tmp_path, "gptq", act_order=True)
    code = (
        "import sys, hashlib, torch; from pathlib import Path; from pipeline.checkpoint.load import load_decoder\n"
        "d = load_decoder(Path(sys.argv[1]), device='cpu', dtype=torch.float32, pack_head=False, "
        "trust_remote_code=False, dense_from={})\n"
        "ids = torch.tensor([1, 5, 99, 17])\n"
        "print(hashlib.sha256(d.forward(ids, d.new_cache(8)).numpy().tobytes()).hexdigest())"
    )
    repository = Path(__file__).parent.parent
    runs = [
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=repository)
        for _ in range(2)
    ]
    assert runs[0].returncode == 0, runs[0].stderr
    assert runs[0].stdout == runs[1].stdout and len(runs[0].stdout.strip()) == 64


@pytest.mark.parametrize("style", ["rope_parameters", "rope_theta"])
def test_rope_settings_of_both_config_styles_are_honoured(tmp_path, style):
    model = tiny("Llama", rope_parameters={"rope_type": "default", "rope_theta": 50.0})
    saved(model, tmp_path)
    if style == "rope_theta":
        edit_config(tmp_path, lambda c: c.update(rope_theta=c.pop("rope_parameters")["rope_theta"]))
    check_logits(tmp_path, logits_of(model))
    edit_config(tmp_path, lambda c: (c.pop("rope_parameters", None), c.update(rope_theta=10000.0)))
    with pytest.raises(AssertionError):
        check_logits(tmp_path, logits_of(model))


def test_scaled_rope_is_honoured(tmp_path):
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    model = tiny("Llama", rope_parameters=rope)
    check_logits(saved(model, tmp_path), logits_of(model))


def test_biases_are_present_exactly_where_the_original_has_them(tmp_path):
    model = tiny("Qwen2")
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            torch.nn.init.constant_(projection.bias, 5.0)
    quantized(model, tmp_path, "gptq")
    decoder = check_logits(tmp_path, logits_of(model))
    attention = decoder.module.model.layers[0].self_attn
    assert attention.q_proj.bias.tolist() == [5.0] * 64 and attention.o_proj.bias is None


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Mistral"])
def test_keys_that_are_not_of_the_family_decide_nothing(tmp_path, kind):
    model = tiny(kind)
    saved(model, tmp_path)
    strange = {"mlp_bias": True} if kind == "Qwen3" else {"mlp_bias": True, "attention_bias": True}
    edit_config(tmp_path, lambda c: c.update(strange))
    check_logits(tmp_path, logits_of(model))


def test_bias_where_the_model_has_none_and_the_reverse(tmp_path):
    quantized(tiny("Llama"), tmp_path, "gptq")
    name = "model.layers.0.self_attn.q_proj.bias"
    rewrite(tmp_path, lambda t: t.update({name: torch.zeros(64)}))
    load(tmp_path)  # auto-gptq stores zeros for a layer without bias
    rewrite(tmp_path, lambda t: t.update({name: torch.ones(64)}))
    with pytest.raises(CheckpointError, match=f"{name}: in the file, but the model has none"):
        load(tmp_path)
    other = tmp_path / "qwen"
    quantized(tiny("Qwen2"), other, "gptq")
    rewrite(other, lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=f"{name}: missing, but the model has one"):
        load(other)


def test_quantized_gpt2_is_refused_by_name_of_the_layer(tmp_path):
    saved(tiny("GPT2"), tmp_path)
    name = "transformer.h.0.mlp.c_fc"
    rewrite(
        tmp_path,
        lambda t: (
            (
                t.pop(f"{name}.weight"),
                t.update(
                    {
                        f"{name}.qweight": torch.zeros(8, 256, dtype=torch.int32),
                        f"{name}.qzeros": torch.full((2, 32), 0x77777777, dtype=torch.int32),
                        f"{name}.scales": torch.ones(2, 256),
                    }
                ),
            )
        ),
    )
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    edit_config(tmp_path, lambda c: c.update(quantization_config=settings))
    with pytest.raises(CheckpointError, match=f"{name}: quantized, but a Conv1D"):
        load(tmp_path)


def test_names_without_the_base_models_prefix(tmp_path):
    model = tiny("GPT2")
    saved(model, tmp_path)

    def strip(tensors):
        renamed = {n.removeprefix("transformer."): t for n, t in tensors.items()}
        tensors.clear()
        tensors.update(renamed)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)  # the causal mask that old exports carry

    rewrite(tmp_path, strip)
    check_logits(tmp_path, logits_of(model))


def test_tied_flag_must_match_the_file(tmp_path):
    model = tiny("Llama", tie=True)
    saved(model, tmp_path)
    embedding = model.get_input_embeddings().weight.data
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": embedding.clone()}))  # auto-gptq stores it twice
    check_logits(tmp_path, logits_of(model))
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is true, but lm_head\.weight differs"):
        load(tmp_path)
    rewrite(tmp_path, lambda t: t.pop("lm_head.weight"))
    edit_config(tmp_path, lambda c: c.update(tie_word_embeddings=False))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: not in the file; is the head tied"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight: not in the file"),
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"layers\.1\.mlp\.up_proj\.weight: not in the file"),
        (lambda t: t.update({"model.ghost.weight": torch.ones(2)}), r"model\.ghost\.weight: in the file, but"),
        (lambda t: t.update({"model.norm.weight": torch.ones(63)}), r"model\.norm\.weight: shape \[63\].*\[64\]"),
        (lambda t: t.update({"lm_head.weight": torch.ones(127, 64)}), r"lm_head\.weight: shape \[127, 64\]"),
    ],
)
def test_missing_left_over_and_misshapen_tensors_are_named(tmp_path, change, says):
    saved(tiny("Llama"), tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError, match=says):
        load(tmp_path)


def test_unknown_architecture_and_remote_code_are_refused(tmp_path):
    saved(tiny("Llama"), tmp_path)
    edit_config(tmp_path, lambda c: c.update(model_type="ghost"))
    with pytest.raises(CheckpointError, match=r"config\.json: no model can be made of it"):
        load(tmp_path)


def test_dtype_and_dense_rows_are_read_back(tmp_path):
    saved(tiny("Llama"), tmp_path)
    decoder = load(tmp_path, dtype=torch.bfloat16, dense_from={"FullLinear": 4})
    assert {p.dtype for p in decoder.module.parameters()} == {torch.bfloat16}
    assert decoder.describe()["kernels"] == {"FullLinear (dense from 4 rows)": 15}
    assert dense_from_of(decoder) == {"FullLinear": 4}
    measured = dense_from_of(load(tmp_path, dtype=torch.bfloat16, dense_from=None))
    (name,) = measured  # whichever of the two is faster here
    assert name in ("FullLinear", "FewRowsLinear") and measured[name] in (None, *ROW_CANDIDATES)


@pytest.mark.parametrize("kind", ["Int8Linear", "FewRowsInt8Linear"])
@pytest.mark.parametrize("engine", ["hf", "lean"])
@pytest.mark.parametrize("tie", [False, True])
def test_packed_head_takes_a_tied_embedding_along(tmp_path, tie, engine, kind):
    """The reference: transformers with the rounded table in the place of its own."""
    if kind == "FewRowsInt8Linear" and native.refusal() is not None:
        pytest.skip(f"no kernels here: {native.refusal()}")
    model = tiny("Llama", tie=tie)
    saved(model, tmp_path)
    full = load(tmp_path, engine=engine)
    decoder = load(tmp_path, pack_head=True, engine=engine, dense_from={kind: None})
    assert decoder.describe()["kernels"][kind] == 1
    rounded_VD = model.get_output_embeddings().weight.detach()
    step_V1 = (rounded_VD.abs().amax(1, keepdim=True) / 127).clamp(min=1e-30)  # the padding token: zeros
    rounded_VD = (rounded_VD / step_V1).round() * step_V1
    ids = torch.arange(len(rounded_VD))
    table_VD = rounded_VD if tie else model.get_input_embeddings().weight
    torch.testing.assert_close(decoder.module.get_input_embeddings()(ids), table_VD, rtol=1e-6, atol=0)
    saving = rounded_VD.numel() * 3 - 4 * len(rounded_VD)  # float32 to bytes and a scale
    assert weight_bytes(full.module) - weight_bytes(decoder.module) == saving
    assert read_bytes_per_step(full.module) - read_bytes_per_step(decoder.module) == saving
    model.get_output_embeddings().weight.data.copy_(rounded_VD)  # the embedding too, where tied
    got_TV = decoder.forward(IDS[0], decoder.new_cache(IDS.shape[1]))
    torch.testing.assert_close(got_TV, logits_of(model), rtol=1e-3, atol=1e-3)
    if engine == "hf":
        decoder.module.tie_weights()  # as lm-eval does: there is nothing to tie any more
        assert torch.equal(decoder.forward(IDS[0], decoder.new_cache(IDS.shape[1])), got_TV)


def test_a_head_cut_down_is_packed_and_the_whole_embedding_by_itself(tmp_path):
    saved(tiny("Llama", tie=True), tmp_path)
    whole = load(tmp_path, pack_head=True, engine="lean")
    options = {"device": "cpu", "dtype": torch.float32, "pack_head": True, "trust_remote_code": False}
    cut = load_decoder(tmp_path, dense_from=NEVER, vocab_ids=[3, 40, 99], **options)
    logits_TV, logits_TU = (d.forward(IDS[0], d.new_cache(IDS.shape[1])) for d in (whole, cut))
    torch.testing.assert_close(logits_TU, logits_TV[:, [3, 40, 99]], rtol=1e-5, atol=1e-6)
    table = weight_bytes(whole.module.get_input_embeddings())
    assert weight_bytes(cut.module) == weight_bytes(whole.module) + weight_bytes(cut.module.head)
    assert read_bytes_per_step(cut.module) == weight_bytes(cut.module) - table + 64 + 4


def test_an_embedding_that_is_not_tied_is_packed_beside_a_head_cut_down_only(tmp_path):
    model = tiny("Llama", tie=False)
    saved(model, tmp_path)
    options = {"device": "cpu", "dtype": torch.float32, "pack_head": True, "trust_remote_code": False}
    whole, cut = (load_decoder(tmp_path, dense_from=NEVER, vocab_ids=v, **options) for v in (None, [3, 40, 99]))
    assert type(whole.module.get_input_embeddings()) is torch.nn.Embedding
    table_VD, rounded = model.get_input_embeddings().weight.detach(), cut.module.get_input_embeddings()
    step_V1 = table_VD.abs().amax(1, keepdim=True) / 127
    got_VD = rounded(torch.arange(len(table_VD)))
    assert ((got_VD - table_VD).abs() <= step_V1 * 0.501).all() and not torch.equal(got_VD, table_VD)


def test_a_packed_head_is_rounded_by_half_a_step_at_most(tmp_path):
    model = tiny("Llama", tie=False)
    saved(model, tmp_path)
    decoder = load(tmp_path, pack_head=True)
    with torch.inference_mode():
        hidden_TD = model.model(input_ids=IDS).last_hidden_state[0]
    step_V = model.lm_head.weight.detach().abs().amax(1) / 127
    bound_TV = hidden_TD.abs().sum(1, keepdim=True) * step_V / 2  # rounding is at most half a step a weight
    assert ((logits_of(decoder.module) - logits_of(model)).abs() <= bound_TV * 1.001 + 1e-5).all()


def test_checkpoint_files_are_not_needed_after_loading(tmp_path):
    model = tiny("Llama")
    decoder = load(saved(model, tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"\0" * (tmp_path / "model.safetensors").stat().st_size)
    assert torch.allclose(logits_of(decoder.module), logits_of(model), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_large_tensors_are_made_of_memory_that_was_used_before(tmp_path):
    """glibc by itself maps each of more than 32 MiB anew: a fault a page."""
    saved(tiny("Llama"), tmp_path)
    load(tmp_path)
    faults = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.full((2**24,), 1.0)  # 64 MiB, 16384 pages
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert faults[2] < 1000, faults


def test_position_limit_comes_from_the_config(tmp_path):
    saved(tiny("Llama"), tmp_path)
    assert load(tmp_path).max_positions == json.loads((tmp_path / "config.json").read_text())["max_position_embeddings"]


@pytest.mark.parametrize("method", [None, "gptq_v2", "awq"])
def test_each_tensor_is_read_once(tmp_path, monkeypatch, method):
    if method is None:
        saved(tiny("Qwen2", tie=True), tmp_path)
    else:
        quantized(tiny("Qwen2"), tmp_path, method, sym=method == "gptq_v2")
    seen: list[str] = []
    read_one = TensorFiles.__getitem__
    monkeypatch.setattr(TensorFiles, "__getitem__", lambda self, name: seen.append(name) or read_one(self, name))
    load(tmp_path)
    looked_at = [n for n in seen if n.endswith("qzeros") and method == "gptq_v2"]  # once more, to tell v1 from v2
    assert len(seen) - len(looked_at) // 2 == len(set(seen)) == len(TensorFiles(tmp_path))


def test_a_config_that_says_everything_is_read_as_transformers_reads_it(tmp_path):
    saved(tiny("Llama"), tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    ours = plain_config(values)
    assert ours is not None and all(getattr(ours, name) == getattr(theirs, name) for name in SAID)
    for name in SAID:  # whatever is left to imply, or of another type, is transformers' to read
        assert plain_config({k: v for k, v in values.items() if k != name}) is None
        assert plain_config({**values, name: str(values[name]).encode()}) is None
    odd = {"model_type": "mistral", "auto_map": {"AutoModel": "x.Y"}, "hidden_size": 63, "num_hidden_layers": 0}
    odd |= {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    assert all(plain_config({**values, name: value}) is None for name, value in odd.items())


@pytest.mark.slow  # an interpreter of its own
def test_decoding_starts_without_importing_transformers(tmp_path):
    quantized(tiny("Llama"), tmp_path, "gptq")
    code = (
        "import sys, torch; from pathlib import Path; from pipeline.checkpoint.load import load_decoder\n"
        "d = load_decoder(Path(sys.argv[1]), device='cpu', dtype=torch.float32, pack_head=False, "
        "trust_remote_code=False)\n"
        "d.forward(torch.tensor([1, 5]), d.new_cache(8))\n"
        "sys.exit(str(sorted({'transformers', 'scipy', 'sympy'} & {*sys.modules})).strip('[]') or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral", "GPT2"])
def test_a_folder_is_known_to_be_whole_before_anything_loads_it(tmp_path, kind):
    """Of an architecture that is not ours the values alone are checked, and no module is built."""
    folder = saved(tiny(kind), tmp_path)
    check_whole(folder)
    name = next(n for n in load_file(folder / "model.safetensors") if n.endswith("bias") or "norm" in n)
    rewrite(folder, lambda t: t.update({name: t[name][:-1].clone()}))
    if kind == "GPT2":
        check_whole(folder)
    else:
        with pytest.raises(CheckpointError, match=rf"model\.safetensors: {name}: shape .* config\.json implies"):
            check_whole(folder)
    saved(tiny(kind), tmp_path)
    rewrite(folder, lambda t: t[name][0].fill_(float("inf")))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {name} holds 1 NaN or infinite"):
        check_whole(folder)
