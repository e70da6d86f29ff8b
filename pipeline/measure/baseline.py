"""The full-precision evaluation as others are compared with it: compact logits, per-document and per-item rows."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import provenance
from pipeline.measure import harness, statistics
from pipeline.measure.quality import CompactLogits, StreamScores

LOGITS_FILE, NLL_FILE, SAMPLES_FILE = "baseline_logits.safetensors", "token_nll.parquet", "samples.jsonl"
HEADER = "evaluated"


class BaselineMismatch(ValueError):
    """The baseline was evaluated on other tokens or with other settings."""


@dataclass
class Baseline:
    logits: dict[str, CompactLogits]  # by category
    documents: list[dict[str, Any]]  # rows of token_nll.parquet
    samples: list[dict[str, Any]]
    weights_sha256: str


def write_logits(folder: Path, scores: dict[str, StreamScores], header: dict[str, str]) -> int:
    """Tensors `CATEGORY.ids_SK`, ...; `header` says what they belong to. Returns the bytes written."""
    from safetensors.torch import save_file

    kept = {category: s.compact for category, s in scores.items() if s.compact is not None}
    tensors = {f"{c}.{name}": t.contiguous() for c, part in kept.items() for name, t in part._asdict().items()}
    # one key, because safetensors writes several in any order
    save_file(tensors, folder / LOGITS_FILE, metadata={HEADER: json.dumps(header, sort_keys=True)})
    return (folder / LOGITS_FILE).stat().st_size


def write_nll(folder: Path, rows: list[dict[str, Any]]) -> None:
    """One row a document: document, category, nll_nats, tokens."""
    import pandas as pd

    pd.DataFrame(rows).to_parquet(folder / NLL_FILE, index=False)


def read(folder: Path, stream_sha256: str) -> Baseline:
    """Raises BaselineMismatch when the baseline's tokens, windows or top-k are not those of `stream_sha256`."""
    import pandas as pd
    from safetensors import safe_open

    if not (folder / LOGITS_FILE).is_file():
        raise BaselineMismatch(f"{folder / LOGITS_FILE}: not found; run evaluate@base first")
    logits: dict[str, CompactLogits] = {}
    with safe_open(folder / LOGITS_FILE, framework="pt") as f:
        header = json.loads(f.metadata()[HEADER])
        for category in sorted({name.rsplit(".", 1)[0] for name in f.keys()}):  # noqa: SIM118
            logits[category] = CompactLogits(*(f.get_tensor(f"{category}.{part}") for part in CompactLogits._fields))
    if header["stream_sha256"] != stream_sha256:
        raise BaselineMismatch(
            f"{folder}: the baseline was scored on other tokens or windows than evaluate.* and the tokenizer give now; "
            f"run evaluate@base again"
        )
    documents = pd.read_parquet(folder / NLL_FILE).to_dict("records")
    lines = (folder / SAMPLES_FILE).read_text(encoding="utf-8").splitlines()
    return Baseline(logits, documents, [json.loads(line) for line in lines], header["weights_sha256"])


def weights_sha256(checkpoint: Path) -> str:
    """Hash of the weights alone, whatever else lies in the folder."""
    return provenance.json_sha256([provenance.file_sha256(p) for p in sorted(checkpoint.glob("*.safetensors"))])


def compare(
    base: Baseline,
    scores: dict[str, StreamScores],
    documents: list[dict[str, Any]],
    samples: list[dict[str, Any]],
    seed: int,
) -> dict[str, Any]:
    """The metrics `against_base`, on the same tokens and items; intervals are 95 %, resampled by document."""
    tasks = sorted({s["task"] for s in samples if "correct" in s})
    changes = {task: dataclasses.asdict(statistics.mcnemar(*paired(base.samples, samples, task))) for task in tasks}
    by_category = {c: _differences([s], _of(c, base.documents), _of(c, documents), seed) for c, s in scores.items()}
    return _differences(list(scores.values()), base.documents, documents, seed) | {
        "acc_last_word": changes.get(harness.LAST_WORD),
        "mcnemar": changes,
        "by_category": by_category,
    }


def _of(category: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["category"] == category]


def _differences(
    scores: list[StreamScores], before: list[dict[str, Any]], after: list[dict[str, Any]], seed: int
) -> dict[str, Any]:
    kl_S = np.concatenate([s.kl_nats_S for s in scores if s.kl_nats_S is not None])
    agree_S = np.concatenate([s.agree_S for s in scores if s.agree_S is not None])
    assert [(d["document"], d["tokens"]) for d in before] == [(d["document"], d["tokens"]) for d in after]
    tokens_D = [d["tokens"] for d in after]
    change_D = [a["nll_nats"] - b["nll_nats"] for b, a in zip(before, after, strict=True)]
    kl_D = [float(part.sum()) for part in np.split(kl_S, np.cumsum(tokens_D)[:-1])]
    return {
        "delta_log_ppl": dataclasses.asdict(statistics.paired_mean_difference(change_D, tokens_D, seed)),
        "kl_nats_mean": float(kl_S.mean()),
        "kl_nats_mean_interval": dataclasses.asdict(statistics.paired_mean_difference(kl_D, tokens_D, seed)),
        "kl_nats_median": float(np.median(kl_S)),
        "kl_nats_p99": float(np.quantile(kl_S, 0.99)),
        "top1_agreement": float(agree_S.mean()),
    }


def paired(before: list[dict[str, Any]], after: list[dict[str, Any]], task: str) -> tuple[list[bool], list[bool]]:
    """Right or wrong on the same items, in one order. Raises BaselineMismatch when the items differ."""
    left, right = harness.correct_by_item(before, task), harness.correct_by_item(after, task)
    if left.keys() != right.keys():
        raise BaselineMismatch(f"{task}: the baseline answered other items; run evaluate@base again")
    return list(left.values()), [right[item] for item in left]


def alarms(base: Baseline, against: dict[str, Any], documents: list[dict[str, Any]], weights_sha256: str) -> list[str]:
    """What looks too good or too equal to be true, one sentence each."""
    found = []
    delta = against["delta_log_ppl"]
    if delta["high"] < 0:
        found.append(f"implausible gain: log-perplexity below the baseline's by {-delta['value']:.4f} nats a token")
    for task, change in against["mcnemar"].items():
        if change["gained"] > change["lost"] and change["mcnemar_p"] < 1 - statistics.CONFIDENCE:
            found.append(f"implausible gain: {task} gains {change['gained']} items and loses {change['lost']}")
    same = [d["nll_nats"] for d in documents] == [d["nll_nats"] for d in base.documents]
    if same and weights_sha256 != base.weights_sha256:
        found.append("identical scores for different weights: the checkpoint scored may not be the one named")
    return found
