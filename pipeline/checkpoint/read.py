"""A checkpoint folder in any of its public formats, as one form: packed linear layers and plain tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from pipeline.checkpoint.awq import AwqReader
from pipeline.checkpoint.compressed import CompressedReader
from pipeline.checkpoint.files import CheckpointError, TensorFiles, read_object
from pipeline.checkpoint.gptq import GptqReader
from pipeline.checkpoint.packed import PackedLinear


class Reader(Protocol):
    """What a format knows: the packed layers by name, their (N, K), and how to read one."""

    names: list[str]
    suffixes: tuple[str, ...]
    format: str

    def shape(self, name: str) -> tuple[int, int]: ...
    def read(self, name: str) -> PackedLinear: ...


READERS: dict[str, Any] = {"gptq": GptqReader, "awq": AwqReader, "compressed-tensors": CompressedReader}
OLD_SETTINGS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}  # beside config.json, in older exports
PACKED_SUFFIXES = (".qweight", ".weight_packed")


class PackedLinears(Mapping[str, PackedLinear]):
    """name -> PackedLinear, each read when it is asked for."""

    def __init__(self, folder: Path, reader: Reader | None) -> None:
        self.folder = folder
        self.reader = reader
        self.names = dict.fromkeys(reader.names if reader else [])

    def __contains__(self, name: object) -> bool:
        return name in self.names  # Mapping's own would read the layer

    def __getitem__(self, name: str) -> PackedLinear:
        if self.reader is None or name not in self.names:
            raise KeyError(name)
        with located(self.folder):
            return self.reader.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class PlainTensors(Mapping[str, torch.Tensor]):
    """name -> tensor for those that belong to no packed layer."""

    def __init__(self, files: TensorFiles, owned: set[str]) -> None:
        self.files = files
        self.names = dict.fromkeys(n for n in files if n not in owned)

    def __contains__(self, name: object) -> bool:
        return name in self.names  # Mapping's own would read the tensor

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.files[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.files.entries[name].shape


@dataclass(frozen=True)
class Checkpoint:
    """config.json, the format found, and the weights; `weight_bytes` and `bits_per_weight` are the file's own."""

    folder: Path
    config: dict[str, Any]
    format: str
    linears: PackedLinears
    tensors: PlainTensors
    weight_bytes: int
    bits_per_weight: float


def read(folder: Path) -> Checkpoint:
    """Open a full-precision, GPTQ (v1, v2), AWQ or compressed-tensors folder; tensors are read when asked for.

    Raises CheckpointError (a ValueError) naming the file or key that is missing, damaged, contradictory or unsupported.
    """
    config = read_object(folder / "config.json")
    files = TensorFiles(folder)
    settings = quantization_settings(folder, config)
    reader: Reader | None = None
    if settings is not None:
        method = settings.get("quant_method")
        if not isinstance(method, str) or method not in READERS:
            raise CheckpointError(
                f"{folder / 'config.json'}: quantization_config.quant_method {method!r} is not read; "
                f"known: {', '.join(READERS)}, or no quantization_config"
            )
        with located(folder):
            reader = READERS[method](settings, files)
    _check_packed(folder, files, reader)
    owned = {f"{n}.{s}" for n in reader.names for s in reader.suffixes} if reader else set()
    plain = PlainTensors(files, owned)
    weights = sum(files.entries[n].count for n in plain)
    with located(folder):
        weights += sum(n * k for n, k in map(reader.shape, reader.names)) if reader else 0
    nbytes = sum(e.nbytes for e in files.entries.values())
    return Checkpoint(
        folder=folder,
        config=config,
        format=reader.format if reader else "full",
        linears=PackedLinears(folder, reader),
        tensors=plain,
        weight_bytes=nbytes,
        bits_per_weight=8 * nbytes / weights,
    )


def quantization_settings(folder: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """quantization_config of config.json, or the separate file of older exports; None for full precision."""
    settings: dict[str, Any] | None = config.get("quantization_config")
    if settings is not None and not isinstance(settings, dict):
        found = type(settings).__name__
        raise CheckpointError(f"{folder / 'config.json'}: quantization_config is {found}, an object is due; correct it")
    for name, method in OLD_SETTINGS.items():
        if (folder / name).is_file():
            beside = {"quant_method": method, **read_object(folder / name)}
            settings = beside if settings is None else {"quant_method": method, **settings}
            break
    return settings


@contextlib.contextmanager
def located(folder: Path) -> Iterator[None]:
    """Adds the folder to the message of a CheckpointError that names only a tensor or a key."""
    try:
        yield
    except CheckpointError as e:
        raise e if str(folder) in str(e) else CheckpointError(f"{folder}: {e}") from None


def _check_packed(folder: Path, files: TensorFiles, reader: Reader | None) -> None:
    packed = [n for n in files if n.endswith(PACKED_SUFFIXES)]
    if reader is None and packed:
        raise CheckpointError(f"{folder}: {packed[0]} is packed, but config.json has no quantization_config; add it")
    if reader is not None and not reader.names:
        raise CheckpointError(f"{folder}: quantization_config is set, but no layer of that format is in the file")
