"""compute-sanitizer over small calls of every kernel, each tool in a process with a time limit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from .report import Part
from .setting import Setting

TOOLS = ("memcheck", "racecheck")
FOUND = 9  # the exit status that compute-sanitizer is told to give
CALLS = (sys.executable, "-m", "benchmarks.device.small_calls")


def run(part: Part, setting: Setting) -> None:
    program = shutil.which("compute-sanitizer") or _beside_nvcc()
    if setting.dry:
        part.attempt("calls", lambda: _watch(part, "calls without a tool", [*CALLS, "cpu"]))
        return
    if program is None:
        part.notes.append("compute-sanitizer is not installed")
        return
    for tool in TOOLS:
        command = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "5", *CALLS, "cuda"]
        part.attempt(tool, lambda: _watch(part, tool, command))  # noqa: B023


def _beside_nvcc() -> str | None:
    path = os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "compute-sanitizer")
    return path if os.path.exists(path) else None


def _watch(part: Part, name: str, command: list[str]) -> None:
    # Each tensor an allocation of its own: a read beyond it is one beyond what the tool knows.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=max(part.left_s, 1.0), check=False
        )
    except subprocess.TimeoutExpired:
        part.skipped.append(f"{name}: no verdict within its seconds")
        return
    if done.returncode not in (0, FOUND):
        last = (done.stderr.strip() or done.stdout.strip() or "nothing was said").splitlines()[-3:]
        part.notes.append(f"{name}: exit status {done.returncode}: {' / '.join(last)}")
        if "every call ran" not in done.stdout and command[0] != CALLS[0]:
            return  # the tool itself does not run here
    if done.returncode == FOUND:
        part.errors.append(f"{name}: {done.stdout[-2000:]}")
    part.check(f"{name}: exit status", done.returncode, 0)
