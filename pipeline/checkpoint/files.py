"""The tensors of a checkpoint folder, read from safetensors one at a time and checked on the way.

Headers are read at once (names, shapes, sizes); data only when a tensor is asked for, into memory of its own, so that
loading peaks near the size of the checkpoint and outlives the file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

WORDS, SCALES, INDICES = ("I32",), ("F16", "BF16", "F32"), ("I32", "I64")  # dtypes of packed layers' parts
CHECKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MAPPED_BYTES = 2**25  # what was read of an open file stays in memory until it is closed


class CheckpointError(ValueError):
    """A checkpoint that cannot be read right: one line with the file or tensor, what is wrong and a way out."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))  # names come from the file and may hold line ends


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies and what its header says; `dtype` as safetensors spells it, such as I32."""

    file: Path
    shape: tuple[int, ...]
    nbytes: int
    dtype: str

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not found; point at a folder in Hugging Face form") from None
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: not readable JSON ({e}); fetch or export the checkpoint again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds {type(value).__name__}, an object is due; export the checkpoint again")
    return value


def as_object(settings: dict[str, Any], key: str) -> dict[str, Any]:
    """An object inside quantization_config, empty where it is absent or null. Raises CheckpointError."""
    value = settings.get(key)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(
            f"quantization_config.{key}: holds {type(value).__name__}, an object is due; export the checkpoint again"
        )
    return value or {}


class TensorFiles(Mapping[str, torch.Tensor]):
    """name -> tensor of a folder's safetensors file, or of the shards its index lists.

    Raises CheckpointError when the folder has no safetensors, a shard is missing, damaged or outside the folder, and,
    on access, when a floating-point tensor holds NaN or infinity.
    """

    def __init__(self, folder: Path) -> None:
        self.entries: dict[str, Entry] = {}
        self.metadata: dict[str, str] = {}
        self._open: tuple[Path, Any] | None = None
        self._mapped = 0
        for file in weight_files(folder):
            self._scan(file)
        if not self.entries:
            raise CheckpointError(f"{folder}: its safetensors hold no tensor; fetch or export it again")
        for name, file in indexed(folder).items():
            if name not in self.entries or self.entries[name].file != file:
                raise CheckpointError(f"{file}: lacks {name}, which the index places there; fetch the folder again")

    def _scan(self, file: Path) -> None:
        with _opened(file) as f:
            self.metadata.update(f.metadata() or {})
            for name in f.keys():  # noqa: SIM118 (not a dict)
                if name in self.entries:
                    raise CheckpointError(f"{file}: {name} is also in {self.entries[name].file.name}; keep one")
                view = f.get_slice(name)
                shape = tuple(view.get_shape())
                dtype = view.get_dtype()
                self.entries[name] = Entry(file, shape, math.prod(shape) * _bits(dtype) // 8, dtype)
                if not self.entries[name].count:
                    raise CheckpointError(f"{file}: {name} has shape {list(shape)}, no values; export it again")

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self.entries[name]
        reader = self._reader(entry)
        try:
            tensor: torch.Tensor = reader.get_tensor(name).clone()  # the original is a view of the mapped file
        except Exception as e:  # safetensors' own for a dtype torch has not, and whatever torch makes of it
            raise CheckpointError(f"{entry.file}: {name} cannot be read ({e}); export it again") from e
        if tensor.dtype in CHECKED and tensor.numel() and not torch.isfinite(torch.stack(torch.aminmax(tensor))).all():
            count = int((~torch.isfinite(tensor)).sum())
            raise CheckpointError(f"{entry.file}: {name} holds {count} NaN or infinite values; export it again")
        return tensor

    def _reader(self, entry: Entry) -> Any:
        """The tensor's file, left open for the next one: opening parses the header of all its tensors."""
        if self._open is None or self._open[0] != entry.file or self._mapped > MAPPED_BYTES:
            self._open = None  # unmapped before the next is mapped
            self._open, self._mapped = (entry.file, _opened(entry.file)), 0
        self._mapped += entry.nbytes
        return self._open[1]

    def part(self, layer: str, suffix: str, dtypes: tuple[str, ...], dimensions: int = 2) -> torch.Tensor:
        """A tensor that a packed layer cannot be without, of one of `dtypes`."""
        name = f"{layer}.{suffix}"
        self.header(layer, suffix, dtypes, dimensions)
        return self[name]

    def header(self, layer: str, suffix: str, dtypes: tuple[str, ...], dimensions: int = 2) -> Entry:
        """What the file says of such a tensor, without its data."""
        name = f"{layer}.{suffix}"
        if name not in self.entries:
            raise CheckpointError(f"{name}: missing beside the layer's other tensors; export the checkpoint again")
        entry = self.entries[name]
        if entry.dtype not in dtypes or len(entry.shape) != dimensions:
            raise CheckpointError(
                f"{name}: {entry.dtype} of shape {list(entry.shape)}, but {' or '.join(dtypes)} with {dimensions} "
                f"dimensions is due; export the checkpoint again"
            )
        return entry

    def optional(self, layer: str, suffix: str) -> torch.Tensor | None:
        name = f"{layer}.{suffix}"
        return self[name] if name in self.entries else None

    def layers(self, suffix: str) -> list[str]:
        """Sorted names of the layers that have a tensor `.suffix`."""
        return sorted(n.removesuffix(f".{suffix}") for n in self.entries if n.endswith(f".{suffix}"))

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the weights: the index's shards, model.safetensors, or the only one there is."""
    shards = sorted(set(indexed(folder).values()))
    if shards:
        return shards
    files = sorted(folder.glob("*.safetensors"))
    named = [f for f in files if f.name == "model.safetensors"] or files
    if len(named) == 1:
        return named
    if named:
        raise CheckpointError(f"{folder}: {len(named)} safetensors files and no index; keep one, or add the index")
    pickled = sorted(f.name for pattern in PICKLED for f in folder.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"{folder}: only pickled weights ({pickled[0]}), which may run code when opened; "
            f"convert them with save_pretrained(safe_serialization=True)"
        )
    raise CheckpointError(f"{folder}: no *.safetensors; point at a folder in Hugging Face form")


def indexed(folder: Path) -> dict[str, Path]:
    """tensor -> shard of the folder's index; empty without one. Raises CheckpointError for a shard elsewhere."""
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if not indices:
        return {}
    weight_map = read_object(indices[0]).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{indices[0]}: no weight_map; fetch the folder again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or "\\" in shard or shard in (".", ".."):
            raise CheckpointError(f"{indices[0]}: {name} lies in {shard!r}, outside the folder; use plain file names")
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            raise CheckpointError(f"{folder / shard}: listed in the index but missing; fetch the folder again")
    return {name: folder / shard for name, shard in weight_map.items()}


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{file}: not a whole safetensors file ({e}); fetch or export it again") from None


def _bits(dtype: str) -> int:
    """Bits of an element of a safetensors dtype such as BF16, I32, F8_E4M3 or BOOL (a byte)."""
    digits = re.search(r"\d+", dtype)
    return int(digits.group()) if digits else 8
