"""The backward of logprob on the Triton backends: the library's products and one kernel between them."""

from unittest.mock import patch

import pytest
import torch

from datc_kernels import linear_credit, logits_credit
from datc_kernels.linear_credit import chunked
from datc_kernels.testing import truth
from datc_kernels.testing.inputs import Sizes, plain
from datc_kernels.testing.rounding import rounding

SIZE = Sizes(N=9, V=70, D=8, K=4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODES = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "scale and temperature": {"logit_scale": 0.3, "temperature": 0.7},
    "all": {"softcap": 3.0, "logit_scale": 1.7, "temperature": torch.linspace(0.5, 2.0, 9), "vocab_size": 66},
}


@pytest.fixture
def backend(run_variant):
    with run_variant("triton in large tiles") as name:
        yield name


def gradients(logprob, *inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    logprob(*leaves).backward(torch.linspace(-1, 2, SIZE.N))
    return [leaf.grad for leaf in leaves]


def assert_close(got, true):
    """Of the largest entry: sums over V, D and N in float32, and one cast to the dtype."""
    allowed = rounding(length=SIZE.V + SIZE.D + SIZE.N) + torch.finfo(got.dtype).eps / 2
    assert (got.double() - true).abs().max() <= allowed * true.abs().max()


@pytest.fixture
def case():
    case = plain(0, SIZE)
    ids = case.token_ids % 66
    ids[2] = -100
    return case.hidden, case.weight, ids


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_k14_against_float64(mode, dtype, case, backend):
    """K14, K17: hidden, weight and bias, an ignored row among them, in several tiles of rows and columns."""
    hidden, weight, ids = case
    bias = torch.randn(SIZE.V, generator=torch.Generator().manual_seed(1))
    inputs = [x.to(dtype) for x in (hidden, weight, bias)]
    options = MODES[mode]
    with patch.object(chunked, "tile_shape", lambda device: (4, 32)):
        got = gradients(lambda h, w, b: linear_credit(h, w, ids, bias=b, backend=backend, **options).logprob, *inputs)
    true = gradients(lambda h, w, b: truth.logprob(h, w, ids, bias=b, **options).float(), *(x.double() for x in inputs))
    for g, t in zip(got, true, strict=True):
        assert g.dtype == dtype
        assert_close(g, t)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_of_existing_logits(mode, dtype, case, backend):
    hidden, weight, ids = case
    logits, options = (hidden @ weight.T).to(dtype), MODES[mode]
    (got,) = gradients(lambda z: logits_credit(z, ids, backend=backend, **options).logprob, logits)
    one = torch.eye(SIZE.V, dtype=torch.float64)
    (true,) = gradients(lambda z: truth.logprob(z, one, ids, **options).float(), logits.double())
    assert got.dtype == dtype
    assert_close(got, true)
    assert (got[2] == 0).all()
    assert (got[:, options.get("vocab_size", SIZE.V) :] == 0).all()


def test_k6_masked_logits_get_no_gradient(backend):
    """K6: exactly zero where the logit is -inf, also beneath a soft-cap, where the tanh's slope would not be."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    logits[:, 10:45] = -torch.inf
    ids = torch.tensor([0, 3, 9, 49])
    for softcap in (None, 5.0):
        (got,) = gradients_of_four(logits, lambda z, cap=softcap: logits_credit(z, ids, softcap=cap, backend=backend).logprob)
        assert (got[:, 10:45] == 0).all()
        assert (got[:, :10] != 0).all()


def gradients_of_four(x, logprob):
    leaf = x.clone().requires_grad_()
    logprob(leaf).sum().backward()
    return (leaf.grad,)


def test_k13_the_sampled_column_of_a_nearly_certain_token(backend):
    """K13: 1 - p_y = 1e-6 keeps its digits."""
    logits = torch.zeros(3, 20, dtype=torch.float64)
    logits[:, 5] = torch.log(torch.tensor(19 * (1 - 1e-6) / 1e-6))
    ids = torch.tensor([5, 5, 6])
    (got,) = gradients_of_four(logits.float(), lambda z: logits_credit(z, ids, backend=backend).logprob)
    torch.testing.assert_close(got[:2, 5], torch.full((2,), 1e-6), rtol=rounding(length=20, condition=17), atol=0)  # a gap of 17


def test_bitwise_repeatable(case, backend):
    hidden, weight, ids = case
    runs = [gradients(lambda h, w: linear_credit(h, w, ids, backend=backend).logprob, hidden, weight) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_k23_an_ignored_row_contributes_nothing(case, backend):
    """K23: whatever its hidden state and its incoming gradient hold."""
    hidden, weight, ids = case
    bad = hidden.clone()
    bad[2] = torch.nan
    clean, dirty = (gradients(lambda h, w: linear_credit(h, w, ids, backend=backend).logprob, x, weight) for x in (hidden, bad))
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    leaf = bad.clone().requires_grad_()
    incoming = torch.ones(SIZE.N)
    incoming[2] = torch.nan
    linear_credit(leaf, weight, ids, backend=backend).logprob.backward(incoming)
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_only_what_requires_a_gradient_gets_one(wanted, case, backend):
    hidden, weight, ids = case
    inputs = [x.clone().requires_grad_(bool(w)) for x, w in zip((hidden, weight, torch.zeros(SIZE.V)), wanted, strict=True)]
    linear_credit(inputs[0], inputs[1], ids, bias=inputs[2], backend=backend).logprob.sum().backward()
    assert [x.grad is not None for x in inputs] == [bool(w) for w in wanted]
