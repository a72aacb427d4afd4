"""Every backend in every variant; Triton's kernels in its interpreter (`tests/conftest.py`)."""

import pytest

from datc_kernels import missing_backends
from datc_kernels.testing.variants import CPU_VARIANTS, TRITON_VARIANTS, VARIANTS, using


def run_in(variant):
    for name, variants in (("triton", TRITON_VARIANTS), ("cpu", CPU_VARIANTS)):
        if variant in variants and name in missing_backends():
            pytest.skip(missing_backends()[name])
    return using(variant)


@pytest.fixture(params=[*VARIANTS, *CPU_VARIANTS])
def backend(request):
    """The name of a backend; the whole test, its backward passes included, runs in that variant."""
    with run_in(request.param) as name:
        yield name


@pytest.fixture(params=VARIANTS)
def float64_backend(request):
    """`backend` for tests in float64."""
    with run_in(request.param) as name:
        yield name


@pytest.fixture(params=[*VARIANTS, "cpu"])
def allocating_backend(request):
    """The backends whose `allocate_weights` takes float64."""
    with run_in(request.param) as name:
        yield name


@pytest.fixture(params=[*VARIANTS, *CPU_VARIANTS, *TRITON_VARIANTS[3:]])
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
