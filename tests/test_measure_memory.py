"""The ledger adds up, and what cannot be known is null with a reason."""

import mmap

import pytest
import torch
from torch import nn

from pipeline.measure import memory
from pipeline.measure.memory import Ledger, PeakMeter, read_bytes_per_step, weight_bytes


def ledger(**changes):
    values = {
        "weight_bytes": 1000,
        "draft_weight_bytes": None,
        "cache_bytes_per_token": 10,
        "draft_cache_bytes_per_token": None,
        "cache_bytes": 200,
        "peak_memory_bytes": 1500,
        "peak_load_memory_bytes": 1800,
        "libraries_bytes": 100,
    }
    return Ledger(**(values | changes))


def test_tied_weights_count_once_and_packed_integers_as_they_lie():
    module = nn.Module()
    module.a = nn.Linear(8, 4, bias=False)  # 4 * 8 * 4 bytes
    module.b = nn.Linear(8, 4, bias=False)
    module.b.weight = module.a.weight
    module.register_buffer("codes", torch.zeros(6, 3, dtype=torch.int32))  # 72 bytes
    assert weight_bytes(module) == 128 + 72


def test_an_untied_embedding_is_read_by_the_row(make_decoder):
    tied = make_decoder(0, tie_word_embeddings=True)
    untied = make_decoder(0, tie_word_embeddings=False)
    table = 128 * 64 * 4
    assert weight_bytes(untied.module) - weight_bytes(tied.module) == table
    assert read_bytes_per_step(tied.module) == weight_bytes(tied.module)
    assert read_bytes_per_step(untied.module) == weight_bytes(untied.module) - table + 64 * 4


def test_a_scale_inside_an_embedding_has_no_rows():
    """As in Gemma, whose embedding multiplies by a number it keeps as a buffer."""
    module = nn.Module()
    module.embedding, module.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    module.embedding.register_buffer("embed_scale", torch.tensor(2.0))
    module.get_input_embeddings, module.get_output_embeddings = (lambda: module.embedding), (lambda: module.head)
    assert read_bytes_per_step(module) == 4 * (10 * 4 + 4 + 1)


def test_entries_sum_to_the_peak_and_the_longest_context_follows():
    closed = ledger().close([2000, 1310, 1200], max_positions=60, reasons={})
    assert closed.workspace_bytes == 300
    # (2000 - 1000 - 300) / 10 = 70, beyond the model's 60; (1310 - 1300) / 10 = 1; 1200 holds not even the weights
    assert closed.longest_context_tokens == {"2000": 60, "1310": 1, "1200": None}
    assert "exceed" in closed.null_reasons["longest_context_tokens.1200"]


def test_a_draft_takes_its_share():
    closed = ledger(draft_weight_bytes=100, draft_cache_bytes_per_token=5).close([2200], 1000, {})
    assert closed.workspace_bytes == 200 and closed.longest_context_tokens == {"2200": (2200 - 1300) // 15}


def test_no_peak_is_null_with_its_reason():
    closed = ledger(peak_memory_bytes=None).close([5000], 60, {"peak_memory_bytes": "not here"})
    assert closed.null_reasons["peak_memory_bytes"] == "not here"
    assert closed.workspace_bytes is None and "workspace_bytes" in closed.null_reasons
    assert closed.longest_context_tokens == {"5000": None}


def test_peak_on_a_cpu_starts_anew_at_reset():
    meter = PeakMeter("cpu")
    meter.reset()
    if meter.reason is not None:
        pytest.skip(meter.reason)
    before = meter.peak_bytes()
    with mmap.mmap(-1, 64 * 2**20) as block:  # goes back to the system, whatever malloc keeps
        block.write(b"1" * len(block))
        high = meter.peak_bytes()
    meter.reset()
    after = meter.peak_bytes()
    assert before > 0 and high - before > 60 * 2**20 and high - after > 60 * 2**20


def test_a_system_that_cannot_reset_gives_null_and_says_why(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "CLEAR_REFS", tmp_path / "absent" / "clear_refs")
    meter = PeakMeter("cpu")
    meter.reset()
    assert meter.peak_bytes() is None and "cannot be reset" in meter.reason


def test_too_little_memory_is_refused_in_one_line():
    with pytest.raises(ValueError, match=r"runtime\.min_free_memory_bytes"):
        memory.refuse_too_little(2**60)
