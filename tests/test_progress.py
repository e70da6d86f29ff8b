"""The log of a stage, what it says is left, and the warning when nothing moves."""

import logging
import time
import warnings
from pathlib import Path

import pytest

from pipeline import progress


@pytest.fixture(autouse=True)
def always_logged(monkeypatch):
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.0)


def test_the_log_says_how_far_a_stage_is_and_how_it_ended(tmp_path):
    path = tmp_path / "logs" / "draft.log"
    with progress.stage_log("draft", path), progress.bar("training", 4, "step") as shown:
        for _ in range(4):
            shown.update()
        logging.getLogger("some.library").warning("a word from a library")
        warnings.warn("a word from Python", stacklevel=1)
    text = path.read_text()
    assert "draft: started" in text and "draft: done in 0:00" in text
    assert "training: 1 of 4 steps, 0:00 gone, about 0:00 left" in text and "training: 4 of 4 steps" in text
    assert "a word from a library" in text and "a word from Python" in text


def test_what_ended_a_stage_is_in_its_log_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 30)
    with pytest.raises(ValueError), progress.stage_log("fetch@target", tmp_path / "a.log"):
        raise ValueError(f"refused: hf_{'x' * 30}")
    text = (tmp_path / "a.log").read_text()
    assert "ended after 0:00 by ValueError: refused: ***" in text and "xxx" not in text


@pytest.mark.parametrize(
    ("count", "left_s", "due"),
    [
        (1, None, "about 0:30 left"),
        (1, 12.0, "about 0:12 left"),
        (3, -1.0, "about 0:00 left"),
        (4, None, "0:00 left"),
    ],
)
def test_what_is_left_follows_from_the_pace_or_from_the_budget(count, left_s, due):
    shown = progress.Bar("blocks", 4, "block")
    shown.count = count
    assert shown._text(10.0 * count, left_s).endswith(due)


def test_without_a_total_nothing_is_promised():
    shown = progress.Bar("lm-eval", None, "forward")
    shown.update(7)
    assert shown._text(75.0, None) == "lm-eval: 7 forwards, 1:15 gone"


def test_a_stage_that_does_not_move_says_so_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "STALLED_AFTER_S", 0.2)
    with progress.stage_log("benchmark", tmp_path / "a.log"):
        with progress.bar("blocks", 3, "block") as shown:
            for _ in range(3):
                time.sleep(0.05)
                shown.update()
        assert capsys.readouterr().err == "", "it moved all the time"
        time.sleep(0.6)
    assert (
        capsys.readouterr().err
        == "warning: benchmark: nothing has moved for 0:00; last: blocks: 3 of 3 blocks, 0:00 gone, about 0:00 left\n"
    )
    assert (tmp_path / "a.log").read_text().count("nothing has moved") == 1


def test_a_log_that_cannot_be_written_does_not_end_the_stage(tmp_path):
    (tmp_path / "logs").write_text("a file where the folder should be")
    with progress.stage_log("report", tmp_path / "logs" / "report.log"):
        pass


def test_a_log_on_a_full_disk_does_not_end_the_stage():
    """What was buffered is tried once more when the log is closed."""
    with progress.stage_log("report", Path("/dev/full")):
        pass


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (75, "1:15"), (3599.6, "1:00:00"), (7325, "2:02:05")])
def test_clock(seconds, text):
    assert progress.clock(seconds) == text
