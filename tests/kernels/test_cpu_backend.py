"""What only the C++ ops promise: bits that do not depend on threads, every instruction set, a bounded workspace, odd inputs."""

import gc
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from datc_kernels import allocate_weights, candidate_advantages, linear_credit, logits_credit, missing_backends, native
from datc_kernels.dispatch import choose
from datc_kernels.testing import truth
from datc_kernels.testing.budgets import assert_as_good_as
from datc_kernels.testing.inputs import CASES, Sizes, everything, plain
from datc_kernels.testing.rounding import assert_rounded, rounding

pytestmark = pytest.mark.skipif("cpu" in missing_backends(), reason=missing_backends().get("cpu", ""))
MIB = 2**20
CPU = torch.device("cpu")
PORTABLE, AVX2, AVX512 = 1, 2, 3


def fields(result):
    return {name: getattr(result, name) for name in result.__dataclass_fields__ if getattr(result, name) is not None}


@pytest.fixture(params=[PORTABLE, AVX2, AVX512], ids=["portable", "AVX2", "AVX-512"])
def level(request):
    try:
        torch.ops.datc_cpu.instruction_set(request.param)
    except RuntimeError as error:
        pytest.skip(str(error))
    with patch.object(native, "LEVEL", request.param):
        yield request.param


def test_it_is_what_none_takes_on_a_cpu():
    assert choose(None, CPU) == choose("cpu", CPU) == "cpu"
    assert choose(None, CPU, torch.float64) == "chunked"
    assert choose(None, CPU, torch.float64, compiled_takes_float64=True) == "cpu"
    assert choose(None, torch.device("cuda")) == "chunked"
    with pytest.raises(RuntimeError, match="^backend: 'cpu' cannot run here: it needs tensors on a CPU"):
        choose("cpu", torch.device("cuda"))


def test_without_the_extension_everything_else_runs():
    """K63: the reason is said, and None takes what is there."""
    case = plain()
    with patch.object(native, "WHY_MISSING", "nobody compiled it"):
        assert missing_backends()["cpu"] == "nobody compiled it"
        assert choose(None, CPU) == "chunked"
        assert linear_credit(*case.args).credit.isfinite().all()
        with pytest.raises(RuntimeError, match="^backend: 'cpu' cannot run here: nobody compiled it"):
            linear_credit(*case.args, backend="cpu")


@pytest.mark.parametrize("name", CASES)
def test_every_instruction_set_is_exact(name, level):
    case = CASES[name]()
    got, reference = (linear_credit(*case.args, **case.options, backend=b) for b in ("cpu", "reference"))
    assert_as_good_as(got, reference, truth.linear_credit(*case.args, **case.options))


@pytest.mark.parametrize("name", ["plain", "sharp", "everything"])
def test_gradients_of_every_instruction_set(name, level):
    case = CASES[name]()
    logits = case.logits().requires_grad_()
    logits_credit(logits, case.token_ids, **case.logits_options, backend="cpu").logprob.sum().backward()
    exact = case.logits().double().requires_grad_()
    logits_credit(exact, case.token_ids, **case.logits_options, backend="chunked").logprob.sum().backward()
    assert_rounded(logits.grad, exact.grad, length=Sizes.V)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_read_and_written_exactly(dtype, level):
    """Every number of 16 bits, subnormal, infinite and NaN ones too, arrives as what it is; gradients round to nearest even."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = every[every.isfinite()]
    for x in (finite[:60_000], every):
        z, u = torch.zeros(len(x), 1).to(dtype), x[:, None]
        got = logits_credit(z, torch.zeros(len(x), dtype=torch.int64), reward=u, backend="cpu")
        assert torch.equal(got.reward_mean.nan_to_num(123.0), x.float().nan_to_num(123.0) if len(x) < 65_536 else _seen(x))
    logits = torch.randn(7, 130, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    wide = logits.detach().float().requires_grad_()
    for x in (logits, wide):
        logits_credit(x, torch.arange(7), backend="cpu").logprob.sum().backward()
    assert torch.equal(logits.grad, wide.grad.to(dtype))


def _seen(x):
    """The mean of one reward; of an infinite one the differences, and so the mean, are NaN."""
    return x.float().where(x.isfinite(), torch.nan).nan_to_num(123.0)


def test_the_row_pass_has_the_same_bits_for_any_number_of_threads():
    """With logits and rewards given there is no library product in between."""
    case = plain(3, Sizes(N=150, V=3001))
    u = case.reward_grad @ case.reward_embedding.T
    lengths = torch.tensor([70, 0, 30, 50])
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            logits = case.logits().requires_grad_()
            got = logits_credit(logits, case.token_ids, reward=u, softcap=20.0, backend="cpu")
            got.logprob.sum().backward()
            weights = allocate_weights(got.credit, torch.tensor([1.0, 2.0, -0.5, 3.0]), lengths, backend="cpu")
            results.append([*(x.detach() for x in fields(got).values()), logits.grad, weights.weight, weights.temperature])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def watch(f):
    """(peak of the bytes that f holds beyond those before it, its largest single allocation)."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        f()
    alive = peak = largest = 0
    for e in sorted((e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        alive += e.nbytes()
        peak, largest = max(peak, alive), max(largest, e.nbytes())
    return peak, largest


@pytest.mark.parametrize("op", ["linear", "log-prob only", "logits", "top k"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_workspace_is_bounded(dtype, op):
    """[N, V] would be 128 MiB; wide operands of another dtype fill the bound of 64 MiB best."""
    wide = plain(0, Sizes(N=600, V=2048, D=4096, K=4096)).to(dtype)
    tall = plain(0, Sizes(N=1024, V=32_768, D=8, K=8)).to(dtype)
    for case in (wide, tall):
        logits = case.logits() if op == "logits" else None
        run = {
            "linear": lambda case=case: linear_credit(*case.args, backend="cpu"),
            "log-prob only": lambda case=case: linear_credit(*case.args[:3], backend="cpu"),
            "logits": lambda case=case, logits=logits: logits_credit(logits, *case.args[2:], backend="cpu"),
            "top k": lambda case=case: candidate_advantages(
                case.hidden, case.weight, case.reward_grad, case.reward_embedding, top_k=8, backend="cpu"
            ),
        }[op]
        peak, largest = watch(run)
        assert 0 < largest <= 16 * MIB + 4096
        assert peak < (64 if case is wide and dtype != torch.float32 else 8) * MIB


def test_a_backward_holds_gradients_and_a_bounded_workspace():
    case = plain(0, Sizes(N=1024, V=32_768, D=8, K=8))
    hidden = case.hidden.requires_grad_()
    peak, largest = watch(lambda: linear_credit(hidden, *case.args[1:3], backend="cpu").logprob.sum().backward())
    assert 0 < largest <= 4 * MIB
    assert peak < 8 * MIB


@pytest.mark.parametrize("ignore", [-(2**63), 2**63 - 1])
def test_any_integer_marks_ignored_rows(ignore):
    """The ends of int64 too, beyond the first tile: no difference of ids and columns may overflow (`make test-sanitize`)."""
    case = plain()
    ids = torch.where(torch.arange(16) % 2 == 0, ignore, case.token_ids)
    hidden, logits = case.hidden.requires_grad_(), case.logits().detach().requires_grad_()
    with patch.object(native, "tile_shape", lambda width: (5, 64)):
        for x, got in (
            (hidden, linear_credit(hidden, case.weight, ids, *case.args[3:], ignore_index=ignore, backend="cpu")),
            (logits, logits_credit(logits, ids, *case.args[3:], ignore_index=ignore, backend="cpu")),
        ):
            got.logprob.sum().backward()
            assert all((value[::2] == 0).all() for value in (*fields(got).values(), x.grad))
            assert (got.logprob[1::2] < 0).all()


def odd_layout(x, how):
    """The same numbers, transposed, strided, reversed in memory order, or from an unaligned address."""
    if how == "transposed":
        return x.T.contiguous().T
    if how == "strided":
        wide = torch.full((2 * x.shape[0], 3 * x.shape[1]), float("nan")).to(x.dtype)
        view = wide[::2, 1::3]
        return view.copy_(x)
    if how == "unaligned":
        return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    return x


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**16),
    N=st.integers(1, 9),
    V=st.integers(1, 90),
    missing=st.integers(0, 12),
    poison=st.sampled_from([None, float("nan"), float("inf"), -float("inf")]),
    where=st.sampled_from(["logits", "reward"]),
    how=st.sampled_from(["plain", "transposed", "strided", "unaligned"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    softcap=st.sampled_from([None, 5.0]),
)
def test_fuzz_against_chunked(seed, N, V, missing, poison, where, how, dtype, softcap):
    """Any shape, layout and dtype, a tenth of the entries NaN or infinite: NaN where `chunked` has NaN, else its numbers."""
    generator = torch.Generator().manual_seed(seed)
    z = 3 * torch.randn(N, V, generator=generator)
    u = torch.randn(N, max(1, V - missing), generator=generator)
    ids = torch.randint(V, (N,), generator=generator)
    if poison is not None:
        spoiled = z if where == "logits" else u
        spoiled[torch.rand(spoiled.shape, generator=generator) < 0.1] = poison
    z, u = odd_layout(z.to(dtype), how), odd_layout(u.to(dtype), how)
    got, expected = (logits_credit(z, ids, reward=u, softcap=softcap, temperature=0.8, backend=b) for b in ("cpu", "chunked"))
    # A row with a NaN or +inf among its logits has no distribution: NaN here, in part of the fields there.
    defined = ~(z.isnan() | ((z == torch.inf) & (softcap is None))).any(dim=1)
    assert got.logprob[z.isnan().any(dim=1)].isnan().all()
    for name, value in fields(expected).items():
        # Logits up to some 16, and the differences of differences of a credit that may be small beside the rewards.
        allowed = rounding(length=V, condition=32)
        torch.testing.assert_close(getattr(got, name)[defined], value[defined], rtol=allowed, atol=allowed, equal_nan=True)


@pytest.mark.parametrize("how", ["transposed", "strided", "unaligned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_k34_layouts_of_linear_credit(how, dtype):
    case = everything().to(dtype)
    case = replace(case, options=case.options | {"temperature": case.options["temperature"].float()})
    args = [odd_layout(x, how) if x.ndim == 2 else x for x in case.args]
    a = linear_credit(*args, **case.options, backend="cpu")
    b = linear_credit(*case.args, **case.options, backend="cpu")
    for name, value in fields(b).items():
        assert_rounded(getattr(a, name), value, length=Sizes.V + Sizes.D, condition=2, name=name)
