"""The short form of `make torture`: the first stages of the smoke graph under a few kills."""

import pytest
import torture

pytestmark = pytest.mark.slow


def test_the_first_stages_survive_kills(tmp_path):
    found = torture.torture(tmp_path, kills=4, seed=3, targets=("calibrate", "prompts"), longest_s=9.0)
    assert found["not_survived"] == []
    assert found["kills"] == found["survived"] == 4
    assert found["results_equal_undisturbed"] and found["completed_graphs"] >= 1
