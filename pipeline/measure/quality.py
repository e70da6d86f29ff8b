"""Quality on running text: token_ppl, the baseline's compact logits, KL and agreement against them.

Legend: T stream tokens, S scored tokens (every token but the first: S = T - 1), B windows of a batch, N inputs of a
window, K kept logits, V vocabulary, D documents. All log-probabilities are natural (nats).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

SEPARATOR = "\n\n"  # between documents of a stream, as in the perplexity of the GPTQ and AWQ papers


class Stream(NamedTuple):
    """One category's documents as a single token stream; `document_T` indexes `documents` (the separator and BOS
    belong to the document that they precede)."""

    category: str
    documents: list[str]
    ids_T: np.ndarray
    document_T: np.ndarray


def concatenate(category: str, documents: list[tuple[str, str]], tokenizer: Any, max_tokens: int | None) -> Stream:
    """Join `documents` (id, text) with blank lines into one stream of at most `max_tokens`.

    Exactly one BOS, at the start of the stream, iff the tokenizer adds one. Raises ValueError without a scored token.
    """
    ids: list[int] = leading_tokens(tokenizer)
    owner: list[int] = [0] * len(ids)
    for index, (_, text) in enumerate(documents):
        if max_tokens is not None and len(ids) >= max_tokens:
            break
        new = tokenizer.encode(SEPARATOR * bool(index) + text, add_special_tokens=False, verbose=False)
        ids.extend(new)
        owner.extend([index] * len(new))
    if len(ids) < 2:
        raise ValueError(f"category {category}: no tokens to score in {len(documents)} evaluation documents")
    used = slice(0, max_tokens)
    return Stream(category, [name for name, _ in documents], np.array(ids[used]), np.array(owner[used]))


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder; no code of the model runs. Raises ValueError naming the folder."""
    from transformers import AutoTokenizer

    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder / 'tokenizer.json'}: not found; give a model with a fast tokenizer")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as e:  # the tokenizers library raises Exception itself
        why = " ".join(str(e).split())[:200]
        raise ValueError(f"{folder}: its tokenizer cannot be read ({why}); fetch the model again") from e


def leading_tokens(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before every text by itself: [BOS], or nothing."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer.encode("a")[:1] == [bos] else []


class Window(NamedTuple):
    """Inputs ids_T[begin:end] predict ids_T[begin + 1 : end + 1]; the first `skip` predictions are scored already."""

    begin: int
    end: int
    skip: int


def windows(length: int, window_tokens: int, stride_tokens: int) -> list[Window]:
    """Cover a stream of `length` tokens so that every token but the first is scored once, with the most context that
    windows at this stride give. stride = window: disjoint inputs. Needs stride <= window; empty below two tokens."""
    assert 1 <= stride_tokens <= window_tokens
    plan: list[Window] = []
    scored = 0  # position of the last token scored so far
    for begin in itertools.count(0, stride_tokens):
        if scored >= length - 1:
            return plan
        end = min(begin + window_tokens, length - 1)
        plan.append(Window(begin, end, scored - begin))
        scored = end
    raise AssertionError("unreachable")


def score(
    logits_of: Callable[[torch.Tensor], torch.Tensor], ids_T: torch.Tensor, plan: list[Window], batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (targets_S, log_probs_SV in float32) of each window in order; `logits_of` maps ids_BN to logits_BNV."""
    import torch

    for _, group in itertools.groupby(plan, key=lambda w: w.end - w.begin):
        same_length = list(group)
        for first in range(0, len(same_length), batch_size):
            batch = same_length[first : first + batch_size]
            with torch.inference_mode():
                logits_BNV = logits_of(torch.stack([ids_T[w.begin : w.end] for w in batch]))
            for w, logits_NV in zip(batch, logits_BNV, strict=True):
                targets_S = ids_T[w.begin + 1 + w.skip : w.end + 1]
                yield targets_S, torch.log_softmax(logits_NV[w.skip :].float(), dim=-1)


class CompactLogits(NamedTuple):
    """The K most likely tokens of each scored position and the log of the mass of all others.

    Rounded to float16, a log-probability l is off by at most |l| / 2048; `kl_nats` normalizes what is stored, so the
    rounded numbers are again a distribution and the KL stays a KL.
    """

    ids_SK: torch.Tensor  # int32, most likely first
    log_probs_SK: torch.Tensor  # float16
    log_tail_S: torch.Tensor  # float32, -inf when nothing is left

    def part(self, begin: int, end: int) -> CompactLogits:
        return CompactLogits(*(t[begin:end] for t in self))


def compact(log_probs_SV: torch.Tensor, top_k: int) -> CompactLogits:
    import torch

    log_probs_SK, ids_SK = log_probs_SV.topk(min(top_k, log_probs_SV.shape[-1]), dim=-1)
    return CompactLogits(ids_SK.to(torch.int32), log_probs_SK.half(), _log_mass_outside(log_probs_SV, ids_SK))


def _log_mass_outside(log_probs_SV: torch.Tensor, ids_SK: torch.Tensor) -> torch.Tensor:
    """log of the summed probability of all tokens but `ids_SK`, without the cancellation of 1 - sum."""
    return log_probs_SV.scatter(-1, ids_SK.long(), -float("inf")).logsumexp(-1)


def kl_nats(base: CompactLogits, log_probs_SV: torch.Tensor) -> torch.Tensor:
    """KL(base || q) at each scored position, float64: exact over the K kept tokens, all others lumped into one.

    Lumping can only lose divergence (log-sum inequality), so this is a lower bound; it misses
    tail mass x KL between the two tails.
    """
    import torch

    kept_q_SK = log_probs_SV.gather(-1, base.ids_SK.long())
    tail_q_S = _log_mass_outside(log_probs_SV, base.ids_SK)
    log_q = torch.cat([kept_q_SK, tail_q_S[:, None]], dim=-1).double()
    log_p = torch.cat([base.log_probs_SK.double(), base.log_tail_S.double()[:, None]], dim=-1).log_softmax(-1)
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)


@dataclass
class StreamScores:
    """Of each scored position of one stream: negative log-likelihood, and either the compact logits (the baseline) or
    KL(base || this model) and whether the most likely token is the baseline's."""

    nll_nats_S: np.ndarray
    compact: CompactLogits | None
    kl_nats_S: np.ndarray | None
    agree_S: np.ndarray | None


def score_stream(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    ids_T: torch.Tensor,
    plan: list[Window],
    batch_size: int,
    top_k: int,
    base: CompactLogits | None,
) -> StreamScores:
    """One pass over a stream. `base` None: this is the baseline, whose compact logits are kept."""
    import torch

    nll, kept, kl, agree = [], [], [], []
    done = 0
    for targets_S, log_probs_SV in score(logits_of, ids_T, plan, batch_size):
        nll.append(-log_probs_SV.gather(-1, targets_S[:, None])[:, 0])
        if base is None:
            kept.append(compact(log_probs_SV, top_k))
            continue
        reference = CompactLogits(*(t.to(log_probs_SV.device) for t in base.part(done, done + len(targets_S))))
        kl.append(kl_nats(reference, log_probs_SV))
        agree.append(reference.ids_SK[:, 0] == log_probs_SV.argmax(-1))
        done += len(targets_S)

    def joined(parts: list[torch.Tensor]) -> Any:
        return torch.cat(parts).cpu().numpy()

    if base is None:
        whole = CompactLogits(*(torch.cat(parts).cpu() for parts in zip(*kept, strict=True)))
        return StreamScores(joined(nll), whole, None, None)
    return StreamScores(joined(nll), None, joined(kl), joined(agree))


def perplexity(nll_nats: float, tokens: int) -> float:
    """exp(total negative log-likelihood / scored tokens); infinite where that overflows."""
    assert tokens > 0
    with np.errstate(over="ignore"):
        return float(np.exp(np.float64(nll_nats) / tokens))


def by_document(stream: Stream, nll_nats_S: np.ndarray) -> list[dict[str, Any]]:
    """One row per document that has a scored token: document, category, nll_nats (sum), tokens (scored)."""
    owner_S = stream.document_T[1:]
    nll_D = np.bincount(owner_S, weights=nll_nats_S, minlength=len(stream.documents))
    tokens_D = np.bincount(owner_S, minlength=len(stream.documents))
    return [
        {"document": name, "category": stream.category, "nll_nats": float(nll), "tokens": int(tokens)}
        for name, nll, tokens in zip(stream.documents, nll_D, tokens_D, strict=True)
        if tokens
    ]
