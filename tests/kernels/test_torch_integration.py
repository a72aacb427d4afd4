"""The ops as PyTorch sees them: opcheck, compile, autocast, gradient modes."""

import pytest
import torch

from datc_kernels import TokenCredit, TokenWeights, allocate_weights, linear_credit, logits_credit, missing_backends
from datc_kernels.testing.inputs import Sizes, everything, plain, short_reward_vocabulary

TINY = Sizes(N=6, V=40, D=5, K=4)
CPU = pytest.param("cpu", marks=pytest.mark.skipif("cpu" in missing_backends(), reason=missing_backends().get("cpu", "")))
BACKENDS = ["reference", "chunked", CPU]
WITH_TRITON = [*BACKENDS, pytest.param("triton", marks=pytest.mark.skipif("triton" in missing_backends(), reason="no Triton"))]
ops = torch.ops.datc


def refused(backend, *tensors):
    """Whether the C++ ops refuse these, as they must: they compute in float32."""
    return backend == "cpu" and any(isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in tensors)


def assert_same(a, b):
    for name in a.__dataclass_fields__:
        x, y = getattr(a, name), getattr(b, name)
        assert x is y is None or torch.equal(x, y), name


def linear_samples():
    """Positional arguments of datc::linear_credit in its several modes."""
    for name, case in {
        "plain": plain(0, TINY),
        "everything": everything(0, TINY),
        "short": short_reward_vocabulary(0, TINY),
        "float64": plain(0, TINY).to(torch.float64),
        "bfloat16": plain(0, TINY).to(torch.bfloat16),
        "no tokens": plain(0, Sizes(N=0, V=40, D=5, K=4)),
    }.items():
        yield name, _linear_args(case)
    case = plain(0, TINY)
    yield "log-prob only", _linear_args(case, reward=False)
    yield "head trained", _linear_args(case, head=True)
    yield "only the head", _linear_args(case, head=True, hidden=False)
    yield "ignored", _linear_args(case, ids=torch.full((6,), -100))
    yield "int32 ids", _linear_args(case, ids=case.token_ids.int())


def _linear_args(case, *, reward=True, head=False, hidden=True, ids=None):
    o = case.options
    temperature = o.get("temperature", 1.0)
    per_row = temperature if isinstance(temperature, torch.Tensor) else None
    bias = o.get("bias")
    return (
        case.hidden.clone().requires_grad_(hidden),
        case.weight.clone().requires_grad_(head),
        case.token_ids if ids is None else ids,
        case.reward_grad if reward else None,
        case.reward_embedding if reward else None,
        None if bias is None else bias.clone().requires_grad_(head),
        per_row,
        1.0 if per_row is not None else temperature,
        o.get("logit_scale", 1.0),
        o.get("softcap"),
        o.get("vocab_size", len(case.weight)),
        -100,
        "",
        0,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "args"), [pytest.param(n, a, id=n) for n, a in linear_samples()])
def test_k58_opcheck_linear_credit(name, args, backend):
    """K55, K58: schema (nothing mutated, no aliases), fake, autograd registration, AOT dispatch with dynamic shapes."""
    if refused(backend, *args):
        with pytest.raises(RuntimeError, match="expected float32"):
            ops.linear_credit(*args, backend)
        return
    torch.library.opcheck(ops.linear_credit.default, (*args, backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (1, 1, 1), (0, 0, 1)])
def test_k58_opcheck_linear_credit_backward(needs, backend):
    for _, args in linear_samples():
        args = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
        if refused(backend, *args):
            continue
        hidden, weight, ids, _, _, bias, *settings = args
        logprob, stats = ops.linear_credit(*args, backend)
        incoming = torch.ones_like(logprob)
        arguments = (incoming, logprob, stats, hidden, weight, ids, bias, *settings, backend, [bool(n) for n in needs])
        torch.library.opcheck(ops.linear_credit_backward.default, arguments, test_utils=("test_schema", "test_faketensor"))


def logits_samples():
    for name, case in {
        "plain": plain(0, TINY),
        "everything": everything(0, TINY),
        "float64": plain(0, TINY).to(torch.float64),
        "float16": plain(0, TINY).to(torch.float16),
        "no tokens": plain(0, Sizes(N=0, V=40, D=5, K=4)),
    }.items():
        _, _, ids, grad, table, _, *settings = _linear_args(case)
        logits = case.logits()
        u = grad @ table.T
        for how, reward in {"product": (grad, table, None), "given": (None, None, u), "none": (None, None, None)}.items():
            yield f"{name}, reward {how}", (logits.clone().requires_grad_(), ids, *reward, *settings)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "args"), [pytest.param(n, a, id=n) for n, a in logits_samples()])
def test_k58_opcheck_logits_credit(name, args, backend):
    if refused(backend, *args):
        with pytest.raises(RuntimeError, match="expected float32"):
            ops.logits_credit(*args, backend)
        return
    torch.library.opcheck(ops.logits_credit.default, (*args, backend))
    logits, ids, _, _, _, *settings = args
    logits = logits.detach()
    logprob, stats = ops.logits_credit(logits, *args[1:], backend)
    arguments = (torch.ones_like(logprob), logprob, stats, logits, ids, *settings, backend)
    torch.library.opcheck(ops.logits_credit_backward.default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("utility", ["advantage", "sign"])
@pytest.mark.parametrize("frozen", [None, torch.arange(16) % 3 == 0])
def test_k58_opcheck_allocate_weights(frozen, utility, backend):
    lengths = torch.tensor([6, 0, 10])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        credit, advantage = torch.randn(16).to(dtype), torch.tensor([1.0, -2.0, 0.5])
        torch.library.opcheck(ops.allocate_weights.default, (credit, advantage, lengths, frozen, 4.0, utility, backend))


@pytest.mark.parametrize("backend", WITH_TRITON)
def test_k58_one_graph_forward_and_backward(backend):
    """K58: fullgraph, the record built inside the compiled function, the bits of eager mode, and no new graph for a new N."""
    torch._dynamo.reset()
    graphs, first = [], 0

    def count(graph, example_inputs):
        graphs.append(graph)
        return torch._dynamo.backends.debugging.aot_eager(graph, example_inputs)

    def step(hidden, weight, ids, grad, table, lengths):
        out = linear_credit(hidden, weight, ids, grad, table, temperature=0.8, softcap=20.0, backend=backend)
        weights = allocate_weights(out.credit, torch.ones(2), lengths, backend=backend)
        return -(out.logprob * weights.weight).sum(), out, weights, out.cosine

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=count)
    for n in (6, 9, 14):
        case = plain(n, Sizes(N=n, V=50, D=7, K=5))
        lengths = torch.tensor([2, n - 2])
        results = []
        for run in (step, compiled):
            hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
            loss, out, weights, cosine = run(hidden, weight, *case.args[2:], lengths)
            loss.backward()
            assert isinstance(out, TokenCredit)
            assert isinstance(weights, TokenWeights)
            results.append((out, weights, [loss, cosine, hidden.grad, weight.grad]))
        (a, b, c), (x, y, z) = results
        assert_same(a, x)
        assert_same(b, y)
        assert all(torch.equal(p, q) for p, q in zip(c, z, strict=True))
        assert x.logprob.requires_grad
        assert not x.credit.requires_grad
        first = first or len(graphs)
    assert len(graphs) == first


@pytest.mark.parametrize("backend", WITH_TRITON)
def test_k58_one_graph_with_existing_logits_and_every_option(backend):
    torch._dynamo.reset()
    case = everything(0, TINY)

    def step(logits, ids, grad, table, temperature):
        options = case.logits_options | {"temperature": temperature}
        return logits_credit(logits, ids, grad, table, **options, backend=backend)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    logits = case.logits().requires_grad_()
    again = logits.detach().clone().requires_grad_()
    args = (*case.args[2:], case.options["temperature"])
    out, eager = compiled(logits, *args), step(again, *args)
    assert_same(out, eager)
    out.logprob.sum().backward()
    eager.logprob.sum().backward()
    assert torch.equal(logits.grad, again.grad)


def test_k58_the_wrong_argument_still_raises_under_compile():
    torch._dynamo.reset()
    case = plain(0, TINY)
    compiled = torch.compile(lambda *a: linear_credit(*a).credit, backend="aot_eager")
    bad = case.token_ids.clone()
    bad[1] = 40
    compiled(*case.args)
    with pytest.raises(ValueError, match="token_ids: expected ids from 0 to 39"):
        compiled(case.hidden, case.weight, bad, *case.args[3:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_k42_autocast_changes_no_number(dtype, backend):
    """K12, K42: bit for bit, forward and backward, with the backward inside or outside the context."""
    case = plain()

    def run(inside, outside):
        hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
        logits = case.logits().requires_grad_()
        with torch.autocast("cpu", dtype=dtype, enabled=inside):
            out = linear_credit(hidden, weight, *case.args[2:], backend=backend)
            direct = logits_credit(logits, *case.args[2:], backend=backend)
            weights = allocate_weights(out.credit, torch.ones(1))
            loss = out.logprob.sum() + direct.logprob.sum()
            if not outside:
                loss.backward()
        if outside:
            loss.backward()
        return (out, direct, weights), (hidden.grad, weight.grad, logits.grad)

    records, grads = run(False, True)
    for outside in (True, False):
        others, other_grads = run(True, outside)
        for a, b in zip(records, others, strict=True):
            assert_same(a, b)
        assert all(torch.equal(a, b) for a, b in zip(grads, other_grads, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode, backend):
    """The bits of the ordinary call, nothing to differentiate; also with inputs made in inference mode."""
    case = plain()
    expected = linear_credit(*case.args, backend=backend)
    with mode():
        hidden = case.hidden.clone()
        assert_same(linear_credit(hidden.requires_grad_(), *case.args[1:], backend=backend), expected)
        got = linear_credit(hidden, *case.args[1:], backend=backend)
        assert not got.logprob.requires_grad
        direct = logits_credit(case.logits(), *case.args[2:], backend=backend)
    assert_same(direct, logits_credit(case.logits(), *case.args[2:], backend=backend))


def test_a_forward_mode_derivative_is_refused(backend):
    """PyTorch takes a derivative that an op does not have for zero."""
    case = plain(0, Sizes(N=6, V=40, D=8, K=8))
    ids, one = case.token_ids % 40, torch.ones_like
    calls = {
        "hidden": (lambda x: linear_credit(x, case.weight, ids, backend=backend).logprob, case.hidden),
        "weight": (lambda x: linear_credit(case.hidden, x, ids, backend=backend).logprob, case.weight),
        "logits": (lambda x: logits_credit(x, ids, backend=backend).logprob, case.logits()),
    }
    for name, (call, x) in calls.items():
        with pytest.raises(RuntimeError, match=f"^{name}: expected a tensor without a forward-mode tangent"):
            torch.func.jvp(call, (x,), (one(x),))
        with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match=f"^{name}: "):
            call(torch.autograd.forward_ad.make_dual(x, one(x)))


def test_constants_may_be_written_into(backend):
    case = plain(0, Sizes(N=6, V=40, D=8, K=8))
    gradients = []
    for change in (False, True):
        hidden, logits = case.hidden.clone().requires_grad_(), case.logits().requires_grad_()
        made = linear_credit(hidden, *case.args[1:], backend=backend), logits_credit(logits, *case.args[2:], backend=backend)
        for out in made:
            if change:
                for name in ("entropy", "logsumexp", "sum_p2", "credit", "displacement_norm"):
                    getattr(out, name).add_(1.0).clamp_(-1, 1)
            out.logprob.sum().backward()
        gradients.append((hidden.grad, logits.grad))
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert torch.equal(gradients[0][1], gradients[1][1])


def test_deterministic_algorithms_can_be_demanded(backend):
    case = plain()
    torch.use_deterministic_algorithms(True)
    try:
        hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
        got = linear_credit(hidden, weight, *case.args[2:], backend=backend)
        got.logprob.sum().backward()
        allocate_weights(got.credit, torch.ones(1), backend=backend)
    finally:
        torch.use_deterministic_algorithms(False)
    assert hidden.grad.isfinite().all()


def test_a_caller_in_float64_by_default(backend):
    """The default dtype is the caller's business."""
    case = plain()
    expected = linear_credit(*case.args, backend=backend)
    torch.set_default_dtype(torch.float64)
    try:
        assert_same(linear_credit(*case.args, backend=backend), expected)
        assert allocate_weights(expected.credit, torch.ones(1).float(), backend=backend).weight.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
