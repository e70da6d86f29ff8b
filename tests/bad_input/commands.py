"""The command line and the places it names."""

from __future__ import annotations

from bad_input.world import Row, each, nothing, remove, write


def mistake(words: str, names: str, way_out: str) -> Row:
    return Row(words or "nothing", f"$ {words}", nothing, names, way_out)


ROWS = [
    mistake("", "STAGE", "see `python -m pipeline --help`"),
    mistake("measure", "measure: no such stage", "known: benchmark, "),
    mistake("../report", r"\.\./report: no such stage", "known: "),
    mistake("environment out=x --parms y", "--parms", "see `python -m pipeline --help`"),
    mistake("environment out", "out: not of the form", "name=path"),
    mistake("environment out=", "out=: not of the form", "name=path"),
    mistake("environment", "path 'out' is missing", "give out=PATH"),
    mistake("environment out=a out=b", "out=b: out is given twice", "give it once"),
    mistake("environment out=a in=b", "unknown path 'in'", "it takes out and metrics"),
    mistake("environment@cpu out=a", "environment@cpu: takes no key", "give environment alone"),
    mistake("evaluate checkpoint=model corpus=corpus out=o", "evaluate@: needs a key", "evaluate@KEY"),
    mistake("evaluate@ checkpoint=model corpus=corpus out=o", "evaluate@: needs a key", "evaluate@KEY"),
    mistake("quantize@int3 model=model calibration=calibration out=o", r"quantize\.int3: no such", "known: gptq, awq"),
    mistake("environment out=x --params nowhere.yaml", r"nowhere\.yaml: not found", "run `make params`"),
    Row(
        "an input that is not there", "calibrate target=nowhere", nothing, "target=nowhere not found", "run `dvc repro`"
    ),
    Row(
        "results that are not there", "report results=nowhere", nothing, "results=nowhere not found", "run `dvc repro`"
    ),
    Row("metrics: a folder", "environment metrics=corpus", nothing, "metrics=corpus is a folder", "give a file"),
    Row("out: below a file", "environment out=params.yaml/x", nothing, "out=params.yaml/x", "give another place"),
    Row(
        "metrics: below a file",
        "environment metrics=params.yaml/x",
        nothing,
        "metrics=params.yaml/x",
        "give another place",
    ),
    Row(
        "the baseline compared with itself",
        "evaluate@base baseline=corpus",
        nothing,
        "evaluate@base",
        "takes no baseline",
    ),
    Row("nothing to compare with", "evaluate@gptq", nothing, "evaluate@gptq", "needs baseline=PATH"),
    Row(
        "corpus: a file",
        "calibrate",
        each(remove("corpus"), write("corpus", "text")),
        r"corpus/documents\.jsonl",
        "run `dvc repro`",
    ),
]
