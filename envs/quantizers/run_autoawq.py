"""AWQ (Lin et al. 2024) by autoawq 0.2.9, on the CPU or one GPU. The library's searches run as they are."""

from __future__ import annotations

import sys
import time
from importlib.metadata import version
from typing import Any

from protocol import Emit, Refused, load_model, save_tensors, serve


def quantize(request: dict[str, Any], emit: Emit) -> None:
    from awq.models.auto import AWQ_CAUSAL_LM_MODEL_MAP
    from awq.models.base import AwqConfig
    from awq.quantize import quantizer as library

    model = load_model(request, emit)
    settings = request["settings"]
    names = {module: name for name, module in model.named_modules()}
    kept = {model.get_submodule(name) for name in request["modules"]}
    wrapper = AWQ_CAUSAL_LM_MODEL_MAP[model.config.model_type](
        model, model.config.model_type, False, model.config, AwqConfig(), None
    )
    # The library's own exclusion sees names inside a layer only, so it cannot leave out one layer's module.
    library.exclude_layers_to_not_quantize = lambda linears, _: {n: m for n, m in linears.items() if m in kept}
    mappings_of = wrapper.get_layers_for_scaling
    wrapper.get_layers_for_scaling = lambda *args: [m for m in mappings_of(*args) if kept.intersection(m["layers"])]

    scales: dict[str, Any] = {}
    rows = request["rows"]
    wrapper.quantize(
        tokenizer=None,
        quant_config={
            "w_bit": settings["bits"],
            "q_group_size": settings["group_size"],
            "zero_point": settings["zero_point"],
            "version": "GEMM",
        },
        calib_data=rows,
        duo_scaling=settings["duo_scaling"],
        apply_clip=settings["clip"],
        max_calib_samples=len(rows),
        max_calib_seq_len=len(rows[0]),
        quantizer_cls=reporting_quantizer(names, scales, emit),
    )
    save_tensors(model.state_dict(), request["tensors"])
    save_tensors(scales, request["scales"])
    emit("done", versions={name: version(name) for name in ("autoawq", "torch", "transformers")})


def reporting_quantizer(names: dict[Any, str], scales: dict[str, Any], emit: Emit) -> type:
    """autoawq's quantizer that also checks its inputs, and reports each scale search and each packed module."""
    import torch
    from awq.quantize.quantizer import AwqQuantizer
    from awq.utils.module import get_named_linears

    class ReportingQuantizer(AwqQuantizer):
        def init_quant(self, *args: Any, **kwargs: Any) -> Any:
            modules, module_kwargs, inputs_RTK = super().init_quant(*args, **kwargs)
            emit("calibrated", rows=inputs_RTK.shape[0], tokens=inputs_RTK.shape[0] * inputs_RTK.shape[1])
            return modules, module_kwargs, inputs_RTK

        def _get_input_feat(self, layer: Any, named_linears: Any) -> Any:
            # Every linear's inputs, excluded or not: the library's mappings look them up by name.
            return super()._get_input_feat(layer, get_named_linears(layer))

        def _search_best_scale(self, module: Any, prev_op: Any, layers: list[Any], inp: Any, **kwargs: Any) -> Any:
            scaled = [names[layer] for layer in layers]
            if not torch.isfinite(inp).all():
                raise Refused(f"{scaled[0]}: its calibration inputs contain NaN or infinity; check the model's weights")
            started, self.losses = time.monotonic(), []
            found = super()._search_best_scale(module, prev_op, layers, inp, **kwargs)
            time_s = time.monotonic() - started
            for name in scaled:
                scales[f"in/{name}"] = found[2]
                emit("scaled", name=name, library_error=min(self.losses), time_s=time_s / len(scaled))
            if isinstance(prev_op, torch.nn.Linear):
                scales[f"out/{names[prev_op]}"] = found[2]
            return found

        def _compute_best_scale(self, x: Any, w_mean: Any, x_mean: Any, module2inspect: Any, *args: Any) -> Any:
            # The search scales weights in place and restores them from `state_dict()` moved to the CPU, which is a copy
            # on a GPU and the very same memory on the CPU: there the first scale would stay in the weights for good.
            state_dict = module2inspect.state_dict
            module2inspect.state_dict = lambda: {name: t.clone() for name, t in state_dict().items()}
            try:
                return super()._compute_best_scale(x, w_mean, x_mean, module2inspect, *args)
            finally:
                del module2inspect.state_dict

        def _compute_loss(self, *args: Any) -> float:
            self.losses.append(super()._compute_loss(*args))
            return self.losses[-1]

        def _apply_quant(self, module: Any, named_linears: dict[str, Any]) -> None:
            packed = [names[linear] for linear in named_linears.values()]
            super()._apply_quant(module, named_linears)
            for name in packed:
                emit("module", name=name)

    return ReportingQuantizer


if __name__ == "__main__":
    sys.exit(serve(quantize))
