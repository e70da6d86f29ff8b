"""AWQ by autoawq 0.2.9 (archived; envs/quantizers/run_autoawq.py), in AutoAWQ's GEMM format."""

from __future__ import annotations

from pipeline.config import QuantizeMethod
from pipeline.progress import bar
from pipeline.quantizers import Job, QuantizationError, Quantized, Solved, archived
from pipeline.quantizers.plan import Plan, refuse_multiple

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
CLIP_ROWS = 64


def check(plan: Plan, method: QuantizeMethod, section: str) -> None:
    refuse_multiple(plan, 32, "autoawq", of_inputs=False)
    for name, (n, _) in plan.shapes.items():
        if method.clip and n % CLIP_ROWS:
            raise QuantizationError(
                f"{section}.clip: autoawq searches {CLIP_ROWS} outputs at a time, but {name} has {n}; set clip: false"
            )
    archived.python()


def quantize(job: Job) -> Quantized:
    solved: dict[str, Solved] = {}
    last: dict[str, dict] = {}
    rows = equal_rows(job.rows)
    with bar("autoawq", len(job.plan.shapes), "module") as shown:
        for event in archived.run("run_autoawq.py", job, rows):
            last[event["event"]] = event
            if event["event"] == "scaled":
                solved[event["name"]] = Solved(library_error=event["library_error"], time_s=event["time_s"])
            if event["event"] == "module":
                solved.setdefault(event["name"], Solved(unscaled=True))
                shown.update()
    scales = archived.load(job.scratch / "scales.safetensors")
    return Quantized(
        tensors=archived.load(job.scratch / "tensors.safetensors"),
        config={
            "quant_method": "awq",
            "version": "gemm",
            "bits": job.method.bits,
            "group_size": job.method.group_size,
            "zero_point": job.method.zero_point,
            "modules_to_not_convert": job.plan.ignored_modules or None,
        },
        solved={name: solved[name] for name in job.plan.shapes},
        rows=last["calibrated"]["rows"],
        tokens=last["calibrated"]["tokens"],
        versions=last["done"]["versions"],
        scales_in={n.removeprefix("in/"): s for n, s in scales.items() if n.startswith("in/")},
        scales_out={n.removeprefix("out/"): s for n, s in scales.items() if n.startswith("out/")},
    )


def equal_rows(rows: list[list[int]]) -> list[list[int]]:
    """The rows as one rectangle, because autoawq takes one batch and drops what does not fill its last row.

    Rows of one length stay as they are. Others are joined and cut again into as many equal rows: at most one token
    a row is left over, where the library by itself skips every row over its limit.
    """
    if len({len(row) for row in rows}) == 1:
        return rows
    stream = [token for row in rows for token in row]
    length = len(stream) // len(rows)
    return [stream[i * length : (i + 1) * length] for i in range(len(rows))]
