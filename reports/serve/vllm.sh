#!/bin/sh
# Recommended: base, speculative decoding with K = 1. From the repository's root.
# vLLM was not part of the study: its kernels differ from those that were measured, so measure again.
# Measured in the engine lean, with float32 activations, on cpu;
# transformers computes in bfloat16 here, vLLM in its --dtype: other speeds, and at near ties other answers.
# Measured with the head of the draft (and an embedding tied to it) held at 8 bits;
# the files hold them in full precision, and so will this.
exec vllm serve artifacts/target \
  --host 127.0.0.1 \
  --dtype bfloat16 \
  --override-generation-config '{"temperature": 0.0, "top_k": -1, "top_p": 1.0}' \
  --speculative-config '{"method": "draft_model", "model": "artifacts/quantized/draft", "num_speculative_tokens": 1, "num_speculative_tokens_per_batch_size": {"1-3": 1, "4-16": 0}}' "$@"
