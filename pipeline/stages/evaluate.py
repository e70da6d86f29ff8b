"""Stage `evaluate`: quality of one checkpoint in the modules that serve it, alone and against the baseline.

`out` gets results.json (lm-eval's), samples.jsonl (one row per item), token_nll.parquet (one row per document) and, for
the baseline, baseline_logits.safetensors. Speculative decoding has no row here: it is its target's.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline import provenance, readers
from pipeline.checkpoint.files import read_object
from pipeline.config import ConfigError, Evaluate, Model, Runtime
from pipeline.measure import baseline as reference
from pipeline.measure import harness, memory, passages, quality, setup
from pipeline.progress import bar

if TYPE_CHECKING:
    from pipeline.engine.decoder import Decoder


def run(
    evaluate: Evaluate,
    model: Model,
    runtime: Runtime,
    *,
    key: str,
    checkpoint: Path,
    corpus: Path,
    out: Path,
    baseline: Path | None = None,
) -> dict[str, Any]:
    """Evaluate `checkpoint`; `baseline` is the out folder of evaluate@base, and absent there."""
    check_key(key, baseline)
    harness.check_tasks(evaluate.tasks)
    check_window(evaluate.window_tokens, checkpoint)
    documents = held_out(corpus)
    rows = harness.build_rows(documents, evaluate, runtime.seed)
    tokenizer = quality.load_tokenizer(checkpoint)
    streams = build_streams(documents, tokenizer, evaluate, runtime.seed)
    stream_sha256 = streams_sha256(streams, evaluate)
    base = None if baseline is None else reference.read(baseline, stream_sha256)

    decoder = load(checkpoint, runtime, model.trust_remote_code, "lean")
    scores, readback = score_streams(decoder, streams, evaluate, base), decoder.describe()
    if decoder.engine != "hf":
        del decoder  # before the next one is loaded: there may be room for one
        decoder = load(checkpoint, runtime, model.trust_remote_code, "hf")
    engines = None if readback["engine"] == "hf" else engine_difference(decoder, streams, evaluate, scores)
    with tempfile.TemporaryDirectory() as scratch:
        raw = harness.evaluate_tasks(decoder.module, tokenizer, rows, evaluate, runtime.seed, Path(scratch))
        results = harness.portable(raw, Path(scratch))
    samples = list(harness.sample_rows(raw))
    nll_rows = [row for s in streams for row in quality.by_document(s, scores[s.category].nll_nats_S)]
    weights = reference.weights_sha256(checkpoint)

    with provenance.whole_folder(out) as folder:
        provenance.write_json(folder / "results.json", results)
        provenance.write_text(folder / reference.SAMPLES_FILE, harness.json_lines(samples))
        reference.write_nll(folder, nll_rows)
        header = {"stream_sha256": stream_sha256, "weights_sha256": weights}
        logits_bytes = reference.write_logits(folder, scores, header) if base is None else None

    against = None if base is None else reference.compare(base, scores, nll_rows, samples, runtime.seed)
    alarms = [] if base is None or against is None else reference.alarms(base, against, nll_rows, weights)
    tasks = harness.task_metrics(raw, samples)
    last_word = tasks.get(harness.LAST_WORD, {})
    return {
        "tasks": tasks,
        "token_ppl": token_ppl(nll_rows, evaluate),
        "against_base": against,
        "acc_last_word": last_word.get("acc"),
        "acc_last_word_stderr": last_word.get("acc_stderr"),
        "baseline_logits_bytes": logits_bytes,
        "task_hash": provenance.json_sha256([stream_sha256, rows, results["configs"], evaluate.limit]),
        "alarms": non_finite(scores) + alarms,
        "bos": describe_bos(tokenizer),
        "readback": readback,
        "tasks_readback": decoder.describe(),
        "engine_difference": engines,
    }


def check_key(key: str, baseline: Path | None) -> None:
    """The baseline is compared with nothing, everything else with it."""
    if (key == "base") != (baseline is None):
        need = "takes no baseline=" if key == "base" else "needs baseline=PATH, the out folder of evaluate@base"
        raise ConfigError(f"evaluate@{key}: {need}")


def check_window(window_tokens: int, checkpoint: Path) -> None:
    """Raises ConfigError when a window does not fit the model's context."""
    settings = read_object(checkpoint / "config.json")
    settings = settings.get("text_config", settings)
    context = settings.get("max_position_embeddings") or settings.get("n_positions")
    if context is not None and window_tokens > context:
        raise ConfigError(
            f"evaluate.window_tokens: {window_tokens} is beyond the context of {context} tokens of {checkpoint}; "
            f"give at most {context}"
        )


def held_out(corpus: Path) -> list[dict[str, Any]]:
    """Documents of the evaluation split. Raises NothingToEvaluate when there are none."""
    rows = readers.read_documents(corpus)
    documents = [d for d in rows if d["split"] == "evaluation"]
    if not documents:
        raise harness.NothingToEvaluate(
            f"{corpus / 'documents.jsonl'}: none of {len(rows)} documents is in the evaluation split; "
            f"widen corpus.*.evaluation_documents"
        )
    return documents


def load(checkpoint: Path, runtime: Runtime, trust_remote_code: bool, engine: Literal["lean", "hf"]) -> Decoder:
    """The layers that serve, each fixed to its kernel for many rows: in the engine that serves (`lean`, where it knows
    the architecture), or in transformers' modules, which lm-eval needs.

    Serving measures from how many rows that kernel pays; here a window's length must not decide how it is rounded.
    """
    import torch

    from pipeline.checkpoint.load import dense_from_of, load_decoder, set_dense_from

    memory.refuse_too_little(runtime.min_free_memory_bytes)
    if runtime.threads is not None:
        torch.set_num_threads(runtime.threads)
    decoder = load_decoder(
        checkpoint,
        device=runtime.device,
        dtype=getattr(torch, runtime.dtype),
        pack_head=setup.pack_head(checkpoint),
        trust_remote_code=trust_remote_code,
        engine=engine,
    )
    set_dense_from(decoder.module, {name: rows and 1 for name, rows in dense_from_of(decoder).items()})
    return decoder


def build_streams(
    documents: list[dict[str, Any]], tokenizer: Any, evaluate: Evaluate, seed: int
) -> list[quality.Stream]:
    """One stream per category: its documents in seeded order, each cut to `max_document_chars`."""
    streams = []
    for category in sorted({d["category"] for d in documents}):
        chosen = passages.shuffled([d for d in documents if d["category"] == category], seed)
        texts = [(d["id"], passages.cut(d["text"], evaluate.max_document_chars)) for d in chosen]
        streams.append(quality.concatenate(category, texts, tokenizer, evaluate.max_ppl_tokens))
    return streams


def streams_sha256(streams: list[quality.Stream], evaluate: Evaluate) -> str:
    """Identity of what is scored and how: equal hashes may be compared position by position."""
    tokens = [[s.category, s.ids_T.tolist()] for s in streams]
    return provenance.json_sha256([tokens, evaluate.window_tokens, evaluate.stride_tokens, evaluate.baseline_top_k])


def engine_difference(
    decoder: Decoder, streams: list[quality.Stream], evaluate: Evaluate, scores: dict[str, quality.StreamScores]
) -> dict[str, Any]:
    """Loss of the first window of each stream by `decoder`, which the tasks run in, less that by the engine that
    serves, in nats a token: what the tasks' scores leave open of what is served."""
    import numpy as np

    first = [s._replace(ids_T=s.ids_T[: evaluate.window_tokens + 1]) for s in streams]
    found = score_streams(decoder, first, evaluate, None)
    parts = [f.nll_nats_S - scores[c].nll_nats_S[: len(f.nll_nats_S)] for c, f in found.items()]
    difference_S = np.concatenate(parts)
    return {
        "tokens": len(difference_S),
        "mean_nats": float(difference_S.mean()),
        "mean_absolute_nats": float(np.abs(difference_S).mean()),
    }


def score_streams(
    decoder: Decoder, streams: list[quality.Stream], evaluate: Evaluate, base: reference.Baseline | None
) -> dict[str, quality.StreamScores]:
    import torch

    def logits_of(ids_BN: torch.Tensor) -> torch.Tensor:
        shown.update(len(ids_BN))
        return torch.stack([decoder.forward(ids_N, decoder.new_cache(len(ids_N))) for ids_N in ids_BN])

    windows = {
        s.category: quality.windows(len(s.ids_T), evaluate.window_tokens, evaluate.stride_tokens) for s in streams
    }
    with bar("token perplexity", sum(map(len, windows.values())), "window") as shown:
        return {
            stream.category: quality.score_stream(
                logits_of,
                torch.from_numpy(stream.ids_T).to(decoder.device),
                windows[stream.category],
                evaluate.batch_size,
                evaluate.baseline_top_k,
                None if base is None else base.logits[stream.category],
            )
            for stream in streams
        }


def token_ppl(nll_rows: list[dict[str, Any]], evaluate: Evaluate) -> dict[str, Any]:
    """Papers' form: exp(total nll / total tokens), overall and by category."""

    def of(rows: list[dict[str, Any]]) -> dict[str, Any]:
        tokens = sum(r["tokens"] for r in rows)
        return {
            "value": quality.perplexity(sum(r["nll_nats"] for r in rows), tokens),
            "tokens": tokens,
            "documents": len(rows),
        }

    by_category = {
        c: of([r for r in nll_rows if r["category"] == c]) for c in sorted({r["category"] for r in nll_rows})
    }
    window = {"window_tokens": evaluate.window_tokens, "stride_tokens": evaluate.stride_tokens}
    return of(nll_rows) | window | {"by_category": by_category}


def non_finite(scores: dict[str, quality.StreamScores]) -> list[str]:
    import numpy as np

    counts = {c: int((~np.isfinite(s.nll_nats_S)).sum()) for c, s in scores.items()}
    return [f"{n} tokens of {c} have a log-likelihood that is not finite" for c, n in counts.items() if n]


def describe_bos(tokenizer: Any) -> dict[str, Any]:
    """The BOS rule of every scoring path: one, where the tokenizer adds one, else none."""
    leading, prefix = quality.leading_tokens(tokenizer), harness.rolling_prefix(tokenizer)
    return {
        "added": bool(leading),
        "token": tokenizer.decode(leading) if leading else None,
        "rolling_prefix": None if prefix is None else tokenizer.decode([prefix]),
    }
