"""Stopping in good order: the first Ctrl-C, SIGTERM or SIGHUP asks, a second Ctrl-C insists."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

from transformer_vq.progress import warn

MESSAGE = "\nstopping after this step and saving; press Ctrl-C again to quit without saving"


class StopRequest:
    """A context in which SIGINT, SIGTERM and SIGHUP are noted instead of obeyed at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        is_rank_zero = self.signal is None
        self.signal = number
        if is_rank_zero:
            # The terminal may be closed (SIGHUP), or the signal may interrupt another print to
            # stderr, which raises RuntimeError. Neither must keep the run from being saved.
            with suppress(OSError, RuntimeError):
                warn(MESSAGE)
