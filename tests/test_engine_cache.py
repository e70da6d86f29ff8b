"""The cache against transformers' own forward without any cache."""

import pytest
import torch

from pipeline.engine.cache import ContextFull

FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_with_rollback_equal_one_forward(make_decoder, family):
    decoder = make_decoder(1, family, **FAMILIES[family])
    ids_T = torch.randint(0, 128, (40,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole_TV = decoder.module(input_ids=ids_T[None], use_cache=False).logits[0]
    cache = decoder.new_cache(48)
    parts = [decoder.forward(ids_T[:17], cache)]
    decoder.forward(torch.full((5,), 3), cache)  # wrong tokens, forgotten again
    cache.rollback(17)
    parts += [decoder.forward(ids_T[17:18], cache), decoder.forward(ids_T[18:23], cache)]
    cache.rollback(20)
    parts = [torch.cat(parts)[:20]]
    parts += [decoder.forward(ids_T[20:40], cache)]
    assert cache.length == 40
    torch.testing.assert_close(torch.cat(parts), whole_TV, rtol=1e-4, atol=1e-4)


def test_last_only_is_the_last_row(make_decoder):
    decoder = make_decoder(2)
    ids_T = torch.arange(9)
    all_TV = decoder.forward(ids_T, decoder.new_cache(9))
    torch.testing.assert_close(decoder.forward(ids_T, decoder.new_cache(9), last_only=True), all_TV[-1:])


def test_overflow_is_refused_and_leaves_the_cache_as_it_was(make_decoder):
    decoder = make_decoder(2)
    cache = decoder.new_cache(4)
    decoder.forward(torch.arange(3), cache)
    with pytest.raises(ContextFull, match=r"3 \+ 2 tokens do not fit in a cache of 4"):
        decoder.forward(torch.arange(2), cache)
    assert cache.length == 3
    with pytest.raises(ContextFull, match="context of 256"):
        decoder.new_cache(257)


def test_bytes_per_token_by_hand(make_decoder):
    # 2 layers x (key + value) x 2 heads x 16 x 4 bytes
    assert make_decoder(0).cache_bytes_per_token() == 2 * 2 * 2 * 16 * 4
