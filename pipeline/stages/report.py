"""Stage `report`: results only -> reports/ (report.md, figures, metrics.json, serve/); no model is loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pipeline import provenance
from pipeline.config import (
    Benchmark,
    Calibration,
    Corpus,
    Draft,
    Evaluate,
    Model,
    Prompts,
    QuantizeMethod,
    Report,
    Runtime,
    Speculate,
)  # fmt: skip
from pipeline.reporting import document, headline, records, serving, summary, tradeoff_section
from pipeline.reporting.study import Study
from pipeline.stages import written_by_stages


def run(
    name: str,
    report: Report,
    runtime: Runtime,
    model: Model,
    corpus: dict[str, Corpus],
    calibration: Calibration,
    prompts: Prompts,
    draft: Draft,
    quantize: dict[str, QuantizeMethod],
    evaluate: Evaluate,
    speculate: Speculate,
    benchmark: Benchmark,
    *,
    results: Path,
    environment: Path,
    out_report: Path,
    out_metrics: Path,
    out_figures: Path,
    out_serve: Path,
    swept: Path | None = None,
) -> dict[str, Any]:
    """Write the report on the records in the folder `results` (one STAGE[@KEY].json each, as records.RECORDS lists)
    and on the points of `swept` (reports/sweep.json).

    Every section is taken so that a record made under another configuration is refused. Returns what `out_metrics`
    holds; prints the verdict and the report's path.
    """
    sections = {
        "name": name, "report": report, "runtime": runtime, "model": model, "corpus": corpus,
        "calibration": calibration, "prompts": prompts, "draft": draft, "quantize": quantize, "evaluate": evaluate,
        "speculate": speculate, "benchmark": benchmark,
    }  # fmt: skip
    points = tradeoff_section.read(swept) if swept is not None else ()
    link = Path(os.path.relpath(out_figures, out_report.parent)).as_posix()
    with written_by_stages(results):
        study = Study.gather(sections, records.load(results, environment, sections), link, points)
        text, metrics = document.render(study), summary.summarize(study)
        with provenance.whole_folder(out_figures) as folder:
            document.draw(study, folder)
        with provenance.whole_folder(out_serve) as folder:
            serving.write(study, folder)
    provenance.write_text(out_report, text)
    provenance.write_json(out_metrics, metrics)
    print(headline.plain_verdict(study))
    print(f"Report: {out_report}")
    return metrics
