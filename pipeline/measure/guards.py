"""Did a row run what its name says? One line for each doubt, None where there is none. Pure: no model, no file.

A guard reads what really happened (rounds, prompts, objects as loaded), never the setting that asked for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

PACKED_KERNEL = re.compile(r"int\d|dequant", re.IGNORECASE)  # kernels of integer codes say their width, or Dequant

Rounds = Sequence[tuple[int, int]]  # (drafted, accepted)


def draft_len(asked: int, rounds: Rounds, lookup: bool) -> str | None:
    """Drafted tokens a round: exactly K, in the last round of an answer too; a lookup may find fewer."""
    drafted = [d for d, _ in rounds]
    if asked and not any(drafted):
        return "nothing was ever drafted"
    wrong = [d for d in drafted if (d > asked if lookup else d != asked)]
    if wrong:
        return f"K = {asked} did not act: {len(wrong)} of {len(drafted)} rounds drafted {_range(wrong)} tokens"
    return None


def forced_length(asked_tokens: int, lengths: Sequence[int]) -> str | None:
    """With end tokens ignored every answer has the length asked for."""
    wrong = [n for n in lengths if n != asked_tokens]
    if wrong:
        some = f"{len(wrong)} of {len(lengths)} answers have {_range(wrong)}"
        return f"the forced length of {asked_tokens} tokens did not act: {some}"
    return None


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def equal_prompts(reference: Sequence[Sequence[Any]], other: Sequence[Sequence[Any]]) -> str | None:
    """Prompts of two arms, block by block (a prompt: its id and its token ids): the same ones in the same order."""
    for index, (ours, theirs) in enumerate(zip(reference, other, strict=True)):
        if list(ours) != list(theirs):
            return f"other prompts than base's in block {index}"
    return None


def is_packed(readback: Mapping[str, Any]) -> bool:
    """Whether most linear layers, as loaded, run on integer codes."""
    return bool(PACKED_KERNEL.search(main_kernel(readback)))


def main_kernel(readback: Mapping[str, Any]) -> str:
    """The class of most linear layers, without what was measured about it."""
    kernels: Mapping[str, int] = readback["kernels"]
    return max(kernels, key=kernels.__getitem__).partition(" ")[0]


def kernel(packed_in_file: bool, readback: Mapping[str, Any], what: str) -> str | None:
    """The layers run on what the file holds: packed codes on a kernel for them, full precision on a full one."""
    if is_packed(readback) == packed_in_file:
        return None
    held = "packed codes" if packed_in_file else "full precision"
    return f"{what}: the file holds {held}, but its layers ran in {main_kernel(readback)}"


def weights_dtype(asked: str, readback: Mapping[str, Any]) -> str | None:
    """What is not packed was loaded in the dtype asked for."""
    found = readback["weights_dtype"]
    return None if found == asked else f"runtime.dtype: {asked} asked, weights loaded in {found}"
