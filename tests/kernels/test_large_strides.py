"""K29: a row index times a stride beyond 2^31 elements, on every backend. Memory is reserved, only some pages of it touched."""

import pytest
import torch

from datc_kernels import allocate_weights, candidate_advantages, linear_credit, logits_credit
from datc_kernels.testing.inputs import Sizes, plain

STRIDE = 3 * 2**28  # elements; the fourth row starts beyond 2^31, the third beyond 2^31 bytes of float16
CASE = plain(0, Sizes(N=4, V=4, D=16, K=16)).to(torch.float16)


@pytest.fixture
def backend(float32_backend):
    return float32_backend


@pytest.fixture(scope="module")
def space():
    try:
        return torch.empty(3 * STRIDE + 64, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("this machine does not reserve 4.8 GB")


def far(x, space):
    """x [4, c], every row STRIDE elements after the one before."""
    view = space.as_strided(x.shape, (STRIDE, 1))
    view.copy_(x)
    return view


def same(a, b):
    for name, value in vars(a).items():
        other = getattr(b, name)
        assert value is other is None or torch.equal(value, other), name


@pytest.mark.parametrize("name", ["hidden", "weight", "reward_grad", "reward_embedding"])
def test_k29_rows_far_apart(name, backend, space):
    arguments = dict(zip(("hidden", "weight", "token_ids", "reward_grad", "reward_embedding"), CASE.args, strict=True))
    near = arguments[name].clone()
    strange = arguments | {name: far(near, space)}
    assert torch.equal(strange[name], near)
    same(linear_credit(**strange, backend=backend), linear_credit(**arguments, backend=backend))
    candidates = [{k: v for k, v in a.items() if k != "token_ids"} for a in (strange, arguments)]
    same(*(candidate_advantages(**a, top_k=2, backend=backend) for a in candidates))
    if name in ("hidden", "weight"):
        gradients = []
        for a in (strange, arguments):
            leaves = [a["hidden"].detach().requires_grad_(), a["weight"].detach().requires_grad_()]
            linear_credit(*leaves, a["token_ids"], backend=backend).logprob.sum().backward()
            gradients.append([leaf.grad.clone() for leaf in leaves])
        assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


@pytest.mark.parametrize("name", ["logits", "reward"])
def test_k29_logits_far_apart(name, backend, space):
    arguments = {"logits": CASE.logits(), "token_ids": CASE.token_ids, "reward": CASE.reward_grad @ CASE.reward_embedding.T}
    near = arguments[name].clone()
    same(logits_credit(**arguments | {name: far(near, space)}, backend=backend), logits_credit(**arguments, backend=backend))


def test_k29_padded_rows_far_apart(space):
    credit, mask = CASE.hidden[:, :8].float(), torch.ones(4, 8, dtype=torch.bool)
    apart = far(CASE.hidden[:, :8], space)
    expected = allocate_weights(CASE.hidden[:, :8].clone(), torch.ones(4), mask=mask)
    assert torch.equal(allocate_weights(apart, torch.ones(4), mask=mask).weight, expected.weight)
    assert torch.equal(allocate_weights(credit, torch.ones(4), mask=mask).weight, expected.weight.to(credit.dtype))
