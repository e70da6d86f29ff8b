"""vLLM on the CPU as an arm, in the environment of `make bench-peers`: one JSON line in, one out.

Started with a model folder and a number of threads. {"prompt": [ids], "tokens": n} gives the times of n greedy tokens,
end tokens ignored, nothing kept from the prompt before; the engine's steps are driven and timed here.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main(folder: str, threads: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is no answer
    cores = sorted(os.sched_getaffinity(0))[:threads]
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
    os.environ |= own | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

    from vllm import LLM, SamplingParams

    limits = {"max_model_len": 2048, "max_num_seqs": 1, "enable_prefix_caching": False}
    engine = LLM(model=folder, dtype="bfloat16", trust_remote_code=False, **limits).llm_engine
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        settings = SamplingParams(temperature=0.0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False)
        engine.add_request(str(number), {"prompt_token_ids": asked["prompt"]}, settings)
        clock, tokens = [time.perf_counter()], 0
        while engine.has_unfinished_requests():
            for done in engine.step():
                tokens = len(done.outputs[0].token_ids)
                clock.append(time.perf_counter())
        prompt_ms, predicted_ms = 1e3 * (clock[1] - clock[0]), 1e3 * (clock[-1] - clock[1])
        found = {"prompt_n": len(asked["prompt"]), "prompt_ms": prompt_ms}
        answers.write(json.dumps({**found, "predicted_n": tokens, "predicted_ms": predicted_ms}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
