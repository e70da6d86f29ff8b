"""What a sweep over draft lengths is worth stands beside its best K: verdict, blocks, reasons, misses, divergences."""

import pytest
from report_fixtures import PARAMS, sections_of, write_study

from pipeline.reporting import document, figures, records, rows, sweeps
from pipeline.reporting.study import Study

WIDE = "K = 2: the interval of its speedup is +-12 %, asked +-10 %"


def study_of(folder, **changes):
    sections = sections_of(PARAMS)
    return Study.gather(sections, records.load(*write_study(folder, PARAMS, **changes), sections), "figures")


def undecided(metrics):
    metrics |= {"best_draft_len": 0, "verdict": "UNDECIDED", "reasons": [WIDE]}


def test_an_undecided_sweep_says_so_in_text_and_figure(tmp_path):
    study = study_of(tmp_path, speculate__base=undecided)
    text = document.render(study)
    shown = WIDE.replace("+-", "±")
    assert f"- `base`: best K = 0, UNDECIDED, 3 blocks: made up; {shown}." in text
    assert "- `gptq`: best K = 1, OK, 3 blocks: made up." in text
    with figures.style():
        drawn = figures.draft_length(study.records.per_target("speculate"), study.noise_floor)
    titles = [ax.get_title(loc="left") for ax in drawn.axes]
    assert titles[:2] == ["base: best K = 0\nUNDECIDED, 3 blocks", "gptq: best K = 1\nOK, 3 blocks"]


def timed(**points):
    """Edits a sweep: k1=(predicted, measured, low, high); every other K was not timed."""

    def change(metrics):
        for point in metrics["curve"]:
            given = points.get(f"k{point['draft_len']}")
            if given is None:
                point["measured"] = point["measured"] if point["draft_len"] == 0 else None
                continue
            point["predicted_speedup"], *measured = given
            point["measured"]["speedup"] = dict(zip(("value", "low", "high"), measured, strict=True))

    return change


@pytest.mark.parametrize(
    ("points", "said"),
    [
        (
            {"k1": (1.1, 1.0, 0.9, 1.2), "k2": (0.6, 0.8, 0.7, 0.9)},
            "largest 25 % (K = 2); 1 of 2 intervals exclude it",
        ),
        ({"k1": (1.1, 1.0, 0.9, 1.2)}, "largest 10 % (K = 1); 0 of 1 intervals exclude it"),
        ({}, "n/a (no K with a prediction was timed)"),
    ],
)
def test_misses_of_the_prediction_are_counted(tmp_path, points, said):
    text = sweeps.misses(study_of(tmp_path, speculate__gptq=timed(**points))).replace("\u00a0", " ")
    assert f"- `gptq`: {said}." in text


NEAR = {"grade": "numeric", "first_divergence": {"prompt": "code:7", "position": 12, "top2_gap": 0.0312}}
SAID = (
    "numeric: answers first leave plain decoding at token 12 of prompt code:7, where the target's two best logits are"
)


def test_answers_that_are_not_exact_show_where_and_how_near_a_tie(tmp_path):
    def in_sweep(metrics):
        next(p for p in metrics["curve"] if p["draft_len"] == 2)["measured"]["lossless"] = NEAR

    edits = {
        "benchmark": lambda m: m["arms"]["gptq_spec"].update(lossless=NEAR),
        "speculate__awq": in_sweep,
    }
    text = document.render(study_of(tmp_path, **edits))
    assert f"- `gptq_spec`: {SAID} 0.0312 apart." in text
    assert f"- `awq`, K = 2: {SAID} 0.0312 apart." in text
    assert "first leave plain decoding" not in document.render(study_of(tmp_path / "b"))


def test_an_answer_that_ends_early_has_no_gap():
    """An infinite gap is null in JSON."""
    where = rows.divergence({"grade": "broken", "first_divergence": {"prompt": "p", "position": 3, "top2_gap": None}})
    assert where == "broken: answers first leave plain decoding at token 3 of prompt p, where one of the answers ends"
