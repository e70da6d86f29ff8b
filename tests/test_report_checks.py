"""Faults planted in the records turn the row VOID or NOT COMPARABLE; without them every row is OK."""

import dataclasses

import pytest
from report_fixtures import PARAMS, sections_of, write_study

from pipeline.reporting import records
from pipeline.reporting.study import Study


def rows_of(folder, **changes):
    sections = sections_of(PARAMS)
    return Study.gather(sections, records.load(*write_study(folder, PARAMS, **changes), sections), "figures").rows


def in_arms(*names, entry="readback", **changes):
    def fault(metrics):
        for name in names:
            metrics["arms"][name][entry] |= changes

    return {"benchmark": fault}


def in_sweep(target, change):
    return {f"speculate__{target}": change}


def judged(folder, name, **faults):
    row = rows_of(folder, **faults)[name]
    return row.verdict, list(row.reasons)


def test_without_a_fault_every_row_is_ok(tmp_path):
    assert {(r.verdict, r.reasons) for r in rows_of(tmp_path).values()} == {("OK", ())}


def test_a_packed_checkpoint_that_ran_dense_is_void_and_shows_no_speed(tmp_path):
    fault = in_arms("gptq", kernels={"FullLinear": 210, "Int4Linear": 1})
    row = rows_of(tmp_path, **fault)["gptq"]
    assert row.verdict == "VOID" and row.speedup is None and row.decode_tok_per_s is None
    assert row.reasons == ("kernel: the file holds packed codes, but its layers ran in FullLinear",)


def test_a_baseline_that_ran_packed_is_void(tmp_path):
    found = judged(tmp_path, "base", **in_arms("base", kernels={"Int4Linear": 210, "FullLinear": 1}))
    assert found == ("VOID", ["kernel: the file holds full precision, but its layers ran in Int4Linear"])


@pytest.mark.parametrize(
    ("name", "kernels", "said"),
    [
        ("gptq_spec", {"FewRowsLinear": 29}, "the file holds packed codes, but its layers ran in FewRowsLinear"),
        ("base_spec", {"Int4Linear": 28}, "the file holds full precision, but its layers ran in Int4Linear"),
    ],
)
def test_a_draft_of_another_precision_is_void(tmp_path, name, kernels, said):
    verdict, reasons = judged(tmp_path, name, **in_arms(name, entry="draft_readback", kernels=kernels))
    assert verdict == "VOID" and f"draft precision: {said}" in reasons


@pytest.mark.parametrize("named", [["base"], ["gptq", "awq"], ["gptq"]])
@pytest.mark.parametrize("packed", [True, False])
def test_the_draft_is_as_the_sweep_was_told(tmp_path, named, packed):
    """For each target in and out of the list, a draft of either precision."""
    params = dataclasses.replace(PARAMS, speculate=dataclasses.replace(PARAMS.speculate, quantized_draft_for=named))
    sections = sections_of(params)
    kernels = {"Int4Linear": 28} if packed else {"FullLinear": 29}
    fault = in_arms("base_spec", "gptq_spec", "awq_spec", entry="draft_readback", kernels=kernels)
    found = Study.gather(sections, records.load(*write_study(tmp_path, params, **fault), sections), "figures").rows
    for target in ("base", "gptq", "awq"):
        doubted = any(r.startswith("draft precision") for r in found[f"{target}_spec"].reasons)
        assert doubted == ((target in named) != packed)


@pytest.mark.parametrize(("asked", "held"), [(True, False), (False, True), (True, True)])
def test_a_head_held_otherwise_than_the_recipe_says_is_void(tmp_path, asked, held):
    kernels = {"Int4Linear": 210, "Int8Linear" if held else "FullLinear": 1}
    faults = in_arms("awq", kernels=kernels)
    faults["quantize__awq"] = lambda metrics: metrics["recipe"]["settings"].update(pack_head=asked)
    verdict, reasons = judged(tmp_path, "awq", **faults)
    assert (verdict == "OK") == (asked == held)
    assert any(reason.startswith("head: ") for reason in reasons) == (asked != held)


def test_weights_loaded_in_another_dtype_are_void(tmp_path):
    found = judged(tmp_path, "awq", **in_arms("awq", weights_dtype="float32"))
    assert found == ("VOID", ["runtime.dtype: bfloat16 asked, weights loaded in float32"])


@pytest.mark.parametrize(("drafted", "shown"), [(1.5, "1.5"), (None, "0"), (4.0, "4")])
def test_a_sweep_whose_draft_length_did_not_act_voids_the_row(tmp_path, drafted, shown):
    def fault(metrics):
        next(p for p in metrics["curve"] if p["draft_len"] == 2)["measured"]["drafted_per_round"] = drafted

    said = f"the sweep's K = 2 did not act: {shown} tokens drafted a round"
    assert judged(tmp_path, "base_spec", **in_sweep("base", fault)) == ("VOID", [said])


def test_a_draft_length_chosen_with_a_draft_of_another_precision_is_not_comparable(tmp_path):
    def fault(metrics):
        metrics["draft_readback"]["kernels"] = {"FullLinear": 29}

    said = "K was chosen with a draft of another precision than the one that ran"
    assert judged(tmp_path, "awq_spec", **in_sweep("awq", fault)) == ("NOT COMPARABLE", [said])


def test_a_draft_length_chosen_on_another_kernel_is_noted(tmp_path):
    def fault(metrics):
        metrics["readback"]["kernels"] = {"FewRowsLinear (dense from 8 rows)": 211}

    said = "K was chosen with the target on FewRowsLinear, the row ran on Linear"
    assert judged(tmp_path, "base_spec", **in_sweep("base", fault)) == ("OK", [said])


def test_a_lookup_has_no_precision_and_may_draft_fewer(tmp_path):
    def by_lookup(metrics):
        arm = metrics["arms"]["base_spec"]
        arm["draft"] = {"kind": "ngram", "precision": "no weights"}
        arm["draft_readback"] = {"engine": "ngram", "precision": "no weights", "weight_bytes": 0}

    def sweep(metrics):
        metrics["draft_readback"] = {"engine": "ngram"}
        for point in metrics["curve"]:
            if point["measured"] and point["draft_len"]:
                point["measured"]["drafted_per_round"] = 0.4

    assert judged(tmp_path, "base_spec", benchmark=by_lookup, **in_sweep("base", sweep)) == ("OK", [])
