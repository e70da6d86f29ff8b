"""What was measured once on a machine stays; a damaged note of it is measured anew."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import measure_fixtures as tiny
import pytest
from test_safety import ordinary

from pipeline.engine import native

COMPILED = native.folders()[0]  # where the other tests have theirs


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELS_DIR", str(tmp_path / "kernels"))


def never():
    raise AssertionError("measured again")


def test_an_answer_is_measured_once():
    assert native.remembered("which", lambda: 128) == 128
    assert native.remembered("which", never) == 128
    assert native.remembered("other", lambda: None) is None
    assert native.remembered("other", never) is None, "no rows at all is an answer too"


def test_the_first_of_two_processes_stands():
    def while_another_answers():
        native.remembered("which", lambda: "theirs")
        return "mine"

    assert native.remembered("which", while_another_answers) == "theirs"


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"'])
def test_a_damaged_note_is_replaced(text):
    native.remembered("which", lambda: 1)
    (folder,) = native.folders()
    (path,) = folder.glob("choices-*.json")
    path.write_text(text)
    assert native.remembered("which", lambda: 2) == 2
    assert json.loads(path.read_text()) == {"which": 2}
    assert list(folder.glob("*.partial")) == []


LOADS = """
import sys, torch
from pathlib import Path
from pipeline.checkpoint.load import load_decoder
from pipeline.engine import native
native.remembered("which", lambda: 1)
decoder = load_decoder(
    Path(sys.argv[1]), device="cpu", dtype=torch.float32, pack_head=True, trust_remote_code=False
)
print(len(decoder.forward(torch.tensor([1, 2]), decoder.new_cache(4))))
native.refusal()
print(next((f for f in native.folders() if list(f.glob("kernels-*"))), None))
"""


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="root without setpriv")
def test_where_the_folder_is_read_only_a_model_loads_and_the_users_cache_is_used(tmp_path):
    """First with the library there, then without (a stand-in for the compiler makes one), then with no place at all."""
    model = tiny.checkpoint(tmp_path / "model", seed=1)
    kernels, cache = tmp_path / "checkout/artifacts/kernels", tmp_path / "cache"
    kernels.mkdir(parents=True)
    for path in COMPILED.glob(f"kernels-{native.key()}.so"):
        shutil.copy(path, kernels)
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho made > "$2"\n')
    compiler.chmod(0o755)

    def load(**environment: str) -> list[str]:
        done = subprocess.run(
            [*ordinary(), sys.executable, "-c", LOADS, str(model)],
            env=os.environ | {"KERNELS_DIR": str(kernels), "XDG_CACHE_HOME": str(cache)} | environment,
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.split("\n")

    def kept(folder: Path) -> list[str]:
        return sorted(path.name.split("-")[0] for path in folder.glob("*"))

    kernels.chmod(0o555)
    if kept(kernels):
        assert load()[1] == str(kernels), "what is there is used"
        assert kept(cache / "quantspec/kernels") == ["choices"]
    kernels.chmod(0o755)
    for path in kernels.iterdir():
        path.unlink()
    kernels.chmod(0o555)
    assert load(CXX=str(compiler))[1] == str(cache / "quantspec/kernels")
    assert kept(cache / "quantspec/kernels") == ["choices", "kernels"]
    assert kept(kernels) == []
    load(XDG_CACHE_HOME=str(kernels / "none"), CXX="no-such-compiler")


def test_what_is_there_counts_where_nothing_can_be_written(tmp_path, monkeypatch):
    assert native.remembered("which", lambda: 1) == 1
    monkeypatch.setattr(native, "_writable", lambda folder: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("a file where a folder is due")
    assert native.remembered("which", never) == 1
    assert native.remembered("other", lambda: 2) == 2
    assert native.remembered("other", lambda: 3) == 3, "measured anew"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert native.remembered("other", lambda: 4) == 4
    assert native.remembered("other", never) == 4
