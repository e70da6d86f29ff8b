"""Quality against size over settings: the copies in the matrix beside those of a sweep, and two libraries compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import provenance
from pipeline.measure.statistics import Interval
from pipeline.reporting import markdown, numbers
from pipeline.reporting.numbers import change_pct, fixed, interval_of, share, signed_interval
from pipeline.reporting.records import METHODS

if TYPE_CHECKING:
    from pipeline.reporting.study import Study

SHOWN = (
    "bits", "group_size", "sym", "desc_act", "true_sequential", "damp_percent", "zero_point", "clip", "duo_scaling",
    "calibration_rows", "pack_head",
)  # fmt: skip
TERMS = {
    "true_sequential": "the modules of a layer are rounded in the order they run, each on what the rounded ones "
    "before it put out",
    "pack_head": "the head is held at 8 bits",
}
SAME_QUALITY = ("target", "corpus", "baseline", "evaluate")  # of two points that may stand in one table


@dataclass(frozen=True)
class Point:
    """One quantized copy: settings, bytes of its weights, and quality against full precision on the same tokens.

    `inputs`: hashes of the target, the texts, the baseline's results, the evaluation's settings, the calibration rows.
    """

    method: str
    settings: dict[str, Any]
    weight_bytes: int
    delta_log_ppl: Interval
    kl_nats_mean: float
    top1_agreement: float
    inputs: dict[str, str]

    @classmethod
    def of(cls, quantized: dict[str, Any], evaluated: dict[str, Any]) -> Point:
        """From the records of quantize@METHOD and evaluate@METHOD. Raises ValueError when they are not of one copy."""
        origin, scored = quantized["provenance"], evaluated["provenance"]
        if origin["outputs"]["out"] != scored["inputs"]["checkpoint"]:
            key = quantized["key"]
            raise ValueError(f"evaluate@{key}: scored another checkpoint than quantize@{key} wrote; run `dvc repro`")
        metrics, against = quantized["metrics"], evaluated["metrics"]["against_base"]
        delta = interval_of(against["delta_log_ppl"])
        assert delta is not None, "evaluate refuses a perplexity that is not finite"
        return cls(
            quantized["key"],
            metrics["recipe"]["settings"],
            metrics["weight_bytes"],
            delta,
            against["kl_nats_mean"],
            against["top1_agreement"],
            {
                **{name: origin["inputs"][name] for name in ("target", "calibration")},
                **{name: scored["inputs"][name] for name in ("corpus", "baseline")},
                "evaluate": provenance.json_sha256(scored["sections"]["evaluate"]),
            },
        )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Point:
        delta = interval_of(data["delta_log_ppl"])
        if delta is None:
            raise TypeError("a point without a change of perplexity")
        return cls(**{**data, "delta_log_ppl": delta})

    @property
    def backend(self) -> str:
        return str(self.settings["backend"])

    @property
    def ppl_increase_pct(self) -> Interval:
        return change_pct(self.delta_log_ppl)

    def same_but_backend(self, other: Point) -> bool:
        """Whether the library is all that differs: the settings, the rows and the texts are the same."""
        mine, theirs = ({**p.settings, "backend": None} for p in (self, other))
        return (self.method, mine, self.inputs) == (other.method, theirs, other.inputs)

    def same_quality_scale(self, other: Point) -> bool:
        return all(self.inputs[name] == other.inputs[name] for name in SAME_QUALITY)


def read(path: Path) -> tuple[Point, ...]:
    """The points of a file that `make sweep` wrote. Raises ValueError naming a file that is not one."""
    data = provenance.read_json(path)
    try:
        return tuple(Point.from_json(p) for p in data["points"])
    except (KeyError, TypeError) as e:
        raise ValueError(
            f"{path}: not a sweep's results ({e}); run `make sweep`, or bring the committed file back"
        ) from e


def points(study: Study) -> tuple[list[Point], list[Point], int]:
    """The copies in the matrix, those of the sweep that stand beside them, and how many do not."""
    own = [Point.of(*(study.records.by_name[f"{stage}@{m}"] for stage in ("quantize", "evaluate"))) for m in METHODS]
    swept = [p for p in study.sweep if p not in own]
    fitting = [p for p in swept if p.same_quality_scale(own[0])]
    return own, fitting, len(swept) - len(fitting)


def within_reach(study: Study) -> str | None:
    """The smallest copy of the sweep that meets the limit of perplexity where the matrix has none that does."""
    limit = study.config.report.max_ppl_increase_pct
    own, fitting, _ = points(study)
    meets = lambda p: limit is not None and p.ppl_increase_pct.value <= limit  # noqa: E731
    found = min(filter(meets, fitting), key=lambda p: p.weight_bytes, default=None)
    if found is None or any(map(meets, own)):
        return None
    mine = next(p.settings for p in own if p.method == found.method)
    other = {k: "null" if v is None else v for k, v in found.settings.items() if mine.get(k) != v}
    how = " ".join(f"-S quantize.{found.method}.{name}={value}" for name, value in sorted(other.items()))
    return (
        f"Within the limit of perplexity, among other settings: {found.method} at "
        f"{signed_interval(found.ppl_increase_pct, '%')}, {numbers.size(found.weight_bytes)} as stored; `dvc exp run "
        f"{how}` measures what else it is worth."
    )


def tradeoff(study: Study) -> str:
    own, fitting, left_out = points(study)
    note = (
        f"{left_out} of the sweep's copies belong to another model, text or evaluation and are left out; `make sweep` "
        f"makes them anew."
        if left_out
        else ""
    )
    if not fitting:
        only = "Only the copies in the matrix were measured; `make sweep` adds other settings and libraries."
        return markdown.section("Other settings", only, note)
    return markdown.section("Other settings", table(own + fitting), libraries(own + fitting), note)


def table(points: Sequence[Point]) -> str:
    """All points, the smallest first; settings that never vary have no column."""
    settings = [name for name in SHOWN if len({str(p.settings[name]) for p in points}) > 1]
    rows = [
        [
            f"**{p.method}**" if _on_front(p, points) else p.method,
            p.backend,
            *("all" if p.settings[name] is None else str(p.settings[name]) for name in settings),
            numbers.size(p.weight_bytes),
            signed_interval(p.ppl_increase_pct, "%"),
            fixed(p.kl_nats_mean, 3),
            share(p.top1_agreement, places=1),
        ]
        for p in sorted(points, key=lambda p: (p.weight_bytes, p.kl_nats_mean))
    ]
    headers = ["method", "library", *settings, "weights", "perplexity", "KL, nats", "same top token"]
    intro = (
        "Copies of the target under other settings, against full precision on the same tokens, the smallest first. "
        "**Bold**: no other row is at most as large with a smaller KL."
    )
    terms = "".join(f" **{name}**: {TERMS[name]}." for name in settings if name in TERMS)
    return f"{intro}{terms}\n\n{markdown.table(headers, rows, left=2)}"


def _on_front(point: Point, points: Sequence[Point]) -> bool:
    return not any(p.weight_bytes <= point.weight_bytes and p.kl_nats_mean < point.kl_nats_mean for p in points)


def libraries(points: Sequence[Point]) -> str:
    """Pairs that differ in the library alone: how far apart are two implementations of one method?"""
    pairs = [(a, b) for a in points for b in points if a.backend < b.backend and a.same_but_backend(b)]
    if not pairs:
        return "**Two libraries**: no two of these differ in the library alone."
    rows = [
        [
            f"{a.method}, groups of {a.settings['group_size']}",
            f"{a.backend} / {b.backend}",
            " / ".join(signed_interval(p.ppl_increase_pct, "%") for p in (a, b)),
            f"{fixed(a.kl_nats_mean, 3)} / {fixed(b.kl_nats_mean, 3)}",
            fixed(a.kl_nats_mean / b.kl_nats_mean, 2, "the second is 0") if b.kl_nats_mean else numbers.na("KL of 0"),
        ]
        for a, b in pairs
    ]
    headers = ["method", "libraries", "perplexity", "KL, nats", "ratio of KL"]
    intro = "**Two libraries**: the same settings and calibration rows by two implementations of one method."
    return f"{intro}\n\n{markdown.table(headers, rows, left=2)}"
