"""GPTQ and AWQ by llmcompressor 0.14 in the main environment, in compressed-tensors' pack-quantized format."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from pipeline.config import QuantizeMethod
from pipeline.progress import Bar, bar
from pipeline.quantizers import Job, QuantizationError, Quantized, Solved
from pipeline.quantizers.plan import Plan

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
NOT_FINITE = "its calibration inputs contain NaN or infinity; check the model's weights"


def check(plan: Plan, method: QuantizeMethod, section: str) -> None:
    """Nothing beyond what every backend is checked for."""


def quantize(job: Job) -> Quantized:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from pipeline.provenance import read_json

    torch.manual_seed(job.seed)
    dtype = getattr(torch, job.dtype)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype, local_files_only=True).eval()
    out = job.scratch / "compressed"
    with bar(f"llmcompressor {job.method.method}", len(job.plan.shapes), "module") as shown, quiet():
        report = Report(job.plan, shown)
        recipe = gptq_recipe(job, report) if job.method.method == "gptq" else awq_recipe(job, report)
        compress(model, job, recipe)
        model.save_pretrained(out)
    return Quantized(
        tensors={name: t for path in sorted(out.glob("*.safetensors")) for name, t in load_file(path).items()},
        config=read_json(out / "config.json")["quantization_config"],
        solved={name: report.solved.get(name, Solved(unscaled=True)) for name in job.plan.shapes},
        rows=len(job.rows),
        tokens=sum(map(len, job.rows)),
        versions={name: version(name) for name in ("llmcompressor", "compressed-tensors", "torch", "transformers")},
        scales_in=report.scales_in,
        scales_out=report.scales_out,
    )


class Report:
    """What the modifiers below say of each module."""

    def __init__(self, plan: Plan, shown: Bar) -> None:
        self.plan, self.shown = plan, shown
        self.solved: dict[str, Solved] = {}
        self.scales_in: dict[str, Any] = {}
        self.scales_out: dict[str, Any] = {}

    def add(self, name: str, solved: Solved) -> None:
        if name in self.plan.shapes:
            self.solved[name] = solved
            self.shown.update()


def compress(model: Any, job: Job, recipe: list[Any]) -> None:
    """Run the recipe over the rows, one a batch and in order: nothing is padded, cut or shuffled."""
    import torch
    from compressed_tensors.utils import patch_attr
    from llmcompressor import oneshot
    from llmcompressor.core import reset_session
    from llmcompressor.pipelines.cache import IntermediatesCache
    from torch.utils.data import DataLoader

    batches: Any = [
        {"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row), dtype=torch.long)}
        for row in job.rows
    ]
    # A processor would only be saved with the model; any object keeps the library from looking for one.
    processor: Any = object()
    with contextlib.ExitStack() as stack:
        stack.callback(reset_session)
        if not torch.cuda.is_available():
            # Pinned memory needs an accelerator; without one there is nothing to copy to.
            stack.enter_context(patch_attr(IntermediatesCache, "_pin_intermediate", staticmethod(lambda value: None)))
        oneshot(model=model, processor=processor, recipe=recipe, dataset=DataLoader(batches, batch_size=None))


def scheme(job: Job, *, symmetric: bool) -> dict[str, Any]:
    """The modifier arguments that say which modules get which grid."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    group = job.method.group_size
    weights = QuantizationArgs(
        num_bits=job.method.bits,
        type="int",
        symmetric=symmetric,
        strategy="channel" if group == -1 else "group",
        group_size=None if group == -1 else group,
    )
    group_0 = QuantizationScheme(targets=["Linear"], weights=weights)
    return {"config_groups": {"group_0": group_0}, "ignore": ["lm_head", *job.plan.ignored_modules]}


def gptq_recipe(job: Job, report: Report) -> list[Any]:
    import torch
    from llmcompressor.modifiers.gptq import GPTQModifier

    class ReportingGPTQ(GPTQModifier):
        def compress_module_list(self, module_list: Any) -> None:
            for module in module_list:
                name, hessian = self._module_names[module], self._hessians[module]
                # The library would take a NaN for a singular Hessian and round to nearest.
                if not torch.isfinite(hessian).all():
                    raise QuantizationError(f"{name}: {NOT_FINITE}")
                dead_columns = int((torch.diag(hessian) == 0).sum())
                started = time.monotonic()
                with recorded_losses() as losses:
                    super().compress_module_list([module])
                fell_back = name in self._rtn_fallback_module_names
                report.add(
                    name,
                    Solved(
                        library_error=losses[-1],
                        time_s=time.monotonic() - started,
                        dead_columns=dead_columns,
                        fallback="singular Hessian" if fell_back else None,
                    ),
                )

    return [
        ReportingGPTQ(
            dampening_frac=job.method.damp_percent,
            actorder="static" if job.method.desc_act else None,
            **scheme(job, symmetric=job.method.sym),
        )
    ]


def awq_recipe(job: Job, report: Report) -> list[Any]:
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    class ReportingAWQ(AWQModifier):
        def _compute_best_scale(self, mapping: Any, *args: Any) -> Any:
            started = time.monotonic()
            scales_K = super()._compute_best_scale(mapping, *args)
            time_s = (time.monotonic() - started) / len(mapping.balance_names)
            error = self._error_metrics[-1]["best_error"]
            for name in mapping.balance_names:
                report.scales_in[name] = scales_K
                report.add(name, Solved(library_error=error, time_s=time_s))
            report.scales_out[mapping.smooth_name] = scales_K
            return scales_K

        def on_calibration_end(self, *args: Any, **kwargs: Any) -> None:
            super().on_calibration_end(*args, **kwargs)
            for mapping in self._resolved_mappings:
                # The library skips a layer whose outputs are not finite, with a warning.
                if mapping.smooth_name not in report.scales_out:
                    raise QuantizationError(f"{mapping.balance_names[0]}: {NOT_FINITE}")

    return [
        ReportingAWQ(duo_scaling=job.method.duo_scaling),
        QuantizationModifier(**scheme(job, symmetric=not job.method.zero_point)),
    ]


@contextlib.contextmanager
def recorded_losses() -> Iterator[list[float | None]]:
    """The losses that the library only logs."""
    from compressed_tensors.utils import patch_attr
    from llmcompressor.modifiers.gptq import base

    losses: list[float | None] = []

    class Recorder(base.CompressionLogger):
        def set_results(self, name: str | None = None, loss: float | None = None) -> None:
            super().set_results(name=name, loss=loss)
            losses.append(loss)

    with patch_attr(base, "CompressionLogger", Recorder):
        yield losses


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the libraries' logs and warnings; errors still come as exceptions."""
    # Read when the library is first imported, which by itself logs.
    os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "ERROR")
    from loguru import logger

    logger.disable("compressed_tensors")
    tracer = logging.getLogger("torch.fx._symbolic_trace")
    level = tracer.level
    tracer.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        tracer.setLevel(level)
        logger.enable("compressed_tensors")
