"""A made-up Llama and its byte-level tokenizer: the whole pipeline runs on it in tests, without any download."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pipeline.config import RandomLlama

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# What the few merges beyond single bytes are learnt from.
MERGE_TEXT = (
    "the cat and the hen went to the river, and then the other hens went there with the keeper of the lamp; "
    "nobody on the shore had seen another lamp shine so far over the water, or had heard the sea sing to the rocks. "
    "def return_all(words): return [word for word in words if len(word) > 1] # returns the longer words in the list"
)


def make(shape: RandomLlama, folder: Path, *, dtype: torch.dtype, seed: int) -> None:
    """Write config.json, model.safetensors and the tokenizer to `folder`; the same seed gives the same bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer(shape.vocab_size, shape.max_position_embeddings)
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(config)
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer(vocab_size: int, context_tokens: int) -> Any:
    """Byte-level BPE: 256 bytes, two turn marks (the second ends a text) and as many merges as fit.

    MERGE_TEXT has merges for about 370 ids; beyond them the model's embedding is padding, as in many real models.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([MERGE_TEXT], trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=TURN_END,
        pad_token=TURN_END,
        model_max_length=context_tokens,
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = CHAT_TEMPLATE
    return made
