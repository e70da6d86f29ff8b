"""A GGUF file is written here with gguf's own writer, from a random Llama, and must come back as that Llama."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data_fixtures import RUNTIME, SHAPE, model_section
from safetensors.torch import load_file, save_file

from pipeline.checkpoint import from_gguf, random_llama
from pipeline.checkpoint.from_gguf import ConversionError
from pipeline.provenance import file_sha256, tree_sha256
from pipeline.sources import SourceError
from pipeline.stages import fetch_target

RENAMED = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k as GGUF orders them: the two halves of each head's rotation, pair by pair."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, tensors, tokenizer, **changed):
    import gguf

    backend = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(backend["vocab"], key=backend["vocab"].get)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(SHAPE.num_hidden_layers)
    writer.add_context_length(SHAPE.max_position_embeddings)
    writer.add_embedding_length(SHAPE.hidden_size)
    writer.add_feed_forward_length(SHAPE.intermediate_size)
    writer.add_head_count(SHAPE.num_attention_heads)
    writer.add_head_count_kv(SHAPE.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(20000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(SHAPE.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changed.get("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges([" ".join(m) for m in backend["merges"]])
    for special in ("bos", "eos", "pad"):
        getattr(writer, f"add_{special}_token_id")({"bos": 0, "eos": 1, "pad": 1}[special])
    writer.add_add_bos_token(changed.get("add_bos", False))
    writer.add_chat_template(random_llama.CHAT_TEMPLATE)
    for name, tensor in tensors.items():
        array = tensor.float().numpy()
        for rows, heads in (("q_proj", SHAPE.num_attention_heads), ("k_proj", SHAPE.num_key_value_heads)):
            array = interleaved(array, heads) if rows in name else array
        for ours, theirs in RENAMED.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    random_llama.make(SHAPE, folder, dtype=torch.float32, seed=3)
    tokenizer = random_llama.make_tokenizer(SHAPE.vocab_size, SHAPE.max_position_embeddings)
    return SimpleNamespace(tensors=load_file(folder / "model.safetensors"), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def converted(tmp_path_factory, original):
    folder = tmp_path_factory.mktemp("gguf")
    path = write_gguf(folder / "tiny.gguf", original.tensors, original.tokenizer)
    (folder / "out").mkdir()
    conversions = from_gguf.convert(path, folder / "out", torch.bfloat16)
    return SimpleNamespace(path=path, folder=folder / "out", conversions=conversions)


def test_weights_come_back_in_the_original_row_order_with_one_head(original, converted):
    found = load_file(converted.folder / "model.safetensors")
    assert set(found) == set(original.tensors)
    for name, tensor in original.tensors.items():
        assert torch.equal(found[name], tensor.to(torch.bfloat16)), name
    config = json.loads((converted.folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is True and "quantization_config" not in config
    assert config["rope_parameters"]["rope_theta"] == 20000.0
    assert any("bfloat16" in c for c in converted.conversions)


def test_tokenizer_splits_digits_and_runs_of_spaces_adds_no_bos_and_ends_turns(converted):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted.folder)
    pieces = [p for p, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("x =   10")]
    assert pieces == ["x", "Ġ=", "ĠĠĠ", "1", "0"]
    assert tokenizer("a").input_ids[0] != tokenizer.bos_token_id == 0
    assert (tokenizer.eos_token, tokenizer.pad_token) == (random_llama.TURN_END, random_llama.TURN_END)
    generation = json.loads((converted.folder / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["bos_token_id"]) == (1, 0)
    assert tokenizer.decode(tokenizer("a , b .  c").input_ids) == "a , b .  c"


def test_a_bos_flag_in_the_file_is_kept(tmp_path, original):
    from transformers import AutoTokenizer

    path = write_gguf(tmp_path / "t.gguf", original.tensors, original.tokenizer, add_bos=True)
    metadata = from_gguf.read_metadata(path)
    from_gguf.build_tokenizer(metadata).save_pretrained(tmp_path / "out")
    from_gguf.check_tokenizer(metadata, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a").input_ids.count(0) == 1


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("tokenizer.ggml.tokens", lambda v: [*v[:5], v[6], v[5], *v[7:]], "token 5"),
        ("tokenizer.ggml.merges", lambda v: v[::-1], "merges"),
        ("tokenizer.ggml.add_bos_token", lambda v: True, "BOS added"),
        ("tokenizer.ggml.pre", lambda v: "gpt-2", "digits kept together"),
        ("tokenizer.ggml.eos_token_id", lambda v: 0, "tokenizer eos_token_id"),
    ],
)
def test_a_tokenizer_unlike_the_file_is_an_error(converted, name, change, said):
    metadata = from_gguf.read_metadata(converted.path)
    with pytest.raises(ConversionError, match=said):
        from_gguf.check_tokenizer(metadata | {name: change(metadata[name])}, converted.folder)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("llama.block_count", 3, "num_hidden_layers"),
        ("llama.attention.head_count_kv", 4, "num_key_value_heads"),
        ("llama.rope.freq_base", 10000.0, "rope_theta"),
        ("tokenizer.ggml.eos_token_id", 0, "config eos_token_id"),
    ],
)
def test_a_config_unlike_the_file_is_an_error(converted, name, value, said):
    metadata = from_gguf.read_metadata(converted.path)
    from_gguf.check_config(metadata, converted.folder)
    with pytest.raises(ConversionError, match=said):
        from_gguf.check_config(metadata | {name: value}, converted.folder)


def test_weights_unlike_the_file_are_an_error(tmp_path, converted):
    (tmp_path / "config.json").write_bytes((converted.folder / "config.json").read_bytes())
    tensors = load_file(converted.folder / "model.safetensors")
    with pytest.raises(ConversionError, match="dtype of model"):
        from_gguf.check_weights(converted.path, converted.folder, torch.float16)
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ConversionError, match="tensors"):
        from_gguf.check_weights(converted.path, tmp_path, torch.bfloat16)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConversionError, match=r"values of model\.layers\.1\.mlp\.down_proj"):
        from_gguf.check_weights(converted.path, tmp_path, torch.bfloat16)


def test_files_that_cannot_be_converted_are_refused_by_name(tmp_path, original):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"not a model at all" * 10)
    with pytest.raises(ConversionError, match=r"bad\.gguf: not a GGUF file"):
        from_gguf.read_metadata(bad)
    unknown = write_gguf(tmp_path / "u.gguf", original.tensors, original.tokenizer, pre="mystery")
    with pytest.raises(ConversionError, match=r"tokenizer\.ggml\.pre is 'mystery', but only gpt-2, smollm"):
        from_gguf.read_metadata(unknown)


def test_a_random_target_is_the_same_twice_whatever_the_global_generator_and_lists_its_files(tmp_path):
    metrics = fetch_target.run(model_section(), RUNTIME, out=tmp_path / "one")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert fetch_target.run(model_section(), RUNTIME, out=tmp_path / "two") == metrics
    assert torch.equal(torch.get_rng_state(), before)
    assert tree_sha256(tmp_path / "one") == tree_sha256(tmp_path / "two")
    other = RUNTIME.__class__(**{**vars(RUNTIME), "seed": 8})
    fetch_target.run(model_section(), other, out=tmp_path / "other")
    weights = "model.safetensors"
    assert file_sha256(tmp_path / "other" / weights) != file_sha256(tmp_path / "one" / weights)
    source = json.loads((tmp_path / "one/source.json").read_text())
    assert source["files"][weights] == file_sha256(tmp_path / "one" / weights)
    assert set(source["files"]) == {p.name for p in (tmp_path / "one").iterdir()} - {"source.json"}
    assert (source["license"], source["note"]) == ("Apache-2.0", "n")
    by_hand = 320 * 64 + 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64)
    assert metrics["parameters"] == by_hand and metrics["weight_bytes"] > 4 * by_hand


def test_a_local_folder_keeps_its_files_and_is_refused_when_unfit(tmp_path):
    fetch_target.run(model_section(), RUNTIME, out=tmp_path / "from")
    (tmp_path / "from/pytorch_model.bin").write_bytes(b"pickle")
    local = model_section(source="path", path=str(tmp_path / "from"), random=None)
    fetch_target.run(local, RUNTIME, out=tmp_path / "to")
    assert {p.name for p in (tmp_path / "to").iterdir()} == {p.name for p in (tmp_path / "from").iterdir()} - {
        "pytorch_model.bin"
    }
    config_path = tmp_path / "from/config.json"
    config = json.loads(config_path.read_text())
    for extra, said in (
        ({"quantization_config": {"bits": 4}}, "is quantized already"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "trust_remote_code: false, but m brings its own code"),
    ):
        config_path.write_text(json.dumps(config | extra))
        with pytest.raises(SourceError, match=said):
            fetch_target.run(local, RUNTIME, out=tmp_path / "refused")
    (tmp_path / "from/tokenizer.json").unlink()
    config_path.write_text(json.dumps(config))
    with pytest.raises(SourceError, match=r"has no tokenizer\.json"):
        fetch_target.run(local, RUNTIME, out=tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
