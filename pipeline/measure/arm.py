"""One arm as it runs: a target, perhaps a draft, loaded in this process, and everything that is timed or read of them.

Legend: T tokens, V vocabulary, n tokens of one forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pipeline import config, provenance
from pipeline.checkpoint.load import dense_from_of, load_decoder
from pipeline.engine.decoder import Decoder
from pipeline.engine.generate import Generation, Reading, generate, logits_along, read, room_for
from pipeline.engine.propose import ModelProposer, NgramProposer, Proposer
from pipeline.engine.replay import KeptAt, kept_from_hits
from pipeline.engine.sample import Sampling
from pipeline.measure.costs import BatchSeconds, CostCurve, batch_seconds, draft_cost_ratios
from pipeline.measure.memory import Ledger, PeakMeter, read_bytes_per_step, resident_bytes, weight_bytes
from pipeline.measure.setup import ArmSpec, Ask, DraftSpec
from pipeline.measure.verdict import LogitGaps

ATTEMPTS = 8  # at one answer while its steps are compiled: one for each number of tokens is enough, and one more


class Arm:
    """Loads on construction; raises ValueError or OSError from the checkpoint reader."""

    def __init__(self, spec: ArmSpec) -> None:
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        self.spec = spec
        self.meter = PeakMeter(spec.device)
        self.libraries_bytes = None if self.meter.cuda else resident_bytes("VmRSS")
        self.target = self._load(spec.target, spec.pack_head, spec.dense_from, None)
        self.draft: Decoder | None = None
        self.proposer = self._proposer(spec.draft) if spec.draft else None
        self.peak_load_bytes = self.meter.peak_bytes()
        self.peak_load_reason = self.meter.reason
        self.meter.reset()
        self.longest_tokens = 0

    def draft_with(self, draft: DraftSpec) -> None:
        """Another draft for the loaded target."""
        self.draft = None
        self.proposer = self._proposer(draft)

    def _proposer(self, draft: DraftSpec) -> Proposer:
        if draft.folder is None:
            assert draft.ngram_max is not None
            return NgramProposer(draft.ngram_max, self.target.vocab_size, self.target.device)
        self.draft = self._load(draft.folder, draft.pack_head, None, draft.vocab)
        return ModelProposer(self.draft, self.target.vocab_size)

    def _load(
        self, folder: str, pack_head: bool, dense_from: dict[str, int | None] | None, vocab: str | None
    ) -> Decoder:
        return load_decoder(
            Path(folder),
            device=self.spec.device,
            dtype=getattr(torch, self.spec.dtype),
            pack_head=pack_head,
            trust_remote_code=self.spec.trust_remote_code,
            dense_from=dense_from,
            vocab_ids=None if vocab is None else provenance.read_json(Path(vocab))["ids"],
        )

    def read(self, prompt_ids: list[int], asks: Sequence[Ask]) -> Reading:
        """A prompt read once, by the draft as well if one of `asks` drafts, for all of their answers."""
        room = max(room_for(ask.max_new_tokens, ask.draft_len) for ask in asks)
        return read(self.target, prompt_ids, room, self.proposer if any(ask.draft_len for ask in asks) else None)

    def generate(self, prompt_ids: list[int], ask: Ask, reading: Reading | None = None) -> Generation:
        """One answer, with the identities of the protocol asserted on it. One in which a step was compiled is made
        again, since its times are not those of decoding."""
        for _ in range(ATTEMPTS):
            before = self._made()
            done = self._generate(prompt_ids, ask, reading)
            if self._made() == before:
                break
        else:
            raise RuntimeError(f"steps were still compiled in attempt {ATTEMPTS} at one answer: none is timed")
        room = len(prompt_ids) + room_for(ask.max_new_tokens, ask.draft_len)
        self.longest_tokens = max(self.longest_tokens, min(room, self.target.max_positions))
        self._check(done, ask, room)
        return done

    def _made(self) -> int:
        return self.target.made + (self.draft.made if self.draft else 0)

    def _generate(self, prompt_ids: list[int], ask: Ask, reading: Reading | None) -> Generation:
        sampling = _sampling(ask.sampling)
        generator = None
        if not sampling.greedy:
            generator = torch.Generator(self.target.device).manual_seed(self.spec.seed)
        return generate(
            self.target,
            prompt_ids,
            max_new_tokens=ask.max_new_tokens,
            end_ids=frozenset(self.spec.end_ids),
            proposer=self.proposer if ask.draft_len else None,
            draft_len=ask.draft_len,
            sampling=sampling,
            generator=generator,
            ignore_end=ask.ignore_end,
            reading=reading,
        )

    def _check(self, done: Generation, ask: Ask, room: int) -> None:
        """new = 1 (the prompt's own) + accepted + rounds - cut; a draft model drafts K in each round where it fits."""
        accepted = sum(r.accepted for r in done.rounds)
        assert len(done.ids) == 1 + accepted + len(done.rounds) - done.cut
        assert all(r.accepted <= r.drafted <= ask.draft_len for r in done.rounds)
        if ask.draft_len and self.draft and room <= min(self.target.max_positions, self.draft.max_positions):
            assert all(r.drafted == ask.draft_len for r in done.rounds), "the draft length did not act"

    def kept_at(self, prompt_ids: list[int], answer: list[int], hits: list[bool] | None) -> KeptAt:
        """What the draft would keep of `answer` at any position, for any K: from `hits`, or by asking the lookup."""
        if hits is not None:
            return kept_from_hits(hits)
        assert isinstance(self.proposer, NgramProposer)
        proposer = self.proposer

        def lookup(position: int, k: int) -> tuple[int, int]:
            drafted = proposer.lookup(prompt_ids + answer[:position], k)
            due = answer[position : position + len(drafted)]
            kept = next((i for i, (a, b) in enumerate(zip(drafted, due, strict=False)) if a != b), len(due))
            return len(drafted), kept

        return lookup

    def hits(self, prompt_ids: list[int], answer: list[int]) -> list[bool]:
        """One teacher-forced pass of the draft: is its choice at each answer position the answer's token?"""
        assert isinstance(self.proposer, ModelProposer) and answer
        proposer = self.proposer
        decoder = proposer.decoder
        room = decoder.max_positions - len(prompt_ids)
        if room < 0:
            return [False] * len(answer)
        logits_TV = logits_along(decoder, decoder.known(prompt_ids), decoder.known(answer[:-1][:room]))
        choices = proposer.ids_of(logits_TV[:, : proposer.common_vocab].argmax(-1)).tolist()
        found = [a == b for a, b in zip(choices, answer, strict=False)]
        return found + [False] * (len(answer) - len(found))

    def gaps(self, prompt_ids: list[int], answer_ids: list[int], plain_token: int, other_token: int) -> LogitGaps:
        """The target's logits after a prompt and the start of an answer, as distances from the best one."""
        logits_V = logits_along(self.target, prompt_ids, answer_ids)[-1].float()
        best, second = logits_V.topk(2).values.tolist()
        return LogitGaps(best - second, best - float(logits_V[plain_token]), best - float(logits_V[other_token]))

    def cost_curve(
        self, context_ids: list[int], max_tokens: int, draft_len: int, repeats: int, sampling: config.Sampling
    ) -> CostCurve:
        """With `repeats` of everything, rounds of `draft_len` among them."""
        curve = CostCurve(self.target, self.proposer, context_ids, max_tokens, draft_len, _sampling(sampling))
        curve.repeat(repeats)
        return curve

    def draft_cost_ratios(self, context_ids: list[int], draft_len: int, repeats: int) -> tuple[float, float]:
        assert self.proposer is not None
        return draft_cost_ratios(self.target, self.proposer, context_ids, draft_len, repeats)

    def batch_seconds(
        self, context_ids: list[int], batch_sizes: list[int], draft_lens: list[int], repeats: int
    ) -> dict[int, BatchSeconds] | str:
        assert self.proposer is not None
        return batch_seconds(self.target, self.proposer, context_ids, batch_sizes, draft_lens, repeats)

    def describe(self) -> dict[str, Any]:
        """Read back from the loaded objects, not from the configuration. `draft` is null without one."""
        draft: dict[str, Any] | None = None
        if self.draft is not None:
            about = self.draft.describe()
            draft = {**about, "precision": precision(about), "weight_bytes": weight_bytes(self.draft.module)}
        elif self.proposer is not None:
            draft = {"engine": "ngram", "precision": "no weights", "weight_bytes": 0}
        target = {**self.target.describe(), "device": device_name(self.spec.device)}
        return {"target": target, "draft": draft}

    def dense_from(self) -> dict[str, int | None]:
        """From how many rows on each class of the target's layers uses a plain GEMM."""
        return dense_from_of(self.target)

    def read_bytes(self) -> dict[str, int]:
        """Bytes a forward of target and draft must read: weights, and cache per position of context."""
        return {
            "target_weights": read_bytes_per_step(self.target.module),
            "target_cache_per_token": self.target.cache_bytes_per_token(),
            "draft_weights": read_bytes_per_step(self.draft.module) if self.draft else 0,
            "draft_cache_per_token": self.draft.cache_bytes_per_token() if self.draft else 0,
        }

    def ledger(self, budgets_bytes: list[int]) -> dict[str, Any]:
        """The memory ledger over everything generated so far."""
        peak, peak_reason = self.meter.peak_bytes(), self.meter.reason
        per_token = self.target.cache_bytes_per_token()
        draft_per_token = self.draft.cache_bytes_per_token() if self.draft else None
        # the peak of loading on a CPU counts from the start of the process, which is right: nothing ran before
        entries = Ledger(
            weight_bytes=weight_bytes(self.target.module),
            draft_weight_bytes=weight_bytes(self.draft.module) if self.draft else None,
            cache_bytes_per_token=per_token,
            draft_cache_bytes_per_token=draft_per_token,
            cache_bytes=self.longest_tokens * (per_token + (draft_per_token or 0)),
            peak_memory_bytes=peak,
            peak_load_memory_bytes=self.peak_load_bytes,
            libraries_bytes=self.libraries_bytes,
        )
        no_draft = "no draft model"
        reasons = {
            "draft_weight_bytes": no_draft,
            "draft_cache_bytes_per_token": no_draft,
            "peak_memory_bytes": peak_reason,
            "peak_load_memory_bytes": self.peak_load_reason,
            "libraries_bytes": "not part of device memory",
        }
        return asdict(entries.close(budgets_bytes, self.target.max_positions, reasons))


def _sampling(settings: config.Sampling) -> Sampling:
    return Sampling(settings.temperature, settings.top_k, settings.top_p)


def precision(readback: dict[str, Any]) -> str:
    """The kernel that most linear layers run in, or the weights' dtype where that is torch's own."""
    kernel = max(readback["kernels"], key=readback["kernels"].__getitem__)
    full = kernel.startswith(("Linear", "FullLinear", "FewRowsLinear"))
    return str(readback["weights_dtype"] if full else kernel)


def device_name(device: str) -> str:
    """`cpu`, or the GPU's own name."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device
