"""Linear layers on the C++ kernels of few_rows.cpp, which are compiled once a machine and torch version.

The library is kept in the folder that the environment variable FEW_ROWS_DIR names (else in the temporary one) and loads
in milliseconds. Not torch's extension loader: a build that is killed there leaves a lock on which the next process
waits for ever. Here a process that finds no library compiles its own and renames it into place.

Legend: M rows (tokens), N output channels, K input channels, G groups of K, W words of 8 codes.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from pipeline.engine.linear import FullLinear, PackedWeight

SOURCE = Path(__file__).with_name("few_rows.cpp")
FLAGS = ["-O3", "-std=c++20", "-shared", "-fPIC", "-fno-math-errno", "-fopenmp"]
CPU_FLAGS = {"AVX2": ["-mavx2", "-mfma"], "AVX512": ["-mavx2", "-mfma"]}
GROUP_MULTIPLE = 64  # codes that int4_linear reads at once
INPUT_MULTIPLE = 16  # weights that bf16_linear reads at once


@functools.cache
def refusal() -> str | None:
    """Compiles and loads the kernels if need be; None when they can be used, else why not."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return "no C++ compiler"
    try:
        torch.ops.load_library(str(_library(compiler)))
    except (OSError, subprocess.CalledProcessError) as e:
        detail = getattr(e, "stderr", None) or str(e)
        return f"compiling few_rows.cpp failed: {detail.strip().splitlines()[-1]}"
    return None


def _library(compiler: str) -> Path:
    """The compiled library; its name holds everything that it was made from."""
    from torch.utils.cpp_extension import include_paths

    torch_lib = Path(torch.__file__).parent / "lib"
    flags = [*FLAGS, *CPU_FLAGS.get(torch.backends.cpu.get_cpu_capability(), [])]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    made_from = "\0".join([SOURCE.read_text(), torch.__version__, *flags])
    folder = Path(os.environ.get("FEW_ROWS_DIR", Path(tempfile.gettempdir()) / f"few_rows-{os.getuid()}"))
    library = folder / f"few_rows-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}.partial")
        includes = [f"-I{path}" for path in include_paths()]
        links = [f"-L{torch_lib}", "-lc10", "-ltorch_cpu", "-ltorch"]
        try:
            command = [compiler, *flags, *includes, str(SOURCE), "-o", str(partial), *links]
            subprocess.run(command, check=True, capture_output=True, text=True)
            partial.replace(library)
        finally:
            partial.unlink(missing_ok=True)
    return library


def pack_nibbles(codes_NK: torch.Tensor) -> torch.Tensor:
    """4-bit codes -> int32 [N, K / 8]: of each 64 codes, nibble j of word i is code 8 j + i."""
    N, K = codes_NK.shape
    words = torch.zeros(N, K // 64, 8, dtype=torch.int32)
    for j, part in enumerate(codes_NK.view(N, K // 64, 8, 8).to(torch.int32).unbind(2)):
        words |= part << 4 * j
    return words.view(N, K // 8)


def unpack_nibbles(words_NW: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_nibbles`: uint8 [N, K]."""
    N = len(words_NW)
    blocks = words_NW.view(N, -1, 8)
    return torch.stack([(blocks >> 4 * j & 15).to(torch.uint8) for j in range(8)], 2).view(N, -1)


class FewRowsLinear(FullLinear):
    """A bfloat16 weight_NK read once for all rows, with products and sums in float32."""

    def native(self, x_MK: torch.Tensor) -> torch.Tensor:
        y_MN: torch.Tensor = torch.ops.few_rows.bf16_linear(x_MK.contiguous(), self.weight)
        return y_MN


class FewRowsInt4Linear(PackedWeight):
    """4-bit codes in contiguous groups; w = (code - zero) * scale without rounding scale or zero."""

    codes_NW: torch.Tensor
    scales_NG: torch.Tensor
    zeros_NG: torch.Tensor

    def __init__(
        self,
        codes_NK: torch.Tensor,
        scales_NG: torch.Tensor,
        zeros_NG: torch.Tensor,
        group_size: int,
        bias_N: torch.Tensor | None,
    ) -> None:
        super().__init__(codes_NK.shape[0], codes_NK.shape[1], bias_N)
        self.group_size = group_size
        self.register_buffer("codes_NW", pack_nibbles(codes_NK))
        self.register_buffer("scales_NG", scales_NG.float().contiguous())
        self.register_buffer("zeros_NG", zeros_NG.to(torch.uint8).contiguous())

    def native(self, x_MK: torch.Tensor) -> torch.Tensor:
        y_MN: torch.Tensor = torch.ops.few_rows.int4_linear(
            x_MK.contiguous(), self.codes_NW, self.scales_NG, self.zeros_NG
        )
        return y_MN

    def tile(self, start: int, stop: int) -> torch.Tensor:
        codes_NGg = unpack_nibbles(self.codes_NW[start:stop]).view(stop - start, -1, self.group_size)
        zeros_NG1, scales_NG1 = (t[start:stop, :, None].float() for t in (self.zeros_NG, self.scales_NG))
        return ((codes_NGg.float() - zeros_NG1) * scales_NG1).flatten(1)


def takes_full(K: int, dtype: torch.dtype, device: str) -> bool:
    """Whether a weight of K columns can be a FewRowsLinear here."""
    return device == "cpu" and dtype == torch.bfloat16 and K % INPUT_MULTIPLE == 0 and refusal() is None


def takes_int4(bits: int, K: int, group_size: int, zeros: torch.Tensor, dtype: torch.dtype, device: str) -> bool:
    """Whether codes can be a FewRowsInt4Linear here: whole zeros, groups of a multiple of 64 that fill a row."""
    fits = bits == 4 and K % group_size == 0 and group_size % GROUP_MULTIPLE == 0
    whole = not zeros.is_floating_point() or bool((zeros == zeros.round()).all() and (zeros >= 0).all())
    floats = dtype in (torch.bfloat16, torch.float32)
    return device == "cpu" and fits and whole and floats and refusal() is None
