"""`python -m tests.fuzz_checkpoints --executions N`: coverage-guided fuzzing of the checkpoint readers (atheris).

An input is a folder in one string of bytes: three parts after their lengths (config.json, the header of the
safetensors file, its tensors), so that a mutation lands inside a part instead of breaking the container each time;
half of those to the JSON parts put an odd value where another stood. The
only exceptions a reader may raise are CheckpointError and other ValueErrors of one line; anything else ends the run,
and atheris leaves the input beside it. `make fuzz` installs atheris; how far a run came is in reports/fuzz.json.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline import provenance

sys.path.insert(0, str(Path(__file__).parent))

FORMATS = ("gptq", "gptq_v2", "awq", "compressed-tensors", "full")
PARTS = 3
ODD = (None, True, -1, 0, 1, 3, 2**31, 2**63, 0.5, 1e308, "", "x", "re:(", [], [1], [0, 0], {}, {"x": 1}, "I32", "F16")
MAX_PART_BYTES = 2**16 - 1


def joined(parts: list[bytes]) -> bytes:
    return b"".join(struct.pack("<H", len(part)) + part for part in parts)


def divided(data: bytes) -> list[bytes]:
    """Inverse of `joined`; a length beyond the end takes what is left."""
    parts = []
    for _ in range(PARTS):
        (size,) = struct.unpack("<H", data[:2].ljust(2, b"\0"))
        parts.append(data[2 : 2 + size])
        data = data[2 + size :]
    return parts


def spoilt(value: Any, generator: random.Random) -> Any:
    """A JSON value with one place in it, at any depth, removed or given one of ODD."""
    if isinstance(value, dict | list) and value and generator.random() < 0.9:
        places = sorted(value) if isinstance(value, dict) else range(len(value))
        place = generator.choice(places)
        made = value.copy()
        if generator.random() < 0.1:
            del made[place]
        else:
            made[place] = spoilt(made[place], generator)
        return made
    return generator.choice(ODD)


def write_folder(data: bytes, folder: Path) -> None:
    config, header, tensors = divided(data)
    (folder / "config.json").write_bytes(config)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + tensors)


def read_everything(folder: Path) -> int:
    """What loading does, without a model: every header, setting, packed layer and plain tensor. Returns the tensors."""
    from pipeline.checkpoint.packed import dequantize
    from pipeline.checkpoint.read import read

    checkpoint = read(folder)
    weights = [dequantize(checkpoint.linears[name]) for name in checkpoint.linears]
    return len(weights) + len([checkpoint.tensors[name] for name in checkpoint.tensors])


def execute(data: bytes, folder: Path) -> bool:
    """Whether the folder that `data` describes was read; False when it was refused as it should be."""
    write_folder(data, folder)
    try:
        read_everything(folder)
    except ValueError as e:
        assert str(e) and "\n" not in str(e), f"not one line: {e!r}"
        return False
    return True


def mutator(data: bytes, max_bytes: int, seed: int) -> bytes:
    import atheris

    generator = random.Random(seed)
    parts = divided(data)
    which = generator.randrange(PARTS)
    try:
        assert which < PARTS - 1 and generator.random() < 0.5
        parts[which] = json.dumps(spoilt(json.loads(parts[which]), generator)).encode()
    except (AssertionError, ValueError, RecursionError):
        parts[which] = atheris.Mutate(parts[which], max(len(parts[which]) + 64, 1))
    return joined([part[:MAX_PART_BYTES] for part in parts])[:max_bytes]


def seeds() -> Iterator[bytes]:
    """A whole little checkpoint of each format: one layer, and only its linear layers."""
    from checkpoint_fixtures import quantized, saved, tiny

    for name in FORMATS:
        with tempfile.TemporaryDirectory() as at:
            folder = Path(at)
            shape = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
            model = tiny("Qwen2", num_hidden_layers=1, vocab_size=16, **shape)
            saved(model, folder) if name == "full" else quantized(model, folder, name, group_size=8)
            raw = (folder / "model.safetensors").read_bytes()
            (size,) = struct.unpack("<Q", raw[:8])
            config = json.loads((folder / "config.json").read_text())
            kept = {k: v for k, v in config.items() if k in ("model_type", "quantization_config")}
            yield joined([json.dumps(kept).encode(), raw[8 : 8 + size], raw[8 + size :]])


def fuzz(executions: int, seconds: int) -> None:
    """Ends the process, as libFuzzer does."""
    import atheris

    with atheris.instrument_imports(include=["pipeline.checkpoint"]):
        import pipeline.checkpoint.read  # noqa: F401

    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as at:
        corpus, folder = Path(at) / "corpus", Path(at) / "folder"
        corpus.mkdir()
        folder.mkdir()
        for number, seed in enumerate(seeds()):
            assert execute(seed, folder), f"seed {number} must be readable"
            (corpus / str(number)).write_bytes(seed)
        limits = [
            f"-runs={executions}",
            f"-max_total_time={seconds}",
            f"-max_len={PARTS * MAX_PART_BYTES}",
            "-timeout=20",
        ]
        arguments = [sys.argv[0], *limits, "-rss_limit_mb=4096", str(corpus)]
        atheris.Setup(arguments, lambda data: execute(data, folder), custom_mutator=mutator)
        atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_checkpoints", description=__doc__.split("\n")[0])
    parser.add_argument("--executions", type=int, default=200_000)
    parser.add_argument("--seconds", type=int, default=0, help="stop after this long; 0 = never")
    parser.add_argument("--out", type=Path, default=Path("reports/fuzz.json"))
    parser.add_argument("--here", action="store_true", help="in this process, without a record")
    args = parser.parse_args()
    if args.here:
        fuzz(args.executions, args.seconds)
    command = [sys.executable, "-m", "tests.fuzz_checkpoints", "--here", *sys.argv[1:]]
    said: list[str] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as running:
        assert running.stderr is not None
        for line in running.stderr:
            sys.stderr.write(line)
            said.append(line)
    record = found(said, running.returncode)
    provenance.write_json(args.out, record)
    print(json.dumps(record, indent=1))
    return int(record["failure"] is not None)


def found(said: list[str], code: int) -> dict[str, Any]:
    """From libFuzzer's lines. `inputs_kept`: those that reached code which none before had; `failure`: how it ended
    before its time, else null."""
    counts = [match for line in said if (match := re.match(r"#(\d+)\s.* corp: (\d+)/", line))]
    ended = [match for line in said if (match := re.match(r"Done (\d+) runs in (\d+) second", line))]
    failure = next(
        (line.strip() for line in reversed(said) if "ERROR" in line or "Exception" in line), f"exit code {code}"
    )
    return {
        "executions": int(ended[-1][1]) if ended else int(counts[-1][1]) if counts else 0,
        "seconds": int(ended[-1][2]) if ended else None,
        "inputs_kept": int(counts[-1][2]) if counts else 0,
        "formats": list(FORMATS),
        "failure": failure if code else None,
        "atheris": importlib.metadata.version("atheris"),
    }


if __name__ == "__main__":
    sys.exit(main())
