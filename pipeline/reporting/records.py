"""The results a report is made of: one record a stage, checked to belong to the configuration at hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import provenance

TARGETS = ("base", "gptq", "awq")
METHODS = TARGETS[1:]
RECORDS = (
    "fetch@target",
    "fetch@corpus",
    "calibrate",
    "prompts",
    "draft",
    "quantize@gptq",
    "quantize@awq",
    "quantize@draft",
    *(f"evaluate@{key}" for key in TARGETS),
    *(f"speculate@{key}" for key in TARGETS),
    "benchmark",
    "rank_drafts",
)


QUANTIZED = (*METHODS, "draft")
TIMED = (*(f"speculate@{key}" for key in TARGETS), "benchmark", "rank_drafts")
WRITTEN_BY = {
    "target": "fetch@target",
    "corpus": "fetch@corpus",
    "calibration": "calibrate",
    "prompts": "prompts",
    "draft": "draft",
    "gptq": "quantize@gptq",
    "awq": "quantize@awq",
    "quantized_draft": "quantize@draft",
}
# artifact -> the records that read it, and the name it has among their inputs: all must have seen the same bytes
READ_BY = {
    "target": [
        *((name, "target") for name in ("calibrate", "prompts", "draft", *(f"quantize@{key}" for key in QUANTIZED))),
        ("quantize@gptq", "model"),
        ("quantize@awq", "model"),
        ("evaluate@base", "checkpoint"),
        ("speculate@base", "checkpoint"),
        ("benchmark", "base"),
        ("rank_drafts", "base"),
    ],
    "corpus": [(name, "corpus") for name in ("calibrate", "prompts", *(f"evaluate@{key}" for key in TARGETS))],
    "calibration": [(f"quantize@{key}", "calibration") for key in QUANTIZED],
    "prompts": [("draft", "prompts"), *((name, "prompts") for name in TIMED)],
    "draft": [("quantize@draft", "model"), *((name, "draft") for name in TIMED)],
    "gptq": [
        ("evaluate@gptq", "checkpoint"),
        ("speculate@gptq", "checkpoint"),
        ("benchmark", "gptq"),
        ("rank_drafts", "gptq"),
    ],
    "awq": [
        ("evaluate@awq", "checkpoint"),
        ("speculate@awq", "checkpoint"),
        ("benchmark", "awq"),
        ("rank_drafts", "awq"),
    ],
    "quantized_draft": [(name, "quantized_draft") for name in TIMED],
}


class StaleResults(ValueError):
    """A result file that does not belong to the present params.yaml: names the file, the key and both values."""


@dataclass(frozen=True)
class Records:
    """Every stage's record by name (`evaluate@gptq`), and the machine's fingerprint."""

    by_name: dict[str, dict[str, Any]]
    environment: dict[str, Any]

    def metrics(self, name: str) -> dict[str, Any]:
        return self.by_name[name]["metrics"]

    def per_target(self, stage: str) -> dict[str, dict[str, Any]]:
        return {key: self.metrics(f"{stage}@{key}") for key in TARGETS}


def load(results: Path, environment: Path, sections: dict[str, Any]) -> Records:
    """Read RECORDS from the folder `results`, refusing those made with other `sections` (name -> section) or artifacts.

    Raises StaleResults, or ValueError when a file is absent or not JSON.
    """
    now = provenance.finite(sections)
    by_name = read(results)
    machine, sha256 = provenance.read_json(environment), provenance.tree_sha256(environment)
    for name, record in by_name.items():
        path = results / f"{name}.json"
        check_sections(path, record, now)
        if record["provenance"]["inputs"].get("environment", sha256) != sha256:
            raise StaleResults(f"{path}: measured on another machine than {environment} describes; run `dvc repro`")
    check_artifacts(results, by_name)
    return Records(by_name, machine)


def read(results: Path) -> dict[str, dict[str, Any]]:
    """RECORDS by name, as they lie. Raises ValueError when a file is absent or not JSON."""
    return {name: provenance.read_json(results / f"{name}.json") for name in RECORDS}


def check_sections(path: Path, record: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises StaleResults when a section that the record was made with differs from the one in `now`."""
    for name, then in record["provenance"]["sections"].items():
        if name not in now:
            continue
        keyed = name == "quantize" and record.get("key") in now[name]
        current = now[name][record["key"]] if keyed else now[name]
        dotted = f"{name}.{record['key']}" if keyed else name
        if difference := first_difference(then, current, dotted):
            key, old, new = difference
            raise StaleResults(f"{path}: made with {key}={old!r}, but params.yaml now has {new!r}; run `dvc repro`")


def check_artifacts(results: Path, by_name: dict[str, dict[str, Any]]) -> None:
    """Raises StaleResults when two records were made with different bytes of the same artifact.

    A record without the hash (made before it was kept) proves nothing and is passed over.
    """
    for artifact, readers in READ_BY.items():
        writer = WRITTEN_BY[artifact]
        written = by_name[writer]["provenance"].get("outputs", {}).get("out")
        seen = [(writer, written), *((name, by_name[name]["provenance"]["inputs"].get(own)) for name, own in readers)]
        (first, due), *others = [(name, sha256) for name, sha256 in seen if sha256 is not None] or [("", "")]
        for name, sha256 in others:
            if sha256 != due:
                raise StaleResults(
                    f"{results / name}.json: made with {artifact} {sha256[:12]}, but {first}.json has {due[:12]}; "
                    f"run `dvc repro`"
                )


def first_difference(then: Any, now: Any, path: str) -> tuple[str, Any, Any] | None:
    """Dotted key and both values of the first leaf that differs; an absent key counts as None."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in [*then, *(k for k in now if k not in then)]:
            if found := first_difference(then.get(key), now.get(key), f"{path}.{key}"):
                return found
        return None
    return None if then == now else (path, then, now)
