"""Ctrl-C and SIGTERM: finish the step, save, leave."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """An orderly stop: the message says where the run stands and how it goes on; `signal` is what asked for it."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.signal = number


class StopRequest:
    """Within `with`, the first signal is only noted (`.signal`, and a line on standard error); a second one stops at once, as it
    would outside.

    Outside of the main thread, where handlers cannot be set, nothing changes.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()
        # Whatever the signal came upon may be in the middle of an import or of a line: nothing but the system is called here.
        with suppress(OSError):
            os.write(2, b"%s: finishing this step and saving; once more to stop at once\n" % signal.Signals(number).name.encode())

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
