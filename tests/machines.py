"""The suite as other machines would run it: `python -m tests.machines` (`make test-machines`).

Three runs that meet every value of every setting: instruction set of the C++ ops, that of PyTorch and its matrix libraries,
threads, order of the tests, and a machine that is busy with something else. What this machine cannot do is said as NOT RUN.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from datc_kernels import native


@dataclass(frozen=True)
class Machine:
    """One run.

    capability  of the C++ ops; `libraries` has what PyTorch, MKL and oneDNN are told to use at most
    threads     of an operation, in every worker
    shuffled    modules, and tests within them, in a random order whose seed is printed
    busy        a loop beside it on every core
    """

    capability: str
    threads: int
    shuffled: bool = False
    busy: bool = False


MACHINES = (
    Machine("portable", 1, shuffled=True),
    Machine("avx2", 8, busy=True),
    Machine("avx512", 2),
)
LEVELS = {"portable": 1, "avx2": 2, "avx512": 3}
LIBRARIES = {
    "portable": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512"},
}


def why_not(machine: Machine) -> str | None:
    """The reason why this machine cannot be that one."""
    if native.WHY_MISSING is not None:
        return native.WHY_MISSING
    try:
        torch.ops.datc_cpu.instruction_set(LEVELS[machine.capability])
    except RuntimeError as error:
        return str(error)
    return None


@contextmanager
def load(cores: int) -> Iterator[None]:
    """So many processes that count for ever."""
    counting = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(cores)]
    try:
        yield
    finally:
        for process in counting:
            process.kill()
            process.wait()


def run(machine: Machine, workers: int, rest: list[str], seed: int) -> int:
    """The exit status of pytest."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        str(workers),
        "--dist",
        "worksteal",
        "-m",
        "not slow",
        "--cpu-capability",
        machine.capability,
    ]
    if machine.shuffled:
        command += ["--random-order-bucket=module", f"--random-order-seed={seed}"]
    environment = os.environ | LIBRARIES[machine.capability] | {"OMP_NUM_THREADS": str(machine.threads)}
    print(f"\n{machine}{f', seed {seed}' if machine.shuffled else ''}\n{' '.join([*command, *rest])}", flush=True)
    with load(os.cpu_count() or 1 if machine.busy else 0):
        return subprocess.run([*command, *rest], env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=LEVELS, help="one of the runs")
    parser.add_argument("--workers", type=int, default=2, help="of pytest-xdist")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the random order")
    options, rest = parser.parse_known_args()  # the rest is pytest's: files, -k
    said, status = [], 0
    for machine in MACHINES:
        if options.only not in (None, machine.capability):
            continue
        reason = why_not(machine)
        if reason is not None:
            said.append(f"NOT RUN  {machine}: {reason}")
            continue
        began = time.monotonic()
        failed = run(machine, options.workers, rest, options.seed)
        status = status or failed
        said.append(f"{'FAILED ' if failed else 'passed '}  {machine}  {time.monotonic() - began:.0f} s")
    print("\n".join(["", *said]))
    return status


if __name__ == "__main__":
    sys.exit(main())
