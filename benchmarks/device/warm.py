"""Compiles the kernels of the later parts in several processes at once, into Triton's own cache on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import torch

from datc_kernels import linear_credit

from . import linear, sweep
from .report import Part
from .setting import Setting, draw


def _calls(setting: Setting) -> Iterator[Callable[[], object]]:
    yield from linear.calls(setting)
    for candidate in sweep.candidates(setting):

        def call(candidate: sweep.Candidate = candidate) -> object:
            shape = setting.shapes[-1]
            with candidate.used():
                return linear_credit(*draw(setting, 4, shape.V, shape.D, shape.K).args, backend="triton")

        yield call


def share(setting: Setting, index: int, of: int) -> int:
    """Every of-th call, from the index-th on; a call that fails is the later part's to report. How many ran."""
    ran = 0
    for call in list(_calls(setting))[index::of]:
        try:
            call()
            ran += 1
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return ran


def run(part: Part, setting: Setting) -> None:
    if setting.dry:
        part.attempt("a share", lambda: part.notes.append(f"{share(setting, 1, 20)} calls, nothing to compile"))
        return
    part.attempt("processes", lambda: _processes(part))


def _processes(part: Part) -> None:
    of = max(1, min(8, (os.cpu_count() or 1) // 2))
    command = [sys.executable, "-m", "benchmarks.device.warm"]
    running = [subprocess.Popen([*command, str(i), str(of)], stdout=subprocess.DEVNULL) for i in range(of)]
    late = 0
    for process in running:
        try:
            process.wait(timeout=max(part.left_s, 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            late += 1
    part.notes.append(f"{of} processes, {late} of them stopped at the end of their seconds")


if __name__ == "__main__":
    share(Setting(torch.device("cuda"), dry=False), int(sys.argv[1]), int(sys.argv[2]))
