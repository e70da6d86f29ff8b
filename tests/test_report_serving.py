"""reports/serve/: the choice as JSON, the command for vLLM, and the transformers script, which is run."""

import dataclasses
import json
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from report_fixtures import PARAMS, sections_of, sha_of, write_study

from pipeline.reporting import records, serving
from pipeline.reporting.study import Study

ROOT = Path(__file__).parents[1]
FLOAT32 = dataclasses.replace(PARAMS, runtime=dataclasses.replace(PARAMS.runtime, dtype="float32"))
PROMPT = "the cat and the hen"


def study_of(folder, params=PARAMS, **changes):
    sections = sections_of(params)
    return Study.gather(sections, records.load(*write_study(folder, params, **changes), sections), "figures")


def only(*names):
    """Edits the benchmark so that of all rows only `names` are OK."""

    def change(metrics):
        for name, arm in metrics["arms"].items():
            if name not in names:
                arm |= {"verdict": "UNDECIDED", "reasons": ["made up"]}

    return change


def served(folder, name, params=PARAMS, draft_format="compressed-tensors", **changes):
    """The written folder of a study in which the row `name` is chosen."""
    formats = {"gptq": "gptq", "awq": "awq", "draft": draft_format}
    edits = {f"quantize__{k}": lambda m, f=f: m.update(format=f) for k, f in formats.items()}
    changes = {"benchmark": only(name)} | edits | changes
    change = changes["benchmark"]

    def in_dtype(metrics):
        change(metrics)
        for arm in metrics["arms"].values():
            for loaded in filter(None, (arm["readback"], arm.get("draft_readback"))):
                loaded["weights_dtype"] = params.runtime.dtype

    study = study_of(folder / "study", params, **(changes | {"benchmark": in_dtype}))
    assert study.recommendation.choice == name
    serving.write(study, folder / "serve")
    return folder / "serve"


def words_of(script):
    """The words of the command that a POSIX shell would run."""
    text = "".join(line for line in script.read_text().replace("\\\n", "").splitlines(True) if line[0] != "#")
    return shlex.split(text)


def read(folder):
    return json.loads((folder / "choice.json").read_text())


def test_the_choice_names_what_to_serve_why_and_what_it_rests_on(tmp_path):
    found = read(served(tmp_path, "gptq_spec"))
    assert (found["decision"], found["fallback"]) == ("deploy", False)
    serve = found["serve"]
    target, draft = "artifacts/quantized/gptq", "artifacts/quantized/draft"
    assert serve["target"] == {"folder": target, "format": "gptq", "sha256": sha_of("gptq")}
    assert serve["draft"] == {"folder": draft, "format": "compressed-tensors", "sha256": sha_of("quantized_draft")}
    assert (serve["draft_len"], serve["dtype"], serve["sampling"]["temperature"]) == (1, "bfloat16", 0.0)
    assert found["constraints"]["max_ppl_increase_pct"] == 10.0
    evidence = found["evidence"]
    assert evidence["row"]["speedup_low"] < evidence["row"]["speedup"] < evidence["row"]["speedup_high"]
    assert evidence["failures"]["awq"] == ["UNDECIDED"]
    made = found["made_with"]
    assert made["inputs_sha256"]["prompts"] == sha_of("prompts")
    assert set(made["results_sha256"]) == set(records.RECORDS)
    assert made["git"]["commit"] and made["versions"]["torch"] and made["machine"]["cpu"] == "Made-Up CPU"


@pytest.mark.parametrize(
    ("rows", "decision"), [(("base",), "no decision"), ((), "nothing qualifies"), (("base", "awq_spec"), "deploy")]
)
def test_without_a_decision_base_is_the_stated_fallback(tmp_path, rows, decision):
    study = study_of(tmp_path / "study", benchmark=only(*rows))
    serving.write(study, tmp_path / "serve")
    found = read(tmp_path / "serve")
    assert (found["decision"], found["fallback"]) == (decision, decision != "deploy")
    for name in ("vllm.sh", "transformers_generate.py"):
        assert ("Fallback, for nothing was shown to be better" in (tmp_path / "serve" / name).read_text()) == (
            found["fallback"]
        )
    if found["fallback"]:
        assert found["serve"]["row"] == "base" and found["serve"]["draft"] is None


@pytest.mark.parametrize(
    ("packed", "row", "said"),
    [
        ([], "awq_spec", None),
        (["gptq"], "awq_spec", None),
        (["awq"], "awq_spec", "head of the target (and"),
        (["draft"], "awq_spec", "head of the draft (and"),
        (["awq", "draft"], "awq_spec", "head of the target and the draft (and"),
        (["awq", "draft"], "base_spec", None),
    ],
)
def test_a_server_that_reads_heads_in_full_says_so(tmp_path, packed, row, said):
    quantize = {n: dataclasses.replace(q, pack_head=n in packed) for n, q in PARAMS.quantize.items()}
    heads = {f"quantize__{n}": lambda m: m["recipe"]["settings"].update(pack_head=True) for n in packed}
    params = dataclasses.replace(PARAMS, quantize=quantize)

    def change(metrics):
        only(row)(metrics)
        for name, arm in metrics["arms"].items():
            if name.removesuffix("_spec") in packed:
                arm["readback"]["kernels"]["Int8Linear"] = 1
            if "draft" in packed and name in ("gptq_spec", "awq_spec"):
                arm["draft_readback"]["kernels"]["Int8Linear"] = 1

    study = study_of(tmp_path / "study", params, benchmark=change, **heads)
    assert study.recommendation.choice == row
    serving.write(study, tmp_path / "serve")
    files = {n: (tmp_path / "serve" / n).read_text() for n in ("vllm.sh", "transformers_generate.py", "choice.json")}
    for text in files.values():
        assert ("held at 8 bits" in text) == (said is not None) and (said is None or said in text)


LOADED = {"engine": "lean", "activations_dtype": "float32"}


@pytest.mark.parametrize(
    ("loaded", "said"), [(LOADED, True), ({**LOADED, "engine": "hf"}, True), ({"engine": "hf"}, False)]
)
def test_another_engine_or_dtype_than_the_measured_one_is_said(tmp_path, loaded, said):
    def change(metrics):
        only("base_spec")(metrics)
        for arm in metrics["arms"].values():
            arm["readback"] |= loaded

    folder = served(tmp_path, "base_spec", benchmark=change)
    engine, dtype = loaded["engine"], loaded.get("activations_dtype")
    for name in ("vllm.sh", "transformers_generate.py", "choice.json"):
        text = (folder / name).read_text()
        assert (f"Measured in the engine {engine}, with {dtype} activations, on cpu;" in text) == said, name
        assert ("transformers computes in bfloat16 here" in text) == said, name
    assert (read(folder)["serve"]["unlike_measured"] is not None) == said


@pytest.mark.parametrize(("quantized_for", "draft"), [([], "artifacts/draft"), (["base"], "artifacts/quantized/draft")])
def test_vllm_is_told_the_draft_and_its_length(tmp_path, quantized_for, draft):
    speculate = dataclasses.replace(PARAMS.speculate, quantized_draft_for=quantized_for)
    words = words_of(served(tmp_path, "base_spec", dataclasses.replace(PARAMS, speculate=speculate)) / "vllm.sh")
    assert words[:4] == ["exec", "vllm", "serve", "artifacts/target"]
    assert words[words.index("--host") + 1] == "127.0.0.1", "a server is not open to the network unless asked"
    assert words[words.index("--dtype") + 1] == "bfloat16"
    speculation = json.loads(words[words.index("--speculative-config") + 1])
    assert speculation == {
        "method": "draft_model",
        "model": draft,
        "num_speculative_tokens": 2,
        "num_speculative_tokens_per_batch_size": {"1-3": 2, "4-15": 1, "16-16": 0},
    }
    sampling = json.loads(words[words.index("--override-generation-config") + 1])
    assert sampling == {"temperature": 0.0, "top_k": -1, "top_p": 1.0}


def lookup(metrics):
    metrics.clear()
    metrics |= {"kind": "ngram", "ngram_max": 3}


def drafted_by_lookup(name):
    def change(metrics):
        only(name)(metrics)
        for arm in metrics["arms"].values():
            if arm["draft"]:
                arm["draft"] = {"kind": "ngram", "precision": "no weights"}

    return change


def test_vllm_looks_tokens_up_where_the_draft_is_a_lookup(tmp_path):
    params = dataclasses.replace(PARAMS, draft=dataclasses.replace(PARAMS.draft, kind="ngram", ngram_max=3))
    untold = {"speculate__base": lambda m: m.update(batches="no batch was measured")}
    folder = served(tmp_path, "base_spec", params, draft=lookup, benchmark=drafted_by_lookup("base_spec"), **untold)
    words = words_of(folder / "vllm.sh")
    assert json.loads(words[words.index("--speculative-config") + 1]) == {
        "method": "ngram",
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
        "num_speculative_tokens": 2,
    }


def test_batch_sizes_with_the_same_draft_length_are_one_range():
    assert serving.vllm_schedule({1: 3, 2: 3, 4: 1, 8: 1, 16: 0}) == {"1-3": 3, "4-15": 1, "16-16": 0}
    assert serving.vllm_schedule({1: 2}) == {"1-1": 2}


def test_a_schedule_that_does_not_vary_is_left_out(tmp_path):
    always = {"speculate__base": lambda m: [p.update(draft_len=2) for p in m["batches"]]}
    words = words_of(served(tmp_path, "base_spec", **always) / "vllm.sh")
    assert "per_batch_size" not in words[words.index("--speculative-config") + 1]
    assert read(tmp_path / "serve")["serve"]["draft_len_by_batch"] == {"1": 2, "4": 2, "16": 2}


@pytest.mark.parametrize(("sym", "dtype"), [(False, "float16"), (True, "bfloat16")])
def test_gptq_with_zero_points_runs_in_float16_in_vllm(tmp_path, sym, dtype):
    gptq = dataclasses.replace(PARAMS.quantize["gptq"], sym=sym)
    params = dataclasses.replace(PARAMS, quantize=PARAMS.quantize | {"gptq": gptq})
    words = words_of(served(tmp_path, "gptq", params) / "vllm.sh")
    assert words[words.index("--dtype") + 1] == dtype and "--speculative-config" not in words


def test_the_command_is_one_that_a_shell_can_run(tmp_path):
    folder = served(tmp_path, "gptq_spec")
    echo = tmp_path / "vllm"
    echo.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    echo.chmod(0o755)
    done = subprocess.run(
        ["sh", str(folder / "vllm.sh"), "--port", "9"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [*words_of(folder / "vllm.sh")[2:-1], "--port", "9"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """artifacts/ with a tiny target, packed copies and drafts; and the dense models that stand behind them."""
    from checkpoint_fixtures import edit_config, quantized, saved, tiny

    from pipeline.checkpoint.random_llama import make_tokenizer

    root = tmp_path_factory.mktemp("repository")
    shape = {"vocab_size": 300, "initializer_range": 0.3, "max_position_embeddings": 256}
    places = {"base": "target", "draft": "draft", "gptq": "quantized/gptq", "awq": "quantized/awq"}
    dense = {name: tiny("Llama", **shape) for name in (*places, "quantized_draft")}
    saved(dense["base"], root / "artifacts/target")
    saved(dense["draft"], root / "artifacts/draft")
    for name in ("gptq", "awq"):
        quantized(dense[name], root / "artifacts" / places[name], name)
    quantized(dense["quantized_draft"], root / "artifacts/quantized/draft", "compressed-tensors")
    # as llmcompressor writes it; without it transformers expects dense weights
    edit_config(
        root / "artifacts/quantized/draft",
        lambda c: c["quantization_config"].update(quantization_status="compressed"),
    )
    for folder in [*(root / "artifacts" / p for p in places.values()), root / "artifacts/quantized/draft"]:
        make_tokenizer(300, 256).save_pretrained(folder)
    return root, dense


def run_script(folder, root, monkeypatch):
    """The script's names after it ran as it is, in the repository `root`."""
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "argv", ["transformers_generate.py", PROMPT])
    return runpy.run_path(str(folder / "transformers_generate.py"), run_name="__main__")


def greedy(model, inputs):
    answer = model.generate(**inputs, max_new_tokens=FLOAT32.benchmark.max_new_tokens, do_sample=False)
    return answer.tolist()


@pytest.mark.parametrize("row", ["base", "gptq", "awq", "base_spec", "gptq_spec"])
def test_the_script_gives_the_answer_of_the_weights_it_serves(models, tmp_path, monkeypatch, capsys, row):
    from transformers.generation.candidate_generator import AssistedCandidateGenerator

    root, dense = models
    proposed, propose = [], AssistedCandidateGenerator.get_candidates

    def watched(self, input_ids, *args, **named):
        found = propose(self, input_ids, *args, **named)
        proposed.append(found[0].shape[1] - input_ids.shape[1])
        return found

    monkeypatch.setattr(AssistedCandidateGenerator, "get_candidates", watched)
    ran = run_script(served(tmp_path, row, FLOAT32), root, monkeypatch)
    target = row.removesuffix("_spec")
    assert ran["answer"].tolist() == greedy(dense[target], ran["inputs"])
    expected = dense[target].model.layers[0].mlp.up_proj.weight
    assert (ran["model"].model.layers[0].mlp.up_proj.weight - expected).abs().max() < 1e-6
    assert len(set(ran["answer"][0].tolist())) > 8, "the tiny model stands still: the test would see little"
    assert capsys.readouterr().out.strip()
    draft_len = {"base_spec": 2, "gptq_spec": 1}.get(row, 0)
    assert set(proposed[:-2]) == ({draft_len} if draft_len else set())


def test_the_script_looks_tokens_up(models, tmp_path, monkeypatch):
    root, dense = models
    params = dataclasses.replace(FLOAT32, draft=dataclasses.replace(PARAMS.draft, kind="ngram", ngram_max=3))
    folder = served(tmp_path, "base_spec", params, draft=lookup, benchmark=drafted_by_lookup("base_spec"))
    assert "prompt_lookup_num_tokens=2, max_matching_ngram_size=3" in (folder / "transformers_generate.py").read_text()
    ran = run_script(folder, root, monkeypatch)
    assert ran["answer"].tolist() == greedy(dense["base"], ran["inputs"])


def test_compressed_tensors_are_read_by_transformers_alone(models, tmp_path, monkeypatch):
    """A target that drafts for itself has its quantized copy as the draft."""
    root, dense = models

    def drafts_for_itself(metrics):
        only("base_spec")(metrics)
        own(metrics["arms"]["base_spec"])

    def own(found):
        found["draft"] = {"kind": "self", "precision": "Int4Linear"}
        found["draft_readback"] |= {"precision": "Int4Linear", "kernels": {"Int4Linear": 210, "Linear": 1}}

    folder = served(tmp_path, "base_spec", FLOAT32, benchmark=drafts_for_itself, speculate__base=own)
    assert "pipeline" not in (folder / "transformers_generate.py").read_text()
    ran = run_script(folder, root, monkeypatch)
    assert ran["answer"].tolist() == greedy(dense["base"], ran["inputs"])
    found, expected = (m.model.layers[0].mlp.up_proj.weight for m in (ran["draft"], dense["quantized_draft"]))
    assert (found - expected).abs().max() < 1e-6


def test_prompts_without_a_template_are_asked_without_one(models, tmp_path, monkeypatch):
    root, _ = models
    folder = served(tmp_path, "base", FLOAT32, prompts=lambda m: m.update(chat_template=False))
    ran = run_script(folder, root, monkeypatch)
    assert ran["tokenizer"].decode(ran["inputs"]["input_ids"][0]) == PROMPT


@pytest.mark.parametrize("row", ["base", "gptq_spec"])
def test_the_script_runs_in_a_process_of_its_own_and_is_well_formed(models, tmp_path, row):
    script = served(tmp_path, row, FLOAT32) / "transformers_generate.py"
    done = subprocess.run(
        [sys.executable, str(script), PROMPT],
        cwd=models[0],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    ruff = Path(sys.executable).with_name("ruff")
    for command in (["check"], ["format", "--check"]):
        subprocess.run([str(ruff), *command, "--config", str(ROOT / "pyproject.toml"), str(script)], check=True)
