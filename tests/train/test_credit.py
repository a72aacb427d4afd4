"""Credit methods: numbers by hand, what each promises, and that every one trains. T numbers: reports against other trainers."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import MEAN
from torch import Tensor

from datc_kernels import TokenCredit
from datc_kernels.testing.rounding import rounding
from datc_train.credit import METHODS, CreditInputs, TokenAdvantage
from datc_train.credit.free_positions import FreePositions


def inputs(lengths: list[int], seed: int = 0, **given: object) -> CreditInputs:
    """Random numbers for everything that any method reads; `given` replaces fields."""
    generator = torch.Generator().manual_seed(seed)
    n, b, k, d = sum(lengths), len(lengths), 5, 6

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    credit = {field.name: normal(n) for field in fields(TokenCredit)}
    credit |= {"logprob": -normal(n).abs() - 0.01, "entropy": normal(n).abs(), "displacement_norm": normal(n).abs()}
    values = {
        "credit": TokenCredit(**credit),
        "advantage": normal(b),
        "lengths": torch.tensor(lengths, dtype=torch.int64),
        "frozen": torch.rand(n, generator=generator) < 0.3,
        "ceiling": 4.0,
        "utility": "advantage",
        "responses": torch.arange(b),
        "seed": (0, 1),
        "score": normal(b),
        "reward_grad": normal(n, k),
        "embedding": normal(n, k),
        "pad_embedding": normal(k),
        "token_reward": normal(n),
        "left_out_score": normal(n),
        "hidden": normal(n, d),
        "base_hidden": normal(n, d),
    }
    return CreditInputs(**values | given)  # type: ignore[arg-type]


def by_hand(method: str, n: int, **given: object) -> TokenAdvantage:
    """One response of n free tokens with A = 2."""
    given = {"advantage": torch.tensor([2.0]), "frozen": torch.zeros(n, dtype=torch.bool)} | given
    return METHODS[method].token_advantage(inputs([n], **given))


def part(whole: CreditInputs, responses: list[int]) -> CreditInputs:
    """Some of its responses, in that order."""
    start = [0, *whole.lengths.cumsum(0).tolist()]
    tokens = torch.cat([torch.arange(start[r], start[r + 1]) for r in responses])
    own = {"credit": TokenCredit(*(getattr(whole.credit, f.name)[tokens] for f in fields(TokenCredit)))}
    for name in ("advantage", "lengths", "responses", "score"):
        own[name] = getattr(whole, name)[responses]
    for name in ("frozen", "reward_grad", "embedding", "token_reward", "left_out_score", "hidden", "base_hidden"):
        own[name] = getattr(whole, name)[tokens]
    return replace(whole, **own)


# ---------------------------------------------------------------- what they promise

shapes = st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=40, deadline=None)
@given(lengths=shapes, seed=st.integers(0, 2**31), ceiling=st.sampled_from([1.0, 2.0, 4.0, 8.0]))
def test_promises(method: str, lengths: list[int], seed: int, ceiling: float) -> None:
    given = inputs(lengths, seed, ceiling=ceiling)
    out = METHODS[method].token_advantage(given)
    promises, weight = METHODS[method].promises, out.weights.weight
    assert out.value.dtype == weight.dtype == torch.float32
    assert out.value.isfinite().all()
    assert out.weights.temperature.shape == given.advantage.shape
    advantage = given.advantage.repeat_interleave(given.lengths)
    torch.testing.assert_close(out.value, advantage * weight, rtol=rounding(), atol=rounding())
    if "mean" in promises:
        for values, a in zip(out.value.double().split(lengths), given.advantage.tolist(), strict=True):
            if len(values):
                assert float(values.mean()) == pytest.approx(a, rel=MEAN, abs=MEAN)
    if "sign" in promises:
        assert (weight >= 0).all()
    if "band" in promises:
        assert (weight <= ceiling * (1 + rounding())).all()
        assert (weight >= (1 - rounding()) / ceiling).all()
    if "frozen" in promises:
        assert (weight[given.frozen] == 1).all()
        assert torch.equal(out.value[given.frozen], advantage[given.frozen])
    for values in out.notes.values():
        assert values.shape == given.advantage.shape


@pytest.mark.parametrize("method", [name for name, m in METHODS.items() if not m.needs_rollout])
def test_micro_batches_change_nothing(method: str) -> None:
    """T31: a response's token advantages are the same whichever responses come with it, in whatever order."""
    whole = inputs([4, 0, 7, 1, 5], 3)
    at_once = METHODS[method].token_advantage(whole)
    spans = at_once.value.split(whole.lengths.tolist())
    for batch in ([2], [4, 0], [3, 2, 1, 0]):
        some = METHODS[method].token_advantage(part(whole, batch))
        for r, values in zip(batch, some.value.split(whole.lengths[batch].tolist()), strict=True):
            torch.testing.assert_close(values, spans[r], rtol=MEAN, atol=MEAN)


@pytest.mark.parametrize("method", METHODS)
def test_inputs_stay_as_they_are_and_no_graph_comes_out(method: str) -> None:
    given = inputs([5, 3])
    before = {name: value.clone() for name, value in vars(given).items() if isinstance(value, Tensor)}
    out = METHODS[method].token_advantage(given)
    assert all(torch.equal(getattr(given, name), value) for name, value in before.items())
    assert not out.value.requires_grad


@pytest.mark.parametrize("method", METHODS)
def test_t1_zero_advantage(method: str) -> None:
    """T1: a dead group learns nothing from a weight; what additive methods add to it is their own, and documented."""
    out = METHODS[method].token_advantage(inputs([6, 4], advantage=torch.zeros(2)))
    if method in ("red", "p2t"):
        assert (out.value != 0).any()
    else:
        assert (out.value == 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_nothing_to_share_out(method: str) -> None:
    """Without a free position, or with one token a response: A, but for what P2T adds and DelTA scales."""
    given = inputs([3, 1], frozen=torch.ones(4, dtype=torch.bool))
    out = METHODS[method].token_advantage(given)
    if "frozen" in METHODS[method].promises:
        assert torch.equal(out.value, given.advantage.repeat_interleave(given.lengths))
    assert METHODS[method].token_advantage(inputs([0, 0])).value.shape == (0,)


# ---------------------------------------------------------------- by hand


def test_datc_by_hand() -> None:
    """Two tokens: s = +-d / |d| = +-1 (up to the floor), util = +-2: w = 2 softmax(+-2 / tau), held at 1 / lambda = 1 / 4."""
    credit = inputs([2]).credit
    out = by_hand("datc", 2, credit=replace(credit, credit=torch.tensor([3.0, -3.0])))
    assert out.weights.weight.tolist() == pytest.approx([1.75, 0.25], abs=1e-4)
    assert out.value.tolist() == pytest.approx([3.5, 0.5], abs=1e-4)


def test_no_angle_takes_the_norms() -> None:
    credit = replace(inputs([2]).credit, displacement_norm=torch.tensor([2.0, 1.0]), force_norm=torch.tensor([1.0, 2.0]))
    assert by_hand("datc_no_angle", 2, credit=credit).weights.weight.tolist() == [1.0, 1.0]
    credit = replace(credit, force_norm=torch.tensor([1.0, 0.5]))
    assert by_hand("datc_no_angle", 2, credit=credit).weights.weight.tolist() == pytest.approx([1.75, 0.25], abs=1e-3)


def test_shuffled_is_a_permutation_of_the_free_weights() -> None:
    given = inputs([40, 30], 1)
    plain, shuffled = (METHODS[m].token_advantage(given).weights.weight for m in ("datc", "datc_shuffled"))
    assert not torch.equal(plain, shuffled)
    for a, b, frozen in zip(plain.split([40, 30]), shuffled.split([40, 30]), given.frozen.split([40, 30]), strict=True):
        assert torch.equal(a[~frozen].sort().values, b[~frozen].sort().values)
        assert torch.equal(a[frozen], b[frozen])


@pytest.mark.parametrize("method", ["datc_shuffled", "datc_random"])
def test_dice_depend_on_seed_rollout_and_response(method: str) -> None:
    def weight(seed: tuple[int, int], responses: list[int]) -> Tensor:
        given = replace(inputs([30]), seed=seed, responses=torch.tensor(responses))
        return METHODS[method].token_advantage(given).weights.weight

    same = weight((0, 1), [0])
    assert torch.equal(same, weight((0, 1), [0]))
    assert not any(torch.equal(same, weight(*other)) for other in (((1, 1), [0]), ((0, 2), [0]), ((0, 1), [1])))


def test_entropy_favours_unsure_tokens_of_either_sign() -> None:
    credit = replace(inputs([2]).credit, entropy=torch.tensor([3.0, 1.0]))
    for sign in (1.0, -1.0):
        out = by_hand("entropy", 2, credit=credit, advantage=torch.tensor([2.0 * sign]))
        assert out.weights.weight.tolist() == pytest.approx([1.75, 0.25], abs=1e-2)


def test_red_by_hand() -> None:
    """r = 1, 3, 5 at free positions: mean 3, sigma sqrt(8/3); the frozen third token keeps A and counts in the offset."""
    out = by_hand(
        "red",
        4,
        token_reward=torch.tensor([1.0, 3.0, 7.0, 5.0]),
        frozen=torch.tensor([False, False, True, False]),
        score=torch.tensor([20.0]),
    )
    step = 2 / math.sqrt(8 / 3)
    assert out.value.tolist() == pytest.approx([2 - step, 2.0, 2.0, 2 + step])
    assert out.weights.weight.tolist() == pytest.approx([1 - step / 2, 1.0, 1.0, 1 + step / 2])
    assert out.notes["red_offset"].tolist() == [4.0]
    same = by_hand("red", 3, token_reward=torch.full((3,), 0.1))
    assert same.value.tolist() == [2.0, 2.0, 2.0]  # rounding of equal rewards is nothing to learn from


def test_p2t_by_hand() -> None:
    """I = 0 and log 3: softmax 1/4 and 3/4. R = 10: A + 0.1 (10 + 6 softmax) = 2 + 1 + 0.15 and 2 + 1 + 0.45."""
    out = by_hand(
        "p2t",
        3,
        score=torch.tensor([10.0]),
        reward_grad=torch.tensor([[1.0, 2.0], [math.log(3.0), 0.0], [9.0, 9.0]]),
        embedding=torch.tensor([[1.0, 1.0], [2.0, 5.0], [3.0, 3.0]]),
        pad_embedding=torch.tensor([1.0, 1.0]),
        frozen=torch.tensor([False, False, True]),
    )
    assert out.value.tolist() == pytest.approx([3.15, 3.45, 3.0])
    assert out.notes["p2t_varying_part"].tolist() == pytest.approx([0.3 / 2])
    undefined = by_hand("p2t", 2, advantage=torch.zeros(1)).notes["p2t_varying_part"]
    assert undefined.isnan().all()


@pytest.mark.parametrize("method", ["oar_g", "oar_p"])
def test_oar_by_hand(method: str) -> None:
    """I = e^n - 1 for n = 0, 0.4, 0.8, 1: s = n, th = the first quarter between 0 and 0.4, at 0.75 of the way: 0.3.
    w = 0.1, 1 + 0.1/0.7, 1 + 0.5/0.7, 2, over their mean."""
    n = torch.tensor([0.0, 0.4, 0.8, 1.0])
    importance = torch.expm1(n)
    given = {"reward_grad": -importance[:, None], "embedding": torch.ones(4, 1)} if method == "oar_g" else {}
    out = by_hand(method, 4, score=torch.tensor([5.0]), left_out_score=5.0 + importance, **given)
    weight = torch.tensor([0.1, 1 + 0.1 / 0.7, 1 + 0.5 / 0.7, 2.0])
    torch.testing.assert_close(out.weights.weight, weight / weight.mean(), rtol=rounding(length=8), atol=rounding(length=8))
    equal = by_hand(method, 4, reward_grad=torch.ones(4, 1), embedding=torch.ones(4, 1), left_out_score=torch.zeros(4))
    assert equal.weights.weight.tolist() == [1.0] * 4


def test_delta_by_hand() -> None:
    """One dimension, p_y = 1/2 everywhere, so v = h / 2. Positive side v = 0, 2 (A = 1), negative side v = 0 (A = -1), and a
    response of A = 0. mu+ = 1, mu- = 0; m+ = v^2 - (v - 1)^2 = -1, 3: gamma 2, shares sigmoid(-1/2), sigmoid(3/2); m- = 1,
    gamma 0: 1/2. Then mu+ = 2 b / (a + b), and so on once more."""
    given = inputs(
        [2, 1, 1],
        credit=replace(inputs([4]).credit, logprob=torch.full((4,), math.log(0.5))),
        hidden=torch.tensor([[0.0], [4.0], [0.0], [3.0]]),
        advantage=torch.tensor([1.0, -1.0, 0.0]),
    )

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    a, b = sigmoid(-0.5), sigmoid(1.5)
    mu = 2 * b / (a + b)
    margins = [-(mu**2), 4 - (2 - mu) ** 2]
    gamma = abs(margins[1] - margins[0]) / 2
    raw = torch.tensor([0.8 + 0.4 * sigmoid(m / gamma) for m in margins] + [1.0, 0.8])
    out = METHODS["delta"].token_advantage(given)
    torch.testing.assert_close(out.weights.weight, raw / raw.mean(), rtol=rounding(length=16), atol=rounding(length=16))
    assert float(out.weights.weight.mean()) == pytest.approx(1.0, rel=rounding(length=16))
    one_side = replace(given, advantage=torch.tensor([1.0, 2.0, 0.0]))
    assert METHODS["delta"].token_advantage(one_side).weights.weight.tolist() == [1.0] * 4


def test_arca_by_hand() -> None:
    """Salience 5, 0, 1 and a frozen one: over their mean 2."""
    out = by_hand(
        "arca",
        4,
        hidden=torch.tensor([[3.0, 4.0], [1.0, 1.0], [0.0, 1.0], [9.0, 9.0]]),
        base_hidden=torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]),
        frozen=torch.tensor([False, False, False, True]),
    )
    assert out.weights.weight.tolist() == [2.5, 0.0, 0.5, 1.0]
    hidden = torch.randn(3, 2)
    assert by_hand("arca", 3, hidden=hidden, base_hidden=hidden).weights.weight.tolist() == [1.0] * 3


@settings(max_examples=60, deadline=None)
@given(lengths=shapes, seed=st.integers(0, 2**31), q=st.floats(0, 1))
def test_statistics_over_free_positions(lengths: list[int], seed: int, q: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    x, frozen = torch.randn(n, generator=generator), torch.rand(n, generator=generator) < 0.4
    positions = FreePositions(torch.tensor(lengths), frozen)
    x = torch.where(frozen, torch.nan, x)  # never read
    for b, values in enumerate(x.double().split(lengths)):
        values = values[~values.isnan()]
        if len(values):
            assert float(positions.mean(x)[b]) == pytest.approx(float(values.mean()), rel=MEAN, abs=MEAN)
            assert float(positions.std(x)[b]) == pytest.approx(float(values.std(correction=0)), rel=MEAN, abs=MEAN)
            assert float(positions.quantile(x, q)[b]) == pytest.approx(float(values.quantile(q)), rel=MEAN, abs=MEAN)
            torch.testing.assert_close(positions.softmax(x).split(lengths)[b][~frozen.split(lengths)[b]], values.softmax(0))
