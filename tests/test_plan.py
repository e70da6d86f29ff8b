"""What an experiment will hold, from its config alone."""

from pathlib import Path

import pytest

from pipeline import config, plan

ROOT = Path(__file__).parents[1]
EIGHT_BILLION = "experiment=llama3_8b"


def sizes(*overrides):
    """arm -> (weights, draft), GiB as printed."""
    params = config.parse(config.compose(ROOT / "conf", list(overrides)), Path("params.yaml"))
    rows = [line.strip("| ").split("|") for line in plan.plan(params).splitlines() if line.startswith("|")][2:]
    return {cells[0].strip(): (cells[1].strip(), cells[2].strip()) for cells in rows}


def test_a_packed_arm_is_a_third_of_full_precision():
    """Linear layers in 4.25 bits (a scale and a zero of 16 bits for 128 weights), the rest in 2 bytes."""
    params = config.parse(config.compose(ROOT / "conf", [EIGHT_BILLION]), Path("params.yaml"))
    full, packed = params.model.parameters, params.model.packable_parameters
    found = sizes(EIGHT_BILLION)
    assert float(found["base"][0]) == pytest.approx(full * 2 / 2**30, rel=0.01)
    expected = packed * (4 + 32 / 128) / 8 + (full - packed) * 2
    assert float(found["gptq"][0]) == pytest.approx(expected / 2**30, rel=0.01)
    assert float(found["gptq"][0]) < 0.4 * float(found["base"][0])


@pytest.mark.parametrize("named", [[], ["base"], ["gptq", "awq"], ["base", "gptq", "awq"]])
def test_each_arm_has_the_draft_that_it_will_run_with(named):
    found = sizes(EIGHT_BILLION, f"speculate.quantized_draft_for=[{','.join(named)}]")
    full = float(sizes(EIGHT_BILLION, "speculate.quantized_draft_for=[]")["base_spec"][1])
    for target in ("base", "gptq", "awq"):
        assert (float(found[f"{target}_spec"][1]) < full) == (target in named)
        assert float(found[target][1]) == 0


def test_a_lookup_holds_nothing_and_a_copy_drafts_for_base_alone():
    assert {draft for _, draft in sizes(EIGHT_BILLION, "draft=ngram").values()} == {"0.00"}
    own = sizes(EIGHT_BILLION, "draft=self")
    assert own["base_spec"][1] == own["gptq"][0]
    assert own["gptq_spec"][1] == own["awq_spec"][1] and not own["gptq_spec"][1][0].isdigit()
