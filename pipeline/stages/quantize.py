"""Stage `quantize@KEY`: a full-precision checkpoint and calibration rows -> a quantized checkpoint and its recipe.

Refusals come first (settings, shapes, rows), then the reference pass, the library's run, the export, and last the
errors of every module as read back from the written file.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline import provenance
from pipeline.config import QuantizeMethod, Runtime
from pipeline.measure import memory
from pipeline.quantizers import Job, QuantizationError, Quantized, adapter
from pipeline.quantizers.bars import no_other_bars
from pipeline.quantizers.plan import Plan, make_plan

BF16_INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "bf16"}
PROBE_TOKENS = 64
WORSE_THAN_NEAREST = 1.5


def run(
    quantize: QuantizeMethod,
    runtime: Runtime,
    *,
    key: str,
    model: Path,
    calibration: Path,
    out: Path,
    target: Path | None = None,
) -> dict[str, Any]:
    """Write the checkpoint and recipe.json to `out`; the metrics hold the per-module table.

    `model` may be a draft whose draft.json says `self` (then `target` is quantized) or `ngram` (nothing is).
    Raises QuantizationError or CheckpointError, one line, before slow work wherever the cause can be known by then.
    """
    draft = model / "draft.json"
    kind = None
    if draft.exists():
        kind = provenance.read_json(draft).get("kind")
        if kind is None:
            raise QuantizationError(f"{draft}: has no kind; run `dvc repro draft` again")
    if kind == "self" and target is None:
        raise QuantizationError(f"{draft}: the draft is the target itself; give target=PATH, which is then quantized")
    source = target if kind == "self" and target is not None else model
    with provenance.whole_folder(out) as folder:
        if kind is not None:
            shutil.copyfile(draft, folder / "draft.json")
        if kind == "ngram":
            return {"kind": kind, "weight_bytes": 0, "modules": 0, "layers": []}
        plan = make_plan(source, quantize, f"quantize.{key}", adapter(quantize.backend))
        rows = read_rows(calibration / "rows.parquet", plan)[: quantize.calibration_rows]
        memory.refuse_too_little(runtime.min_free_memory_bytes)
        with no_other_bars():
            metrics = _quantize(quantize, runtime, plan, rows, source, folder)
        metrics["recipe"] |= {"calibration_sha256": provenance.file_sha256(calibration / "rows.parquet")}
        provenance.write_json(folder / "recipe.json", metrics["recipe"])
        metrics["checkpoint_sha256"] = provenance.tree_sha256(folder)
    return metrics


def _quantize(
    method: QuantizeMethod, runtime: Runtime, plan: Plan, rows: list[list[int]], source: Path, folder: Path
) -> dict[str, Any]:
    import torch

    from pipeline.quantizers.error import module_table, reference
    from pipeline.quantizers.export import write_checkpoint

    started = time.monotonic()
    threads = runtime.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    dtype, reason = arithmetic_dtype(runtime, method)
    probe_ids = rows[0][:PROBE_TOKENS]
    inputs, logits_TV = reference(source, plan, rows[: method.error_rows], probe_ids, runtime.device, dtype)
    job = Job(
        model=source,
        plan=plan,
        rows=rows,
        method=method,
        device=runtime.device,
        dtype=dtype,
        threads=threads,
        seed=runtime.seed,
        scratch=folder / "scratch",
        probe_ids=probe_ids,
        probe_logits_TV=logits_TV,
    )
    job.scratch.mkdir()
    quantized = adapter(method.backend).quantize(job)
    refuse_fallbacks(quantized, plan)
    write_checkpoint(quantized, plan, source, folder)
    shutil.rmtree(job.scratch)
    recipe = {
        "settings": asdict(method),
        "arithmetic_dtype": dtype,
        "arithmetic_reason": reason,
        "device": runtime.device,
        "threads": threads,
        "seed": runtime.seed,
        "versions": quantized.versions,
    }
    layers = module_table(inputs, quantized, folder, source, method)
    refuse_worse_than_nearest(layers)
    return {
        **_file_metrics(folder, plan),
        "rows": quantized.rows,
        "tokens": quantized.tokens,
        "rows_given": len(rows),
        "tokens_given": sum(map(len, rows)),
        "matched_modules": list(plan.shapes),
        "ignored_modules": plan.ignored,
        **summarize(layers),
        "error_rows": min(method.error_rows, len(rows)),
        "quantize_s": time.monotonic() - started,
        "warnings": warnings(plan, rows),
        "recipe": recipe,
        "layers": layers,
    }


def read_rows(path: Path, plan: Plan) -> list[list[int]]:
    """Token ids of each calibration row, in order. Raises QuantizationError when there is none or an id is too high."""
    import pandas as pd

    if not path.exists():
        raise QuantizationError(f"{path}: not found; run `dvc repro calibrate` to produce it")
    try:
        table = pd.read_parquet(path).sort_values("row")
        rows = [[int(i) for i in ids] for ids in table["input_ids"] if len(ids)]
    except (OSError, ValueError, KeyError, TypeError) as e:
        why = " ".join(str(e).split())[:200]
        raise QuantizationError(f"{path}: not calibration rows ({why}); run `dvc repro calibrate` again") from None
    if not rows:
        raise QuantizationError(f"{path}: no calibration row with tokens; raise calibration.rows or widen the corpus")
    highest = max(max(row) for row in rows)
    if highest >= plan.vocab_size:
        raise QuantizationError(
            f"{path}: token id {highest} is beyond the model's vocabulary of {plan.vocab_size}; "
            f"calibrate with this model's tokenizer"
        )
    return rows


def arithmetic_dtype(runtime: Runtime, method: QuantizeMethod) -> tuple[str, str]:
    """The dtype the library calculates in, and why: it decides speed, not the format of the result."""
    if method.backend == "auto_gptq" and method.bits > 4:
        return "float32", "auto_gptq finds codes by dividing weights in this dtype: bfloat16 has 8 bits, too few"
    if runtime.device != "cpu":
        return runtime.dtype, "runtime.dtype"
    if runtime.dtype == "bfloat16" and BF16_INSTRUCTIONS & cpu_flags():
        return "bfloat16", "runtime.dtype; this CPU has bfloat16 instructions"
    if runtime.dtype == "float32":
        return "float32", "runtime.dtype"
    return "float32", f"this CPU has no {runtime.dtype} instructions and multiplies float32 faster"


def cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    found = [line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))]
    return set(found[0]) if found else set()


def refuse_fallbacks(quantized: Quantized, plan: Plan) -> None:
    """Raises QuantizationError when the method acted on no module: the result would be plain rounding by its name."""
    for name, (_, k) in plan.shapes.items():
        if quantized.solved[name].dead_columns == k:
            quantized.solved[name].fallback = "all calibration inputs are zero"
    reasons = [s.fallback or ("no scale to fold" if s.unscaled else None) for s in quantized.solved.values()]
    if all(reasons):
        first = next(iter(quantized.solved))
        raise QuantizationError(
            f"{first} and all other {len(reasons) - 1} modules were only rounded to nearest ({reasons[0]}); "
            f"raise damp_percent or give more calibration rows"
        )


def refuse_worse_than_nearest(layers: list[dict[str, Any]]) -> None:
    """Raises QuantizationError when the typical module is far worse than plain rounding: no method is, a bug is."""
    ratios = {f"{r['layer']}.{r['module']}": r["error"] / r["nearest_error"] for r in layers if r["nearest_error"]}
    if not ratios or statistics.median(ratios.values()) < WORSE_THAN_NEAREST:
        return
    worst = max(ratios, key=lambda name: ratios[name])
    raise QuantizationError(
        f"layer {worst}: error {ratios[worst]:.1f} times that of rounding to nearest, and at least "
        f"{WORSE_THAN_NEAREST} times in half of the modules: the library's result is broken; use another backend"
    )


def warnings(plan: Plan, rows: list[list[int]]) -> list[str]:
    """Said on stderr and kept in the metrics."""
    tokens, widest = sum(map(len, rows)), max(k for _, k in plan.shapes.values())
    found = []
    if tokens < widest:
        found.append(f"{tokens} calibration tokens are fewer than the {widest} inputs of the widest module")
    for text in found:
        print(f"warning: {text}", file=sys.stderr)
    return found


def summarize(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Totals of the per-module table."""
    from pipeline.quantizers.error import DEFINITION

    errors = {f"{row['layer']}.{row['module']}": row["error"] for row in layers if row["error"] is not None}
    worst = max(errors, key=lambda name: errors[name])
    return {
        "modules": len(layers),
        "fallbacks": sum(row["fallback"] is not None for row in layers),
        "unscaled_modules": sum(row["unscaled"] for row in layers),
        "dead_columns": sum(row["dead_columns"] for row in layers),
        "error": {
            "definition": DEFINITION,
            "median": statistics.median(errors.values()),
            "nearest_median": statistics.median(row["nearest_error"] for row in layers if row["nearest_error"]),
            "max": errors[worst],
            "max_module": worst,
        },
    }


def _file_metrics(folder: Path, plan: Plan) -> dict[str, Any]:
    """Sizes from the file's headers: of everything, and of the quantized modules with their scales and zeros."""
    from pipeline.checkpoint.files import TensorFiles
    from pipeline.checkpoint.read import read

    checkpoint = read(folder)
    found = set(checkpoint.linears)
    assert found == set(plan.shapes), found ^ set(plan.shapes)
    packed = [e.nbytes for name, e in TensorFiles(folder).entries.items() if name.rpartition(".")[0] in found]
    return {
        "format": checkpoint.format,
        "weight_bytes": checkpoint.weight_bytes,
        "bits_per_weight": checkpoint.bits_per_weight,
        "packed_bits_per_weight": 8 * sum(packed) / sum(n * k for n, k in plan.shapes.values()),
    }
