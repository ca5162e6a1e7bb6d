"""Graceful stop on signals.

The first SIGINT (Ctrl-C), SIGTERM or SIGHUP requests a stop; a second Ctrl-C quits at once.
"""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

from transformer_vq.progress import warn

MESSAGE = "\nstopping after this step and saving; press Ctrl-C again to quit without saving"


class StopRequest:
    """A context that records SIGINT, SIGTERM and SIGHUP instead of stopping at once.

    It is true once a signal has arrived. A second SIGINT raises KeyboardInterrupt. Signals that
    were ignored before (as under nohup) stay ignored. It has no effect in other threads.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous_handlers: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous_handlers[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        before, self.signal = self.signal, number
        if before is None:
            # The terminal may be closed (SIGHUP), or the signal may interrupt another print to
            # stderr, which raises RuntimeError. Neither may prevent the run from being saved.
            with suppress(OSError, RuntimeError):
                warn(MESSAGE)
