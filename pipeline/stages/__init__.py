"""One stage a file, with one public `run(sections, paths) -> metrics`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_by_stages(*paths: Path) -> Iterator[None]:
    """Turns a look-up that fails in results (a hand has edited them) into a ValueError with the key and the way out."""
    try:
        yield
    except (LookupError, TypeError, AttributeError) as e:
        where = ", ".join(map(str, paths))
        raise ValueError(
            f"{where}: a record is not as its stage wrote it ({type(e).__name__}: {e}); run `dvc repro`"
        ) from e
