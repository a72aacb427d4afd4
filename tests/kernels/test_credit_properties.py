"""The facts of the credit, for any logits, rewards and ids, on every backend."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datc_kernels import linear_credit, logits_credit
from datc_kernels.testing.inputs import Sizes, plain
from datc_kernels.testing.rounding import rounding
from datc_kernels.testing.variants import VARIANTS, using

pytestmark = pytest.mark.parametrize("variant", VARIANTS)
seeds = st.integers(0, 100_000)
spreads = st.sampled_from([0.01, 1.0, 5.0, 20.0])


def logits_and_rewards(seed, V, spread, N=6):
    """float64, so that a fact is a fact and not a tolerance."""
    generator = torch.Generator().manual_seed(seed)
    z = spread * torch.randn(N, V, generator=generator, dtype=torch.float64)
    u = torch.randn(N, V, generator=generator, dtype=torch.float64)
    return z, u, torch.randint(V, (N,), generator=generator)


def run(variant, z, ids, u, **options):
    with using(variant, tile=(4, 13)) as backend:
        return logits_credit(z, ids, reward=u, backend=backend, **options)


# Sums over up to 60 columns in float64; logits up to 20 x 5 become probabilities, rewards up to 5.
COLUMNS = rounding(torch.float64, length=60, condition=20 * 5 * 5)


def close(a, b, tolerance=COLUMNS):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@given(seed=seeds, V=st.integers(2, 60), spread=spreads)
def test_k19_reinforce_form(variant, seed, V, spread):
    """K19: G = sum_v p_v A_v k_v, so d = sum_b p_b A_b <k_b, k_y> and |G| is that vector's norm."""
    z, u, ids = logits_and_rewards(seed, V, spread)
    p = torch.softmax(z, dim=1)
    A = u - (p * u).sum(dim=1, keepdim=True)
    force = torch.eye(V, dtype=torch.float64) - p[:, None, :]  # [N, b, v]: k of sampling b
    G = (p[:, :, None] * A[:, :, None] * force).sum(dim=1)
    k_y = force[torch.arange(len(ids)), ids]
    got = run(variant, z, ids, u)
    close(got.credit, (G * k_y).sum(dim=1))
    close(got.displacement_norm, G.norm(dim=1))
    close(got.force_norm, k_y.norm(dim=1))


@given(seed=seeds, V=st.integers(2, 30), spread=spreads)
def test_k19_credit_is_the_derivative_of_the_expected_reward(variant, seed, V, spread):
    """K19: by central differences: d/ds of <softmax(z + s k_y), u> at s = 0, k_y the direction in which sampling y pushes z."""
    z, u, ids = logits_and_rewards(seed, V, spread)
    k = torch.nn.functional.one_hot(ids, V) - torch.softmax(z, dim=1)
    step = 1e-5
    # Central differences: step^2 times a third derivative (|u| <= 5, |k| <= 2), and the rounding of a value over the step.
    apart = step**2 * 5 * 2**3 + rounding(torch.float64, length=30, condition=5) / step

    def expected(s):
        return (torch.softmax(z + s * k, dim=1) * u).sum(dim=1)

    close(run(variant, z, ids, u).credit, (expected(step) - expected(-step)) / (2 * step), tolerance=apart)


@given(seed=seeds, V=st.integers(2, 60), spread=spreads, constant=st.floats(-1e3, 1e3))
def test_a_constant_added_to_the_rewards_changes_nothing_but_their_mean(variant, seed, V, spread, constant):
    z, u, ids = logits_and_rewards(seed, V, spread)
    before, after = run(variant, z, ids, u), run(variant, z, ids, u + constant)
    allowed = rounding(torch.float64, length=60, condition=20 * 5 * (5 + abs(constant)))
    for name in ("credit", "advantage", "displacement_norm", "force_norm", "logprob"):
        close(getattr(after, name), getattr(before, name), tolerance=allowed)
    close(after.reward_mean, before.reward_mean + constant)


@given(seed=seeds, V=st.integers(2, 60), spread=spreads, power=st.integers(-10, 10))
def test_scaling_the_gradient_scales_the_credit(variant, seed, V, spread, power):
    """c a power of two: exactly, to the last bit; the cosine stays. In float32."""
    case = plain(seed, Sizes(N=5, V=V, D=6, K=4), logit_std=spread)
    c = 2.0**power
    with using(variant, tile=(4, 13)) as backend:
        one = linear_credit(*case.args, backend=backend)
        hidden, weight, ids, grad, table = case.args
        many = linear_credit(hidden, weight, ids, c * grad, table, backend=backend)
    for name in ("credit", "advantage", "reward_mean", "displacement_norm"):
        assert torch.equal(getattr(many, name), c * getattr(one, name)), name
    assert torch.equal(many.cosine, one.cosine)


@given(seed=seeds, V=st.integers(1, 60), spread=spreads)
def test_sums_over_all_tokens(variant, seed, V, spread):
    """E_{y~p}[d] = 0, sum_v p_v A_v = 0 and sum_v p_v = 1: every token of the vocabulary sampled once."""
    z, u, _ = logits_and_rewards(seed, V, spread, N=1)
    got = run(variant, z.expand(V, -1), torch.arange(V), u.expand(V, -1))
    p = got.logprob.exp()
    close(p.sum().item(), 1.0)
    close((p * got.credit).sum().item(), 0.0)
    close((p * got.advantage).sum().item(), 0.0)
    close((p * p).sum(), got.sum_p2[0])
    close(-(p * got.logprob).sum(), got.entropy[0])


@given(gap=st.floats(-40, 40), rewards=st.tuples(st.floats(-5, 5), st.floats(-5, 5)), y=st.integers(0, 1))
def test_two_candidates(variant, gap, rewards, y):
    """d = 2 q (1 - q)^2 (u_y - u_other) with q = p_y; A_y = (1 - q)(u_y - u_other)."""
    z, u = torch.tensor([[gap, 0.0]], dtype=torch.float64), torch.tensor([rewards], dtype=torch.float64)
    got = run(variant, z, torch.tensor([y]), u)
    away = gap if y == 1 else -gap  # logit of the other token relative to y's
    q, other = 1 / (1 + math.exp(away)), 1 / (1 + math.exp(-away))
    difference = rewards[y] - rewards[1 - y]
    allowed = rounding(torch.float64, condition=40 + 5)  # the gap
    assert got.credit.item() == pytest.approx(2 * q * other**2 * difference, rel=allowed, abs=1e-300)
    assert got.advantage.item() == pytest.approx(other * difference, rel=allowed, abs=1e-300)


@given(seed=seeds, V=st.integers(2, 60), spread=spreads)
def test_the_order_of_the_columns_does_not_matter(variant, seed, V, spread):
    z, u, ids = logits_and_rewards(seed, V, spread)
    order = torch.randperm(V, generator=torch.Generator().manual_seed(seed))
    place = torch.empty_like(order).scatter_(0, order, torch.arange(V))
    before, after = run(variant, z, ids, u), run(variant, z[:, order], place[ids], u[:, order])
    for name in before.__dataclass_fields__:
        close(getattr(after, name), getattr(before, name))


@given(seed=seeds, V=st.integers(2, 60), spread=spreads)
def test_ranges(variant, seed, V, spread):
    """What can never be, in float32: log p > 0, negative entropy or norms, |cos| > 1, sum p^2 outside [1/V, 1]."""
    z, u, ids = logits_and_rewards(seed, V, spread)
    got = run(variant, z.float(), ids, u.float())
    assert (got.logprob <= 0).all()
    assert (got.entropy >= 0).all()
    assert (got.displacement_norm >= 0).all()
    assert (got.force_norm >= 0).all()
    assert (got.cosine.abs() <= 1).all()
    last = rounding(length=60)
    assert (got.sum_p2 <= 1 + last).all()
    assert (got.sum_p2 >= (1 - last) / V).all()
    assert (got.entropy <= math.log(V) * (1 + last)).all()


@given(seed=seeds, V=st.integers(4, 60), rows=st.integers(1, 60), spread=spreads)
def test_k4_a_short_reward_vocabulary_conditions_the_policy(variant, seed, V, rows, spread):
    """K4: the credit is that of the policy on the columns with a row, as if the others did not exist; log-probs keep all."""
    rows = min(rows, V)
    z, u, ids = logits_and_rewards(seed, V, spread)
    short = run(variant, z, ids, u[:, :rows])
    inside = ids < rows
    alone = run(variant, z[:, :rows], ids.clamp(max=rows - 1), u[:, :rows])
    whole = run(variant, z, ids, u)
    for name in ("credit", "advantage", "reward_mean", "displacement_norm", "force_norm"):
        close(getattr(short, name), torch.where(inside, getattr(alone, name), 0.0))
    for name in ("logprob", "entropy", "logsumexp", "sum_p2"):
        close(getattr(short, name), getattr(whole, name))


@settings(max_examples=10)
@given(seed=seeds, spread=spreads, scale=st.floats(0.1, 3), cap=st.floats(0.5, 30), temperature=st.floats(0.2, 3))
def test_k17_options_are_the_written_formula(variant, seed, spread, scale, cap, temperature):
    """K17: z = softcap tanh(logit_scale z / softcap) / temperature."""
    z, u, ids = logits_and_rewards(seed, 30, spread)
    by_hand = run(variant, cap * torch.tanh(scale * z / cap) / temperature, ids, u)
    got = run(variant, z, ids, u, logit_scale=scale, softcap=cap, temperature=temperature)
    for name in got.__dataclass_fields__:
        close(getattr(got, name), getattr(by_hand, name))
