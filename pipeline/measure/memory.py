"""The memory ledger of one process: weights, caches, workspace, peaks, and the longest context that fits a budget.

On a GPU the peaks are torch's allocator's. On a CPU they are the process's largest resident size (VmHWM), so the
workspace there includes the interpreter and its libraries; `libraries_bytes` says how much that was before any weights.
What a device does not tell is null with a reason, never 0.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
PROCESS_BYTES = 2**30  # interpreter and libraries, or a CUDA context, and workspace


def allocation_failure(error: Exception) -> str | None:
    """One line with a way out when `error` is torch's word for memory that was not there; None for anything else."""
    text = str(error)
    if not isinstance(error, RuntimeError) or not re.search(
        r"can't allocate memory|out of memory", text, re.IGNORECASE
    ):
        return None
    asked = re.search(r"allocate (\d+) bytes|allocate ([\d.]+ [KMGT]iB)", text)
    piece = "a tensor" if asked is None else f"a tensor of {asked[2] or f'{int(asked[1]) / 2**30:.1f} GiB'}"
    return (
        f"not enough memory for {piece}; close other programs, lower evaluate.batch_size, *.max_new_tokens or "
        f"prompts.max_prompt_tokens, or take a smaller model"
    )


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers; tensors that share storage (a tied head) count once, packed ones as is."""
    storages = {}
    for tensor in _tensors(module):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def read_bytes_per_step(module: Any) -> int:
    """Bytes of weights that one token's forward must read: all, but of an embedding not shared with the head a row."""
    head = module.get_output_embeddings()
    shared = set() if head is None else {t.data_ptr() for t in _tensors(head)}
    tables = [t for t in _tensors(module.get_input_embeddings()) if t.dim() and t.data_ptr() not in shared]
    return weight_bytes(module) - sum(t.nbytes - t[0].nbytes for t in tables)


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def resident_bytes(field_name: str) -> int | None:
    """VmRSS (now) or VmHWM (peak since the last reset) of this process; None where /proc does not tell."""
    try:
        found = re.search(rf"^{field_name}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found.group(1)) * 1024 if found else None


def available_bytes() -> int:
    """Memory that can be used without swapping, as the kernel estimates it."""
    import psutil

    return int(psutil.virtual_memory().available)


def free_on_device_bytes(device: str) -> int:
    """Free memory where models would lie, asked of the driver so that this process takes none of it."""
    if not device.startswith("cuda"):
        return available_bytes()
    index = device.partition(":")[2] or "0"
    query = ["nvidia-smi", f"--id={index}", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) * 2**20


def process_estimate_bytes(folders: list[Path]) -> int:
    """What a process that loads these checkpoints is taken to need: half as much again as their files, and 1 GiB."""
    files = sum(p.stat().st_size for folder in folders for p in folder.glob("*.safetensors"))
    return PROCESS_BYTES + 3 * files // 2


def refuse_too_little(min_free_memory_bytes: int) -> None:
    """Raises ValueError when less memory is free than runtime.min_free_memory_bytes."""
    free = available_bytes()
    if free < min_free_memory_bytes:
        raise ValueError(
            f"runtime.min_free_memory_bytes: {free} bytes are free, {min_free_memory_bytes} are asked for before a "
            f"model is loaded; end other programs or lower it"
        )


class PeakMeter:
    """Peak memory of this process on `device` since the last `reset`."""

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")
        self.device = device
        self.reason: str | None = None

    def reset(self) -> None:
        """Start anew. On a system that cannot, `reason` says so and later peaks are null."""
        if self.cuda:
            import torch

            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            CLEAR_REFS.write_text("5")
        except OSError as e:
            self.reason = f"the peak of the resident size cannot be reset here ({e.strerror})"

    def peak_bytes(self) -> int | None:
        if self.reason is not None:
            return None
        if self.cuda:
            import torch

            return torch.cuda.max_memory_allocated(self.device)
        peak = resident_bytes("VmHWM")
        if peak is None:
            self.reason = "this system does not tell the peak of the resident size"
        return peak


@dataclass(kw_only=True)
class Ledger:
    """One configuration, in bytes. `cache_bytes`: both caches at the longest run. Null entries are explained."""

    weight_bytes: int
    draft_weight_bytes: int | None
    cache_bytes_per_token: int
    draft_cache_bytes_per_token: int | None
    cache_bytes: int
    peak_memory_bytes: int | None
    peak_load_memory_bytes: int | None
    libraries_bytes: int | None
    workspace_bytes: int | None = None
    longest_context_tokens: dict[str, int | None] = field(default_factory=dict)
    null_reasons: dict[str, str] = field(default_factory=dict)

    @property
    def fixed_bytes(self) -> int:
        return self.weight_bytes + (self.draft_weight_bytes or 0)

    def close(self, budgets_bytes: list[int], max_positions: int, reasons: dict[str, str | None]) -> Ledger:
        """Fill in what follows from the other entries; `reasons` explains entries that are null."""
        if self.peak_memory_bytes is not None:
            rest = self.peak_memory_bytes - self.fixed_bytes - self.cache_bytes
            if rest >= 0:
                self.workspace_bytes = rest
            else:
                reasons = {**reasons, "workspace_bytes": "weights were not all resident at the peak"}
        for budget in budgets_bytes:
            tokens = self._longest_context(budget, max_positions)
            self.longest_context_tokens[str(budget)] = tokens
            if tokens is None:
                why = "no workspace known" if self.workspace_bytes is None else "weights and workspace exceed it"
                self.null_reasons[f"longest_context_tokens.{budget}"] = why
        for name, reason in reasons.items():
            if getattr(self, name) is None:
                self.null_reasons[name] = reason or "not measurable on this device"
        if self.workspace_bytes is None:
            self.null_reasons.setdefault("workspace_bytes", "needs the peak, which is null")
        return self

    def _longest_context(self, budget_bytes: int, max_positions: int) -> int | None:
        """Tokens whose caches fit beside weights and the workspace measured, at most the model's own limit."""
        if self.workspace_bytes is None:
            return None
        room = budget_bytes - self.fixed_bytes - self.workspace_bytes
        tokens = room // (self.cache_bytes_per_token + (self.draft_cache_bytes_per_token or 0))
        return min(tokens, max_positions) if tokens > 0 else None
