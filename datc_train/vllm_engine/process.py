"""A process that we own: asked over a pipe, watched while it works, and ended with all that it started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

WORKER = (sys.executable, "-m", "datc_train.vllm_engine.worker")
_GOODBYE = 15.0  # seconds for an orderly end
_GRACE = 3.0  # seconds between SIGTERM and SIGKILL
_LOOK = 0.5  # seconds between looks at whether the process still is


class EngineProcess:
    """A worker in a session of its own, so that Ctrl-C in the terminal is the trainer's alone.

    log          what the worker and its children print
    timeout      seconds without a sign of life after which a question is an error
    environment  variables beside the trainer's own
    command      what to run; the number of its end of the pipe comes behind it

    The worker answers `(kind, value)`: any number of "alive", then "done" or "failed". It ends itself and its children when
    its standard input closes, which happens however the trainer ends. `timeout` may be changed at any time.
    """

    def __init__(
        self, log: Path, *, timeout: float, environment: Mapping[str, str] | None = None, command: Sequence[str] = WORKER
    ) -> None:
        self.log = log
        self.timeout = timeout
        self._pipe, theirs = Pipe()
        package = str(Path(__file__).parent.parent.parent)
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": path} | dict(environment or {}),
            )
        theirs.close()
        self._asked: str | None = None
        self._log_size = 0
        self._end = weakref.finalize(self, _end, self._process)  # at the interpreter's exit at the latest

    @property
    def pid(self) -> int:
        """Of the worker, and of the process group of everything that it started."""
        return self._process.pid

    def ask(self, what: str, **arguments: Any) -> Any:
        """The worker's answer to a question.

        Raises RuntimeError, after the worker and its children were ended, for one that died, failed, or gave no sign of life
        for `timeout` seconds. Whatever else interrupts the wait leaves the answer behind: only `close` may follow.
        """
        if not self._end.alive:
            raise RuntimeError("sampler: the vLLM engine has ended; the run goes on by --resume auto")
        assert self._asked is None, "a question was left without its answer"
        self._asked, self._log_size = what, self.log.stat().st_size
        try:
            self._pipe.send((what, arguments))
            answer = self._answer(what)
        except (EOFError, ConnectionError):
            raise self._failure(what, f"died (exit status {self._status()})") from None
        self._asked = None
        return answer

    def close(self) -> None:
        """End the worker: in order where it waits for a question, at once where it is busy. May be called more than once."""
        if self._end.alive and self._asked is None:
            with suppress(ConnectionError):
                self._pipe.send(("close", {}))
                self._wait_for_end()
        self._end()
        self._pipe.close()

    def _answer(self, what: str) -> Any:
        deadline = time.monotonic() + self.timeout
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._failure(what, f"gave no sign of life for {self.timeout:g} s (vllm_timeout)")
            if not self._pipe.poll(min(left, _LOOK)):
                if self._process.poll() is not None and not self._pipe.poll(0):  # children may hold the pipe open
                    raise EOFError
                continue
            kind, value = self._pipe.recv()
            if kind == "done":
                return value
            if kind == "failed":
                raise self._failure(what, f"failed: {value}")
            deadline = time.monotonic() + self.timeout

    def _wait_for_end(self) -> None:
        deadline = time.monotonic() + _GOODBYE
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)

    def _status(self) -> int | None:
        try:
            return self._process.wait(_LOOK)
        except subprocess.TimeoutExpired:
            return None

    def _failure(self, what: str, how: str) -> RuntimeError:
        self._end()
        return RuntimeError(
            f"sampler: the vLLM engine {how}, asked to {what.replace('_', ' ')}{self._cause(how)}; its log is {self.log}; "
            "the run goes on from its last checkpoint by --resume auto"
        )

    def _cause(self, how: str) -> str:
        """The first error in what the log has gained since the question; those behind it tell of its consequences."""
        with self.log.open("rb") as file:
            file.seek(self._log_size)
            lines = file.read().decode("utf-8", errors="replace").splitlines()
        found = (line.strip() for line in lines if re.search(r"\w(Error|Exception): ", line) and "WARNING" not in line)
        first = next((line for line in found if line not in how), None)
        return "" if first is None else f" ({first[-400:]})"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Nothing of the worker's process group stays: SIGTERM, so that shared memory is given back, and SIGKILL soon after."""
    assert process.stdin is not None
    process.stdin.close()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline:
            process.poll()  # a process that nobody waited for still counts as one of its group
            os.killpg(process.pid, 0)
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
