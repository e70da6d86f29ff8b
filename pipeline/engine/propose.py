"""Where drafted tokens come from: a draft model with its own cache, or a lookup in the text so far.

Legend: K drafted tokens, V vocabulary of the target, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from pipeline.engine.decoder import Decoder
from pipeline.engine.sample import Sampling, distribution, draw

if TYPE_CHECKING:
    from pipeline.engine.hf_cache import Cache


@dataclass
class Proposal:
    """ids_K on the proposer's device and, for sampling, the distribution each was drawn from (probs_KV)."""

    ids_K: torch.Tensor
    probs_KV: torch.Tensor | None


class Proposer(Protocol):
    def start(self, prompt_ids: list[int], capacity: int) -> None:
        """Forget the last sequence and read this prompt; make room for `capacity` tokens (less if the draft's context
        is shorter)."""

    def room(self, committed: int) -> int:
        """Tokens that may be drafted after `committed` ones."""

    def propose(self, committed: list[int], k: int, sampling: Sampling, generator: torch.Generator | None) -> Proposal:
        """At most k tokens that may follow `committed`."""


class ModelProposer:
    """A draft model. Its cache always holds a prefix of the committed tokens, caught up on each call."""

    def __init__(self, decoder: Decoder, target_vocab_size: int) -> None:
        self.decoder = decoder
        self.target_vocab_size = target_vocab_size
        self.ids_U = decoder.vocab_ids_U
        self.common_vocab = min(decoder.vocab_size, target_vocab_size) if self.ids_U is None else len(self.ids_U)
        self.cache: Cache = decoder.new_cache(1)
        self.cached: list[int] = []
        self._fed = torch.empty(0, dtype=torch.long)
        self._own_generator: torch.Generator | None = None

    def start(self, prompt_ids: list[int], capacity: int) -> None:
        self.cache = self.decoder.new_cache(min(capacity, self.decoder.max_positions))
        self.cached = []
        if len(prompt_ids) < self.cache.capacity:
            self.decoder.prefill(self._catch_up([*prompt_ids, 0])[:-1], self.cache)
            self.cached = list(prompt_ids)

    def room(self, committed: int) -> int:
        # all committed tokens and every drafted one but the last are fed to the draft
        return max(0, self.cache.capacity - committed + 1)

    def propose(self, committed: list[int], k: int, sampling: Sampling, generator: torch.Generator | None) -> Proposal:
        ids_T = self._catch_up(committed)
        generator = self._on_own_device(generator)
        drafted: list[torch.Tensor] = []
        probs: list[torch.Tensor] = []
        for _ in range(k):
            logits_1V = self.decoder.forward(ids_T, self.cache, last_only=True)[:, : self.common_vocab]
            if sampling.greedy:
                ids_T = self.ids_of(logits_1V.argmax(-1))
            else:
                probs_1V = self._widen(distribution(logits_1V, sampling))
                ids_T = draw(probs_1V, generator)
                probs.append(probs_1V)
            drafted.append(ids_T)
        ids_K = torch.cat(drafted)
        self._fed = ids_K[:-1]  # stays on the device; read when the next call needs it
        return Proposal(ids_K, torch.cat(probs) if probs else None)

    def _catch_up(self, committed: list[int]) -> torch.Tensor:
        """Roll back to the longest cached prefix of `committed`; returns the tokens still to be fed (at least one)."""
        if len(self.cached) < self.cache.length:
            self.cached = self.cached + self._fed.tolist()
        assert len(self.cached) == self.cache.length
        same = 0
        limit = min(len(self.cached), len(committed) - 1)
        while same < limit and self.cached[same] == committed[same]:
            same += 1
        self.cache.rollback(same)
        self.cached = list(committed)
        return torch.tensor(self.decoder.known(committed[same:]), device=self.decoder.device)

    def _on_own_device(self, generator: torch.Generator | None) -> torch.Generator | None:
        """A generator draws on its own device only: a draft elsewhere continues one of its own from the same seed."""
        if generator is None or generator.device.type == self.decoder.device.type:
            return generator
        if self._own_generator is None:
            self._own_generator = torch.Generator(self.decoder.device).manual_seed(generator.initial_seed())
        return self._own_generator

    def ids_of(self, columns_T: torch.Tensor) -> torch.Tensor:
        """Token ids of columns of the draft's logits."""
        return columns_T if self.ids_U is None else self.ids_U[columns_T]

    def _widen(self, probs_1V: torch.Tensor) -> torch.Tensor:
        """Over the target's vocabulary; what the draft cannot say has probability 0."""
        if self.ids_U is not None:
            return probs_1V.new_zeros(1, self.target_vocab_size).index_copy_(1, self.ids_U, probs_1V)
        missing = self.target_vocab_size - probs_1V.shape[-1]
        return torch.nn.functional.pad(probs_1V, (0, missing)) if missing else probs_1V


class NgramProposer:
    """Prompt lookup: what followed the latest earlier occurrence of the longest suffix of up to `ngram_max` tokens."""

    def __init__(self, ngram_max: int, target_vocab_size: int, device: torch.device) -> None:
        self.ngram_max = ngram_max
        self.target_vocab_size = target_vocab_size
        self.device = device

    def start(self, prompt_ids: list[int], capacity: int) -> None:
        pass

    def room(self, committed: int) -> int:
        return self.target_vocab_size

    def propose(self, committed: list[int], k: int, sampling: Sampling, generator: torch.Generator | None) -> Proposal:
        ids_K = torch.tensor(self.lookup(committed, k), dtype=torch.long, device=self.device)
        if sampling.greedy:
            return Proposal(ids_K, None)
        return Proposal(ids_K, torch.nn.functional.one_hot(ids_K, self.target_vocab_size).float())

    def lookup(self, committed: list[int], k: int) -> list[int]:
        for n in range(min(self.ngram_max, len(committed) - 1), 0, -1):
            suffix = committed[-n:]
            for start in range(len(committed) - n - 1, -1, -1):
                if committed[start : start + n] == suffix:
                    return committed[start + n : start + n + k]
        return []
