"""The report's figures: plain SVG in a light and a dark variant, the same bytes for the same results.

Nothing rests on colour: targets differ by marker and dash and are labelled where they are drawn. Text is drawn as
paths, so that a figure looks the same whatever fonts the reader has. Every function but `save` and `spread` returns a
matplotlib Figure and is called inside `style()`.
"""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline import provenance
from pipeline.measure.statistics import Interval
from pipeline.reporting.numbers import interval_of, is_finite
from pipeline.reporting.recommendation import Recommendation
from pipeline.reporting.records import TARGETS
from pipeline.reporting.rows import Row
from pipeline.reporting.sweeps import worth

WIDTH_IN = 9.8
PAPER, INK, FAINT = "#ffffff", "#1f2328", "#d1d9e0"
COLOR = {"base": "#59636e", "gptq": "#0072b2", "awq": "#c44e00"}  # Okabe and Ito's, safe for colour-blind readers
MARKER = {"base": "o", "gptq": "s", "awq": "^"}
DASHES = {"base": (0, ()), "gptq": (0, (5, 1.5)), "awq": (0, (1.2, 1.2))}
# The dark variant is the same drawing in these colours, on GitHub's dark ground.
DARK = {
    PAPER: "#0d1117",
    INK: "#e6edf3",
    FAINT: "#3d444d",
    COLOR["base"]: "#a9b1ba",
    COLOR["gptq"]: "#58b4f0",
    COLOR["awq"]: "#f0a35a",
}


@contextmanager
def style() -> Iterator[None]:
    import matplotlib

    settings: Any = {
        "svg.hashsalt": "report",
        "svg.fonttype": "path",
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "axes.titlesize": 9.5,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.linewidth": 0.6,
        "lines.linewidth": 1.6,
        "lines.markersize": 5.5,
        **dict.fromkeys(("grid.color", "axes.edgecolor", "xtick.color", "ytick.color"), FAINT),
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
        **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), PAPER),
    }
    with matplotlib.rc_context(settings):
        yield


def save(figure: Any, folder: Path, name: str) -> None:
    """folder/NAME-light.svg and folder/NAME-dark.svg."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    light = buffer.getvalue()
    dark = re.sub("|".join(DARK), lambda found: DARK[found.group()], light)
    provenance.write_text(folder / f"{name}-light.svg", light)
    provenance.write_text(folder / f"{name}-dark.svg", dark)


def panels(count: int, height_in: float, **kwargs: Any) -> tuple[Any, list[Any]]:
    """A figure as wide as the page, and its `count` axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False, **kwargs)[0])


def errors(iv: Interval) -> list[list[float]]:
    """Distances to both ends, in matplotlib's 2 x 1 form; zero when there is no interval."""
    return [[iv.value - iv.low], [iv.high - iv.value]] if iv.known else [[0.0], [0.0]]


def draft_length(speculated: dict[str, dict[str, Any]], noise_floor: Interval | None) -> Any:
    """Predicted (line) and measured (points with intervals) speedup over plain decoding of the same target, per K."""
    figure, axes = panels(len(TARGETS), 2.9, sharey=True)
    for ax, target in zip(axes, TARGETS, strict=True):
        _curve(ax, target, speculated[target])
        if noise_floor is not None and noise_floor.known:
            ax.axhspan(noise_floor.low, noise_floor.high, color=INK, alpha=0.13, linewidth=0, label="noise floor")
        ax.axhline(1, color=INK, linewidth=0.8)
        ax.set_xlabel("draft length K (tokens a round)")
    axes[0].set_ylabel("speedup over plain decoding (×)")
    axes[0].set_ylim(bottom=0)
    axes[0].legend(frameon=False, fontsize=8, loc="lower left", handlelength=2.2)
    return figure


def _curve(ax: Any, target: str, speculation: dict[str, Any]) -> None:
    curve, color = speculation["curve"], COLOR[target]
    predicted = [(p["draft_len"], p["predicted_speedup"]) for p in curve if is_finite(p["predicted_speedup"])]
    ax.plot(*zip(*predicted, strict=True), color=color, label="predicted")
    timed = [(p["draft_len"], iv) for p in curve if p["measured"] and (iv := interval_of(p["measured"]["speedup"]))]
    for i, (draft_len, iv) in enumerate(timed):
        ax.errorbar(
            draft_len, iv.value, errors(iv), color=color, marker=MARKER[target], markerfacecolor=PAPER, capsize=2.5,
            linestyle="none", label="measured, 95 % interval" if i == 0 else None,
        )  # fmt: skip
    ax.set_title(f"{target}: best K = {speculation['best_draft_len']}\n{worth(speculation)}")
    ax.set_xticks([p["draft_len"] for p in curve])


def trade_off(rows: dict[str, Row], recommendation: Recommendation) -> Any:
    """Speed, weights held and perplexity of all rows, aligned so that a row reads across; * = on the front."""
    figure, (speed, memory, quality) = panels(3, 2.9, sharey=True)
    names = list(rows)[::-1]
    for y, name in enumerate(names):
        row = rows[name]
        _point(speed, y, row, row.decode_tok_per_s)
        _memory_bar(memory, y, row)
        if row.speculative:
            quality.text(0, y, f" = {row.target}", va="center", fontsize=8)
        else:
            _point(quality, y, row, row.ppl_increase_pct)
    speed.set_yticks(range(len(names)), [f"{n} *" if n in recommendation.pareto_front else n for n in names])
    for label, name in zip(speed.get_yticklabels(), names, strict=True):
        label.set_fontweight("bold" if name == recommendation.choice else "normal")
    speed.set_xlim(left=0)
    memory.margins(x=0.22)
    memory.set_xlim(left=0)
    speed.set_title("decode speed (tok/s) → better")
    memory.set_title("weights held (MiB) ← better")
    quality.set_title("perplexity over base (%) ← better")
    for ax in (speed, memory, quality):
        ax.grid(axis="y", visible=False)
    return figure


def _point(ax: Any, y: int, row: Row, iv: Interval | None) -> None:
    if iv is None:
        ax.text(0, y, " n/a", va="center", fontsize=8)
        return
    color = COLOR[row.target]
    ax.errorbar(
        iv.value, y, xerr=errors(iv), color=color, marker=MARKER[row.target], capsize=2.5, clip_on=False,
        markerfacecolor=color if row.speculative else PAPER,
    )  # fmt: skip


def _memory_bar(ax: Any, y: int, row: Row) -> None:
    if row.weight_bytes is None:
        ax.text(0, y, " n/a", va="center", fontsize=8)
        return
    target, draft, color = row.weight_bytes / 2**20, (row.draft_weight_bytes or 0) / 2**20, COLOR[row.target]
    ax.barh(y, target, height=0.5, color=color, alpha=0.75)
    if draft:
        ax.barh(y, draft, left=target, height=0.5, facecolor="none", edgecolor=color, hatch="////")
        ax.text(target + draft, y, " + draft", va="center", fontsize=8)


def costs(speculated: dict[str, dict[str, Any]]) -> Any:
    """Left: cost of verifying n tokens, in steps of one token. Right: share of rounds that keep position j."""
    figure, (verify, accept) = panels(2, 2.9)
    verify_lines, accept_lines = {}, {}
    for target, speculation in speculated.items():
        verify_cost = speculation["costs"]["verify_cost"]
        verify_lines[target] = sorted((int(n), v) for n, v in verify_cost.items() if is_finite(v))
        accept_lines[target] = list(enumerate(longest(speculation)["accept_marginal"], start=1))
    verify.axhline(1, color=INK, linewidth=0.8)
    _lines(verify, verify_lines, top=None)
    _lines(accept, accept_lines, top=1.0)
    verify.set_title("cost of checking n tokens (in steps of one token)")
    verify.set_xlabel("tokens in the step, n = K + 1")
    lens = sorted({longest(s)["draft_len"] for s in speculated.values()})
    accept.set_title(f"share of rounds that keep position j (K = {', '.join(map(str, lens))})")
    accept.set_xlabel("position in the draft, j")
    return figure


def longest(speculation: dict[str, Any]) -> Any:
    """The point of the curve with the longest K."""
    return max(speculation["curve"], key=lambda p: p["draft_len"])


def _lines(ax: Any, lines: dict[str, list[tuple[int, float]]], top: float | None) -> None:
    """One line a target, named at its right end; names are pushed apart where ends lie close."""
    lines = {target: points for target, points in lines.items() if points}
    for target, points in lines.items():
        ax.plot(
            *zip(*points, strict=True), color=COLOR[target], marker=MARKER[target], linestyle=DASHES[target],
            clip_on=False,
        )  # fmt: skip
    ax.set_ylim(0, top)
    heights = spread({target: points[-1][1] for target, points in lines.items()}, 0.075 * ax.get_ylim()[1])
    for target, y in heights.items():
        ax.annotate(
            target, (lines[target][-1][0], y), xytext=(8, 0), textcoords="offset points", va="center",
            annotation_clip=False, color=COLOR[target],
        )  # fmt: skip
    ax.margins(x=0.12)
    ax.set_xticks(sorted({x for points in lines.values() for x, _ in points}))


def spread(heights: dict[str, float], gap: float) -> dict[str, float]:
    """The heights, moved up just enough that neighbours are at least `gap` apart."""
    placed: dict[str, float] = {}
    lowest = float("-inf")
    for name in sorted(heights, key=lambda n: heights[n]):
        placed[name] = max(heights[name], lowest)
        lowest = placed[name] + gap
    return placed


def layer_errors(quantized: dict[str, dict[str, Any]]) -> Any:
    """Per method: the output error of every module (marks) and the median of each layer (line)."""
    figure, axes = panels(len(quantized), 2.6, sharey=True)
    for ax, (method, metrics) in zip(axes, quantized.items(), strict=True):
        rows = [(row["layer"], 100 * row["error"]) for row in metrics["layers"] if is_finite(row["error"])]
        layers = sorted({layer for layer, _ in rows})
        medians = [statistics.median(error for layer, error in rows if layer == at) for at in layers]
        ax.plot(
            *zip(*rows, strict=True), color=COLOR[method], marker=MARKER[method], markersize=3, alpha=0.45,
            linestyle="none",
        )  # fmt: skip
        ax.plot(layers, medians, color=COLOR[method])
        ax.set_title(f"{method}: output error of each module, median of the layer (%)")
        ax.set_xlabel("layer")
    axes[0].set_ylim(bottom=0)
    return figure
