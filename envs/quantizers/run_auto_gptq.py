"""GPTQ (Frantar et al. 2023) by auto-gptq 0.7.1, on the CPU or one GPU. The library's solver runs as it is."""

from __future__ import annotations

import logging
import sys
import time
from importlib.metadata import version
from typing import Any

from protocol import Emit, Refused, load_model, save_tensors, serve


def quantize(request: dict[str, Any], emit: Emit) -> None:
    import torch
    from auto_gptq import BaseQuantizeConfig
    from auto_gptq.modeling import _base, _utils
    from auto_gptq.modeling.auto import GPTQ_CAUSAL_LM_MODEL_MAP

    # The library says "first GPU" for "where layers are solved", and synchronizes with it unconditionally.
    _base.CUDA_0 = _utils.CUDA_0 = torch.device(request["device"])
    if request["device"] == "cpu":
        torch.cuda.synchronize = lambda *_: None

    model = load_model(request, emit)
    settings = request["settings"]
    kept = {model.get_submodule(name): name for name in request["modules"]}
    find_layers = _base.find_layers
    _base.find_layers = lambda layer: {n: m for n, m in find_layers(layer).items() if m in kept}
    _base.GPTQ = reporting_solver(kept, settings["sym"], emit)

    wrapper = GPTQ_CAUSAL_LM_MODEL_MAP[model.config.model_type](
        model,
        quantized=False,
        quantize_config=BaseQuantizeConfig(
            bits=settings["bits"],
            group_size=settings["group_size"],
            damp_percent=settings["damp_percent"],
            desc_act=settings["desc_act"],
            static_groups=False,
            sym=settings["sym"],
            true_sequential=settings["true_sequential"],
        ),
    )
    rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in request["rows"]]
    # One row a batch: padding would enter the Hessian as if it were text.
    examples = [{name: torch.tensor([ids]) for name, ids in row.items()} for row in rows]
    wrapper.quantize(examples, batch_size=1)
    emit("calibrated", rows=len(rows), tokens=sum(len(row) for row in request["rows"]))
    save_tensors(model.state_dict(), request["tensors"])
    emit("done", versions={name: version(name) for name in ("auto-gptq", "torch", "transformers")})


def reporting_solver(names: dict[Any, str], sym: bool, emit: Emit) -> type:
    """auto-gptq's GPTQ class that also checks its Hessian and reports each module it solved."""
    import torch
    from auto_gptq.quantization import gptq as solver

    losses = LossLines()
    solver.logger.addHandler(losses)
    solver.logger.setLevel(logging.INFO)

    class ReportingGPTQ(solver.GPTQ):
        def __init__(self, layer: Any) -> None:
            super().__init__(layer)
            if not sym:
                self.quantizer = storable_grid()

        def fasterquant(self, *args: Any, **kwargs: Any) -> Any:
            name = names[self.layer]
            if not torch.isfinite(self.H).all():
                raise Refused(f"{name}: its calibration inputs contain NaN or infinity; check the model's weights")
            dead_columns = int((torch.diag(self.H) == 0).sum())
            started = time.monotonic()
            try:
                solved = super().fasterquant(*args, **kwargs)
            except torch.linalg.LinAlgError:
                raise Refused(
                    f"{name}: its Hessian is singular; raise damp_percent or give more calibration rows"
                ) from None
            time_s = time.monotonic() - started
            emit("module", name=name, library_error=losses.last, time_s=time_s, dead_columns=dead_columns)
            return solved

    return ReportingGPTQ


class LossLines(logging.Handler):
    """The library gives its loss only in a log line."""

    last: float | None = None

    def emit(self, record: logging.LogRecord) -> None:
        label, _, value = record.getMessage().partition("avg loss: ")
        if value and not label:
            self.last = float(value)


def storable_grid() -> Any:
    """A quantizer whose zero points are at least 1.

    The format stores zero - 1, so that 0 becomes -1, whose sign bits spill over the neighbours it is packed with.
    A group without negative weights gets zero = 1 and one step less above it instead.
    """
    import torch
    from auto_gptq.quantization.quantizer import Quantizer

    class StorableGrid(Quantizer):
        def find_params(self, x: Any, weight: bool = False) -> None:
            super().find_params(x, weight=weight)
            too_low = self.zero == 0
            widened = self.scale * self.maxq / (self.maxq - 1)
            self.scale = torch.where(too_low, widened, self.scale)
            self.zero = torch.where(too_low, torch.ones_like(self.zero), self.zero)

    return StorableGrid()


if __name__ == "__main__":
    sys.exit(serve(quantize))
