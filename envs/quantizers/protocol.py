"""What both runners share: one JSON request on stdin, JSON lines on stdout, and no life after the parent's.

Request keys: model (folder that transformers 4.51 can read), rows (token ids), modules (names to quantize), settings,
device, dtype, threads, seed, probe_ids, and the files to write: probe, tensors, scales.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

Emit = Callable[..., None]


class Refused(Exception):
    """Something the user can act on; its text becomes the parent's one-line error."""


def serve(work: Callable[[dict[str, Any], Emit], None]) -> int:
    """Run `work(request, emit)`. What libraries print goes to stderr: stdout holds nothing but JSON lines."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def emit(event: str, **fields: Any) -> None:
        lines.write(json.dumps({"event": event, **fields}) + "\n")

    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        work(request, emit)
    except Refused as e:
        emit("refused", message=str(e))
        return 2
    return 0


def _die_with_parent() -> None:
    # The parent holds the other end open for as long as it lives, however it dies. Not sys.stdin: a thread that
    # waits inside it makes the interpreter abort at exit.
    os.read(0, 1)
    os._exit(1)


def load_model(request: dict[str, Any], emit: Emit) -> Any:
    """The full-precision model on the CPU (both libraries move one layer at a time to the device), seeds set.

    Writes the logits of the probe's second half, so that the parent can compare what this older transformers
    computes with what its own does: a misread config shows here and nowhere else.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(request["threads"])
    torch.manual_seed(request["seed"])
    torch.use_deterministic_algorithms(True, warn_only=True)
    dtype = getattr(torch, request["dtype"])
    model = AutoModelForCausalLM.from_pretrained(request["model"], torch_dtype=dtype, local_files_only=True).eval()
    model.config.use_cache = False
    with torch.inference_mode():
        logits_1TV = model(torch.tensor([request["probe_ids"]])).logits
    second_half = len(request["probe_ids"]) // 2
    save_file({"logits_TV": logits_1TV[0, second_half:].float().contiguous()}, request["probe"])
    emit("loaded")
    return model


def save_tensors(tensors: dict[str, Any], path: str) -> None:
    from safetensors.torch import save_file

    save_file({name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}, path)
