"""Tiny models shared by the tests: hidden 64, 2 layers, 4 heads, float32, CPU, made from a seed."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

os.environ.setdefault("KERNELS_DIR", str(Path(__file__).parents[1] / "artifacts/kernels"))  # compiled once

import pytest
import yaml
from hypothesis import settings

# The same examples in every run; `--hypothesis-profile default` looks for new ones.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")

WHOLE_GRAPH = ("test_pipeline.py", "test_faults.py")  # files whose tests share the fixture `smoke`
QUANTIZERS = Path(__file__).parents[1] / "envs/quantizers/.venv/bin/python"


CASES = yaml.safe_load((Path(__file__).parent / "cases.yaml").read_text())


@pytest.hookimpl(tryfirst=True)  # before -k is applied
def pytest_collection_modifyitems(items):
    """Tests that this machine cannot run are skipped with the reason; those of a case answer to its name."""
    for item in items:
        name = f"{item.path.name}::{getattr(item, 'originalname', item.name)}"
        for case in (case["name"] for case in CASES if name in case["tests"]):
            item.add_marker(pytest.mark.case(case))
        item.extra_keyword_matches |= {f"case_{mark.args[0]}" for mark in item.iter_markers("case")}
    import torch

    absent = {
        "gpu": None if torch.cuda.is_available() else "no CUDA device",
        "quantizers": None if QUANTIZERS.exists() else "no envs/quantizers; `make setup-quantizers` builds it",
    }
    items.sort(key=lambda item: item.path.name not in (*WHOLE_GRAPH, "test_torture.py"))  # what takes longest first
    for item in items:
        assert "smoke" not in item.fixturenames or item.path.name in WHOLE_GRAPH, "the graph would run twice"
        for marker, reason in absent.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file stays in one process, and so do those that share the smoke graph."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = nodeid.partition("::")[0]
            return "smoke" if Path(path).name in WHOLE_GRAPH else path

    return ByFile(config, log)


@pytest.fixture
def two_threads():
    """Kernels divide their work between threads, of which `make test` gives one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smoke(tmp_path_factory):
    """(folder, what `dvc repro` printed): the whole graph of the smoke experiment, in a folder of its own."""
    from smoke_graph import ROOT, run

    from pipeline import scratch

    folder = tmp_path_factory.mktemp("smoke")
    scratch.make(ROOT, folder, ["experiment=smoke"])
    done = run(folder, "dvc", "repro")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder, done.stdout


@pytest.fixture(scope="session")
def make_decoder():
    """make_decoder(seed, family, noise=0, **config): a Decoder over a random model; noise perturbs its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from pipeline.engine.decoder import Decoder

    def make(seed: int = 0, family: str = "llama", noise: float = 0.0, **config):
        shape = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 128,
            "max_position_embeddings": 256,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            "initializer_range": 0.2,
        } | config
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape), dtype=torch.float32)
        if noise:
            with torch.no_grad():
                for p in module.parameters():
                    p.add_(noise * p.std() * torch.randn_like(p))
        return Decoder(module, shape["max_position_embeddings"])

    return make
