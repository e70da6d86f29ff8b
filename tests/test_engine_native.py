"""What was measured once on a machine stays; a damaged note of it is measured anew."""

import json

import pytest

from pipeline.engine import native


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
    (path,) = native.folder().glob("choices-*.json")
    path.write_text(text)
    assert native.remembered("which", lambda: 2) == 2
    assert json.loads(path.read_text()) == {"which": 2}
    assert list(native.folder().glob("*.partial")) == []
