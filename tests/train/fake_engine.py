"""The worker's process with something else than vLLM in it. Run as `python fake_engine.py <descriptor of the pipe>`."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any

from datc_train.vllm_engine import worker


class Fake:
    def __init__(self, alive: Any) -> None:
        self.alive = alive
        self.child = subprocess.Popen(["sleep", "86400"])

    def pids(self) -> list[int]:
        return [os.getpid(), self.child.pid]

    def echo(self, value: Any) -> Any:
        return value

    def be_slow(self, times: int) -> str:
        for _ in range(times):
            self.alive()
        return "done"

    def hang(self, deaf: bool = False) -> None:
        if deaf:  # as a process that is stopped: it hears no SIGTERM and reads no pipe
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(86400)

    def die(self, number: int) -> None:
        os.kill(os.getpid(), number)
        time.sleep(86400)

    def leave(self, status: int) -> None:
        print("SomeError: out of paper", flush=True)
        os._exit(status)

    def fail(self) -> None:
        raise LookupError("no such layer")

    def shut_down(self) -> None:
        pass


if __name__ == "__main__":
    worker.Worker = Fake  # type: ignore[assignment, misc]
    worker.main()
