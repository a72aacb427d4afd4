"""allocate_weights: examples by hand, layouts, frozen and empty positions, extremes; on every backend."""

import math

import pytest
import torch

from datc_kernels import allocate_weights, effective_sample_ratio, missing_backends, predicted_gain
from datc_kernels.testing import truth
from datc_kernels.testing.budgets import TEMPERATURE, WEIGHT
from datc_kernels.testing.rounding import rounding

CPU = pytest.param("cpu", marks=pytest.mark.skipif("cpu" in missing_backends(), reason=missing_backends().get("cpu", "")))
pytestmark = pytest.mark.parametrize("backend", ["reference", "chunked", CPU])


def one(credit, advantage=1.0, **options):
    credit = torch.as_tensor(credit)
    return allocate_weights(credit, torch.tensor([advantage], dtype=credit.dtype), **options)


def responses(lengths, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    credit = torch.randn(sum(lengths), generator=generator, dtype=torch.float64).pow(3).to(dtype)
    advantage = torch.randn(len(lengths), generator=generator, dtype=torch.float64).to(dtype)
    frozen = torch.rand(sum(lengths), generator=generator) < 0.3
    return credit, advantage, torch.tensor(lengths), frozen


def test_two_tokens_by_hand(backend):
    """d = (1, -1), A = 1: s = +-1 / 1.001, w = 2 softmax(s) = (1.76, 0.24): within the band of 8, so tau = 1."""
    got = one([1.0, -1.0], ceiling=8, backend=backend)
    e = math.exp(2 / 1.001)
    torch.testing.assert_close(got.weight, torch.tensor([2 * e / (1 + e), 2 / (1 + e)]))
    assert got.temperature.tolist() == [1.0]


def test_a_negative_advantage_turns_the_order(backend):
    """The token with the least credit takes most of the blame."""
    credit = torch.tensor([0.5, -0.25, 0.1, 3.0])
    up, down = one(credit, 1.0, backend=backend), one(credit, -1.0, backend=backend)
    assert up.weight.argmax() == 3
    assert down.weight.argmin() == 3
    assert down.weight.argmax() == 1


def test_the_lower_bound_can_be_the_one_that_binds(backend):
    """One token far below the others: min w = 1 / ceiling exactly, max w well inside; and the mirror image."""
    credit = torch.cat([torch.zeros(100), torch.tensor([-50.0])])
    low = one(credit, backend=backend)
    assert low.weight.min().item() == pytest.approx(0.25, rel=rounding())
    assert low.weight.max() < 1.02
    high = one(-credit, backend=backend)
    assert high.weight.max().item() == pytest.approx(4.0, rel=rounding())
    assert low.temperature > 1
    assert high.temperature > 1


def test_utility_sign_takes_the_sign_of_the_advantage_alone(backend):
    credit, advantage, lengths, frozen = responses([5, 9, 30])
    got = allocate_weights(credit, advantage, lengths, frozen=frozen, utility="sign", backend=backend)
    same = allocate_weights(credit, advantage.sign(), lengths, frozen=frozen, backend=backend)
    assert torch.equal(got.weight, same.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype, backend):
    """float64 inside; float32 out, float64 for float64 credit."""
    credit, advantage, lengths, frozen = responses([7, 1, 0, 40], dtype=dtype)
    got = allocate_weights(credit, advantage, lengths, frozen=frozen, ceiling=2.0, backend=backend)
    assert got.weight.dtype == got.temperature.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    weight, temperature = truth.allocate_weights(credit, advantage, lengths, frozen, 2.0)
    torch.testing.assert_close(got.weight.double(), weight, rtol=0, atol=WEIGHT)
    torch.testing.assert_close(got.temperature.double(), temperature, rtol=TEMPERATURE, atol=0)


def test_all_weights_are_one_where_nothing_can_be_told(backend):
    """n < 2, A = 0, equal d, all frozen, ceiling 1, no tokens: exactly 1, temperature 1."""
    varied = [0.3, -1.0, 2.0]
    for got in (
        one([5.0], backend=backend),
        one(varied, 0.0, backend=backend),
        one(varied, -0.0, backend=backend),
        one([0.1] * 7, backend=backend),
        one([0.0] * 7, backend=backend),
        one([1e30] * 7, backend=backend),
        one(varied, ceiling=1, backend=backend),
        one(varied, frozen=torch.tensor([True, True, True]), backend=backend),
        one(varied, frozen=torch.tensor([True, False, True]), backend=backend),
        one(torch.zeros(0), backend=backend),
    ):
        assert (got.weight == 1).all()
        assert (got.temperature == 1).all()


def test_no_responses_and_empty_responses(backend):
    none = allocate_weights(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64), backend=backend)
    assert none.weight.shape == none.temperature.shape == (0,)
    assert allocate_weights(torch.zeros(0, 5), torch.zeros(0), backend=backend).weight.shape == (0, 5)
    assert allocate_weights(torch.zeros(3, 0), torch.zeros(3), backend=backend).temperature.tolist() == [1, 1, 1]
    credit, advantage, _, _ = responses([4, 6])
    dense = allocate_weights(credit, advantage, torch.tensor([4, 6]), backend=backend)
    sparse = allocate_weights(
        credit, torch.tensor([9.0, advantage[0], 9.0, advantage[1], 9.0]), torch.tensor([0, 4, 0, 6, 0]), backend=backend
    )
    assert torch.equal(sparse.weight, dense.weight)
    assert torch.equal(sparse.temperature[[1, 3]], dense.temperature)


def test_frozen_positions_are_exactly_one_whatever_they_hold(backend):
    """NaN and infinity in a frozen or padded position never reach the others."""
    credit, advantage, lengths, frozen = responses([12, 20])
    clean = allocate_weights(credit, advantage, lengths, frozen=frozen, backend=backend)
    for poison in (math.nan, math.inf, -math.inf, 1e38):
        dirty = credit.masked_fill(frozen, poison)
        got = allocate_weights(dirty, advantage, lengths, frozen=frozen, backend=backend)
        assert torch.equal(got.weight, clean.weight)
        assert torch.equal(got.temperature, clean.temperature)
    assert (clean.weight[frozen] == 1).all()
    assert (clean.weight[~frozen] != 1).any()


@pytest.mark.parametrize("utility", ["advantage", "sign"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_gives_nan_in_its_own_response_only(value, utility, backend):
    """A credit, an advantage, or all credits; but what nothing can be told from stays 1."""
    credit = torch.randn(24, generator=torch.Generator().manual_seed(0))
    advantage, lengths = torch.tensor([1.0, 1.0, -1.0, 0.0, 1.0, -0.5]), torch.tensor([5, 5, 5, 4, 1, 4])
    clean = allocate_weights(credit, advantage, lengths, utility=utility, backend=backend)
    credit[2], advantage[1], credit[10:15], credit[15:20] = value, value, value, value
    got = allocate_weights(credit, advantage, lengths, utility=utility, backend=backend)
    assert got.weight[:15].isnan().all()
    assert got.temperature[:3].isnan().all()
    assert (got.weight[15:20] == 1).all()  # A = 0, and a response of one token
    assert torch.equal(got.weight[20:], clean.weight[20:])
    assert torch.equal(got.temperature[3:], clean.temperature[3:])
    assert (allocate_weights(credit, advantage, lengths, utility=utility, ceiling=1.0, backend=backend).weight == 1).all()


def test_a_nan_credit_shows_in_its_own_response_only(backend):
    credit, advantage, lengths, _ = responses([12, 20])
    clean = allocate_weights(credit, advantage, lengths, backend=backend)
    credit[3] = math.nan
    got = allocate_weights(credit, advantage, lengths, backend=backend)
    assert got.weight[:12].isnan().all()
    assert got.temperature[0].isnan()
    assert torch.equal(got.weight[12:], clean.weight[12:])


@pytest.mark.parametrize("how", ["mask", "no mask"])
def test_packed_is_padded(how, backend):
    """[B, T] with a mask gives the bits of the responses end to end; padding weighs 1."""
    lengths = [5, 0, 9, 1, 7] if how == "mask" else [9] * 5
    credit, advantage, sizes, frozen = responses(lengths)
    packed = allocate_weights(credit, advantage, sizes, frozen=frozen, backend=backend)
    mask = torch.arange(9) < sizes[:, None]
    grid = torch.full((5, 9), math.nan).masked_scatter(mask, credit)
    held = torch.zeros(5, 9, dtype=torch.bool).masked_scatter(mask, frozen)
    padded = allocate_weights(grid, advantage, mask=mask if how == "mask" else None, frozen=held, backend=backend)
    assert padded.weight.shape == (5, 9)
    torch.testing.assert_close(padded.weight[mask], packed.weight, rtol=rounding(), atol=0)
    torch.testing.assert_close(padded.temperature, packed.temperature, rtol=TEMPERATURE, atol=0)
    assert (padded.weight[~mask] == 1).all()


def test_layouts_and_dtypes_of_the_lengths(backend):
    """K34: strided credit, expanded advantage, int32 lengths, transposed grids: the same bits."""
    credit, _, lengths, frozen = responses([8, 8])
    advantage = torch.tensor([0.7]).expand(2)
    expected = allocate_weights(credit, advantage.contiguous(), lengths, frozen=frozen, backend=backend).weight
    strided = credit.repeat_interleave(2)[::2]
    held = frozen.repeat_interleave(2)[::2]
    assert torch.equal(allocate_weights(strided, advantage, lengths.int(), frozen=held, backend=backend).weight, expected)
    grid, held = credit.view(2, 8).T.contiguous().T, frozen.view(2, 8).T.contiguous().T
    assert torch.equal(allocate_weights(grid, advantage, frozen=held, backend=backend).weight, expected.view(2, 8))


def test_weights_are_constants_and_inputs_untouched(backend):
    """K41: no gradient flows through the weights, nothing is written in place."""
    credit, advantage, lengths, frozen = responses([8, 8])
    credit.requires_grad_()
    advantage.requires_grad_()
    before = [x.detach().clone() for x in (credit, advantage, lengths, frozen)]
    got = allocate_weights(credit, advantage, lengths, frozen=frozen, backend=backend)
    assert not got.weight.requires_grad
    assert not got.temperature.requires_grad
    for x, y in zip((credit, advantage, lengths, frozen), before, strict=True):
        assert torch.equal(x.detach(), y)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_the_scale_of_the_credit_cancels(scale, backend):
    """float32 credits of any size that a reward model's gradient may have."""
    credit, advantage, lengths, _ = responses([30, 50])
    expected = allocate_weights(credit, advantage, lengths, backend=backend).weight
    got = allocate_weights(credit * scale, advantage, lengths, backend=backend).weight
    # Each scaled credit was rounded to float32 on its own; s, in units of the spread, is up to some 7.
    torch.testing.assert_close(got, expected, rtol=rounding(condition=16), atol=0)


def test_a_common_offset_of_the_credit_shrinks_the_contrast_but_not_the_digits(backend):
    """The floor 1e-3 mean|d| damps differences that are small beside the mean; what is left is exact."""
    credit = 1e4 + torch.randn(50, generator=torch.Generator().manual_seed(0))
    got = one(credit, backend=backend)
    weight, _ = truth.allocate_weights(credit, torch.ones(1), torch.tensor([50]))
    torch.testing.assert_close(got.weight.double(), weight, rtol=rounding(), atol=0)
    assert got.weight.std() < 0.15


@pytest.mark.parametrize("advantage", [1e-30, 1e3, 1e12, -1e12])
def test_extreme_advantages(advantage, backend):
    """Tiny: nearly uniform. Huge: tau grows with A, and the weights stay in the band."""
    credit = torch.randn(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = one(credit, advantage, backend=backend)
    weight, temperature = truth.allocate_weights(credit, torch.tensor([advantage]).double(), torch.tensor([40]))
    torch.testing.assert_close(got.weight, weight, rtol=0, atol=WEIGHT)
    torch.testing.assert_close(got.temperature, temperature, rtol=TEMPERATURE, atol=0)
    assert got.weight.min() >= 0.25
    assert got.weight.max() <= 4


@pytest.mark.parametrize("ceiling", [1.0000001, 1.01, 2, 8.0, 1e6])
def test_ceilings(ceiling, backend):
    credit, advantage, lengths, frozen = responses([300, 3, 2], dtype=torch.float64)
    got = allocate_weights(credit, 5 * advantage, lengths, frozen=frozen, ceiling=ceiling, backend=backend)
    weight, temperature = truth.allocate_weights(credit, 5 * advantage, lengths, frozen, ceiling)
    torch.testing.assert_close(got.weight, weight, rtol=0, atol=WEIGHT)
    torch.testing.assert_close(got.temperature, temperature, rtol=TEMPERATURE, atol=0)


def test_float32_weights_stay_inside_the_band(backend):
    """The last rounding, to float32, does not step over a bound."""
    for ceiling in (2.0, 3.0, 4.0, 7.0):
        for seed in range(10):
            got = one(torch.randn(30, generator=torch.Generator().manual_seed(seed)), 3.0, ceiling=ceiling, backend=backend)
            assert got.weight.max() <= ceiling
            assert got.weight.min().double() >= 1 / ceiling * (1 - rounding())


def test_diagnostics_by_hand(backend):
    weight, lengths = torch.tensor([2.0, 0.0, 1.0, 1.0, 1.0]), torch.tensor([2, 0, 3])
    assert effective_sample_ratio(weight, lengths).tolist() == [0.5, 1.0, 1.0]
    credit = torch.tensor([1.0, -1.0, 3.0, 4.0, math.nan])
    assert predicted_gain(credit, torch.tensor([2.0, 1.0, 1.0]), weight, lengths).tolist() == [4.0, 0.0, 0.0]
    assert effective_sample_ratio(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)
    assert backend in ("reference", "chunked", "cpu")
