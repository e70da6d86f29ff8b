"""Everything that the sections of a report draw on, gathered once."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from pipeline.measure.statistics import Interval, claimable
from pipeline.reporting import rows
from pipeline.reporting.numbers import interval_of
from pipeline.reporting.recommendation import Recommendation, recommend
from pipeline.reporting.records import Records
from pipeline.reporting.rows import Row
from pipeline.reporting.tradeoff_section import Point


@dataclass(frozen=True)
class Study:
    """`config`: sections of params.yaml; `rows` in the order of the matrix; `figures`: their folder, as linked;
    `sweep`: quantized copies under other settings."""

    config: SimpleNamespace
    records: Records
    rows: dict[str, Row]
    noise_floor: Interval | None
    recommendation: Recommendation
    figures: str
    sweep: tuple[Point, ...]

    @classmethod
    def gather(cls, sections: dict[str, Any], records: Records, figures: str, sweep: tuple[Point, ...] = ()) -> Study:
        config = SimpleNamespace(**sections)
        built = rows.build(records)
        measured = records.metrics("benchmark")
        noise_floor = interval_of(measured.get("noise_floor"))
        chosen = recommend(built, config.report, noise_floor, interval_of(measured.get("noise_floor_answer")))
        return cls(config, records, built, noise_floor, chosen, figures, sweep)

    @property
    def choice(self) -> Row | None:
        return self.rows[self.recommendation.choice] if self.recommendation.choice else None

    @property
    def floor(self) -> Interval:
        return claimable(self.noise_floor)

    @property
    def answer_floor(self) -> Interval:
        """Of the time of a whole answer."""
        return claimable(interval_of(self.records.metrics("benchmark").get("noise_floor_answer")))

    def category_floor(self, category: str) -> Interval:
        """Of the decode speed on prompts of one category."""
        floors = self.records.metrics("benchmark").get("noise_floor_by_category", {})
        return claimable(interval_of(floors.get(category)))

    @property
    def arms(self) -> dict[str, Any]:
        return self.records.metrics("benchmark")["arms"]
