"""GPTQ by auto-gptq 0.7.1 (archived), run by envs/quantizers/run_auto_gptq.py, in the format that stores zero - 1."""

from __future__ import annotations

import re

from pipeline.config import QuantizeMethod
from pipeline.progress import bar
from pipeline.quantizers import Job, Quantized, Solved, archived
from pipeline.quantizers.plan import Plan, refuse_multiple

FAMILIES = ("llama", "mistral", "qwen2")


def check(plan: Plan, method: QuantizeMethod, section: str) -> None:
    refuse_multiple(plan, 32, "auto_gptq", of_inputs=True)
    archived.python()


def quantize(job: Job) -> Quantized:
    solved: dict[str, Solved] = {}
    last: dict[str, dict] = {}
    with bar("auto_gptq", len(job.plan.shapes), "module") as shown:
        for event in archived.run("run_auto_gptq.py", job, job.rows):
            last[event["event"]] = event
            if event["event"] == "module":
                solved[event["name"]] = Solved(
                    library_error=event["library_error"], time_s=event["time_s"], dead_columns=event["dead_columns"]
                )
                shown.update()
    return Quantized(
        tensors=archived.load(job.scratch / "tensors.safetensors"),
        config=quantization_config(job.method, job.plan),
        solved=solved,
        rows=last["calibrated"]["rows"],
        tokens=last["calibrated"]["tokens"],
        versions=last["done"]["versions"],
    )


def quantization_config(method: QuantizeMethod, plan: Plan) -> dict:
    """What AutoGPTQ writes, and `dynamic` (GPTQModel, vLLM) for modules left alone, which it has no word for."""
    config = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": method.bits,
        "group_size": method.group_size,
        "sym": method.sym,
        "desc_act": method.desc_act,
        "static_groups": False,
        "damp_percent": method.damp_percent,
        "true_sequential": method.true_sequential,
    }
    if plan.ignored_modules:
        config["dynamic"] = {f"-:^{re.escape(name)}$": {} for name in plan.ignored_modules}
    return config
