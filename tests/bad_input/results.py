"""Results edited by hand, and stores that take none."""

from __future__ import annotations

from bad_input.world import Plant, Row, bytes_of, edit, remove, replace, write


def reported(name: str, plant: Plant, names: str, way_out: str = "run `dvc repro`") -> Row:
    return Row(name, "report --params=studied.yaml", plant, names, way_out)


ROWS = [
    reported(
        "a record without metrics",
        edit("results/prompts.json", lambda r: r.pop("metrics") and None),
        "results: .*metrics",
    ),
    reported(
        "a record without provenance",
        edit("results/prompts.json", lambda r: r.pop("provenance") and None),
        "results: .*provenance",
    ),
    reported("a record that is a list", write("results/prompts.json", "[]"), "results: .*list"),
    reported(
        "an arm that is gone",
        edit("results/benchmark.json", lambda r: r["metrics"]["arms"].pop("gptq") and None),
        "results: .*gptq",
    ),
    reported(
        "words where a number was",
        edit("results/evaluate@base.json", lambda r: r["metrics"].update(token_ppl="good")),
        "results: ",
    ),
    reported("a record is gone", remove("results/evaluate@awq.json"), r"evaluate@awq\.json: not found"),
    reported("a record is cut", bytes_of("results/draft.json", lambda raw: raw[:200]), r"draft\.json: not JSON"),
    reported("a record is empty", write("results/draft.json", ""), r"draft\.json: not JSON"),
    reported("a record is not UTF-8", write("results/draft.json", b'"\xff"'), r"draft\.json: not JSON"),
    reported("a merge conflict", write("results/prompts.json", "<<<<<<< HEAD\n{}\n"), r"prompts\.json: not JSON"),
    reported(
        "made with another setting",
        edit("results/quantize@gptq.json", lambda r: r["provenance"]["sections"]["quantize"].update(bits=8)),
        r"quantize@gptq\.json: made with quantize\.gptq\.bits=8",
    ),
    reported(
        "settings changed since",
        replace("studied.yaml", "baseline_top_k: 64", "baseline_top_k: 63"),
        r"evaluate@base\.json: made with evaluate\.baseline_top_k=64",
    ),
    reported(
        "of another machine",
        edit("results/benchmark.json", lambda r: r["provenance"]["inputs"].update(environment="0" * 64)),
        r"benchmark\.json: measured on another machine",
    ),
    reported("the machine's fingerprint is no JSON", write("environment.json", "{"), r"environment\.json: not JSON"),
    Row(
        "track: no summary",
        "track",
        remove("reports/metrics.json"),
        r"summary=reports/metrics\.json not found",
        "dvc repro",
    ),
    Row(
        "track: a summary that is cut",
        "track",
        bytes_of("reports/metrics.json", lambda raw: raw[:99]),
        r"reports/metrics\.json: not JSON",
        "dvc repro",
    ),
    Row(
        "track: a record that is gone",
        "track",
        remove("results/speculate@gptq.json"),
        r"speculate@gptq\.json: not found",
        "dvc repro",
    ),
    Row(
        "track: a record without its curve",
        "track",
        edit("results/speculate@gptq.json", lambda r: r["metrics"].pop("curve") and None),
        "curve",
        "dvc repro",
    ),
    Row(
        "track: a summary that is a list", "track", write("reports/metrics.json", "[1]"), r"metrics\.json", "dvc repro"
    ),
    Row(
        "track: a summary without arms",
        "track",
        edit("reports/metrics.json", lambda r: r.pop("arms") and None),
        "arms",
        "dvc repro",
    ),
    Row(
        "track: a record without provenance",
        "track",
        edit("results/draft.json", lambda r: r.pop("provenance") and None),
        "provenance",
        "dvc repro",
    ),
]
