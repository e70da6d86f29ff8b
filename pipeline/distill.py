"""A draft distilled from its target: some of its layers under its own embedding and norm, trained to say what the
target says. It learns from the target's own greedy answers (as in DistillSpec, arXiv:2310.08461): that is the text it
will have to guess. It can say the likeliest ids of that text only (as in FR-Spec, arXiv:2502.14856).

What the target thinks is kept as its final hidden states, the exact and compact form of its logits. A linear map leads
from the draft's to the target's (as in the tuned lens, arXiv:2303.08112): least squares give it before the first step,
training goes on with it, and at the end it is folded into the head, which therefore is the draft's own.

Legend: B sequences, S positions, N positions of a loss, D hidden size, U ids of the loss, V vocabulary.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from pipeline.checkpoint.load import load_decoder
from pipeline.config import Distill
from pipeline.engine.lean import LeanDecoder
from pipeline.progress import bar

BETAS = (0.9, 0.95)  # of AdamW: some hundred steps have no use for a memory of a thousand
WARM_UP, LAST_RATE = 0.05, 0.1  # shares of the steps and of the peak learning rate
CURVE_POINTS = 12
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
RIDGE = 1e-3  # of the mean square: hidden states lie in few directions, the others are not to be fitted
CHUNK_POSITIONS = 512  # positions whose logits over the whole vocabulary are held at once


class DistillError(ValueError):
    """A recipe that does not fit the target or the prompts."""


@dataclass(frozen=True)
class Answer:
    """The target's greedy answer to one prompt.

    `ids_S`: prompt and answer; `hidden_SD`: the target's final hidden states (after the norm) at all positions but the
    last, so that `hidden_SD[i]` predicts `ids_S[i + 1]`.
    """

    category: str
    prompt_tokens: int
    ids_S: torch.Tensor
    hidden_SD: torch.Tensor

    @property
    def first(self) -> int:
        """The position that predicts the first token of the answer."""
        return self.prompt_tokens - 1

    def without_beginning(self, prompt_tokens: int | None) -> Answer:
        """With the last `prompt_tokens` of a longer prompt; what the target thinks has still seen the whole."""
        spare = self.prompt_tokens - (prompt_tokens or self.prompt_tokens)
        if spare <= 0:
            return self
        return replace(
            self,
            prompt_tokens=self.prompt_tokens - spare,
            ids_S=self.ids_S[spare:],
            hidden_SD=self.hidden_SD[spare:],
        )


def choose(rows: list[dict[str, Any]], split: str, per_category: int, path: Path) -> list[dict[str, Any]]:
    """The first `per_category` prompts of each category of a split. Raises DistillError when it has none."""
    by_category: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["split"] == split:
            by_category.setdefault(row["category"], []).append(row)
    chosen = [row for _, own in sorted(by_category.items()) for row in own[:per_category]]
    if not chosen:
        raise DistillError(
            f"{path}: no prompt is in the {split} split, which distillation needs; raise prompts.train_per_category "
            f"or take another draft (draft=ngram, draft=self)"
        )
    return chosen


def load_target(folder: Path, device: str) -> Any:
    """The target as a transformers module in float32: what layers are taken from, and what training needs."""
    from transformers import AutoModelForCausalLM

    target: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return target.to(device).eval().requires_grad_(False)


def load_speaker(folder: Path, device: str, dtype: torch.dtype) -> LeanDecoder:
    """The target as it decodes. Raises DistillError for an architecture that the lean engine does not know."""
    options = {"device": device, "dtype": dtype, "pack_head": False, "trust_remote_code": False}
    decoder = load_decoder(folder, **options)  # type: ignore[arg-type]
    if not isinstance(decoder, LeanDecoder):
        raise DistillError(
            f"draft.kind: distill decodes with the lean engine, and {decoder.engine_reason}; take a draft model of its "
            f"family (draft.kind=model) or draft=ngram"
        )
    return decoder


def take_layers(target: Any, layers: list[int]) -> Any:
    """A float32 model of the target's class with only `layers` of it and an untied head; nothing is shared with it.

    Raises DistillError for a layer out of range and for an architecture without `.model.layers`.
    """
    if not hasattr(getattr(target, "model", None), "layers"):
        raise DistillError(
            f"draft.kind: distill copies `.model.layers`, which {type(target).__name__} does not have; take a draft "
            f"model of its family (draft.kind=model) or draft=ngram"
        )
    depth = target.config.num_hidden_layers
    wrong = [layer for layer in layers if not -depth <= layer < depth]
    if wrong or not layers:
        raise DistillError(
            f"draft.distill.layers: {wrong or layers} not in the target, which has {depth} layers; give at least one "
            f"of {-depth}..{depth - 1}"
        )
    config = type(target.config).from_dict(target.config.to_dict())
    config.num_hidden_layers, config.tie_word_embeddings = len(layers), False
    if getattr(config, "layer_types", None):
        config.layer_types = [target.config.layer_types[layer] for layer in layers]
    with torch.random.fork_rng(devices=[]):
        draft = type(target)(config).to(target.device, torch.float32).eval()
    own = {name: tensor for name, tensor in target.state_dict().items() if not name.startswith("model.layers.")}
    for i, layer in enumerate(layers):
        part = target.model.layers[layer].state_dict()
        own |= {f"model.layers.{i}.{name}": tensor for name, tensor in part.items()}
    draft.load_state_dict(own)
    return draft


@torch.inference_mode()
def answer(
    target: LeanDecoder, ends: frozenset[int], prompts: list[dict[str, Any]], max_new_tokens: int, batch_size: int
) -> list[Answer]:
    """Greedy answers in batches of similar length, in the order of `prompts`; hidden states are kept on the way."""
    answers: dict[int, Answer] = {}
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]["input_ids"]))
    with bar("answers of the target", len(prompts), "prompt") as shown:
        for chosen in (order[i : i + batch_size] for i in range(0, len(order), batch_size)):
            together = _answer_together(target, ends, [prompts[i] for i in chosen], max_new_tokens)
            answers |= dict(zip(chosen, together, strict=True))
            shown.update(len(chosen))
    return [answers[i] for i in range(len(prompts))]


def _answer_together(
    target: LeanDecoder, ends: frozenset[int], prompts: list[dict[str, Any]], max_new_tokens: int
) -> list[Answer]:
    """Each prompt is read alone, then all answers grow by a token a step; those that have ended are carried along."""
    asked: list[list[int]] = [p["input_ids"] for p in prompts]
    cache = target.new_cache(max(map(len, asked)) + max_new_tokens, batch=len(asked))
    hidden = [[target.read_prompt(ids, cache, b)] for b, ids in enumerate(asked)]
    new: list[list[int]] = [[] for _ in asked]
    last_BD = torch.stack([parts[0][-1] for parts in hidden])
    while True:
        ids_B = target.module.head.rows(last_BD).argmax(-1)
        going = [b for b, own in enumerate(new) if not own or own[-1] not in ends]
        for b, token in enumerate(ids_B.tolist()):
            if b in going:
                new[b].append(token)
        if len(new[going[0]]) == max_new_tokens or all(own[-1] in ends for own in new):
            break
        last_BD = target.hidden_rows(ids_B[:, None], cache)[:, 0]
        for b in (b for b in going if new[b][-1] not in ends):
            hidden[b].append(last_BD[b : b + 1])
    return [
        Answer(p["category"], len(ids), torch.tensor(ids + own), torch.cat(parts).to(torch.float16))
        for p, ids, own, parts in zip(prompts, asked, new, hidden, strict=True)
    ]


@torch.no_grad()
def agreement(draft: Any, ids_U: torch.Tensor, answers: list[Answer]) -> dict[str, Any]:
    """Share of the target's greedy tokens that are also the draft's among `ids_U`, given the target's text before them.

    {"value", "tokens", "by_category": {category: {"value", "tokens"}}}: one teacher-forced pass an answer.
    """
    counts: dict[str, list[int]] = {}
    for a in answers:
        new_S = a.ids_S[a.prompt_tokens :]
        logits_SU = draft(a.ids_S[None, :-1].to(draft.device), logits_to_keep=len(new_S)).logits[0][:, ids_U]
        hits_tokens = counts.setdefault(a.category, [0, 0])
        hits_tokens[0] += int((ids_U[logits_SU.argmax(-1)].cpu() == new_S).sum())
        hits_tokens[1] += len(new_S)
    rate = lambda hits, tokens: {"value": hits / tokens, "tokens": tokens}  # noqa: E731
    total = [sum(column) for column in zip(*counts.values(), strict=True)]
    return {**rate(*total), "by_category": {category: rate(*own) for category, own in sorted(counts.items())}}


@torch.no_grad()
def fitted_map(draft: Any, answers: list[Answer], prompt_weight: float) -> torch.Tensor:
    """map_DD: the draft's final hidden states times it are the target's, by least squares over the answers' texts with
    `prompt_weight` for a prompt's position. The teacher is what training has, so this costs one pass of the draft."""
    size = answers[0].hidden_SD.shape[-1]
    ours_DD, both_DD = (torch.zeros(size, size, dtype=torch.float64) for _ in range(2))
    for a in answers:
        first = 0 if prompt_weight else a.first
        draft_SD = draft.model(a.ids_S[None, :-1].to(draft.device)).last_hidden_state[0, first:].double().cpu()
        weight_S1 = torch.ones(len(draft_SD), 1, dtype=torch.float64)
        weight_S1[: a.first - first] = prompt_weight
        ours_DD += draft_SD.T @ (weight_S1 * draft_SD)
        both_DD += draft_SD.T @ (weight_S1 * a.hidden_SD[first:].double().cpu())
    ours_DD += RIDGE * ours_DD.diagonal().mean() * torch.eye(size, dtype=torch.float64)
    return torch.linalg.solve(ours_DD, both_DD).to(draft.device, torch.float32)


@torch.no_grad()
def fold(draft: Any, map_DD: torch.Tensor, head_VD: torch.Tensor) -> None:
    """Give the draft the head that takes its hidden states through `map_DD` to the target's head."""
    draft.get_output_embeddings().weight.copy_(head_VD @ map_DD.T)


def train(
    draft: Any,
    map_DD: torch.Tensor,
    head_VD: torch.Tensor,
    ids_U: torch.Tensor,
    answers: list[Answer],
    recipe: Distill,
    seed: int,
) -> dict[str, Any]:
    """Train `draft` and `map_DD` in place towards the target's distributions over `ids_U`; returns what was done and
    the loss.

    Equal seeds and thread counts give equal weights, unless `time_budget_s` ends training early.
    """
    draft.requires_grad_(True)
    draft.get_input_embeddings().weight.requires_grad_(recipe.train_embedding)
    draft.get_output_embeddings().weight.requires_grad_(False)
    weights = [p for p in draft.parameters() if p.requires_grad] + [map_DD.requires_grad_(True)]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, betas=BETAS, weight_decay=0.0)
    losses: list[float] = []
    answers = [a.without_beginning(recipe.prompt_tokens) for a in answers]
    tokens, started = 0, time.monotonic()
    with bar("training the draft", recipe.steps, "step") as shown:
        for step, batch in zip(range(recipe.steps), batches(answers, recipe, seed), strict=False):
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * rate_at(step / recipe.steps)
            optimizer.zero_grad()
            loss = batch_loss(draft, map_DD, head_VD, ids_U, batch, recipe)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            losses.append(loss.item())
            tokens += sum(len(a.hidden_SD) for a in batch)
            left_s = recipe.time_budget_s - (time.monotonic() - started)
            shown.update(left_s=left_s)
            if left_s < 0:
                break
    for weight in weights:
        weight.requires_grad_(False)
    return {
        "steps": len(losses),
        "steps_asked": recipe.steps,
        "seconds": time.monotonic() - started,
        "tokens": tokens,
        "prompt_tokens": recipe.prompt_tokens,
        "trainable_parameters": sum(p.numel() for p in weights),
        "vocab": len(ids_U),
        "loss_curve": loss_curve(losses),
    }


def rate_at(progress: float) -> float:
    """Learning rate as a share of its peak: linear warm-up, then a cosine down to LAST_RATE."""
    if progress < WARM_UP:
        return (progress + 1e-2) / (WARM_UP + 1e-2)
    return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def likely_ids(head_VD: torch.Tensor, answers: list[Answer], count: int | None) -> torch.Tensor:
    """ids_U: the `count` ids with the greatest probability, by the target, summed over the answers; null = all."""
    if count is None or count >= len(head_VD):
        return torch.arange(len(head_VD), device=head_VD.device)
    mass_V = torch.zeros(len(head_VD), device=head_VD.device)
    for hidden_ND in torch.cat([a.hidden_SD[a.first :] for a in answers]).split(CHUNK_POSITIONS):
        mass_V += (hidden_ND.float() @ head_VD.T).softmax(-1).sum(0)
    return mass_V.topk(count).indices.sort().values


def batches(answers: list[Answer], recipe: Distill, seed: int) -> Iterator[list[Answer]]:
    """Endless batches; each epoch in a new order, neighbours in length together so that little is padding."""
    generator = torch.Generator().manual_seed(seed)
    size = min(recipe.batch_size, len(answers))
    while True:
        order = torch.randperm(len(answers), generator=generator).tolist()
        windows = [order[i : i + 8 * size] for i in range(0, len(order), 8 * size)]
        order = [i for window in windows for i in sorted(window, key=lambda i: len(answers[i].ids_S))]
        groups = [order[i : i + size] for i in range(0, len(order) - size + 1, size)]
        for g in torch.randperm(len(groups), generator=generator).tolist():
            yield [answers[i] for i in groups[g]]


def batch_loss(
    draft: Any,
    map_DD: torch.Tensor,
    head_VD: torch.Tensor,
    ids_U: torch.Tensor,
    batch: list[Answer],
    recipe: Distill,
) -> torch.Tensor:
    """KL(target || draft through `map_DD`) over `ids_U`, mean over the answers' positions, times the temperature
    squared (a scalar)."""
    longest = max(len(a.hidden_SD) for a in batch)
    ids_BS = torch.zeros(len(batch), longest, dtype=torch.long, device=head_VD.device)
    weight_BS = torch.zeros(len(batch), longest, device=head_VD.device)
    for i, a in enumerate(batch):
        ids_BS[i, : len(a.hidden_SD)] = a.ids_S[:-1]
        weight_BS[i, : a.first] = recipe.prompt_weight
        weight_BS[i, a.first : len(a.hidden_SD)] = 1.0
    used_BS = weight_BS > 0
    target_ND = torch.cat([a.hidden_SD if recipe.prompt_weight else a.hidden_SD[a.first :] for a in batch]).float()
    # Padding stands behind each sequence, where causal attention does not look.
    draft_ND = draft.model(ids_BS).last_hidden_state[used_BS]
    head_DU = head_VD[ids_U].T
    target_NU = functional.log_softmax(target_ND @ head_DU / recipe.temperature, dim=-1)
    draft_NU = functional.log_softmax(draft_ND @ map_DD @ head_DU / recipe.temperature, dim=-1)
    kl_N = functional.kl_div(draft_NU, target_NU, log_target=True, reduction="none").sum(-1)
    weight_N = weight_BS[used_BS]
    return (kl_N * weight_N).sum() / weight_N.sum() * recipe.temperature**2


def loss_curve(losses: list[float]) -> list[dict[str, Any]]:
    """CURVE_POINTS means of consecutive steps: [{"step": last of them, "kl_nats"}]."""
    size = math.ceil(len(losses) / CURVE_POINTS)
    parts = [losses[i : i + size] for i in range(0, len(losses), size)]
    ends = [min(i + size, len(losses)) for i in range(0, len(losses), size)]
    return [{"step": end, "kl_nats": sum(part) / len(part)} for end, part in zip(ends, parts, strict=True)]


def write(draft: Any, target: Path, dtype: torch.dtype, folder: Path) -> None:
    """Save as a transformers folder in `dtype`, the tokenizer's files copied as they are."""
    draft.to(dtype).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (target / name).exists():
            shutil.copyfile(target / name, folder / name)
