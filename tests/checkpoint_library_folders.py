"""Run by envs/quantizers' interpreter: quantize a tiny model with the archived libraries, save it their way, and write
what their own dequantizers make of every layer.

usage: python checkpoint_library_folders.py MODEL_FOLDER OUT_FOLDER
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

ROWS = [[(7 * row + 3 * column) % 128 for column in range(48)] for row in range(8)]
GPTQ = {  # name: bits, group size, symmetric, act-order
    "gptq_asym": (4, 32, False, False),
    "gptq_sym": (4, 32, True, False),
    "gptq_asym_act": (4, 16, False, True),
    "gptq_sym_act": (4, 32, True, True),
    "gptq_row": (4, -1, False, True),
    "gptq_2bit": (2, 32, False, False),
    "gptq_3bit": (3, 32, False, False),
    "gptq_8bit": (8, 32, False, True),
}


def gptq(model_folder: Path, out: Path, bits: int, group_size: int, sym: bool, desc_act: bool) -> None:
    """Expected weights come from QuantLinear's own forward on the identity."""
    from auto_gptq import AutoGPTQForCausalLM, BaseQuantizeConfig
    from auto_gptq.modeling import _base, _utils

    _base.CUDA_0 = _utils.CUDA_0 = torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.is_available = lambda: True  # the library refuses to start otherwise; nothing runs there
    settings = BaseQuantizeConfig(bits=bits, group_size=group_size, sym=sym, desc_act=desc_act)
    model = AutoGPTQForCausalLM.from_pretrained(str(model_folder), settings, torch_dtype=torch.float32)
    torch.cuda.is_available = lambda: False
    model.quantize([{"input_ids": torch.tensor([r]), "attention_mask": torch.ones(1, len(r))} for r in ROWS])
    model.save_quantized(str(out))
    layers = {n: m for n, m in model.model.named_modules() if hasattr(m, "qweight")}
    expected = {n: m(torch.eye(m.infeatures)).t().contiguous() for n, m in layers.items()}
    save_file(expected, out / "expected" / "weights.safetensors")


def awq(model_folder: Path, out: Path) -> None:
    """Expected weights come from autoawq's dequantize_gemm."""
    from awq import AutoAWQForCausalLM
    from awq.utils.packing_utils import dequantize_gemm

    model = AutoAWQForCausalLM.from_pretrained(str(model_folder), torch_dtype=torch.float32, device_map="cpu")
    settings = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    limits = {
        "max_calib_samples": len(ROWS),
        "max_calib_seq_len": 48,
        "apply_clip": False,
    }  # its clip search wants N % 64
    model.quantize(None, quant_config=settings, calib_data=ROWS, **limits)
    model.save_quantized(str(out))
    layers = {n: m for n, m in model.model.named_modules() if hasattr(m, "qweight")}
    expected = {
        n: dequantize_gemm(m.qweight, m.qzeros, m.scales, m.w_bit, m.group_size).t().contiguous()
        for n, m in layers.items()
    }
    save_file(expected, out / "expected" / "weights.safetensors")


def awq_zero_points(out: Path) -> None:
    """One layer with zero points 0..15 packed by WQLinear_GEMM itself (auto-gptq's packer cannot store 0)."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    zeros_GN = torch.arange(64).view(1, 64) % 16
    linear = torch.nn.Linear(32, 64, bias=False).half()
    scales_GN = torch.full((1, 64), 0.01).half()
    linear.weight.data = (torch.arange(64 * 32).view(64, 32) % 16 - zeros_GN.t()) * scales_GN.t()
    layer = WQLinear_GEMM.from_linear(linear, 4, 32, scales=scales_GN, zeros=zeros_GN.float())
    parts = {f"x.{n}": t.contiguous() for n, t in layer.state_dict().items()}
    weight = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, 32).t().contiguous()
    save_file(parts, out / "model.safetensors")
    save_file({"x": weight, "zeros_GN": zeros_GN}, out / "expected" / "weights.safetensors")


def main(model_folder: Path, out: Path) -> None:
    for name in [*GPTQ, "awq", "awq_zero_points"]:
        (out / name / "expected").mkdir(parents=True)
        torch.manual_seed(0)
        if name in GPTQ:
            gptq(model_folder, out / name, *GPTQ[name])
        elif name == "awq":
            awq(model_folder, out / name)
        else:
            awq_zero_points(out / name)


if __name__ == "__main__":
    with torch.no_grad():
        main(Path(sys.argv[1]), Path(sys.argv[2]))
