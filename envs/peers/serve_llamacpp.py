"""llama.cpp on request: {"prompt": ids, "tokens": n} a line in, {"first": s, "rest": s, "ids": [...]} a line out.

Runs in envs/peers/.venv, which has llama-cpp-python and nothing of this project. Arguments: GGUF file, threads.
"""

import json
import sys
import time

from llama_cpp import Llama


def main() -> None:
    path, threads = sys.argv[1], int(sys.argv[2])
    model = Llama(path, n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False)
    for line in sys.stdin:
        ask = json.loads(line)
        model.reset()
        started = time.perf_counter()
        ids, first = [], 0.0
        for token in model.generate(ask["prompt"], temp=0.0, top_k=1, repeat_penalty=1.0):
            ids.append(token)
            if len(ids) == 1:
                first = time.perf_counter()
            if len(ids) == ask["tokens"]:
                break
        print(json.dumps({"first": first - started, "rest": time.perf_counter() - first, "ids": ids}), flush=True)


if __name__ == "__main__":
    main()
