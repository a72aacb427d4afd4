"""Every loss beside GRPO's: its definition token by token, hand numbers, micro-batches. T numbers: reports on other trainers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_losses import EXACT, batch
from test_train import TINY, lines
from tolerances import FORWARD, NORM
from torch import Tensor

from datc_train import train
from datc_train.advantages import group_advantages, group_deviations
from datc_train.config import config_from
from datc_train.losses import LOSSES, count_responses, count_tokens, importance_weights

MAX_TOKENS = 12


def loss_and_gradient(name: str, data: dict[str, Tensor], **options: object) -> tuple[Tensor, Tensor]:
    logprob = data["logprob"].clone().requires_grad_()
    loss = LOSSES[name](**{**data, "logprob": logprob}, max_tokens=MAX_TOKENS, **options).loss  # type: ignore[arg-type]
    loss.backward()
    assert logprob.grad is not None
    return loss.detach(), logprob.grad


def gradient_by_definition(name: str, data: dict[str, Tensor], clip: float, high: float, beta: float) -> list[float]:
    """d loss / d logp_t from the papers' formulas, in Python's floats."""
    lengths = data["lengths"].tolist()
    responses, tokens = sum(map(bool, lengths)), sum(lengths)
    gradient = []
    start = 0
    for length in lengths:
        span = range(start, start + length)
        start += length
        log_ratios = [float(data["logprob"][t] - data["old_logprob"][t]) for t in span]
        for t, log_ratio in zip(span, log_ratios, strict=True):
            a = float(data["token_advantage"][t])
            ratio = math.exp(sum(log_ratios) / length if name == "gspo_token" else log_ratio)
            if name == "cispo":
                policy = min(ratio, 1 + high) * a
            else:
                clipped = (a > 0 and ratio > 1 + high) or (a < 0 and ratio < 1 - clip)
                policy = 0.0 if clipped else ratio * a
            r = float(data["reference_logprob"][t] - data["logprob"][t])
            share = {
                "grpo": 1 / (responses * length),
                "gspo_token": 1 / (responses * length),
                "dapo": 1 / tokens,
                "cispo": 1 / tokens,
                "dr_grpo": 1 / (responses * MAX_TOKENS),
            }[name]
            gradient.append(-share * (policy + beta * math.expm1(r)))
    return gradient


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    seed=st.integers(0, 2**31),
    clips=st.sampled_from([(0.2, 0.2), (0.2, 0.28), (3e-4, 4e-4), (0.2, 3.0)]),
    beta=st.sampled_from([0.0, 0.03]),
)
def test_gradient_is_its_definition(name: str, lengths: list[int], seed: int, clips: tuple[float, float], beta: float) -> None:
    data = batch(lengths, seed, torch.float64)
    _, gradient = loss_and_gradient(name, data, clip=clips[0], clip_high=clips[1], beta=beta)
    expected = gradient_by_definition(name, data, *clips, beta)
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64), rtol=EXACT, atol=EXACT)


def two_responses() -> dict[str, Tensor]:
    """Lengths 2 and 1; rho = 1.5, 1, 0.5; a = 2, 4, -3."""
    old = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    return {
        "logprob": old + torch.tensor([1.5, 1.0, 0.5], dtype=torch.float64).log(),
        "old_logprob": old,
        "token_advantage": torch.tensor([2.0, 4.0, -3.0], dtype=torch.float64),
        "lengths": torch.tensor([2, 1]),
    }


@pytest.mark.parametrize(
    ("name", "loss", "gradient", "clipped"),
    [
        # min(3, 1.28 x 2), 4, min(-1.5, -0.8 x 3): the first and the last are stopped
        ("grpo", -((2.56 + 4) / 2 - 2.4) / 2, [0.0, -1.0, 0.0], 2),
        ("dapo", -(2.56 + 4 - 2.4) / 3, [0.0, -4 / 3, 0.0], 2),
        ("dr_grpo", -(2.56 + 4 - 2.4) / 24, [0.0, -4 / 24, 0.0], 2),
        # s = sqrt(1.5) = 1.2247 lies within 1.28, 0.5 does not
        ("gspo_token", -(1.5**0.5 * 3 - 2.4) / 2, [-(1.5**0.5) / 2, -(1.5**0.5), 0.0], 1),
        # weights 1.28, 1, 0.5: capped, never dropped
        (
            "cispo",
            -(1.28 * 2 * (-1 + math.log(1.5)) - 8 - 1.5 * (-0.5 + math.log(0.5))) / 3,
            [-2.56 / 3, -4 / 3, 0.5],
            1,
        ),
    ],
)
def test_by_hand(name: str, loss: float, gradient: list[float], clipped: int) -> None:
    data = two_responses()
    got, slope = loss_and_gradient(name, data, clip=0.2, clip_high=0.28)
    assert float(got) == pytest.approx(loss)
    assert slope.tolist() == pytest.approx(gradient)
    terms = LOSSES[name](**data, clip=0.2, clip_high=0.28, max_tokens=MAX_TOKENS)
    assert (terms.clipped_count, terms.token_count) == (clipped, 3)


@pytest.mark.parametrize("name", LOSSES)
def test_weights_of_one_change_no_bit(name: str) -> None:
    """w = 1 is the loss as published."""
    data = batch([5, 9, 2])
    plain = group_advantages(torch.tensor([1.0, 4.0, 2.0]), 3).repeat_interleave(data["lengths"])
    one, other = (
        loss_and_gradient(name, {**data, "token_advantage": a}, beta=0.03) for a in (plain, plain * torch.ones_like(plain))
    )
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("name", LOSSES)
def test_weights_of_mean_one_change_the_gradient(name: str) -> None:
    """In a sequence's own ratio they would cancel."""
    data = batch([4], 1, torch.float64) | {"token_advantage": torch.ones(4, dtype=torch.float64)}
    uneven = {**data, "token_advantage": torch.tensor([2.0, 0.5, 1.0, 0.5], dtype=torch.float64)}
    options = {"clip": 0.99, "clip_high": 99.0}
    _, even = loss_and_gradient(name, data, **options)
    _, weighted = loss_and_gradient(name, uneven, **options)
    torch.testing.assert_close(weighted, even * uneven["token_advantage"])


def test_gspo_token_is_the_sequence_ratio_where_tokens_are_alike() -> None:
    """Value and gradient of mean_b min(s A, clip(s) A), s the geometric mean of the ratios."""
    data = batch([4, 6], 2, torch.float64)
    advantage = torch.tensor([1.5, -0.5], dtype=torch.float64)
    data["token_advantage"] = advantage.repeat_interleave(data["lengths"])
    logprob = data["logprob"].clone().requires_grad_()
    s = torch.stack([d.mean().exp() for d in (logprob - data["old_logprob"]).split([4, 6])])
    loss = -torch.minimum(s * advantage, s.clamp(0.8, 1.2) * advantage).mean()
    loss.backward()
    got, gradient = loss_and_gradient("gspo_token", data)
    torch.testing.assert_close(got, loss.detach())
    torch.testing.assert_close(gradient, logprob.grad)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=2, max_size=8).filter(any), st.integers(0, 2**31), st.data())
def test_t31_micro_batches_add_up(name: str, lengths: list[int], seed: int, draw: st.DataObject) -> None:
    """T30, T31: with the whole batch's denominators, any split of the responses gives its loss and gradient."""
    data = batch(lengths, seed, torch.float64)
    mask = torch.tensor(draw.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))))
    data["importance"] = torch.rand(sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    cut = draw.draw(st.integers(1, len(lengths) - 1))
    whole, gradient = loss_and_gradient(name, data, beta=0.03, response_mask=mask)
    totals = {"total_responses": count_responses(data["lengths"], mask), "total_tokens": count_tokens(data["lengths"], mask)}
    token_cut = sum(lengths[:cut])
    parts = []
    for responses, tokens in ((slice(cut), slice(token_cut)), (slice(cut, None), slice(token_cut, None))):
        piece = {key: value[responses if key == "lengths" else tokens] for key, value in data.items()}
        parts.append(loss_and_gradient(name, piece, beta=0.03, response_mask=mask[responses], **totals))
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    torch.testing.assert_close(torch.cat([g for _, g in parts]), gradient)


@pytest.mark.parametrize("name", LOSSES)
def test_t9_masked_responses_leave_numerator_and_denominator(name: str) -> None:
    """T9: a masked response might as well not be there, even with NaN in it; all masked is exactly 0."""
    data = batch([3, 6, 4], seed=5) | {"importance": torch.full((13,), 0.5)}
    keep = torch.tensor([True] * 3 + [False] * 6 + [True] * 4)
    without = {key: torch.tensor([3, 4]) if key == "lengths" else value[keep] for key, value in data.items()}
    data |= {key: torch.where(keep, value, torch.nan) for key, value in data.items() if key != "lengths"}
    loss, gradient = loss_and_gradient(name, data, beta=0.03, response_mask=torch.tensor([True, False, True]))
    expected, expected_gradient = loss_and_gradient(name, without, beta=0.03)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient[keep], expected_gradient)
    assert (gradient[~keep] == 0).all()
    loss, gradient = loss_and_gradient(name, data, beta=0.03, response_mask=torch.zeros(3, dtype=torch.bool))
    assert loss == 0
    assert (gradient == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_t36_nothing_overflows(name: str) -> None:
    for shift in (-500.0, 500.0):
        data = batch([3, 2], 4)
        data["old_logprob"] = data["logprob"] + shift
        data["reference_logprob"] = data["logprob"] - shift
        loss, gradient = loss_and_gradient(name, data, beta=0.03)
        assert loss.isfinite()
        assert gradient.isfinite().all()


def test_dr_grpo_needs_the_longest_length() -> None:
    with pytest.raises(ValueError, match="^max_tokens: expected the longest that a response may be"):
        LOSSES["dr_grpo"](**batch([3, 2]))


@pytest.mark.parametrize(
    ("change", "message"), [({"clip_high": -0.1}, "^clip_high"), ({"importance": torch.ones(2)}, "^importance")]
)
def test_what_cannot_be_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LOSSES["dapo"](**{**batch([3, 2]), **change})  # type: ignore[arg-type]


def test_deviation_times_advantage_is_the_unscaled_one() -> None:
    score = torch.tensor([1.0, 3.0, 5.0, 7.0, 7.0, 7.0])
    unscaled = group_advantages(score, 3) * group_deviations(score, 3)
    assert unscaled.tolist() == pytest.approx([-2.0, 0.0, 2.0, 0.0, 0.0, 0.0])


# ---------------------------------------------------------------- the sampler's correction


def test_importance_weights_by_hand() -> None:
    """T5: a log-probability that the sampler did not give means exactly 1."""
    old = torch.zeros(5)
    sampler = torch.tensor([-math.log(3.0), -math.log(1.5), math.log(4.0), float("nan"), -200.0])
    weight, cut = importance_weights(old, sampler, "truncate", 2.0)
    assert weight.tolist() == pytest.approx([2.0, 1.5, 0.25, 1.0, 2.0])
    assert cut.tolist() == [True, False, False, False, True]
    weight, cut = importance_weights(old, sampler, "mask", 2.0)
    assert weight.tolist() == pytest.approx([0.0, 1.5, 0.0, 1.0, 0.0])
    assert cut.tolist() == [True, False, True, False, True]
    assert float(weight[3]) == 1.0


@pytest.mark.parametrize(("mode", "bound"), [("clip", 2.0), ("mask", 0.5), ("truncate", float("inf"))])
def test_corrections_that_cannot_be(mode: str, bound: float) -> None:
    with pytest.raises(ValueError, match=r"^(mode|bound): expected"):
        importance_weights(torch.zeros(1), torch.zeros(1), mode, bound)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LOSSES)
def test_importance_weighs_policy_and_kl_terms(name: str) -> None:
    data = batch([4, 3], 7, torch.float64)
    importance = torch.linspace(0, 2, 7, dtype=torch.float64)
    _, plain = loss_and_gradient(name, data, beta=0.1)
    _, weighed = loss_and_gradient(name, data, beta=0.1, importance=importance)
    torch.testing.assert_close(weighed, plain * importance)


# ---------------------------------------------------------------- in the loop


@pytest.mark.parametrize("lora", [{"r": 4, "alpha": 8}, None], ids=["lora", "full"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_trains(tmp_path: Path, loss: str, lora: dict | None) -> None:
    run = train(TINY | {"loss": loss, "lora": lora, "learning_rate": 1e-3, "run_dir": str(tmp_path / "r")})
    first, second = lines(run, "metrics.jsonl")
    assert first["grad_norm"] > 0
    assert first["clip_fraction"] == 0.0
    assert second["kl"] > 0


@pytest.mark.parametrize("loss", LOSSES)
def test_micro_batches_add_up_in_the_loop(tmp_path: Path, loss: str) -> None:
    """T31"""
    norms = []
    for budget in (100_000, 1):
        options = {"loss": loss, "steps": 1, "run_dir": str(tmp_path / str(budget)), "micro_batch_tokens": budget}
        norms.append(lines(train(TINY | options), "metrics.jsonl")[0]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=NORM)


def test_plain_gspo_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="^loss: expected gspo_token: in gspo's one ratio .* weights of mean 1 cancel"):
        config_from({"loss": "gspo"})


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_correction_of_an_exact_sampler_is_one(tmp_path: Path, mode: str) -> None:
    plain = train(TINY | {"steps": 1, "run_dir": str(tmp_path / "plain")})
    run = train(TINY | {"steps": 1, "run_dir": str(tmp_path / "r"), "sampler_correction": mode})
    line = lines(run, "metrics.jsonl")[0]
    assert line["correction_mean"] == pytest.approx(1.0, abs=FORWARD)
    assert line["correction_cut_share"] == 0.0
    assert line["grad_norm"] == pytest.approx(lines(plain, "metrics.jsonl")[0]["grad_norm"], rel=NORM)
    assert lines(plain, "metrics.jsonl")[0]["correction_mean"] is None
