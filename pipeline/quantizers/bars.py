"""The libraries' own bars stay away: one bar a run, over the modules to quantize, is enough."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def no_other_bars() -> Iterator[None]:
    """Hide the bars that do not leave it to the terminal (`disable=None`): transformers' and llmcompressor's."""
    from tqdm import tqdm

    show = tqdm.__init__

    def hide(self: Any, *args: Any, **kwargs: Any) -> None:
        left_to_terminal = "disable" in kwargs and kwargs["disable"] is None
        show(self, *args, **{**kwargs, "disable": None if left_to_terminal else True})

    with mock.patch.object(tqdm, "__init__", hide):
        yield
