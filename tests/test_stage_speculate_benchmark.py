"""The stages speculate and benchmark, whole, on tiny random models."""

import json
import math
import shutil
from pathlib import Path
from statistics import median

import measure_fixtures as tiny
import pytest

from pipeline import provenance
from pipeline.config import RankDrafts, Sampling
from pipeline.measure.setup import draft_for, end_ids, pack_head, read_prompts
from pipeline.measure.verdict import BrokenOutput
from pipeline.stages import benchmark, rank_drafts, speculate


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """base; twin: the same weights; stranger: other weights, same tokenizer; and drafts of each kind."""
    root = tmp_path_factory.mktemp("study")
    tiny.checkpoint(root / "base", seed=1)
    shutil.copytree(root / "base", root / "twin")
    tiny.checkpoint(root / "stranger", seed=2)
    for name in ("twin", "stranger"):
        provenance.write_json(root / name / "draft.json", {"kind": "model"})
    for kind in ("ngram", "self"):
        provenance.write_json(root / kind / "draft.json", {"kind": kind, "ngram_max": 3})
    tiny.prompts_file(root / "prompts.jsonl")
    provenance.write_json(root / "environment.json", {"cpu": "made up"})
    return root


def sweep(study: Path, out: Path, draft: str, key: str = "base", **changes):
    return speculate.run(
        tiny.speculate(**changes),
        tiny.runtime(),
        tiny.model(),
        key=key,
        checkpoint=study / "base",
        draft=study / draft,
        quantized_draft=study / "twin",
        prompts=study / "prompts.jsonl",
        environment=study / "environment.json",
        out=out,
    )


@pytest.fixture(scope="module")
def twin_sweep(study):
    return sweep(study, study / "out_twin", "twin")


def test_a_draft_with_the_same_weights_is_always_right(twin_sweep, study):
    trace = json.loads((study / "out_twin" / "trace.json").read_text())
    assert len(trace) == 4 and all(all(row["hits"]) for row in trace)
    for point in twin_sweep["curve"][1:]:
        # every round gives K + 1 tokens until the answer ends
        rounds = sum(-(-(row["new_tokens"] - 1) // (point["draft_len"] + 1)) for row in trace)
        assert point["rounds"] == rounds and point["acceptance_rate"] > 0.8
    assert twin_sweep["verdict"] in ("OK", "UNDECIDED")
    assert [p["draft_len"] for p in twin_sweep["curve"]] == [0, 1, 2, 3, 4]


def test_timed_runs_equal_the_replay_and_are_exact(twin_sweep, study):
    timed = {p["draft_len"]: p["measured"] for p in twin_sweep["curve"] if p["measured"]}
    assert {0, 1, 3} <= set(timed)
    for k, found in timed.items():
        assert found["lossless"]["grade"] == "exact" and found["drafted_per_round"] == k
    runs = json.loads((study / "out_twin" / "runs.json").read_text())
    trace = {row["prompt"]: row for row in json.loads((study / "out_twin" / "trace.json").read_text())}
    for row in (a for block in runs for a in block["answers"]):
        assert row["new_tokens"] == trace[row["prompt"]]["new_tokens"]
        assert row["rounds"] == -(-(row["new_tokens"] - 1) // (row["draft_len"] + 1))


def test_batches_are_measured_with_every_timed_draft_length(twin_sweep):
    assert [p["batch"] for p in twin_sweep["batches"]] == [1, 3]
    timed = {str(p["draft_len"]) for p in twin_sweep["curve"] if p["measured"] and p["draft_len"]}
    for point in twin_sweep["batches"]:
        assert set(point["gains"]) == timed and point["plain_tok_per_s"] > 0
        assert all(0 < g["low"] <= g["value"] <= g["high"] for g in point["gains"].values())


@pytest.fixture(scope="module")
def sweeps(study, twin_sweep):
    """The same recorded answers for every target: all three are the same weights here."""
    return {f"speculate_{key}": study / "out_twin" for key in ("base", "gptq", "awq")}


def paths(study: Path, **folders: str) -> dict[str, Path]:
    """What a stage over all targets reads; `folders`: which of the study's stands for each."""
    files = {"prompts": "prompts.jsonl", "environment": "environment.json"}
    return {name: study / own for name, own in {**folders, **files}.items()}


def rank(study: Path, sweeps, draft: str = "twin", **changes):
    settings = {
        "candidates": ["draft", "quantized_draft", "gptq", "ngram"],
        "folders": [],
        "ngram_max": 3,
        "cost_repeats": 3,
    }
    return rank_drafts.run(
        RankDrafts(**(settings | changes)),
        tiny.speculate(),
        tiny.runtime(),
        tiny.model(),
        **paths(study, base="base", gptq="base", awq="base", draft=draft, quantized_draft="stranger"),
        **sweeps,
    )


def test_candidate_drafts_are_ranked_without_decoding(study, sweeps, monkeypatch):
    from pipeline.measure.arm import Arm

    monkeypatch.setattr(Arm, "generate", None)
    found = rank(study, sweeps)["targets"]
    by_name = {c["candidate"]: c for c in found["base"]}
    assert set(by_name) == {"draft", "quantized_draft", "gptq", "ngram"}
    assert {c["candidate"] for c in found["awq"]} == {"draft", "quantized_draft", "ngram"}, "no cheaper self"
    assert by_name["draft"]["agreement"] == by_name["gptq"]["agreement"] == 1, "the target's own weights"
    assert by_name["quantized_draft"]["agreement"] < 0.2 and by_name["quantized_draft"]["draft_len"] == 1
    assert by_name["draft"]["in_matrix"] and not by_name["ngram"]["in_matrix"]
    trace = json.loads((study / "out_twin" / "trace.json").read_text())
    assert by_name["draft"]["tokens"] == sum(row["new_tokens"] - 1 for row in trace)
    order = [c["predicted_speedup"]["value"] for c in found["base"]]
    assert order == sorted(order, reverse=True)


def test_a_lookup_agrees_where_it_proposes_the_answers_next_token(study, sweeps):
    from pipeline.engine.propose import NgramProposer

    (found,) = rank(study, sweeps, candidates=["ngram"])["targets"]["base"]
    prompts = {p.id: p.ids for p in read_prompts(study / "prompts.jsonl", 2, "").all}
    proposer = NgramProposer(3, 300, "cpu")
    right = total = 0
    for row in json.loads((study / "out_twin" / "trace.json").read_text()):
        for i in range(1, len(row["ids"])):
            right += proposer.lookup(prompts[row["prompt"]] + row["ids"][:i], 1) == [row["ids"][i]]
            total += 1
    assert found["agreement"] == right / total and found["weight_bytes"] == 0


def test_candidates_that_cannot_be_ranked_are_refused_before_weights_load(study, sweeps, tmp_path, monkeypatch):
    from pipeline.measure import arm

    monkeypatch.setattr(arm, "load_decoder", None)
    with pytest.raises(ValueError, match=r"rank_drafts\.folders: .*nowhere is no model folder"):
        rank(study, sweeps, folders=[str(tmp_path / "nowhere")])
    provenance.write_json(tmp_path / "trace.json", [])
    with pytest.raises(ValueError, match=r"trace\.json: made with other prompts"):
        rank(study, {**sweeps, "speculate_base": tmp_path})


def test_a_draft_with_other_weights_is_almost_never_right_and_zero_is_best(study, tmp_path):
    found = sweep(study, tmp_path / "out", "stranger")
    assert found["curve"][4]["acceptance_rate"] < 0.2
    assert found["best_draft_len"] == 0
    assert {p["measured"]["lossless"]["grade"] for p in found["curve"] if p["measured"]} == {"exact"}


def test_a_draft_whose_context_is_shorter_than_the_prompts_is_refused(study, tmp_path):
    shutil.copytree(study / "twin", tmp_path / "short")
    config = provenance.read_json(tmp_path / "short" / "config.json")
    provenance.write_json(tmp_path / "short" / "config.json", {**config, "max_position_embeddings": 12})
    with pytest.raises(ValueError, match=r"do not fit in the context of .*short, 12; lower prompts\.max_prompt_tokens"):
        sweep(study, tmp_path / "out", str(tmp_path / "short"))


def test_a_draft_whose_context_ends_during_the_answers_drafts_as_long_as_it_can(study, tmp_path):
    shutil.copytree(study / "twin", tmp_path / "short")
    config = provenance.read_json(tmp_path / "short" / "config.json")
    provenance.write_json(tmp_path / "short" / "config.json", {**config, "max_position_embeddings": 18})
    found = sweep(study, tmp_path / "out", str(tmp_path / "short"))
    timed = [p for p in found["curve"] if p["measured"] and p["draft_len"]]
    assert {p["measured"]["lossless"]["grade"] for p in timed} == {"exact"}
    assert all(0 < p["measured"]["drafted_per_round"] < p["draft_len"] for p in timed)


def test_lookup_drafts_without_weights(study, tmp_path):
    found = sweep(study, tmp_path / "out", "ngram")
    assert found["draft"] == {"kind": "ngram", "precision": "no weights", "weight_bytes": 0}
    for point in found["curve"]:
        if point["measured"] and point["draft_len"]:
            assert point["measured"]["drafted_per_round"] <= point["draft_len"]
            assert point["measured"]["lossless"]["grade"] == "exact"


def test_a_quantized_target_cannot_draft_for_itself(study, tmp_path):
    found = sweep(study, tmp_path / "out", "self", key="gptq")
    assert found["verdict"] == "VOID" and "self" in found["reasons"][0]
    assert found["best_draft_len"] == 0 and [p["draft_len"] for p in found["curve"]] == [0]


def test_sampling_times_only(study, tmp_path):
    found = sweep(study, tmp_path / "out", "twin", sampling=Sampling(temperature=1.0, top_k=None, top_p=0.9))
    assert [p["draft_len"] for p in found["curve"]] == [0, 1, 3]
    # p = q: every drafted token is kept, but for those beyond the end of an answer
    assert found["curve"][1]["acceptance_rate"] > 0.8
    assert found["curve"][1]["measured"]["lossless"] is None and "sampling" in found["reasons"][-1]


def test_broken_answers_fail_the_stage_after_writing(study, tmp_path, monkeypatch):
    from pipeline.measure.arm import Arm

    true_generate = Arm.generate

    def wrong(self, prompt_ids, ask, reading=None):
        done = true_generate(self, prompt_ids, ask, reading)
        if ask.draft_len:
            done.ids[2] = (done.ids[2] + 1) % 250
        return done

    monkeypatch.setattr(Arm, "generate", wrong)
    with pytest.raises(
        BrokenOutput, match=r"speculate@base: draft length 1 leaves plain decoding at token 2"
    ) as caught:
        sweep(study, tmp_path / "out", "twin")
    assert "\n" not in str(caught.value) and (tmp_path / "out" / "runs.json").exists()


def test_too_many_prompts_asked_for(study, tmp_path):
    with pytest.raises(ValueError, match=r"speculate.prompts_per_category: 9, .* has 2 evaluation prompts"):
        sweep(study, tmp_path / "out", "twin", prompts_per_category=9)


def matrix(study: Path, out: Path, draft: str = "twin", **changes):
    sweeps = {}
    for key in ("base", "gptq", "awq"):
        sweeps[key] = study / f"speculate@{key}.json"
        best = {"base": 2, "gptq": 0, "awq": 1}[key]
        curve = [
            {"draft_len": k, "measured": {"speedup": {"value": v}} if v else None}
            for k, v in ((0, 1.0), (1, 0.7), (2, None), (3, 0.9))
        ]
        inputs = {"prompts": provenance.tree_sha256(study / "prompts.jsonl"), "environment": "another machine"}
        record = {"metrics": {"best_draft_len": best, "curve": curve}}
        record |= {"provenance": {"inputs": inputs if key == "awq" else {"prompts": inputs["prompts"]}}}
        provenance.write_json(sweeps[key], record)
    return benchmark.run(
        tiny.benchmark(**changes),
        tiny.speculate(),
        tiny.runtime(),
        tiny.model(),
        **paths(study, base="base", gptq="twin", awq="stranger", draft=draft, quantized_draft="twin"),
        speculate_base=sweeps["base"],
        speculate_gptq=sweeps["gptq"],
        speculate_awq=sweeps["awq"],
        out=out,
    )


@pytest.fixture(scope="module")
def local_workers():
    """Arms in this process: the same commands without the start of seven interpreters."""
    from pipeline.measure import costs, worker

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "Worker", tiny.LocalWorker)
        patch.setattr(benchmark, "Worker", tiny.LocalWorker)
        patch.setattr(costs, "BANDWIDTH_BYTES", {"cpu": 2**24})
        yield


@pytest.fixture(scope="module")
def found(study, local_workers):
    return matrix(study, study / "out_matrix")


def test_the_matrix_has_every_row_with_the_k_of_its_sweep(found):
    arms = found["arms"]
    assert list(arms) == ["base", "base_spec", "gptq", "gptq_spec", "awq", "awq_spec"]
    assert [arms[a]["draft_len"] for a in arms] == [0, 2, 0, 3, 0, 1]
    assert any("best draft length is 0" in r for r in arms["gptq_spec"]["reasons"])
    assert arms["awq_spec"]["verdict"] == "NOT COMPARABLE"
    assert any("another environment file" in r for r in arms["awq_spec"]["reasons"])
    assert [n for n, a in arms.items() if a["forced"]] == ["base", "gptq", "awq"]
    assert arms["base"]["speedup"] == {"value": 1.0, "low": 1.0, "high": 1.0}


def test_every_speculative_row_is_graded_and_counted(found):
    for name, arm in found["arms"].items():
        assert arm["lossless"]["grade"] == ("exact" if name.endswith("_spec") else None)
    assert found["arms"]["base_spec"]["acceptance_rate"] > 0.8
    assert found["arms"]["awq_spec"]["acceptance_rate"] < 0.2
    assert found["arms"]["base"]["mean_emitted_per_round"] is None
    assert set(found["arms"]["base"]["by_category"]) == {"code", "prose"}


def test_memory_ceilings_noise_and_interaction_are_there(found):
    bandwidth = found["bandwidth_bytes_per_s"]
    assert 1e8 < bandwidth["low"] <= bandwidth["value"] <= bandwidth["high"]
    for arm in found["arms"].values():
        ledger = arm["memory"]
        for name in ("weight_bytes", "peak_memory_bytes", "peak_load_memory_bytes", "workspace_bytes"):
            assert ledger[name] or ledger["null_reasons"][name]
        assert arm["ceiling_tok_per_s"] * arm["read_bytes_per_token"] == pytest.approx(bandwidth["value"])
    floors = [found["noise_floor"], found["noise_floor_answer"], *found["noise_floor_by_category"].values()]
    for interval in (*floors, *found["interaction"].values(), *found["interaction_control"].values()):
        assert 0 < interval["low"] <= interval["value"] <= interval["high"]


def test_the_parts_of_a_round_are_timed_again_in_every_turn(study, tmp_path):
    found = sweep(study, tmp_path / "out", "twin")
    turns = found["blocks"]["run"] * 2  # prompts of a block
    assert found["costs"]["repeats"] == tiny.speculate().cost_repeats + 1 + turns, "once more for the warm-up"
    costs = found["costs"]
    assert costs["overhead_ms"] == max(0.0, costs["overhead_measured_ms"])
    for point in found["curve"][1:]:
        k = point["draft_len"]
        drafting_ms = costs["draft_step_ms"] + (k - 1) * costs["further_draft_step_ms"]
        round_ms = drafting_ms + costs["target_step_ms"][str(k + 1)] + costs["overhead_ms"]
        due = point["mean_emitted_per_round"] * costs["target_step_ms"]["1"] / round_ms
        assert point["predicted_speedup"] == pytest.approx(due)


def test_the_bandwidth_is_the_median_of_a_reading_in_every_turn(found, study):
    rows = [json.loads(line) for line in (study / "out_matrix" / "blocks.jsonl").read_text().splitlines()]
    readings = {r["block"]: r["bandwidth_bytes_per_s"] for r in rows if r["kept"]}
    assert {len(own) for own in readings.values()} == {2}, "prompts of a block"
    middle = math.exp(median(math.log(r) for own in readings.values() for r in own))
    assert found["bandwidth_bytes_per_s"]["value"] == pytest.approx(middle)


def test_latency_is_paired_block_by_block_as_by_hand(found, study):
    """Of each kept block: mean time to the first token, and the further tokens at its decode rate, over base's."""
    rows = [json.loads(line) for line in (study / "out_matrix" / "blocks.jsonl").read_text().splitlines()]

    def seconds(arm, block):
        own = [r for r in rows if (r["arm"], r["block"], r["protocol"]) == (arm, block, "natural")]
        rate = sum(r["new_tokens"] - 1 for r in own) / sum(r["decode_s"] for r in own)
        first = sum(r["ttft_s"] for r in own) / len(own)
        return first, first + (found["answer_tokens"] - 1) / rate

    blocks = sorted({r["block"] for r in rows if r["kept"]})
    for arm, under in (("base_spec", "base"), ("gptq", "base"), ("awq_spec", "awq")):
        # of an even number of blocks, the middle two are averaged as ratios are: on a log scale
        first, whole = (
            math.exp(median([math.log(seconds(under, b)[i] / seconds(arm, b)[i]) for b in blocks])) for i in (0, 1)
        )
        name = "answer_over_plain" if arm == "awq_spec" else "answer_speedup"
        assert found["arms"][arm][name]["value"] == pytest.approx(whole)
        if under == "base":
            assert found["arms"][arm]["ttft_speedup"]["value"] == pytest.approx(first)


def test_every_generation_is_on_file(found, study):
    rows = [json.loads(line) for line in (study / "out_matrix" / "blocks.jsonl").read_text().splitlines()]
    # a block: 7 arms with natural stop and 4 plain ones at forced length, over 2 prompts
    assert len(rows) == found["blocks"]["run"] * (7 + 4) * 2
    assert {r["new_tokens"] for r in rows if r["protocol"] == "forced"} == {8}
    first, second = ([r["arm"] for r in rows if r["block"] == b] for b in (0, 1))
    assert first == list(reversed(second))


def test_a_row_without_a_draft_is_void_and_says_why(study, tmp_path, local_workers):
    found = matrix(study, tmp_path / "out", "self", timing=tiny.timing(time_budget_s=0.1))
    void = found["arms"]["gptq_spec"]
    assert void["verdict"] == "VOID" and void["memory"]["peak_memory_bytes"] is None
    assert "self" in void["memory"]["null_reasons"]["peak_memory_bytes"]
    assert found["interaction"]["gptq"] is None and found["arms"]["base_spec"]["lossless"]["grade"] == "exact"


def test_degenerate_text_is_void(study, tmp_path, local_workers):
    found = matrix(study, tmp_path / "out", timing=tiny.timing(time_budget_s=0.1), max_compression_ratio=1.000001)
    ratios = {n: a["degenerate"]["compression_ratio"] for n, a in found["arms"].items()}
    for name, arm in found["arms"].items():
        said = any("degenerate text: compresses" in r for r in arm["reasons"])
        assert said == (ratios[name] is not None and ratios[name] > 1.000001)


def test_arms_with_another_dtype_are_not_comparable(study, tmp_path, local_workers, monkeypatch):
    from pipeline.measure.arm import Arm

    true_describe = Arm.describe

    def describe(self):
        told = true_describe(self)
        if self.spec.target.endswith("stranger"):
            told["target"]["activations_dtype"] = "bfloat16"
        return told

    monkeypatch.setattr(Arm, "describe", describe)
    arms = matrix(study, tmp_path / "out", timing=tiny.timing(time_budget_s=0.1))["arms"]
    assert arms["awq"]["verdict"] == "NOT COMPARABLE"
    assert "activations dtype: bfloat16 here, float32 in base" in arms["awq"]["reasons"]
    assert not any("dtype" in r for r in arms["gptq"]["reasons"])


@pytest.mark.slow
@pytest.mark.parametrize("free_bytes", [2**31, 2**50])
def test_real_workers_together_or_one_at_a_time(study, tmp_path, monkeypatch, capsys, free_bytes):
    from pipeline.measure import memory

    monkeypatch.setattr(memory, "free_on_device_bytes", lambda device: free_bytes)
    found = matrix(study, tmp_path / "out", "self", timing=tiny.timing(time_budget_s=0.1))  # five arms, not seven
    resident = free_bytes == 2**50
    assert found["blocks"]["resident"] == resident and found["blocks"]["run"] == 2
    assert ("one at a time" in capsys.readouterr().err) != resident
    assert found["arms"]["base_spec"]["lossless"]["grade"] == "exact"


def test_end_tokens_and_drafts_from_files(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert end_ids(tmp_path) == [7]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 2]}')
    assert end_ids(tmp_path) == [2, 9]
    assert not pack_head(tmp_path)
    (tmp_path / "recipe.json").write_text('{"settings": {"pack_head": true}}')
    (tmp_path / "draft.json").write_text('{"kind": "distill"}')
    assert pack_head(tmp_path)
    plain, quantized = tmp_path, Path("quantized")
    assert draft_for("base", plain, quantized, ["gptq"])[0].folder == str(plain)
    assert draft_for("gptq", plain, quantized, ["gptq"])[0].folder == "quantized"
    assert draft_for("base", plain, quantized, ["base"])[0].folder == "quantized"


def test_blocks_go_round_the_prompts(study):
    prompts = read_prompts(study / "prompts.jsonl", 2, "key")
    assert [[p.id for p in prompts.block(i, 1)] for i in range(3)] == [
        ["code/0", "prose/0"],
        ["code/1", "prose/1"],
        ["code/0", "prose/0"],
    ]
