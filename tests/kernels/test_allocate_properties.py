"""The facts of the weights (a maximiser under a band) for any credits, advantages, lengths and frozen positions."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from datc_kernels import allocate_weights, effective_sample_ratio, missing_backends, predicted_gain
from datc_kernels.testing import truth
from datc_kernels.testing.rounding import rounding

CPU = pytest.param("cpu", marks=pytest.mark.skipif("cpu" in missing_backends(), reason=missing_backends().get("cpu", "")))
pytestmark = pytest.mark.parametrize("backend", ["reference", "chunked", CPU])
# Sums over a response in float64: at most 40 tokens.
MEAN = rounding(torch.float64, length=40)
# exp(A s / tau): |A s| up to 3 sqrt(40), of credits that may be 1000 times smaller than their mean; tau by bisection.
WEIGHT = rounding(torch.float64, length=40, condition=20 * 1000)

values = st.floats(-100, 100, allow_subnormal=False).map(lambda x: round(x, 6))
advantages = st.floats(-3, 3, allow_subnormal=False).map(lambda x: round(x, 6))
ceilings = st.sampled_from([1.05, 1.5, 2.0, 4.0, 8.0])
utilities = st.sampled_from(["advantage", "sign"])


@st.composite
def batches(draw):
    """(credit [N], advantage [B], lengths [B], frozen [N]) in float64; heavy tails, ties and empty responses among them."""
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    credit = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    credit = credit.pow(draw(st.sampled_from([1, 3, 7]))) + draw(st.sampled_from([0.0, 0.0, 5.0]))
    if draw(st.booleans()):
        credit = credit.round()
    share = draw(st.sampled_from([0.0, 0.2, 0.9]))
    frozen = torch.rand(sum(lengths), generator=generator) < share
    advantage = torch.tensor(draw(st.lists(advantages, min_size=len(lengths), max_size=len(lengths))), dtype=torch.float64)
    return credit, advantage, torch.tensor(lengths), frozen


def per_response(lengths, *tensors):
    return zip(*(x.split(lengths.tolist()) for x in tensors), strict=True)


@given(batch=batches(), ceiling=ceilings, utility=utilities)
def test_against_the_truth(backend, batch, ceiling, utility):
    """Newton's method in extended precision finds the same temperature as bisection."""
    credit, advantage, lengths, frozen = batch
    got = allocate_weights(credit, advantage, lengths, frozen=frozen, ceiling=ceiling, utility=utility, backend=backend)
    weight, temperature = truth.allocate_weights(credit, advantage, lengths, frozen, ceiling, utility)
    torch.testing.assert_close(got.weight, weight, rtol=0, atol=WEIGHT)
    torch.testing.assert_close(got.temperature, temperature, rtol=WEIGHT, atol=0)


@given(batch=batches(), ceiling=ceilings, utility=utilities)
def test_mean_band_sign_and_effective_sample_size(backend, batch, ceiling, utility):
    """Mean 1 over free and over all positions, weights in the band, A w of A's sign and mean, ESS at least its bound."""
    credit, advantage, lengths, frozen = batch
    got = allocate_weights(credit, advantage, lengths, frozen=frozen, ceiling=ceiling, utility=utility, backend=backend)
    assert (got.weight <= ceiling).all()
    assert (got.weight >= 1 / ceiling).all()
    assert (got.weight[frozen] == 1).all()
    assert (got.temperature >= 1).all()
    for A, (w, held) in zip(advantage, per_response(lengths, got.weight, frozen), strict=True):
        if len(w):
            assert w.mean().item() == pytest.approx(1, rel=4 * MEAN)  # weights up to 8
            assert (A * w).mean().item() == pytest.approx(A.item(), rel=4 * MEAN)
            assert ((A * w).sign() == A.sign()).all()
        if (~held).any():
            assert w[~held].mean().item() == pytest.approx(1, rel=4 * MEAN)  # weights up to 8
    assert (effective_sample_ratio(got.weight, lengths) >= 1 / (ceiling + 1 / ceiling - 1) - 4 * MEAN).all()
    assert (effective_sample_ratio(got.weight, lengths) <= 1 + 4 * MEAN).all()


@given(batch=batches(), ceiling=ceilings)
def test_the_temperature_is_the_smallest_feasible_one(backend, batch, ceiling):
    """A bound is met exactly, and a slightly smaller tau breaks it, unless tau is 1; where it is 1, both bounds hold there."""
    credit, advantage, lengths, frozen = batch
    got = allocate_weights(credit, advantage, lengths, frozen=frozen, ceiling=ceiling, backend=backend)
    parts = per_response(lengths, credit, frozen, got.weight)
    for A, tau, (d, held, w) in zip(advantage, got.temperature, parts, strict=True):
        d, w = d[~held], w[~held]
        if len(d) < 2 or A == 0 or d.max() == d.min():
            assert tau == 1
            continue
        util = A * (d - d.mean()) / (d.std(correction=0) + 1e-3 * d.abs().mean())
        torch.testing.assert_close(w, len(d) * torch.softmax(util / tau, dim=0), rtol=WEIGHT, atol=MEAN)
        if tau > 1:
            assert max(w.max().item() / ceiling, 1 / ceiling / w.min().item()) == pytest.approx(1, rel=WEIGHT)
            smaller = len(d) * torch.softmax(util / max(1.0, tau.item() * (1 - 1e-6)), dim=0)
            assert smaller.max() > ceiling or smaller.min() < 1 / ceiling


@given(batch=batches(), ceiling=ceilings)
def test_the_weights_maximise_utility_less_divergence(backend, batch, ceiling):
    """No other distribution has a larger mean(w util) - tau KL(w / n || uniform): a thousand random directions tried."""
    credit, advantage, lengths, frozen = batch
    got = allocate_weights(credit, advantage, lengths, frozen=frozen, ceiling=ceiling, backend=backend)
    parts = per_response(lengths, credit, frozen, got.weight)
    for A, tau, (d, held, w) in zip(advantage, got.temperature, parts, strict=True):
        d, w = d[~held], w[~held]
        if len(d) < 2 or d.max() == d.min():
            continue
        util = A * (d - d.mean()) / (d.std(correction=0) + 1e-3 * d.abs().mean())

        def value(w, util=util, tau=tau):
            return (w * util).mean(-1) - tau * (w * w.log()).mean(-1)

        noise = torch.randn(100, len(d), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        others = w * (0.1 * noise).exp()
        others = others / others.mean(dim=1, keepdim=True)
        assert (value(others) <= value(w) + 4 * MEAN * (1 + util.abs().max())).all()


@given(batch=batches(), ceiling=ceilings, utility=utilities)
def test_the_predicted_gain_is_never_negative(backend, batch, ceiling, utility):
    """sum w A d >= sum A d: weight goes where the credit points."""
    credit, advantage, lengths, frozen = batch
    got = allocate_weights(credit, advantage, lengths, frozen=frozen, ceiling=ceiling, utility=utility, backend=backend)
    gain = predicted_gain(credit, advantage, got.weight, lengths)
    size = torch.stack([(A * d).abs().sum() for A, (d,) in zip(advantage, per_response(lengths, credit), strict=True)])
    assert (gain >= -4 * MEAN * (1 + size)).all()


@given(batch=batches(), ceiling=ceilings, power=st.integers(-40, 40))
def test_scaling_the_credit_changes_nothing(backend, batch, ceiling, power):
    """A power of two: exactly."""
    credit, advantage, lengths, frozen = batch
    one = allocate_weights(credit, advantage, lengths, frozen=frozen, ceiling=ceiling, backend=backend)
    many = allocate_weights(credit * 2.0**power, advantage, lengths, frozen=frozen, ceiling=ceiling, backend=backend)
    assert torch.equal(one.weight, many.weight)
    assert torch.equal(one.temperature, many.temperature)


@given(batch=batches(), ceiling=ceilings)
def test_order_of_tokens_and_of_responses_does_not_matter(backend, batch, ceiling):
    """Permutation equivariance, up to the order of the sums; responses are apart from each other to the bit."""
    credit, advantage, lengths, frozen = batch
    got = allocate_weights(credit, advantage, lengths, frozen=frozen, ceiling=ceiling, backend=backend)
    flipped = allocate_weights(
        credit.flip(0), advantage.flip(0), lengths.flip(0), frozen=frozen.flip(0), ceiling=ceiling, backend=backend
    )
    torch.testing.assert_close(flipped.weight.flip(0), got.weight, rtol=0, atol=WEIGHT)
    parts = per_response(lengths, credit, frozen, got.weight)
    for b, (d, held, w) in enumerate(parts):
        alone = allocate_weights(d, advantage[b : b + 1], frozen=held, ceiling=ceiling, backend=backend)
        assert torch.equal(alone.weight, w)


@given(credit=st.lists(values, min_size=2, max_size=12), advantage=advantages)
def test_larger_utility_never_weighs_less(backend, credit, advantage):
    """Weights are monotone in A d, and equal credits weigh the same."""
    assume(advantage != 0)
    d = torch.tensor(credit, dtype=torch.float64)
    w = allocate_weights(d, torch.tensor([advantage], dtype=torch.float64), backend=backend).weight
    order = (advantage * d).argsort(stable=True)
    assert (w[order].diff() >= 0).all()
    same = d[:, None] == d[None, :]
    assert ((w[:, None] - w[None, :]).abs()[same] == 0).all()


@given(batch=batches())
def test_a_wider_band_never_needs_a_larger_temperature(backend, batch):
    credit, advantage, lengths, frozen = batch
    taus = [
        allocate_weights(credit, advantage, lengths, frozen=frozen, ceiling=c, backend=backend).temperature
        for c in (1.5, 3.0, 9.0)
    ]
    assert (taus[0] >= taus[1]).all()
    assert (taus[1] >= taus[2]).all()
