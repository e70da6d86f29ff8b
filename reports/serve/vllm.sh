#!/bin/sh
# Recommended: base, plain decoding. From the repository's root.
# vLLM was not part of the study: its kernels differ from those that were measured, so measure again.
# Measured in the engine lean, with float32 activations, on cpu;
# transformers computes in bfloat16 here, vLLM in its --dtype: other speeds, and at near ties other answers.
exec vllm serve artifacts/target \
  --host 127.0.0.1 \
  --dtype bfloat16 \
  --override-generation-config '{"temperature": 0.0, "top_k": -1, "top_p": 1.0}' "$@"
