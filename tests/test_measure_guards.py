"""A planted fault of each kind turns its row VOID or NOT COMPARABLE; the same run without the fault is OK."""

import dataclasses

import measure_fixtures as tiny
import pytest

from pipeline.measure import guards
from pipeline.measure.answers import Answer
from pipeline.measure.blocks import Block, Blocks, Disturbance
from pipeline.measure.matrix import CONTROL, FORCED, NATURAL, Matrix, Row, Sample, row_metrics
from pipeline.measure.setup import DraftSpec, Prompt
from pipeline.measure.verdict import Divergence, Lossless

K, FORCED_TOKENS, STEP_S = 2, 8, 0.01
READBACK = {
    "engine": "made-up",
    "weights_dtype": "bfloat16",
    "activations_dtype": "bfloat16",
    "threads": 2,
    "device": "cpu",
    "kernels": {"FullLinear": 7},
}
TEXT = "Call me Ishmael."


def prompt(block: int) -> Prompt:
    return Prompt(f"code/{block}", "code", [3, 1, 4, block])


def answer(about: Prompt, draft_len: int, tokens: int, seconds: float) -> Answer:
    """Distinct ids; with a draft every round keeps all of it."""
    ids = [7 * i % 101 + len(about.id) for i in range(tokens)]
    rounds = [(draft_len, draft_len)] * ((tokens - 1) // (draft_len + 1)) if draft_len else [(0, 0)] * (tokens - 1)
    return Answer(about, draft_len, ids, rounds, 0.1, seconds, "length")


def sample(block: int, draft_len: int, faster: float = 1.0) -> Sample:
    wobble = 1 + 0.001 * block
    natural = answer(prompt(block), draft_len, 16, 15 * STEP_S * wobble / faster)
    forced = answer(prompt(block), draft_len, FORCED_TOKENS, 7 * STEP_S * wobble / faster)
    answers = {NATURAL: [natural]} if draft_len else {NATURAL: [natural], FORCED: [forced]}
    draft = {**READBACK, "precision": "bfloat16"} if draft_len else None
    read = {"target_weights": 1000, "target_cache_per_token": 1, "draft_weights": 100, "draft_cache_per_token": 1}
    return Sample(answers, {"target": dict(READBACK), "draft": draft}, {}, read)


def matrix(**faults) -> Matrix:
    """Three quiet blocks of a base, a control, a faster quantized row and a speculative one; `faults` edit an arm's
    sample of the last block in place."""
    spec = DraftSpec("model", "draft", None, pack_head=False)
    rows = {
        "base": Row("base", "base", None, 0, None),
        "gptq": Row("gptq", "gptq", None, 0, None),
        "gptq_spec": Row("gptq_spec", "gptq", spec, K, None),
        CONTROL: Row(CONTROL, "base", None, 0, None),
    }
    speeds = {"gptq": 2.0, "gptq_spec": 3.0}
    blocks = []
    for i in range(3):
        samples = {name: sample(i, row.draft_len, speeds.get(name, 1.0)) for name, row in rows.items()}
        blocks.append(Block(i, list(rows), samples, Disturbance(0.0, 0.0, 0.0, None), False, 1.0))
    for name, fault in faults.items():
        fault(blocks[-1].samples[name])
    settings = tiny.benchmark(
        forced_new_tokens=FORCED_TOKENS, max_loop_share=0.5, max_compression_ratio=4.0, timing=tiny.timing(min_blocks=3)
    )
    return Matrix(rows, Blocks(blocks, 3.0, None, blocks), settings, seed=1)


def judged(name, text=TEXT, graded=None, **faults):
    found = row_metrics(matrix(**faults), name, [text], graded)
    return found["verdict"], found["reasons"]


def replace_natural(**changes):
    def fault(found: Sample) -> None:
        found.answers[NATURAL] = [dataclasses.replace(a, **changes) for a in found.answers[NATURAL]]

    return fault


def replace_readback(**changes):
    return lambda found: found.readback["target"].update(changes)


@pytest.mark.parametrize("name", ["base", "gptq", "gptq_spec"])
def test_without_a_fault_every_row_is_ok(name):
    assert judged(name) == ("OK", [])


def test_degenerate_ids_are_void():
    verdict, reasons = judged("gptq", gptq=replace_natural(ids=[5] * 400))
    assert verdict == "VOID" and reasons[0].startswith("degenerate text: 0.9")


def test_degenerate_text_is_void():
    verdict, reasons = judged("gptq", text="the same " * 200)
    assert verdict == "VOID" and "degenerate text: compresses" in reasons[0]


@pytest.mark.parametrize(
    ("rounds", "said"),
    [
        ([(0, 0)] * 15, "K = 2 did not act: 15 of 25 rounds drafted 0 tokens"),
        ([(K, K)] * 4 + [(1, 1)], "K = 2 did not act: 1 of 15 rounds drafted 1 tokens"),
        ([(5, 2)] * 5, "K = 2 did not act: 5 of 15 rounds drafted 5 tokens"),
    ],
)
def test_a_draft_length_that_did_not_act_is_void(rounds, said):
    assert judged("gptq_spec", gptq_spec=replace_natural(rounds=rounds)) == ("VOID", [said])


def test_plain_decoding_that_drafted_is_void():
    verdict, reasons = judged("gptq", gptq=replace_natural(rounds=[(1, 0)] * 15))
    assert (verdict, reasons) == ("VOID", ["K = 0 did not act: 15 of 45 rounds drafted 1 tokens"])


def test_a_forced_length_that_did_not_act_is_void():
    def ended_early(found: Sample) -> None:
        found.answers[FORCED] = [dataclasses.replace(a, ids=a.ids[:5]) for a in found.answers[FORCED]]

    said = "the forced length of 8 tokens did not act: 1 of 3 answers have 5"
    assert judged("gptq", gptq=ended_early) == ("VOID", [said])


def test_broken_output_is_void():
    verdict, reasons = judged("gptq_spec", graded=Lossless("broken", Divergence("code/1", 4, 3.0), 3))
    assert verdict == "VOID" and reasons[0].startswith("broken: leaves plain decoding at token 4")


@pytest.mark.parametrize(
    "other", [Prompt("code/9", "code", [3, 1, 4, 2]), Prompt("code/2", "code", [3, 1, 4, 2, 0])], ids=["id", "tokens"]
)
def test_other_prompts_are_not_comparable(other):
    said = "other prompts than base's in block 2"
    assert judged("gptq", gptq=replace_natural(prompt=other)) == ("NOT COMPARABLE", [said])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"activations_dtype": "float32"}, "activations dtype: float32 here, bfloat16 in base"),
        ({"threads": 1}, "threads: 1 here, 2 in base"),
        ({"engine": "hf"}, "engine: hf here, made-up in base"),
    ],
)
def test_another_setup_is_not_comparable(changes, said):
    assert judged("gptq", gptq=replace_readback(**changes)) == ("NOT COMPARABLE", [said])


def test_a_lookup_may_find_fewer_tokens_but_not_none_or_more():
    assert guards.draft_len(2, [(2, 1), (0, 0), (1, 0)], lookup=True) is None
    assert guards.draft_len(2, [(0, 0)], lookup=True) == "nothing was ever drafted"
    assert "drafted 3 tokens" in guards.draft_len(2, [(3, 0)], lookup=True)


@pytest.mark.parametrize(
    "name", ["Int4Linear", "FewRowsInt4Linear (dense from 32 rows)", "DequantLinear (3-bit: none)"]
)
def test_kernels_of_packed_codes_are_known_by_name(name):
    assert guards.is_packed({"kernels": {name: 3, "FullLinear": 1}})
    assert not guards.is_packed({"kernels": {name: 1, "FewRowsLinear": 3}})


def test_the_engines_own_kernels_follow_that_rule():
    """Every class a packed or full layer can be loaded as, by what it holds."""
    from pipeline.engine import few_rows, linear, linear4

    packed = (linear4.Int4Linear, few_rows.FewRowsInt4Linear, linear.Int8Linear, linear.DequantLinear)
    full = (linear.FullLinear, few_rows.FewRowsLinear)
    assert all(guards.is_packed({"kernels": {c.__name__: 1}}) for c in packed)
    assert not any(guards.is_packed({"kernels": {c.__name__: 1}}) for c in full)
