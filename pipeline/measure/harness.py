"""lm-eval around our modules: local tasks from evals/, its own tasks by name, results fit for keeping.

Nothing is cached between checkpoints: lm-eval's response cache is not keyed by the model.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import json
import logging
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline import provenance
from pipeline.config import Evaluate
from pipeline.measure import passages, quality
from pipeline.progress import Bar, bar

LOCAL_TASKS_DIR = Path(__file__).resolve().parents[2] / "evals"
LAST_WORD = "last_word"
ACCURACIES = ("acc", "exact_match")
KEPT = ("results", "groups", "configs", "versions", "n-shot", "higher_is_better", "n-samples")


class UnknownTask(ValueError):
    """A task that neither evals/ nor lm-eval has."""


class NothingToEvaluate(ValueError):
    """A category or a task without held-out text."""


class BrokenModel(ValueError):
    """A checkpoint whose scores are beyond numbers."""


def local_tasks() -> dict[str, dict[str, Any]]:
    """Task name -> configuration, of the files under evals/."""
    import yaml

    configs = [yaml.safe_load(p.read_text(encoding="utf-8")) for p in sorted(LOCAL_TASKS_DIR.glob("*.yaml"))]
    return {c["task"]: c for c in configs}


def check_tasks(names: list[str]) -> None:
    """Raises UnknownTask with near matches. lm-eval's own index (seconds) is read only when a name is not local."""
    local = local_tasks()
    if set(names) <= set(local):
        return
    known = task_manager(with_defaults=True).all_tasks
    for name in names:
        if name not in known:
            near = ", ".join(difflib.get_close_matches(name, known, n=3) or sorted(local))
            raise UnknownTask(f"evaluate.tasks: {name!r} is neither under evals/ nor in lm-eval; near matches: {near}")


@functools.cache
def task_manager(with_defaults: bool) -> Any:
    """lm-eval's index over evals/ and, `with_defaults`, over its own thousands of files (read once a process)."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(LOCAL_TASKS_DIR), include_defaults=with_defaults)


def build_rows(documents: list[dict[str, Any]], settings: Evaluate, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Rows of each local task asked for, from held-out `documents`. Raises NothingToEvaluate naming the task."""
    local = local_tasks()
    return {name: _rows_of(local[name], documents, settings, seed) for name in settings.tasks if name in local}


def _rows_of(config: dict[str, Any], documents: list[dict[str, Any]], settings: Evaluate, seed: int) -> list[dict]:
    meta = config["metadata"]
    pool = [d for d in documents if d["category"] in meta["categories"]]
    if meta["rows"] == LAST_WORD:
        rows = passages.last_word_rows(pool, settings.last_word_items, seed)
    else:
        rows = passages.perplexity_rows(pool, settings.perplexity_documents, settings.max_document_chars, seed)
    if not rows:
        found = ", ".join(sorted({d["category"] for d in documents}))
        raise NothingToEvaluate(
            f"evaluate.tasks: {config['task']} finds no held-out text of category {' or '.join(meta['categories'])} "
            f"(the corpus has: {found}); extend corpus.*.evaluation_documents or drop the task"
        )
    return rows


def evaluate_tasks(
    module: Any, tokenizer: Any, rows: dict[str, list[dict[str, Any]]], settings: Evaluate, seed: int, workdir: Path
) -> dict[str, Any]:
    """lm-eval's result with samples, for `settings.tasks`; data files and the datasets cache stay in `workdir`."""
    from lm_eval import evaluator

    for noisy in ("lm_eval", "datasets", "transformers.tokenization_utils_base"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    local = local_tasks()
    specs = [_with_data(local[n], rows[n], workdir) if n in local else n for n in settings.tasks]
    manager = task_manager(with_defaults=not set(settings.tasks) <= set(local))
    with _no_progress_bars():
        loaded = manager.load(specs)
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        if own is None or (settings.num_fewshot is not None and own != 0):
            task.set_config(key="num_fewshot", value=settings.num_fewshot or 0)
        task.set_fewshot_seed(seed=seed)
    try:
        with _no_progress_bars(), bar("lm-eval", None, "forward") as shown:
            model = language_model(module, tokenizer, settings, shown)
            return evaluator.evaluate(model, loaded, limit=settings.limit, bootstrap_iters=0, log_samples=True)
    except OverflowError:
        raise BrokenModel(
            f"evaluate.tasks: a perplexity of {', '.join(settings.tasks)} overflows: the checkpoint gives the text "
            f"next to no probability; quantize it again with other settings"
        ) from None


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """lm-eval draws its bars wherever standard error goes; here only on a terminal (logging is not affected)."""
    with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
        yield


def json_lines(rows: list[dict[str, Any]]) -> str:
    """One strict JSON object a line; non-finite numbers are null."""
    return "".join(json.dumps(provenance.finite(r), ensure_ascii=False, allow_nan=False) + "\n" for r in rows)


def _with_data(config: dict[str, Any], rows: list[dict[str, Any]], workdir: Path) -> dict[str, Any]:
    path = (workdir / f"{config['task']}.jsonl").resolve()
    provenance.write_text(path, json_lines(rows))
    return config | {"dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": str(workdir / "datasets")}}


def language_model(module: Any, tokenizer: Any, settings: Evaluate, shown: Bar) -> Any:
    """lm-eval's HFLM over the loaded module: float32 log-softmax, windows of `window_tokens`, one BOS.

    lm-eval starts every rolling window chain with a prefix token and, for tokenizers that add a BOS, the text with
    another; here the prefix is that only BOS. Tokenizers without one get the end-of-text token as prefix.
    """
    from lm_eval.models.huggingface import HFLM

    class OneBos(HFLM):
        add_bos_token: Any

        def _model_call(self, *args: Any, **kwargs: Any) -> Any:
            logits = super()._model_call(*args, **kwargs)
            shown.update()
            return logits

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            own, self.add_bos_token = self.add_bos_token, False
            try:
                return super().loglikelihood_rolling(requests, disable_tqdm)
            finally:
                self.add_bos_token = own

    return OneBos(
        pretrained=module,
        tokenizer=tokenizer,
        softmax_dtype="float32",
        max_length=settings.window_tokens,
        batch_size=settings.batch_size,
        prefix_token_id=rolling_prefix(tokenizer),
    )


def rolling_prefix(tokenizer: Any) -> int | None:
    """The token that the first token of a rolling text is conditioned on; None = lm-eval's choice."""
    leading = quality.leading_tokens(tokenizer)
    return leading[0] if leading else tokenizer.eos_token_id


def sample_rows(raw: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One deterministic row per item and filter, by task and document: what it takes to recompute each metric."""
    for task in sorted(raw["samples"]):
        kind = raw["configs"][task]["output_type"]
        for sample in sorted(raw["samples"][task], key=lambda s: (s["doc_id"], s["filter"])):
            yield _sample_row(task, kind, sample)


def _sample_row(task: str, kind: str, sample: dict[str, Any]) -> dict[str, Any]:
    row = {"task": task, "doc_id": sample["doc"].get("id", sample["doc_id"]), "filter": sample["filter"]}
    responses = sample["filtered_resps"]
    if kind == "loglikelihood":
        row |= {"target": sample["target"], "loglikelihood": responses[0][0], "is_greedy": bool(responses[0][1])}
    elif kind == "loglikelihood_rolling":
        row |= {"loglikelihood": responses[0]}
        row |= {f"{unit}s": sample[f"{unit}_perplexity"][1] for unit in ("word", "byte")}
    else:
        row |= {"target": sample["target"], "responses": responses}
    correct = next((sample[m] for m in ACCURACIES if m in sample), None)
    return row if correct is None else row | {"correct": bool(correct)}


def task_metrics(raw: dict[str, Any], samples: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Scores of each task by metric name (of the first filter), `items`, and `acc` with its binomial standard error."""
    metrics: dict[str, dict[str, Any]] = {}
    for task, found in raw["results"].items():
        scores: dict[str, Any] = {}
        for name, value in found.items():
            metric, comma, _ = name.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, (int, float)):
                scores.setdefault(metric, value)
        correct = list(correct_by_item(samples, task).values())
        if correct:
            acc = sum(correct) / len(correct)
            scores |= {"acc": acc, "acc_stderr": math.sqrt(acc * (1 - acc) / len(correct))}
        metrics[task] = scores | {"items": raw["n-samples"].get(task, {}).get("effective")}
    return metrics


def correct_by_item(samples: list[dict[str, Any]], task: str) -> dict[str, bool]:
    """Item -> whether it was answered right, under the task's first filter."""
    rows = [s for s in samples if s["task"] == task and "correct" in s]
    return {str(s["doc_id"]): s["correct"] for s in rows if s["filter"] == rows[0]["filter"]}


def portable(raw: dict[str, Any], workdir: Path) -> dict[str, Any]:
    """lm-eval's result without samples, dates, absolute paths and memory addresses: the same on every machine."""
    import lm_eval

    roots = [str(workdir.resolve()), str(LOCAL_TASKS_DIR.parent), str(Path(lm_eval.__file__).parents[1]), sys.prefix]

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): clean(v) for k, v in value.items() if k != "cache_dir"}
        if isinstance(value, (list, tuple)):
            return [clean(v) for v in value]
        if value is None or isinstance(value, (bool, int, float)):
            return value
        text = re.sub(r" at 0x[0-9a-f]+", "", str(value))
        for root in roots:
            text = text.replace(f"{root}/", "").replace(root, "")
        return text

    return {name: clean(raw[name]) for name in KEPT if name in raw} | {"lm_eval_version": lm_eval.__version__}
