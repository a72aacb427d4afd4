"""No [N, V], ever: the allocator itself is watched, inside the ops too."""

import gc

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from datc_kernels import linear_credit, logits_credit, missing_backends
from datc_kernels.testing.inputs import Sizes, plain
from datc_kernels.testing.variants import using


def measure(f):
    """(peak of the bytes that f holds beyond those before it, its largest single allocation)."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        f()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = largest = 0
    for e in sorted(events, key=lambda e: e.start_ns()):
        alive += e.nbytes()
        peak, largest = max(peak, alive), max(largest, e.nbytes())
    return peak, largest


def linear(case, dtype=torch.float32, *, head=False, reward=True):
    case = case.to(dtype)
    hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_(head)
    rest = case.args[2:] if reward else case.args[2:3]

    def forward_backward():
        linear_credit(hidden, weight, *rest, backend="chunked").logprob.sum().backward()
        hidden.grad = weight.grad = None

    return forward_backward


MIB = 2**20


def test_the_measurement_sees_an_n_by_v_tensor():
    """The reference does hold [N, V]; a meter that does not show it is none."""
    case = plain(0, Sizes(N=1024, V=8192, D=8, K=8))
    hidden = case.hidden.requires_grad_()
    peak, largest = measure(lambda: linear_credit(hidden, *case.args[1:], backend="reference"))
    assert largest == 1024 * 8192 * 4
    assert peak >= 2 * largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["credit", "log-prob only", "head trained"])
def test_peak_memory_does_not_grow_with_v_times_n(dtype, mode):
    """Forward and backward, in tiles of 64 x 256: twice the vocabulary adds nothing, but its gradient [V, D] for a trained
    head; twice the rows add O(N D)."""
    width = 8
    options = {"head": mode == "head trained", "reward": mode != "log-prob only"}

    def peak(N, V):
        with using("chunked in small tiles", tile=(64, 256)):
            total, largest = measure(linear(plain(0, Sizes(N=N, V=V, D=width, K=width)), dtype, **options))
        assert largest < 4 * N * V / 4, "an allocation of the order of N V"
        return total

    N, V = 256, 1024
    base = peak(N, V)
    head = 4 * V * width if options["head"] else 0
    assert peak(N, 2 * V) - base <= head + 4096
    # A row: its gradients, float32 copies of hidden and reward gradient, states and results.
    assert peak(2 * N, V) - base <= N * (4 * width * 6 + 400)


def test_peak_of_a_large_head_stays_below_64_mib():
    """V = 65,536, N = 512: [N, V] in float32 would be 128 MiB. Forward and backward, the real tiles, float32."""
    peak, largest = measure(linear(plain(0, Sizes(N=512, V=65_536, D=32, K=32))))
    assert peak < 16 * MIB
    assert largest <= 4 * MIB


@pytest.mark.skipif("cpu" in missing_backends(), reason=missing_backends().get("cpu", ""))
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_the_backward_of_the_cpu_backend_copies_no_whole_hidden(trained, dtype, layout):
    """Beyond the gradients, in the compute dtype and in the input's, and [N] vectors: its workspace."""
    N, V, D = 16_384, 96, 512
    hidden = torch.randn(D, N).to(dtype).T if layout == "transposed" else torch.randn(N, D).to(dtype)
    hidden.requires_grad_(trained == "hidden")
    weight = torch.randn(V, D).to(dtype).requires_grad_(trained == "weight")
    ids = torch.randint(V, (N,))
    ids[::7] = -100
    logprob = linear_credit(hidden, weight, ids, backend="cpu").logprob.sum()
    wanted = hidden if trained == "hidden" else weight
    peak, _ = measure(lambda: torch.autograd.grad(logprob, wanted))
    results = (N if trained == "hidden" else V) * D * (4 if dtype == torch.float32 else 6)
    assert peak < results + 16 * MIB  # hidden itself is 16 or 32 MiB


def test_forward_of_existing_logits_adds_a_bounded_workspace():
    case = plain(0, Sizes(N=1024, V=8192, D=8, K=8))
    logits = case.logits()
    peak, largest = measure(lambda: logits_credit(logits, *case.args[2:], backend="chunked"))
    assert peak < 16 * MIB
    assert largest <= 4 * MIB


def test_backward_of_existing_logits_makes_their_gradient_once():
    case = plain(0, Sizes(N=1024, V=8192, D=8, K=8))
    logits = case.logits().requires_grad_()
    peak, largest = measure(lambda: logits_credit(logits, *case.args[2:], backend="chunked").logprob.sum().backward())
    assert largest == logits.numel() * 4
    assert peak < largest + 16 * MIB


def test_k62_the_tile_is_a_constant_of_the_device():
    """K62: no heuristic reads free memory or N; one row or a million give the same tile."""
    from datc_kernels.products import tile_shape

    assert tile_shape(torch.device("cpu")) == (512, 1024)
    assert tile_shape.__code__.co_varnames[: tile_shape.__code__.co_argcount] == ("device",)
