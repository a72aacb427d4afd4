"""`allocate_weights` on Triton: one program a response, float32 inside."""

import pytest
import torch
from test_golden_vectors import load

from datc_kernels import allocate_weights
from datc_kernels.testing import truth
from datc_kernels.testing.budgets import TEMPERATURE32, WEIGHT

B = 6


@pytest.fixture
def backend(run_variant):
    with run_variant("triton") as name:
        yield name


def assert_true(got, credit, advantage, lengths, frozen=None, **options):
    weight, temperature = truth.allocate_weights(credit, advantage, lengths, frozen, **options)
    torch.testing.assert_close(got.weight.double(), weight, rtol=0, atol=WEIGHT)
    torch.testing.assert_close(got.temperature.double(), temperature, rtol=TEMPERATURE32, atol=0)


@pytest.mark.parametrize("utility", ["advantage", "sign"])
@pytest.mark.parametrize("ceiling", [2.0, 4.0, 8.0])
def test_golden_vectors(utility, ceiling, backend):
    """Every fourteenth response of the file (the interpreter is slow)."""
    data = load("allocation")
    suffix = "_sign" if utility == "sign" else ""
    ends = data["lengths"].cumsum(0)
    chosen = (data["ceiling"] == ceiling).nonzero().squeeze(1)[::14]
    tokens = torch.cat([torch.arange(int(ends[b] - data["lengths"][b]), int(ends[b])) for b in chosen])
    got = allocate_weights(
        data["credit"][tokens].float(),
        data["advantage"][chosen].float(),
        data["lengths"][chosen],
        frozen=data["frozen"][tokens],
        ceiling=ceiling,
        utility=utility,
        backend=backend,
    )
    torch.testing.assert_close(got.weight.double(), data[f"out_weight{suffix}"][tokens], rtol=0, atol=WEIGHT)
    torch.testing.assert_close(got.temperature.double(), data[f"out_temperature{suffix}"][chosen], rtol=TEMPERATURE32, atol=0)


@pytest.mark.parametrize("length", [1, 2, 3, 2047, 2048, 2049, 32_768])
def test_any_length(length, backend):
    credit = torch.randn(length, generator=torch.Generator().manual_seed(length)) ** 3
    advantage, lengths = torch.tensor([-1.5]), torch.tensor([length])
    assert_true(allocate_weights(credit, advantage, backend=backend), credit, advantage, lengths)


@pytest.mark.parametrize("ceiling", [1.1, 4.0, 50.0])
@pytest.mark.parametrize(
    "change",
    {
        "plain": lambda d: d,
        "offset": lambda d: d + 1e4,
        "tiny": lambda d: d * 1e-30,
        "huge": lambda d: d * 1e30,
        "one spike": lambda d: (d == d.max()).float(),
        "two values": lambda d: (d > 0).float(),
    }.values(),
)
def test_any_credit(change, ceiling, backend):
    """No offset and no scale of the credit costs digits."""
    lengths, advantage = torch.tensor([40, 0, 2, 90, 1, 67]), torch.tensor([1.0, 2.0, -1.0, 1e4, 3.0, -1e-3])
    credit = change(torch.randn(200, generator=torch.Generator().manual_seed(0)))
    got = allocate_weights(credit, advantage, lengths, ceiling=ceiling, backend=backend)
    assert_true(got, credit, advantage, lengths, ceiling=ceiling)
    assert ((got.weight >= 1 / ceiling) & (got.weight <= ceiling)).all()


def test_frozen_positions_keep_weight_one_whatever_they_hold(backend):
    credit = torch.randn(60, generator=torch.Generator().manual_seed(0))
    frozen = torch.arange(60) % 4 == 0
    lengths, advantage = torch.tensor([30, 30]), torch.tensor([1.0, -1.0])
    got = allocate_weights(credit.masked_fill(frozen, torch.nan), advantage, lengths, frozen=frozen, backend=backend)
    assert_true(got, credit, advantage, lengths, frozen)
    assert (got.weight[frozen] == 1).all()
    everything = allocate_weights(credit, advantage, lengths, frozen=torch.ones_like(frozen), backend=backend)
    assert (everything.weight == 1).all()


def test_padded(backend):
    credit = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(20) < torch.tensor([20, 7, 0])[:, None]
    advantage = torch.tensor([1.0, -2.0, 1.0])
    got = allocate_weights(credit.masked_fill(~mask, torch.nan), advantage, mask=mask, backend=backend)
    packed = allocate_weights(credit[mask], advantage, torch.tensor([20, 7, 0]), backend=backend)
    assert torch.equal(got.weight[mask], packed.weight)
    assert torch.equal(got.temperature, packed.temperature)
    assert (got.weight[~mask] == 1).all()


def test_uniform_weights(backend):
    """n < 2, A = 0, equal credits, a ceiling of 1: exactly 1, temperature 1."""
    credit = torch.tensor([0.3, 0.1, 0.7, 2.0, 2.0, 2.0])
    got = allocate_weights(credit, torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1, 2, 3]), backend=backend)
    assert (got.weight == 1).all()
    assert (got.temperature == 1).all()
    assert (allocate_weights(credit, torch.ones(1), ceiling=1.0, backend=backend).weight == 1).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_in_its_own_response_only(value, backend):
    credit = torch.randn(30, generator=torch.Generator().manual_seed(0))
    lengths, advantage = torch.tensor([10, 10, 10]), torch.tensor([1.0, 1.0, 1.0])
    clean = allocate_weights(credit, advantage, lengths, backend=backend)
    credit[13], advantage[2] = value, value
    got = allocate_weights(credit, advantage, lengths, backend=backend)
    assert torch.equal(got.weight[:10], clean.weight[:10])
    assert got.weight[10:].isnan().all()
    assert got.temperature[1:].isnan().all()


@pytest.mark.parametrize("utility", ["advantage", "sign"])
def test_not_finite_is_what_the_reference_calls_so(utility, backend):
    for value in (torch.nan, torch.inf, -torch.inf):
        credit = torch.randn(24, generator=torch.Generator().manual_seed(0))
        advantage, lengths = torch.tensor([1.0, 1.0, -1.0, 0.0, 1.0, -0.5]), torch.tensor([5, 5, 5, 4, 1, 4])
        credit[2], advantage[1], credit[10:15], credit[15:20] = value, value, value, value
        got, reference = (
            allocate_weights(credit, advantage, lengths, utility=utility, backend=b) for b in (backend, "reference")
        )
        assert torch.equal(got.weight.isnan(), reference.weight.isnan())
        assert torch.equal(got.temperature.isnan(), reference.temperature.isnan())
        torch.testing.assert_close(got.weight, reference.weight, equal_nan=True, rtol=0, atol=WEIGHT)


def test_what_float32_does_not_hold_is_nan_not_another_number(backend):
    """The other backends compute in float64."""
    wide = allocate_weights(torch.tensor([3e38, -3e38, 0.0]), torch.ones(1), backend=backend)
    steep = allocate_weights(torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([3e38]), backend=backend)
    assert wide.weight.isnan().all()
    assert steep.weight.isnan().all()


def test_a_response_alone_has_the_bits_it_has_among_others(backend):
    credit = torch.randn(90, generator=torch.Generator().manual_seed(0))
    lengths, advantage = torch.tensor([30, 50, 10]), torch.tensor([1.0, -2.0, 0.5])
    whole = allocate_weights(credit, advantage, lengths, backend=backend)
    alone = allocate_weights(credit[30:80], advantage[1:2], backend=backend)
    assert torch.equal(whole.weight[30:80], alone.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_credit_and_no_responses(dtype, backend):
    credit = torch.randn(40, generator=torch.Generator().manual_seed(0)).to(dtype)
    advantage = torch.tensor([0.7], dtype=dtype)
    got = allocate_weights(credit, advantage, backend=backend)
    assert_true(got, credit, advantage, torch.tensor([40]))
    none = allocate_weights(credit[:0], advantage[:0], torch.zeros(0, dtype=torch.int64), backend=backend)
    assert none.weight.shape == none.temperature.shape == (0,)
