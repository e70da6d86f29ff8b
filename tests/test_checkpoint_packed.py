"""Bit streams, group indices and the reference dequantization. R rows, C codes, N and K channels, G groups."""

import pytest
import torch
from checkpoint_fixtures import AWQ_COLUMNS, pack_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.checkpoint.awq import pack_awq, unpack_awq
from pipeline.checkpoint.files import CheckpointError
from pipeline.checkpoint.packed import PackedLinear, checked_group_index, dequantize, pack_words, unpack_words


@st.composite
def streams(draw):
    bits = draw(st.integers(1, 8))
    rows = draw(st.integers(1, 3))
    count = draw(st.integers(1, 70))
    row = st.lists(st.integers(0, 2**bits - 1), min_size=count, max_size=count)
    return bits, [draw(row) for _ in range(rows)]


@settings(max_examples=60, deadline=None)
@given(streams())
def test_pack_and_unpack_are_the_bits_of_one_big_integer(stream):
    bits, codes = stream
    codes_RC = torch.tensor(codes, dtype=torch.uint8)
    words_RW = pack_words(codes_RC, bits)
    assert words_RW.tolist() == [pack_bits(row, bits) for row in codes]
    assert torch.equal(unpack_words(words_RW, bits, codes_RC.shape[1]), codes_RC)


@settings(max_examples=30, deadline=None)
@given(streams())
def test_packing_equals_compressed_tensors(stream):
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    bits, codes = stream
    signed_RC = (torch.tensor(codes) - 2 ** (bits - 1)).to(torch.int8)
    assert torch.equal(pack_words(torch.tensor(codes, dtype=torch.uint8), bits), pack_to_int32(signed_RC, bits))


def test_awq_order_is_autoawqs_column_loop():
    codes_RN = torch.randint(0, 16, (3, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    words = pack_awq(codes_RN)
    for r in range(3):
        for word in range(3):
            for nibble, column in enumerate(AWQ_COLUMNS):
                stored = (int(words[r, word]) >> (4 * nibble)) & 15
                assert stored == codes_RN[r, 8 * word + column]
    assert torch.equal(unpack_awq(words), codes_RN)


@pytest.mark.parametrize("group_index", [None, [1, 0, 2, 0, 1]])
def test_dequantize_by_a_float64_loop(group_index):
    codes = torch.tensor([[0, 15, 7, 3, 8], [1, 2, 3, 4, 5]], dtype=torch.uint8)
    zeros = torch.tensor([[0, 15, 8], [1, 7, 3]], dtype=torch.uint8)
    scales = torch.tensor([[0.5, 0.25, 2.0], [1.0, 3.0, 0.125]], dtype=torch.float16)
    index = torch.tensor(group_index) if group_index else None
    got = dequantize(PackedLinear(codes, scales, zeros, index, bits=4, group_size=2, bias_N=None))
    assert got.dtype == torch.float32
    for n in range(2):
        for k in range(5):
            g = group_index[k] if group_index else k // 2
            assert got[n, k].item() == (int(codes[n, k]) - int(zeros[n, g])) * float(scales[n, g])


def test_plain_group_index_is_none_and_act_order_is_kept():
    assert checked_group_index("x", None, 5, 3, 2) is None
    assert checked_group_index("x", torch.tensor([0, 0, 1, 1, 2]), 5, 3, 2) is None
    shuffled = checked_group_index("x", torch.tensor([1, 0, 2, 0, 1], dtype=torch.int32), 5, 3, 2)
    assert shuffled is not None and shuffled.tolist() == [1, 0, 2, 0, 1]


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ([-1, -1, -1, -1], "never set"),
        ([0, -1, 1, 1], r"\[1\] = -1, outside 0..1"),
        ([0, 0, 1, 2], r"\[3\] = 2, outside 0..1"),
        ([0, 1, 1, 1], "group 0 has 1 columns where 2 are due"),
        ([0, 0, 1], r"shape \[3\], but \[4\]"),
    ],
)
def test_corrupt_group_index_is_refused(index, says):
    with pytest.raises(CheckpointError, match=says):
        checked_group_index("layer.g_idx", torch.tensor(index), 4, 2, 2)
