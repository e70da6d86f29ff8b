"""What is to be served: the recommended row as folders, formats and settings, or the fallback where there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pipeline.reporting import headline
from pipeline.reporting.rows import Row
from pipeline.reporting.study import Study

Decision = Literal["deploy", "no decision", "nothing qualifies"]
FULL = "full"
TARGETS = {"base": "artifacts/target", "gptq": "artifacts/quantized/gptq", "awq": "artifacts/quantized/awq"}
DRAFTS = {"draft": "artifacts/draft", "quantized_draft": "artifacts/quantized/draft"}


@dataclass(frozen=True)
class Weights:
    """A checkpoint folder, relative to the repository; `input`: its name among the benchmark's inputs."""

    folder: str
    input: str
    format: str


@dataclass(frozen=True)
class Deployment:
    """`row` is base, plain, when nothing was decided. `draft` is None for plain decoding and for a lookup."""

    decision: Decision
    row: Row
    target: Weights
    draft: Weights | None
    ngram_max: int | None

    @property
    def fallback(self) -> bool:
        return self.decision != "deploy"

    @property
    def subject(self) -> str:
        what = f"{self.row.target}, {headline.decoding(self.row)}"
        return f"Fallback, for nothing was shown to be better: {what}" if self.fallback else f"Recommended: {what}"


def unlike_measured(study: Study, chosen: Deployment) -> list[str]:
    """What of the measurement a server that reads the files as they are does not repeat, in lines of a comment."""
    return [*_other_engine(study, chosen), *_other_heads(study, chosen)]


def _other_engine(study: Study, chosen: Deployment) -> list[str]:
    """The row's engine and activations, read back, against transformers in the dtype of the weights."""
    loaded, dtype = study.arms[chosen.row.name]["readback"], study.config.runtime.dtype
    if loaded is None or (loaded["engine"], loaded["activations_dtype"]) == ("hf", dtype):
        return []
    return [
        f"Measured in the engine {loaded['engine']}, with {loaded['activations_dtype']} activations, "
        f"on {study.config.runtime.device};",
        f"transformers computes in {dtype} here, vLLM in its --dtype: other speeds, and at near ties other answers.",
    ]


def _other_heads(study: Study, chosen: Deployment) -> list[str]:
    methods = study.config.quantize
    quantized_draft = chosen.draft is not None and chosen.draft.input == "quantized_draft"
    copies = {"the target": chosen.target.input, "the draft": "draft" if quantized_draft else "none"}
    packed = [what for what, key in copies.items() if key in methods and methods[key].pack_head]
    if not packed:
        return []
    return [
        f"Measured with the head of {' and '.join(packed)} (and an embedding tied to it) held at 8 bits;",
        "the files hold them in full precision, and so will this.",
    ]


def deployment(study: Study) -> Deployment:
    row = study.choice
    if row is None:
        return _serving("nothing qualifies", study.rows["base"], study)
    return _serving("deploy" if headline.decided(study) else "no decision", row, study)


def _serving(decision: Decision, row: Row, study: Study) -> Deployment:
    target = Weights(TARGETS[row.target], row.target, _format(study, row.target))
    kind = study.arms[row.name]["draft"]["kind"] if row.speculative else None
    if kind == "ngram":
        return Deployment(decision, row, target, None, study.config.draft.ngram_max)
    return Deployment(decision, row, target, _draft(kind, row, study) if kind else None, None)


def _draft(kind: str, row: Row, study: Study) -> Weights:
    """As the measurement chose it (`measure.setup.draft_for`)."""
    if kind == "self" or row.target in study.config.speculate.quantized_draft_for:
        return Weights(DRAFTS["quantized_draft"], "quantized_draft", _format(study, "draft"))
    return Weights(DRAFTS["draft"], "draft", FULL)


def _format(study: Study, key: str) -> str:
    return FULL if key == "base" else str(study.records.metrics(f"quantize@{key}")["format"])


def settings(study: Study) -> dict[str, Any] | None:
    """The recommended row as a server must be told it; None when nothing qualifies."""
    if study.choice is None:
        return None
    chosen = deployment(study)
    return {
        "checkpoint": chosen.target.folder,
        "draft": study.arms[chosen.row.name]["draft"] if chosen.row.speculative else None,
        "draft_len": chosen.row.draft_len,
        "device": study.config.runtime.device,
        "weights_dtype": study.arms[chosen.row.name]["readback"]["weights_dtype"],
        "temperature": study.config.speculate.sampling.temperature,
    }
