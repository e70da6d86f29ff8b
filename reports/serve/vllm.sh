#!/bin/sh
# Recommended: base, plain decoding. From the repository's root.
# vLLM was not part of the study: its kernels differ from those that were measured, so measure again.
exec vllm serve artifacts/target \
  --host 127.0.0.1 \
  --dtype bfloat16 \
  --override-generation-config '{"temperature": 0.0, "top_k": -1, "top_p": 1.0}' "$@"
