"""What a stage is doing: a log file with what is left, a bar on a terminal, and a word when nothing moves any more."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.config import redacted

LOG_EVERY_S = 10.0
STALLED_AFTER_S = 300.0
LOGGER = logging.getLogger("pipeline")


class Redacted(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


class LogFile(logging.FileHandler):
    """A log that cannot be written (a full disk) is not to end the stage, nor to fill the terminal."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written is tried once more
            super().close()


class Watch:
    """Knows when something last moved, and says so once it has been too long; `moved` starts the count anew."""

    def __init__(self, stage: str) -> None:
        self.stage, self.doing = stage, "starting"
        self._last, self._said = time.monotonic(), False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def moved(self, doing: str) -> None:
        self.doing, self._last, self._said = doing, time.monotonic(), False

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(STALLED_AFTER_S / 10):
            still_s = time.monotonic() - self._last
            if still_s > STALLED_AFTER_S and not self._said:
                self._said = True
                text = f"{self.stage}: nothing has moved for {clock(still_s)}; last: {self.doing}"
                LOGGER.warning(text)
                print(f"warning: {text}", file=sys.stderr)


_watch: Watch | None = None


@contextlib.contextmanager
def stage_log(stage: str, path: Path | None) -> Iterator[None]:
    """Everything that this process logs while a stage runs goes to `path`; without one, or where it cannot be written,
    only the watch is kept."""
    global _watch
    handler: logging.Handler = logging.NullHandler()
    if path is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            handler = LogFile(path, mode="w", encoding="utf-8")
    handler.setFormatter(Redacted("%(asctime)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.captureWarnings(True)
    LOGGER.setLevel(logging.INFO)
    _watch, started = Watch(stage), time.monotonic()
    LOGGER.info("%s: started", stage)
    try:
        yield
        LOGGER.info("%s: done in %s", stage, clock(time.monotonic() - started))
    except BaseException as e:
        LOGGER.info("%s: ended after %s by %s: %s", stage, clock(time.monotonic() - started), type(e).__name__, e)
        raise
    finally:
        _watch.end()
        _watch = None
        logging.captureWarnings(False)
        logging.getLogger().removeHandler(handler)
        handler.close()


class Bar:
    """Counts towards `total` (None: not known). A tqdm bar on a terminal; in the log a line every LOG_EVERY_S."""

    def __init__(self, label: str, total: int | None, unit: str) -> None:
        from tqdm import tqdm

        self.label, self.total, self.unit, self.count = label, total, unit, 0
        self._shown: Any = tqdm(total=total, desc=label, unit=unit, disable=None, leave=False)
        self._started = self._logged = time.monotonic()

    def update(self, n: int = 1, left_s: float | None = None) -> None:
        """`left_s`: what is left at most, where a time budget ends the work before the count does."""
        self.count += n
        self._shown.update(n)
        now = time.monotonic()
        text = self._text(now - self._started, left_s)
        if _watch is not None:
            _watch.moved(text)
        if now - self._logged >= LOG_EVERY_S or self.count == self.total:
            self._logged = now
            LOGGER.info(text)

    def _text(self, gone_s: float, left_s: float | None) -> str:
        if self.total is None:
            return f"{self.label}: {self.count} {self.unit}s, {clock(gone_s)} gone"
        estimate_s = gone_s / self.count * (self.total - self.count) if self.count else float("inf")
        about_s = min(estimate_s, float("inf") if left_s is None else max(0.0, left_s))
        left = f", about {clock(about_s)} left" if about_s < float("inf") else ""
        return f"{self.label}: {self.count} of {self.total} {self.unit}s, {clock(gone_s)} gone{left}"

    def close(self) -> None:
        self._shown.close()


@contextlib.contextmanager
def bar(label: str, total: int | None, unit: str) -> Iterator[Bar]:
    shown = Bar(label, total, unit)
    try:
        yield shown
    finally:
        shown.close()


def clock(seconds: float) -> str:
    """12:03, or 1:02:03 from an hour on."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
