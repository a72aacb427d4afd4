import pytest

from datc_kernels.testing.variants import VARIANTS, using


@pytest.fixture(params=VARIANTS)
def backend(request):
    """The name of a backend; the whole test, its backward passes included, runs in that variant."""
    with using(request.param) as name:
        yield name
