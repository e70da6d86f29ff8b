"""What is measured: prompts, the draft that goes with a target, and the plain description of an arm.

Nothing here loads a model, so that mistakes are found first and the process that drives others stays small.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline import provenance
from pipeline.config import Runtime, Sampling

TARGETS = ("base", "gptq", "awq")
KINDS = ("distill", "self", "ngram", "model")
VOCAB_FILE = "draft_vocab.json"


@dataclass(frozen=True)
class DraftSpec:
    """`kind`: as in draft.json; `folder` of its weights and `vocab`, the file of the ids it can say (None = all), or
    `ngram_max` for a lookup without any."""

    kind: Literal["distill", "self", "ngram", "model"]
    folder: str | None
    ngram_max: int | None
    pack_head: bool
    vocab: str | None = None


@dataclass(frozen=True)
class ArmSpec:
    """What to load; plain values only, so that it can be sent to a worker as JSON."""

    target: str
    pack_head: bool
    draft: DraftSpec | None
    device: str
    dtype: str
    threads: int | None
    trust_remote_code: bool
    end_ids: list[int]
    seed: int
    dense_from: dict[str, int | None] | None  # measured when loading if None; one process's own for the others

    @staticmethod
    def from_json(data: dict[str, Any]) -> ArmSpec:
        draft = data["draft"]
        return ArmSpec(**{**data, "draft": None if draft is None else DraftSpec(**draft)})


@dataclass(frozen=True)
class Ask:
    """How to generate: K, length limit, whether end tokens stop it, and how tokens are chosen."""

    draft_len: int
    max_new_tokens: int
    ignore_end: bool
    sampling: Sampling

    @staticmethod
    def from_json(data: dict[str, Any]) -> Ask:
        return Ask(**{**data, "sampling": Sampling(**data["sampling"])})


@dataclass(frozen=True)
class Prompt:
    id: str
    category: str
    ids: list[int]


@dataclass(frozen=True)
class PromptSet:
    """Prompts by category, all with the same number of prompts; `sha256` of ids and tokens, to compare runs."""

    by_category: dict[str, list[Prompt]]

    @property
    def all(self) -> list[Prompt]:
        return [p for prompts in self.by_category.values() for p in prompts]

    @property
    def longest(self) -> Prompt:
        return max(self.all, key=lambda prompt: len(prompt.ids))

    @property
    def sha256(self) -> str:
        return provenance.json_sha256([[p.id, p.category, p.ids] for p in self.all])

    def block(self, index: int, per_category: int) -> list[Prompt]:
        """Those of block `index`: `per_category` of each category, going round, so that all get their turn."""
        chosen = []
        for prompts in self.by_category.values():
            first = index * per_category
            chosen += [prompts[(first + i) % len(prompts)] for i in range(per_category)]
        return chosen


def read_prompts(path: Path, per_category: int, key: str) -> PromptSet:
    """The first `per_category` evaluation prompts of each category. Raises ValueError when one has fewer.

    `key`: the configuration key that asked for so many, for the message.
    """
    found: dict[str, list[Prompt]] = {}
    for row in prompt_rows(path):
        if row["split"] == "evaluation":
            found.setdefault(row["category"], []).append(Prompt(row["id"], row["category"], row["input_ids"]))
    if not found:
        raise ValueError(f"{path}: no prompt is in the evaluation split; widen corpus.*.evaluation_documents")
    for category, prompts in found.items():
        if len(prompts) < per_category:
            raise ValueError(
                f"{key}: {per_category}, but category {category} of {path} has {len(prompts)} evaluation prompts; "
                f"lower it or raise prompts.per_category"
            )
    return PromptSet({category: prompts[:per_category] for category, prompts in sorted(found.items())})


def prompt_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of the file of stage `prompts`, all splits. Raises ValueError naming the line that is not one of its own."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ValueError(f"{path}: not found; run `dvc repro prompts` to produce it") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            words = all(isinstance(row[name], str) for name in ("id", "category", "split"))
            good = words and row["input_ids"] and all(type(i) is int and i >= 0 for i in row["input_ids"])
        except (ValueError, KeyError, TypeError):
            good = False
        if not good:
            raise ValueError(f"{path}: line {number} is not a prompt; delete the file and run `dvc repro prompts`")
        rows.append(row)
    return rows


def refuse_beyond_context(
    checkpoint: Path, prompts: PromptSet, max_new_tokens: int, draft_len: int, section: str
) -> None:
    """Raises ValueError when the longest prompt, its answer and one round's draft do not fit in the model's context, or
    a prompt's tokens not in its vocabulary."""
    config = provenance.read_json(checkpoint / "config.json")
    context, vocabulary = config.get("max_position_embeddings"), config.get("vocab_size")
    strange = next((p for p in prompts.all if vocabulary is not None and max(p.ids) >= vocabulary), None)
    if strange is not None:
        raise ValueError(
            f"{section}: prompt {strange.id} has token {max(strange.ids)}, but the vocabulary of {checkpoint} ends at "
            f"{vocabulary - 1}; run `dvc repro prompts` for this model"
        )
    longest = prompts.longest
    needed = len(longest.ids) + max_new_tokens + draft_len
    if context is not None and needed > context:
        raise ValueError(
            f"{section}.max_new_tokens: prompt {longest.id} of {len(longest.ids)} tokens + {max_new_tokens} new + "
            f"{draft_len} drafted = {needed} tokens, but the context of {checkpoint} is {context}; lower "
            f"{section}.max_new_tokens, speculate.draft_lens or prompts.max_prompt_tokens"
        )


def end_ids(checkpoint: Path) -> list[int]:
    """End tokens of a model folder: generation_config.json, else config.json. Empty when the model names none."""
    for name in ("generation_config.json", "config.json"):
        path = checkpoint / name
        found = provenance.read_json(path).get("eos_token_id") if path.exists() else None
        if found is not None:
            ends = found if isinstance(found, list) else [found]
            if not all(type(i) is int and i >= 0 for i in ends):
                raise ValueError(f"{path}: eos_token_id is {found!r}, a token id is due; correct it")
            return sorted(ends)
    return []


def pack_head(checkpoint: Path) -> bool:
    """Whether the recipe beside a quantized checkpoint asks for a packed head; full-precision folders have none."""
    path = checkpoint / "recipe.json"
    return bool(path.exists() and provenance.read_json(path)["settings"]["pack_head"])


def draft_for(
    key: str, draft: Path, quantized_draft: Path, quantized_for: Sequence[str]
) -> tuple[DraftSpec | None, str | None]:
    """The draft of target `key`, or None and the reason; its quantized copy where `quantized_for` names the target.

    Kind self: the target's own quantized copy drafts for it; a quantized target has no cheaper self.
    """
    if key not in TARGETS:
        raise ValueError(f"speculate@{key}: no such target; known: {', '.join(TARGETS)}")
    about = provenance.read_json(draft / "draft.json")
    kind = about.get("kind")
    if kind not in KINDS:
        raise ValueError(f"{draft / 'draft.json'}: kind is {kind!r}, known: {', '.join(KINDS)}; run `dvc repro draft`")
    if kind == "ngram":
        return DraftSpec(kind, None, about["ngram_max"], pack_head=False), None
    if kind == "self" and key != "base":
        return None, "draft.kind self: a quantized target would draft for itself at its own cost"
    folder = quantized_draft if kind == "self" or key in quantized_for else draft
    vocab = draft / VOCAB_FILE
    own = kind == "distill" and vocab.exists()  # its quantized copy can say the same
    return DraftSpec(kind, str(folder), None, pack_head(folder), str(vocab) if own else None), None


def refuse_unfit_draft(target: Path, draft: DraftSpec | None, prompts: PromptSet, draft_len: int) -> None:
    """Raises ValueError, before any weights load, when the draft's id -> token table is not the target's, or its
    context ends before a round after the longest prompt (where it ends during an answer, fewer tokens are drafted)."""
    if draft is None or draft.folder is None:
        return
    from pipeline.checkpoint.tokenizer import check_same_tokens

    folder, longest = Path(draft.folder), prompts.longest
    check_same_tokens(target, folder)
    context = provenance.read_json(folder / "config.json").get("max_position_embeddings")
    if context is not None and len(longest.ids) + 1 + draft_len > context:
        raise ValueError(
            f"draft: prompt {longest.id} of {len(longest.ids)} tokens and a round of {draft_len} drafted ones do not "
            f"fit in the context of {folder}, {context}; lower prompts.max_prompt_tokens or speculate.draft_lens, or "
            f"take another draft"
        )


def arm_spec(
    target: Path, draft: DraftSpec | None, runtime: Runtime, *, ends: list[int], trust_remote_code: bool
) -> ArmSpec:
    return ArmSpec(
        target=str(target),
        pack_head=pack_head(target),
        draft=draft,
        device=runtime.device,
        dtype=runtime.dtype,
        threads=runtime.threads,
        trust_remote_code=trust_remote_code,
        end_ids=ends,
        seed=runtime.seed,
        dense_from=None,
    )
