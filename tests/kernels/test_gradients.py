"""Gradients of logprob: gradcheck in float64, autograd's float64 truth in every dtype, and which gradients there are."""

from dataclasses import replace

import pytest
import torch

from datc_kernels import linear_credit, logits_credit
from datc_kernels.testing import truth
from datc_kernels.testing.inputs import CASES, Sizes, everything, peaked, plain
from datc_kernels.testing.rounding import rounding

TINY = Sizes(N=5, V=23, D=4, K=3)
MODES = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 2.0},
    "logit_scale": {"logit_scale": 0.3},
    "temperature": {"temperature": 0.7},
    "row temperature": {"temperature": torch.linspace(0.5, 2.0, 5, dtype=torch.float64)},
    "vocab_size": {"vocab_size": 20},
    "all": {
        "bias": True,
        "softcap": 3.0,
        "logit_scale": 1.7,
        "temperature": torch.linspace(0.5, 2.0, 5, dtype=torch.float64),
        "vocab_size": 20,
    },
}


@pytest.fixture(params=MODES)
def mode(request):
    options = dict(MODES[request.param])
    if options.pop("bias", False):
        options["bias"] = torch.randn(TINY.V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return options


def ids_with_an_ignored_row(case, support=20):
    ids = case.token_ids % support
    ids[2] = -100
    return ids


def test_k19_gradcheck_of_linear_credit(mode, float64_backend):
    """K19: finite differences, for hidden, weight and bias, an ignored row among them."""
    case = plain(0, TINY).to(torch.float64)
    ids = ids_with_an_ignored_row(case)
    bias = mode.pop("bias", None)

    def logprob(hidden, weight, bias):
        return linear_credit(
            hidden, weight, ids, case.reward_grad, case.reward_embedding, bias=bias, backend=float64_backend, **mode
        ).logprob

    inputs = [x.clone().requires_grad_() if x is not None else None for x in (case.hidden, case.weight, bias)]
    assert torch.autograd.gradcheck(logprob, inputs)


def test_k19_gradcheck_of_logits_credit(mode, float64_backend):
    case = plain(0, TINY).to(torch.float64)
    ids = ids_with_an_ignored_row(case)
    mode.pop("bias", None)
    logits = case.logits().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: logits_credit(z, ids, backend=float64_backend, **mode).logprob, [logits])


def gradients(f, *inputs):
    """Gradients of sum_n c_n logprob_n, c of both signs and sizes."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = f(*leaves)
    out.backward(torch.linspace(-1, 2, len(out), dtype=out.dtype))
    return [leaf.grad for leaf in leaves]


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def assert_close(got, true, gap=1.0):
    """Within rounding of the largest entry, all over: sums over V, D and N in float32 or more, and one cast to the dtype.

    gap     logits that become probabilities are so large
    """
    working = torch.float64 if got.dtype == torch.float64 else torch.float32
    allowed = rounding(working, length=Sizes.V + Sizes.D + Sizes.N, condition=gap) + torch.finfo(got.dtype).eps / 2
    assert (got.double() - true).abs().max() <= allowed * true.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["plain", "sharp", "p_y = 0.9995", "p_other = 1 - 1e-6", "ties", "everything"])
def test_k14_gradients_against_float64(name, dtype, backend):
    """K13, K14: sums in float32 over all tiles and rows, rounded once to the dtype of the input."""
    case = CASES[name]().to(dtype)
    options = dict(case.options)
    bias = options.pop("bias", torch.zeros(301, dtype=dtype))
    if dtype in (torch.bfloat16, torch.float16) and "temperature" in options:
        options["temperature"] = options["temperature"].float()

    def ours(hidden, weight, bias):
        return linear_credit(hidden, weight, *case.args[2:], bias=bias, backend=backend, **options).logprob

    def exact(hidden, weight, bias):
        return truth.logprob(hidden, weight, case.token_ids, bias=bias, **options)

    if backend == "cpu" and dtype == torch.float64:
        with pytest.raises(RuntimeError, match="^backend: 'cpu' cannot run here: .*float64"):
            gradients(ours, case.hidden, case.weight, bias)
        return
    got = gradients(ours, case.hidden, case.weight, bias)
    true = gradients(exact, case.hidden.double(), case.weight.double(), bias.double())
    for g, t in zip(got, true, strict=True):
        assert g.dtype == dtype
        assert_close(g, t, gap=20.0 if "1e-6" in name or "0.9995" in name else 1.0)


def test_k13_gradient_of_a_nearly_certain_token(backend):
    """K13: at p_y = 1 - 1e-6 the sampled column's gradient is 1e-6, kept to float32 digits, not 1 - p_y rounded."""
    case = peaked(1e-6)
    (got,) = gradients(
        lambda z: logits_credit(z, case.token_ids, backend=backend).logprob, case.to(torch.float64).logits().float()
    )
    z = case.to(torch.float64).logits().float().double().requires_grad_()
    weights = torch.linspace(-1, 2, 16).double()
    p = torch.softmax(z.detach(), dim=1)
    y = case.token_ids[:, None]
    others = p.scatter(1, y, 0.0).sum(dim=1, keepdim=True)
    true = (-p).scatter(1, y, others) * weights[:, None]
    rest = rounding(length=301)  # the logits are given
    torch.testing.assert_close(got.double(), true, rtol=rest, atol=rest * torch.finfo(torch.float32).tiny)


@pytest.mark.parametrize("wide", ["hidden", "weight"])
def test_k42_gradients_of_mixed_dtypes(wide, backend):
    """K42: each gradient has its own tensor's dtype."""
    case = plain().to(torch.bfloat16)
    case = replace(case, **{wide: getattr(case, wide).float()})
    got = gradients(lambda h, w: linear_credit(h, w, case.token_ids, backend=backend).logprob, case.hidden, case.weight)
    true = gradients(lambda h, w: truth.logprob(h, w, case.token_ids), case.hidden.double(), case.weight.double())
    for g, t, x in zip(got, true, (case.hidden, case.weight), strict=True):
        assert g.dtype == x.dtype
        assert_close(g, t)


@pytest.mark.parametrize("wide", ["reward_grad", "reward_embedding"])
def test_gradients_where_only_the_reward_is_float64(wide, float64_backend):
    """The forward is float64 then, the gradients still have their tensors' dtype."""
    case = plain()
    case = replace(case, **{wide: getattr(case, wide).double()})
    backend = float64_backend
    got = gradients(lambda h, w: linear_credit(h, w, *case.args[2:], backend=backend).logprob, case.hidden, case.weight)
    true = gradients(lambda h, w: truth.logprob(h, w, case.token_ids), case.hidden.double(), case.weight.double())
    for g, t in zip(got, true, strict=True):
        assert g.dtype == torch.float32
        assert_close(g, t)
    logits = case.logits()
    (g,) = gradients(lambda z: logits_credit(z, *case.args[2:], backend=backend).logprob, logits)
    assert g.dtype == torch.float32


@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1)])
def test_only_what_requires_a_gradient_gets_one(wanted, backend):
    """A frozen head (LoRA training) costs no [V, D]: its gradient is None."""
    case = everything()
    options = dict(case.options)
    inputs = [x.detach().clone() for x in (case.hidden, case.weight, options.pop("bias"))]
    for x, yes in zip(inputs, wanted, strict=True):
        x.requires_grad_(bool(yes))
    hidden, weight, bias = inputs
    linear_credit(hidden, weight, *case.args[2:], bias=bias, backend=backend, **options).logprob.sum().backward()
    assert [x.grad is not None for x in inputs] == [bool(yes) for yes in wanted]


def test_the_heads_own_gradients_have_zeros_beyond_the_support(backend):
    case = everything()
    options = case.options | {"bias": case.options["bias"].clone().requires_grad_()}
    weight = case.weight.clone().requires_grad_()
    linear_credit(case.hidden, weight, *case.args[2:], backend=backend, **options).logprob.sum().backward()
    support = options["vocab_size"]
    assert (weight.grad[support:] == 0).all()
    assert (options["bias"].grad[support:] == 0).all()
    assert (weight.grad[:support] != 0).any()


def test_only_logprob_is_differentiable(backend):
    """Credit is a constant even where reward_grad and the table require gradients; they get none."""
    case = plain()
    leaves = [x.clone().requires_grad_() for x in (case.hidden, case.weight, case.reward_grad, case.reward_embedding)]
    hidden, weight, grad, table = leaves
    for got in (
        linear_credit(hidden, weight, case.token_ids, grad, table, backend=backend),
        logits_credit(hidden @ weight.T, case.token_ids, grad, table, backend=backend),
    ):
        for name in got.__dataclass_fields__:
            assert getattr(got, name).requires_grad == (name == "logprob"), name
        assert not got.cosine.requires_grad
        got.logprob.sum().backward()
    assert grad.grad is None
    assert table.grad is None


def test_no_gradient_is_asked_of_a_constant(backend):
    case = plain()
    assert not linear_credit(*case.args, backend=backend).logprob.requires_grad


def test_second_derivatives_are_refused(backend):
    """There is no double backward; it says so instead of returning something."""
    case = plain(0, TINY)
    hidden = case.hidden.clone().requires_grad_()
    logprob = linear_credit(hidden, *case.args[1:], backend=backend).logprob
    (first,) = torch.autograd.grad(logprob.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError):
        first.sum().backward()


def test_k34_gradient_of_an_expanded_incoming_gradient(backend):
    """K34: `sum().backward()` hands the op a stride-0 gradient."""
    case = plain()
    (a,) = gradients_of(case, lambda lp: lp.sum(), backend)
    (b,) = gradients_of(case, lambda lp: (lp * torch.ones(16)).sum(), backend)
    assert torch.equal(a, b)


def gradients_of(case, loss, backend):
    hidden = case.hidden.clone().requires_grad_()
    loss(linear_credit(hidden, *case.args[1:], backend=backend).logprob).backward()
    return (hidden.grad,)


def test_k62_two_backwards_over_a_retained_graph_accumulate(backend):
    """K62: no state is consumed by the first backward."""
    case = plain()
    hidden = case.hidden.clone().requires_grad_()
    logprob = linear_credit(hidden, *case.args[1:], backend=backend).logprob
    logprob.sum().backward(retain_graph=True)
    once = hidden.grad.clone()
    logprob.sum().backward()
    assert torch.equal(hidden.grad, 2 * once)


def test_k41_tied_head_and_reward_table(backend):
    """K41: W and E the same tensor: read twice, changed never, and its gradient is that of the head alone."""
    case = plain(0, Sizes(D=20, K=20))
    tied = case.weight.clone().requires_grad_()
    before = tied.detach().clone()
    got = linear_credit(case.hidden, tied, case.token_ids, case.reward_grad, tied, backend=backend)
    got.logprob.sum().backward()
    assert torch.equal(tied.detach(), before)
    alone = case.weight.clone().requires_grad_()
    apart = linear_credit(case.hidden, alone, case.token_ids, case.reward_grad, case.weight.clone(), backend=backend)
    apart.logprob.sum().backward()
    assert torch.equal(tied.grad, alone.grad)
    assert torch.equal(got.credit, apart.credit)
