"""Triton's kernels run in its interpreter, on CPU tensors: the variable must be there when Triton is imported."""

import os
import sys

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from datc_kernels import missing_backends
from datc_kernels.testing.variants import TRITON_VARIANTS, VARIANTS, using

assert "triton" not in sys.modules, "Triton was imported before tests/kernels/conftest.py could choose its interpreter"


def run_in(variant):
    if variant in TRITON_VARIANTS and "triton" in missing_backends():
        pytest.skip(missing_backends()["triton"])
    return using(variant)


@pytest.fixture(params=VARIANTS)
def backend(request):
    """The name of a backend; the whole test, its backward passes included, runs in that variant."""
    with run_in(request.param) as name:
        yield name


@pytest.fixture(params=VARIANTS)
def float64_backend(request):
    """`backend` for tests in float64, where a module's own `backend` takes float32 only."""
    with run_in(request.param) as name:
        yield name


@pytest.fixture(params=[*VARIANTS, "triton in large tiles"])
def float32_backend(request):
    """The backends that take float32, the fused kernels among them."""
    with run_in(request.param) as name:
        yield name


@pytest.fixture(params=TRITON_VARIANTS[:3])
def triton_backend(request):
    """The fused kernels as shipped, by pointers, and in tiles so small that every branch is met."""
    with run_in(request.param) as name:
        yield name


@pytest.fixture
def run_variant():
    """Opens the variant that a test names itself: `with run_variant("triton in small tiles") as backend`."""
    return run_in
