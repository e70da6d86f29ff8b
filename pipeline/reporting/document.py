"""The report from first line to last."""

from __future__ import annotations

from pathlib import Path

from pipeline.reporting import (
    draft_section,
    figures,
    glossary,
    headline,
    markdown,
    quality_sections,
    setting_sections,
    speed_sections,
    sweeps,
    tradeoff_section,
)
from pipeline.reporting.records import METHODS
from pipeline.reporting.study import Study


def render(study: Study) -> str:
    """Markdown; figures are linked relative to the report."""
    parts = [
        f"# {study.config.name}: how to deploy {study.config.model.name}",
        headline.verdict(study),
        headline.matrix(study),
        markdown.picture(study.figures, "draft-length", "Speedup against draft length, predicted and measured"),
        sweeps.verdicts(study),
        headline.row_notes(study),
        headline.context(study),
        headline.terms(study),
        glossary.words(study),
        speed_sections.trade_off(study),
        speed_sections.categories(study),
        speed_sections.limits(study),
        quality_sections.quality(study),
        quality_sections.quantization(study),
        tradeoff_section.tradeoff(study),
        draft_section.draft(study),
        setting_sections.memory(study),
        setting_sections.data(study),
        setting_sections.environment(study),
        setting_sections.limits(study),
        setting_sections.reproduce(study),
        setting_sections.sources(study),
    ]
    return "\n\n".join(p for p in parts if p) + "\n"


def draw(study: Study, folder: Path) -> None:
    """The figures that `render` links to."""
    speculated = study.records.per_target("speculate")
    methods = {m: study.records.metrics(f"quantize@{m}") for m in METHODS}
    with figures.style():
        figures.save(figures.draft_length(speculated, study.noise_floor), folder, "draft-length")
        figures.save(figures.trade_off(study.rows, study.recommendation), folder, "trade-off")
        figures.save(figures.costs(speculated), folder, "costs")
        figures.save(figures.layer_errors(methods), folder, "layer-error")
