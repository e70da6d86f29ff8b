"""llama.cpp as an arm, in the environment of `make bench-peers`: one JSON line in, one out.

Started with a GGUF file and a number of threads. {"prompt": [ids], "tokens": n} gives llama.cpp's own timings of n
greedy tokens, end tokens ignored, nothing kept from the prompt before.
"""

from __future__ import annotations

import json
import os
import sys


def main(path: str, threads: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is no answer

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel = 2048, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    assert server.listening_address.startswith(("http://127.0.0.1", "127.0.0.1")), server.listening_address
    fixed = {"temperature": 0.0, "samplers": ["temperature"], "ignore_eos": True, "cache_prompt": False}
    for line in sys.stdin:
        asked = json.loads(line)
        done = server.handle_completions({**fixed, "prompt": asked["prompt"], "max_tokens": asked["tokens"]})
        answers.write(json.dumps(done.get("timings") or {"error": str(done)[:300]}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
