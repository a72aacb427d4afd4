"""The objective and the group advantage: hand numbers, their own definition in float64, invariances."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import MEAN
from torch import Tensor

from datc_kernels.testing.rounding import rounding
from datc_train.advantages import frac_reward_zero_std, group_advantages
from datc_train.losses import LOSSES, count_responses, grpo_loss, k3

EXACT = rounding(torch.float64, length=64, condition=32)  # a few dozen terms of either sign, up to some 8, in float64

# ---------------------------------------------------------------- group advantages


def test_advantages_by_hand() -> None:
    advantage = group_advantages(torch.tensor([1.0, 3.0, 0.0, 0.0]), 2)
    assert advantage.dtype == torch.float32
    assert advantage.tolist() == [-1.0, 1.0, 0.0, 0.0]
    assert group_advantages(torch.tensor([1.0, 3.0]), 2, floor=4.0).tolist() == [-0.25, 0.25]


@pytest.mark.parametrize("group_size", [2, 3, 5, 7])
@pytest.mark.parametrize("floor", [0.0, 1e-9, 0.5])
def test_t1_t2_equal_scores_give_exactly_zero(group_size: int, floor: float) -> None:
    """T1, T2: equal float32 scores of size 10 to 30, whose float mean is not the score itself."""
    score = (torch.rand(200, generator=torch.Generator().manual_seed(0)) * 20 + 10).repeat_interleave(group_size)
    assert (group_advantages(score, group_size, floor=floor) == 0).all()
    assert frac_reward_zero_std(score, group_size) == 1.0


def test_t2_t47_equal_group_beside_a_spread_one() -> None:
    """T2: whether a group is dead is its own matter. T47: how many are stands in the metrics of every step."""
    score = torch.tensor([17.3, 17.3, 17.3, 1.0, 2.0, 9.0])
    advantage = group_advantages(score, 3)
    assert (advantage[:3] == 0).all()
    assert (advantage[3:] != 0).all()
    assert frac_reward_zero_std(score, 3) == 0.5


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 9), st.integers(1, 9), st.integers(0, 2**31), st.floats(0, 2))
def test_t46_groups_know_nothing_of_each_other(group_size: int, groups: int, seed: int, floor: float) -> None:
    """T46: groups permuted, advantages permuted, bit for bit; mean 0 and, without a floor, standard deviation 1."""
    generator = torch.Generator().manual_seed(seed)
    score = torch.randn(groups, group_size, generator=generator) * 3 + 20
    order = torch.randperm(groups, generator=generator)
    advantage = group_advantages(score.reshape(-1), group_size, floor=floor).reshape(groups, group_size)
    shuffled = group_advantages(score[order].reshape(-1), group_size, floor=floor).reshape(groups, group_size)
    assert torch.equal(shuffled, advantage[order])
    deviation = score.double() - score.double().mean(1, keepdim=True)
    truth = deviation / score.double().std(1, correction=0, keepdim=True).clamp(min=floor)
    torch.testing.assert_close(advantage, truth.float(), rtol=MEAN, atol=MEAN)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_score_names_its_row(bad: float) -> None:
    with pytest.raises(ValueError, match=r"^score: .* in row 3"):
        group_advantages(torch.tensor([0.0, 1.0, 2.0, bad]), 2)


def test_t44_t45_groups_that_cannot_be() -> None:
    """T44: one response has no group. T45: groups are whole."""
    with pytest.raises(ValueError, match=r"^score: expected whole groups of 2, got 3"):
        group_advantages(torch.zeros(3), 2)
    with pytest.raises(ValueError, match=r"^group_size"):
        group_advantages(torch.zeros(3), 1)
    with pytest.raises(ValueError, match=r"^score"):
        group_advantages(torch.zeros(0), 2)
    with pytest.raises(ValueError, match=r"^score"):
        group_advantages(torch.zeros(2, 2), 2)
    with pytest.raises(ValueError, match=r"^floor"):
        group_advantages(torch.zeros(2), 2, floor=-1.0)


# ---------------------------------------------------------------- the loss


def batch(lengths: list[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A batch off policy enough for both sides of the clip to act."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    old = -torch.rand(n, generator=generator, dtype=torch.float64) * 3
    return {
        "logprob": (old + 0.3 * torch.randn(n, generator=generator, dtype=torch.float64)).to(dtype),
        "old_logprob": old.to(dtype),
        "token_advantage": torch.randn(n, generator=generator, dtype=torch.float64).to(dtype),
        "lengths": torch.tensor(lengths),
        "reference_logprob": (old + 0.3 * torch.randn(n, generator=generator, dtype=torch.float64)).to(dtype),
    }


def loss_and_gradient(data: dict[str, Tensor], **options: object) -> tuple[Tensor, Tensor]:
    logprob = data["logprob"].clone().requires_grad_()
    loss = grpo_loss(**{**data, "logprob": logprob}, **options).loss  # type: ignore[arg-type]
    loss.backward()
    assert logprob.grad is not None
    return loss.detach(), logprob.grad


def by_definition(data: dict[str, Tensor], beta: float, clip: float, mask: list[bool] | None = None) -> float:
    """The formula, token by token, in Python's floats."""
    means = []
    start = 0
    for b, length in enumerate(data["lengths"].tolist()):
        if length and (mask is None or mask[b]):
            total = 0.0
            for t in range(start, start + length):
                logp, old, aw, ref = (
                    float(data[k][t]) for k in ("logprob", "old_logprob", "token_advantage", "reference_logprob")
                )
                rho, r = math.exp(logp - old), ref - logp
                total += min(rho * aw, min(max(rho, 1 - clip), 1 + clip) * aw) - beta * (math.exp(r) - r - 1)
            means.append(total / length)
        start += length
    return -sum(means) / len(means)


def test_loss_by_hand() -> None:
    """Two responses, rho = 1: -(mean(2, 4) + mean(-3)) / 2 = 0, and the gradient is -A w / (R length)."""
    data = {
        "logprob": torch.tensor([-1.0, -2.0, -0.5]),
        "old_logprob": torch.tensor([-1.0, -2.0, -0.5]),
        "token_advantage": torch.tensor([2.0, 4.0, -3.0]),
        "lengths": torch.tensor([2, 1]),
    }
    loss, gradient = loss_and_gradient(data)
    assert loss == 0
    assert gradient.tolist() == [-0.5, -1.0, 1.5]
    terms = grpo_loss(**data)
    assert terms.kl_sum is None
    assert (terms.clipped_count.item(), terms.token_count.item()) == (0.0, 3.0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.03, 1.0]),
    st.sampled_from([0.1, 0.2]),
)
def test_loss_is_its_definition(lengths: list[int], seed: int, beta: float, clip: float) -> None:
    data = batch(lengths, seed, torch.float64)
    terms = grpo_loss(**data, beta=beta, clip=clip)
    assert float(terms.loss) == pytest.approx(by_definition(data, beta, clip), rel=EXACT, abs=EXACT)
    rho, aw = (data["logprob"] - data["old_logprob"]).exp(), data["token_advantage"]
    clipped = ((rho > 1 + clip) & (aw > 0)) | ((rho < 1 - clip) & (aw < 0))
    assert terms.clipped_count == clipped.sum()
    assert terms.token_count == sum(lengths)


def test_gradcheck() -> None:
    data = batch([4, 0, 7, 1], dtype=torch.float64)
    logprob = data.pop("logprob").requires_grad_()
    assert torch.autograd.gradcheck(lambda x: grpo_loss(x, **data, beta=0.1).loss, (logprob,))


@pytest.mark.parametrize("on_policy", [True, False])
def test_clip_stops_the_gradient_only_outward(on_policy: bool) -> None:
    data = batch([40, 60], seed=3)
    if on_policy:
        data["old_logprob"] = data["logprob"]
    _, gradient = loss_and_gradient(data)
    rho, aw = (data["logprob"] - data["old_logprob"]).exp(), data["token_advantage"]
    stopped = ((rho > 1.2) & (aw > 0)) | ((rho < 0.8) & (aw < 0))
    assert bool(stopped.any()) is not on_policy
    share = torch.tensor([1 / 80] * 40 + [1 / 120] * 60)
    torch.testing.assert_close(gradient, torch.where(stopped, 0.0, -rho * aw * share))


def test_weights_of_one_are_grpo_bit_for_bit() -> None:
    data = batch([5, 9, 2])
    plain = group_advantages(torch.tensor([1.0, 4.0, 2.0]), 3).repeat_interleave(data["lengths"])
    results = [
        loss_and_gradient({**data, "token_advantage": advantage}, beta=0.03)
        for advantage in (plain, plain * torch.ones_like(plain))
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=2, max_size=8).filter(any), st.integers(0, 2**31), st.data())
def test_t31_micro_batches_add_up(lengths: list[int], seed: int, draw: st.DataObject) -> None:
    """T31: with the whole batch's denominator, any split of the responses gives its loss and gradient."""
    data = batch(lengths, seed, torch.float64)
    mask = torch.tensor(draw.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))))
    cut = draw.draw(st.integers(1, len(lengths) - 1))
    whole, gradient = loss_and_gradient(data, beta=0.03, response_mask=mask)
    total = count_responses(data["lengths"], mask)
    token_cut = sum(lengths[:cut])
    parts = []
    for responses, tokens in ((slice(cut), slice(token_cut)), (slice(cut, None), slice(token_cut, None))):
        part = {name: value[responses if name == "lengths" else tokens] for name, value in data.items()}
        parts.append(loss_and_gradient(part, beta=0.03, response_mask=mask[responses], total_responses=total))
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    torch.testing.assert_close(torch.cat([g for _, g in parts]), gradient)


def test_t9_masked_responses_leave_numerator_and_denominator() -> None:
    """T9: a masked response might as well not be there, even with NaN in it."""
    data = batch([3, 6, 4], seed=5)
    mask = torch.tensor([True, False, True])
    keep = torch.tensor([True] * 3 + [False] * 6 + [True] * 4)
    without = {name: torch.tensor([3, 4]) if name == "lengths" else value[keep] for name, value in data.items()}
    for name in ("logprob", "old_logprob", "token_advantage", "reference_logprob"):
        data[name] = torch.where(keep, data[name], float("nan"))
    loss, gradient = loss_and_gradient(data, beta=0.03, response_mask=mask)
    expected, expected_gradient = loss_and_gradient(without, beta=0.03)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient[keep], expected_gradient)
    assert (gradient[~keep] == 0).all()
    terms = grpo_loss(**data, response_mask=mask)
    assert terms.token_count == 7
    assert terms.kl_sum is not None
    assert terms.kl_sum.isfinite()


@pytest.mark.parametrize("total", [None, 0, torch.tensor(0.0)])
def test_t9_everything_masked_is_exactly_zero(total: Tensor | int | None) -> None:
    """T9: no 0 / 0."""
    loss, gradient = loss_and_gradient(
        batch([3, 2]), beta=0.03, response_mask=torch.zeros(2, dtype=torch.bool), total_responses=total
    )
    assert loss == 0
    assert (gradient == 0).all()


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_no_token_is_exactly_zero(lengths: list[int]) -> None:
    data = batch(lengths)
    data["lengths"] = data["lengths"].long()
    loss, gradient = loss_and_gradient(data)
    assert loss == 0
    assert gradient.shape == (0,)


def test_empty_responses_do_not_count() -> None:
    data = batch([3, 4], seed=1)
    padded = {**data, "lengths": torch.tensor([0, 3, 0, 4])}
    assert torch.equal(loss_and_gradient(data, beta=0.1)[1], loss_and_gradient(padded, beta=0.1)[1])
    assert count_responses(padded["lengths"]) == 2


def test_t1_zero_advantage_leaves_the_kl_gradient() -> None:
    """T1: a documented choice: a dead group is still held near the reference, and only that."""
    data = batch([4])
    data["token_advantage"] = torch.zeros(4)
    _, gradient = loss_and_gradient(data, beta=0.03)
    r = data["reference_logprob"] - data["logprob"]
    torch.testing.assert_close(gradient, 0.03 / 4 * -torch.expm1(r), rtol=rounding(length=8), atol=0)
    assert (loss_and_gradient(data)[1] == 0).all()


def test_kl_is_zero_at_the_reference() -> None:
    data = batch([4])
    data["reference_logprob"] = data["logprob"]
    terms = grpo_loss(**data, beta=0.03)
    assert terms.kl_sum == 0


def test_k3_is_accurate_where_it_is_small() -> None:
    """An error of the size of r's rounding, not of 1's (which exp(r) - r - 1 has): 1e-4 of k3 where r = 1e-3."""
    r = torch.logspace(-6, 0.5, 200, dtype=torch.float64).float()
    truth = torch.expm1(r.double()) - r.double()
    error = (k3(torch.zeros(200), r).double() - truth).abs()
    assert (error <= rounding() * torch.expm1(r.double())).all()


@pytest.mark.parametrize("r", [19.0, 21.0, 100.0, 1e4])
def test_t36_k3_never_overflows_and_still_pulls_up(r: float) -> None:
    """T36: finite, convex, and its gradient pulls logp up towards the reference however far away it is."""
    logprob = torch.tensor([-r], requires_grad=True)
    value = k3(logprob, torch.zeros(1))
    value.backward()
    assert logprob.grad is not None
    assert value.isfinite()
    assert logprob.grad.item() == pytest.approx(-math.expm1(min(r, 20.0)), rel=rounding(condition=20))
    assert value > k3(torch.tensor([-r + 0.5]), torch.zeros(1))


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_t36_ratio_never_overflows(advantage: float) -> None:
    logprob = torch.tensor([-1.0], requires_grad=True)
    terms = grpo_loss(logprob, torch.tensor([-500.0]), torch.tensor([advantage]), torch.tensor([1]))
    terms.loss.backward()
    assert logprob.grad is not None
    assert terms.loss.isfinite()
    assert logprob.grad.item() == pytest.approx(0.0 if advantage > 0 else math.exp(20), rel=rounding(condition=20))


def test_only_logprob_gets_a_gradient() -> None:
    """Credit, old and reference log-probabilities are constants, even where a graph comes with them."""
    data = {name: value.clone() for name, value in batch([3, 2]).items()}
    for name in ("logprob", "old_logprob", "token_advantage", "reference_logprob"):
        data[name].requires_grad_()
    terms = grpo_loss(**data, beta=0.1)
    terms.loss.backward()
    assert data["logprob"].grad is not None
    assert all(data[name].grad is None for name in ("old_logprob", "token_advantage", "reference_logprob"))
    assert not any(x.requires_grad for x in (terms.kl_sum, terms.clipped_count, terms.token_count) if x is not None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprob": torch.zeros(5, 1)}, "^logprob"),
        ({"old_logprob": torch.zeros(4)}, "^old_logprob"),
        ({"token_advantage": torch.zeros(2)}, "^token_advantage"),
        ({"reference_logprob": torch.zeros(6)}, "^reference_logprob"),
        ({"reference_logprob": None, "beta": 0.1}, "^reference_logprob"),
        ({"lengths": torch.tensor([3, 3])}, "^lengths: expected a sum of 5"),
        ({"lengths": torch.tensor([3.0, 2.0])}, "^lengths"),
        ({"response_mask": torch.ones(2)}, "^response_mask"),
        ({"response_mask": torch.ones(3, dtype=torch.bool)}, "^response_mask"),
        ({"beta": -0.1}, "^beta"),
        ({"clip": 1.5}, "^clip"),
    ],
)
def test_what_cannot_be_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grpo_loss(**{**batch([3, 2]), **change})  # type: ignore[arg-type]


def test_losses_by_name() -> None:
    assert LOSSES["grpo"] is grpo_loss
