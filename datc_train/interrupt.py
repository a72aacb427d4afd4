"""Ctrl-C and SIGTERM: finish the step, save, leave."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """An orderly stop: the message says where the run stands and how it goes on; `signal` is what asked for it."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.signal = number


class StopRequest:
    """Within `with`, the first signal is only noted (`.signal`); a second one stops at once, as it would outside.

    Outside of the main thread, where handlers cannot be set, nothing changes.
    """

    def __init__(self, notice: Any = None) -> None:
        self.signal: int | None = None
        self.notice = notice  # called with the signal's name when it comes
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
        if self.notice is not None:
            self.notice(signal.Signals(number).name)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
