"""Set before torch is imported: OpenMP threads that spin beside a busy process make small operations many times slower, and
Triton's kernels run in its interpreter, on CPU tensors, only where its variable was there when it was imported."""

import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

from datc_kernels import native

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# One database-free, seeded profile: a failure on one machine is the same failure on the next.
settings.register_profile("datc", deadline=None, derandomize=True, database=None, max_examples=25)
settings.load_profile("datc")
# With --hypothesis-profile; `make test-sanitize` does.
settings.register_profile("datc-thorough", settings.get_profile("datc"), max_examples=300)

LEVELS = {"portable": 1, "avx2": 2, "avx512": 3}


def pytest_addoption(parser):
    parser.addoption(
        "--cpu-capability",
        choices=LEVELS,
        help="the instruction set of the C++ ops, here and in processes that tests start (default: the widest)",
    )


def pytest_configure(config):
    capability = config.getoption("--cpu-capability")
    if capability is None:
        return
    level = LEVELS[capability]
    try:
        torch.ops.datc_cpu.instruction_set(level)
    except (AttributeError, RuntimeError) as error:
        raise pytest.UsageError(f"--cpu-capability {capability}: {native.WHY_MISSING or error}") from None
    native.LEVEL = level
    os.environ["DATC_TESTS_LEVEL"] = str(level)
    forced = str(Path(__file__).parent / "forced")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if forced not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (forced, *paths)))


def pytest_terminal_summary(terminalreporter):
    cpu = native.WHY_MISSING or torch.ops.datc_cpu.instruction_set(native.LEVEL)
    terminalreporter.write_line(f"C++ ops: {cpu}; torch: {torch.backends.cpu.get_cpu_capability()}")
