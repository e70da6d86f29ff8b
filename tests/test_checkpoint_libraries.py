"""Folders written by auto-gptq and autoawq themselves, against the libraries' own dequantizers."""

import subprocess
from pathlib import Path

import pytest
import torch
import transformers
from checkpoint_fixtures import saved, tiny
from safetensors.torch import load_file

from pipeline.checkpoint.awq import AwqReader
from pipeline.checkpoint.files import TensorFiles
from pipeline.checkpoint.load import load_decoder
from pipeline.checkpoint.packed import dequantize
from pipeline.checkpoint.read import read

pytestmark = [pytest.mark.quantizers, pytest.mark.slow]

HERE = Path(__file__).parent
PYTHON = HERE.parent / "envs" / "quantizers" / ".venv" / "bin" / "python"
GPTQ = ["asym", "sym", "asym_act", "sym_act", "row", "2bit", "3bit", "8bit"]
FOLDERS = ["awq", *(f"gptq_{name}" for name in GPTQ)]


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    if not PYTHON.exists():
        pytest.skip("envs/quantizers is not installed")
    model, out = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("folders")
    saved(tiny("Llama"), model)
    script = HERE / "checkpoint_library_folders.py"
    ran = subprocess.run([PYTHON, script, model, out], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return out


@pytest.mark.parametrize("name", FOLDERS)
def test_dequantize_equals_the_librarys_own(folders, name):
    expected = load_file(folders / name / "expected" / "weights.safetensors")
    checkpoint = read(folders / name)
    assert checkpoint.format == name.partition("_")[0]
    assert set(checkpoint.linears) == set(expected) and len(expected) == 14
    for layer, weight in expected.items():
        ours = dequantize(checkpoint.linears[layer])
        assert torch.equal(ours.to(weight.dtype), weight), layer  # the product is exact in float32, rounded once


@pytest.mark.parametrize("name", ["gptq_asym_act", "gptq_sym_act"])
def test_act_order_is_in_the_file(folders, name):
    assert any(linear.group_index_K is not None for linear in read(folders / name).linears.values())


def test_all_16_zero_points_as_autoawq_packs_them(folders):
    out = folders / "awq_zero_points"
    expected = load_file(out / "expected" / "weights.safetensors")
    linear = AwqReader({"bits": 4, "group_size": 32}, TensorFiles(out)).read("x")
    assert torch.equal(linear.zeros_NG.t().long(), expected["zeros_GN"])
    assert torch.equal(dequantize(linear).to(expected["x"].dtype), expected["x"])


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_equal_transformers_on_the_dequantized_weights(folders, name):
    checkpoint = read(folders / name)
    decoder = load_decoder(
        folders / name, device="cpu", dtype=torch.float32, pack_head=False, trust_remote_code=False, dense_from={}
    )
    config = transformers.AutoConfig.from_pretrained(folders / name)
    del config.quantization_config
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    weights = {f"{n}.weight": dequantize(linear) for n, linear in checkpoint.linears.items()}
    result = plain.load_state_dict({**dict(checkpoint.tensors), **weights}, strict=False)
    assert not result.missing_keys
    ids = torch.tensor([1, 5, 99, 17, 64, 3])
    with torch.inference_mode():
        due = plain(input_ids=ids[None]).logits[0]
        got = decoder.forward(ids, decoder.new_cache(8))
    assert (got - due).abs().max() <= 1e-5 * due.abs().max()
