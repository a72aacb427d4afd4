"""Several rewards as one: score, gradient and credit of the weighted sum against autograd and sums by hand, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from datc_kernels import linear_credit
from datc_train.credit import METHODS
from datc_train.credit_point import CreditPoint
from datc_train.quickstart import load_tiny_policy, load_tiny_reward_model
from datc_train.reward import RewardModel
from datc_train.reward.several import JoinedTables, RewardPart, WeightedRewards, weighted_rewards, weighted_sum
from datc_train.score import score_rollout
from datc_train.types import Prompt, Rollout, ScoredRollout

LENGTHS = torch.tensor([3, 0, 5, 4])
N, B, V, D = 12, 4, 17, 6
WEIGHTS = [1.5, -0.4]


def drawn(widths: tuple[int, ...], rows: tuple[int, ...] = (V, V), dtype: torch.dtype = torch.float64) -> list[ScoredRollout]:
    """Scored rollouts in which the score is a function of the tokens' embeddings, and the gradient is autograd's."""
    dice = torch.Generator().manual_seed(3)
    found = []
    for width, count in zip(widths, rows, strict=True):
        mapped = torch.rand(N, generator=dice) < 0.7
        content = torch.rand(N, generator=dice) < 0.2
        grad = torch.randn(N, width, generator=dice, dtype=torch.float64) * mapped[:, None]
        table = torch.randn(count, width, generator=dice, dtype=torch.float64)
        score = torch.randn(B, generator=dice)
        token, left = (torch.randn(N, generator=dice) for _ in range(2))
        frozen = content | ~mapped
        left = torch.where(frozen, score.repeat_interleave(LENGTHS), left)
        one = ScoredRollout(score, grad.to(dtype), mapped, frozen, table.to(dtype), token_reward=token * mapped)
        found.append(replace(one, left_out_score=left))
    return found


def ids(below: int = V) -> Tensor:
    return torch.randint(below, (N,), generator=torch.Generator().manual_seed(4))


def summed(scored: list[ScoredRollout], weights: Any = WEIGHTS, **options: Any) -> ScoredRollout:
    return weighted_sum(scored, weights, response_ids=options.pop("ids", ids()), lengths=LENGTHS, group_size=2, **options)


def test_credit_of_the_sum_is_the_sum_of_credits() -> None:
    dice = torch.Generator().manual_seed(5)
    hidden, head = (torch.randn(size, D, generator=dice, dtype=torch.float64) for size in (N, V))
    scored = drawn((4, 7))
    total = summed(scored)
    assert total.reward_grad is not None
    assert total.reward_grad.shape == (N, 11)

    def credit(one: ScoredRollout, backend: str) -> Any:
        return linear_credit(hidden, head, ids(), one.reward_grad, one.reward_embedding, backend=backend)

    for backend in ("reference", "chunked"):
        got = credit(total, backend)
        for name in ("credit", "advantage", "reward_mean"):
            expected = sum(w * getattr(credit(one, backend), name) for w, one in zip(WEIGHTS, scored, strict=True))
            torch.testing.assert_close(getattr(got, name), expected, rtol=1e-10, atol=1e-12)


def test_gradient_of_the_sum_is_autograds() -> None:
    """Two nonlinear scores of embeddings of one-hot tokens: u of the sum is the derivative by the one-hot vectors."""
    dice = torch.Generator().manual_seed(6)
    tables = [torch.randn(V, width, generator=dice, dtype=torch.float64) for width in (4, 7)]
    onehot = torch.nn.functional.one_hot(ids(), V).double().requires_grad_()
    everything = torch.ones(N, dtype=torch.bool)
    total, scored = torch.zeros((), dtype=torch.float64), []
    for table, weight in zip(tables, WEIGHTS, strict=True):
        embedded = (onehot.detach() @ table).requires_grad_()
        (grad,) = torch.autograd.grad(embedded.cumsum(0).tanh().sum(), embedded)
        scored.append(ScoredRollout(torch.zeros(B), grad, everything, ~everything, table))
        total = total + weight * (onehot @ table).cumsum(0).tanh().sum()
    (u,) = torch.autograd.grad(total, onehot)
    got = summed(scored)
    assert got.reward_grad is not None
    assert got.reward_embedding is not None
    torch.testing.assert_close(got.reward_grad @ got.reward_embedding.T, u, rtol=1e-10, atol=1e-12)


def test_scores_token_rewards_and_left_out_scores_are_sums_by_hand() -> None:
    scored = drawn((4, 7))
    constant = torch.tensor([0.1, -2.0, 3.0, 0.5], dtype=torch.float64)
    got = summed(scored, constant=constant)
    a, b = scored

    def by_hand(name: str) -> Tensor:
        return WEIGHTS[0] * getattr(a, name).double() + WEIGHTS[1] * getattr(b, name).double()

    torch.testing.assert_close(got.score, (by_hand("score") + constant).float())
    assert torch.equal(got.mapped, a.mapped | b.mapped)
    assert torch.equal(got.frozen, ~got.mapped | (a.frozen & a.mapped) | (b.frozen & b.mapped))
    assert got.token_reward is not None
    assert got.left_out_score is not None
    torch.testing.assert_close(got.token_reward, by_hand("token_reward").float())
    owner = torch.repeat_interleave(LENGTHS)
    expected = torch.where(got.frozen, got.score[owner].double(), by_hand("left_out_score") + constant[owner])
    torch.testing.assert_close(got.left_out_score, expected.float())


def test_one_of_weight_one_is_itself() -> None:
    (one,) = drawn((4,), (V,))
    assert summed([one], [1.0]) is one
    with_constant = summed([one], [1.0], constant=torch.zeros(B))
    for name in ("score", "reward_grad", "mapped", "frozen", "reward_embedding", "token_reward", "left_out_score"):
        assert torch.equal(getattr(with_constant, name), getattr(one, name)), name


def test_rows_that_one_table_lacks() -> None:
    """An id without a row in every table is not mapped; the others' gradients stay."""
    got = summed(drawn((4, 7), (V, V - 5)))
    assert got.reward_embedding is not None
    assert got.reward_grad is not None
    assert got.reward_embedding.shape == (V - 5, 11)
    beyond = ids() >= V - 5
    assert beyond.any()
    assert not got.mapped[beyond].any()
    assert got.frozen[beyond].all()
    assert (got.reward_grad[beyond] == 0).all()
    assert torch.equal(got.reward_grad[~beyond], summed(drawn((4, 7))).reward_grad[~beyond])  # type: ignore[index]


def test_a_response_that_one_model_could_not_read_is_unread() -> None:
    a, b = drawn((4, 7))
    got = summed([a, replace(b, unread=torch.tensor([False, False, True, False]))])
    whole = summed([a, b])
    tokens = torch.repeat_interleave(LENGTHS) == 2
    assert got.unread is not None
    assert got.unread.tolist() == [False, False, True, False]
    assert got.score[2] == whole.score[3]  # the mean of its group's others
    assert torch.equal(got.score[[0, 1, 3]], whole.score[[0, 1, 3]])
    assert got.frozen[tokens].all()
    assert (got.reward_grad[tokens] == 0).all()  # type: ignore[index]
    assert torch.equal(got.mapped[~tokens], whole.mapped[~tokens])


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((torch.bfloat16, torch.float32), torch.float32),
        ((torch.bfloat16, torch.bfloat16), torch.bfloat16),
        ((torch.float16, torch.float16), torch.float32),  # a weight may leave its range
    ],
)
def test_dtypes(dtypes: tuple[torch.dtype, torch.dtype], expected: torch.dtype) -> None:
    scored = [drawn((4, 7), dtype=dtype)[i] for i, dtype in enumerate(dtypes)]
    got, exact = summed(scored), summed(drawn((4, 7)))
    assert got.reward_grad is not None
    assert got.reward_grad.dtype == expected
    torch.testing.assert_close(got.reward_grad.double(), exact.reward_grad, rtol=0.02, atol=1e-2)


def test_tables_are_joined_once() -> None:
    join = JoinedTables()
    tables = [torch.randn(5, 2), torch.randn(4, 3)]
    first = join(tables)
    assert join(list(tables)) is first
    assert torch.equal(first, torch.cat([tables[0][:4], tables[1]], dim=1))
    assert join([tables[1], tables[0]]) is not first
    assert join(tables[:1]) is tables[0]


def test_weights_of_responses() -> None:
    scored = drawn((4, 7))
    weights = [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.5, 0.1, -1.0, 2.0])]
    got = summed(scored, weights)
    for response in range(B):
        alone = summed(scored, [float(weights[0][response]), float(weights[1][response])])
        tokens = torch.repeat_interleave(LENGTHS) == response
        torch.testing.assert_close(got.reward_grad[tokens], alone.reward_grad[tokens])  # type: ignore[index]
        torch.testing.assert_close(got.score[response], alone.score[response])


def tiny(seed: int = 0) -> RewardModel:
    model, tokenizer = load_tiny_reward_model()
    if seed:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    return RewardModel(model, tokenizer)


def rollout() -> tuple[Rollout, Any]:
    _, tokenizer = load_tiny_policy()
    responses = [tokenizer.encode(text, add_special_tokens=False) for text in ("Birds sing.", "Drums!", "a walk", "tea and cake")]
    prompts = [Prompt([{"role": "user", "content": text}], {"answer": text}) for text in ("Name a hobby.", "And food?")]
    response_ids = torch.tensor([token for response in responses for token in response])
    lengths = torch.tensor([len(response) for response in responses])
    flat = torch.zeros(len(response_ids))
    return Rollout(tuple(prompts), ((1,), (1,)), 2, response_ids, lengths, flat, torch.ones(4, dtype=torch.bool)), tokenizer


def brief(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [-float(len(response)) for response in completion_ids]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gets_the_sum_of_what_it_asks_for(method: str) -> None:
    """Models alone, then their sum beside a function: each field against the formula of its page."""
    sampled, tokenizer = rollout()
    models, how = [tiny(), tiny(1)], METHODS[method]
    gradient = how.needs_reward_gradient
    alone = [score_rollout(m, sampled, tokenizer, (), gradient=gradient, method=how) for m in models]
    rewards = weighted_rewards([*models, brief], [*WEIGHTS, 0.25])
    got = score_rollout(rewards, sampled, tokenizer, (), gradient=gradient, method=how)
    constant = -0.25 * sampled.lengths.double()

    def by_hand(name: str) -> Tensor:
        return sum(w * getattr(one, name).double() for w, one in zip(WEIGHTS, alone, strict=True))  # type: ignore[return-value]

    torch.testing.assert_close(got.score.double(), by_hand("score") + constant, rtol=1e-6, atol=1e-6)
    assert list(got.parts) == ["reward_model", "reward_model_2", "brief"]
    assert torch.equal(got.parts["reward_model_2"], alone[1].score)
    if how.needs_token_rewards:
        torch.testing.assert_close(got.token_reward.double(), by_hand("token_reward"), rtol=1e-5, atol=1e-6)  # type: ignore[union-attr]
    if how.needs_left_out_scores:
        owner = torch.repeat_interleave(sampled.lengths)
        expected = by_hand("left_out_score") + constant[owner]
        torch.testing.assert_close(got.left_out_score.double(), expected, rtol=1e-5, atol=1e-5)  # type: ignore[union-attr]
    if how.needs_embedding:

        def product(one: ScoredRollout) -> Tensor:
            assert one.reward_grad is not None
            assert one.reward_embedding is not None
            embedding = one.reward_embedding[sampled.response_ids]
            embedding = embedding if method == "oar_g" else embedding - one.pad_embedding
            return (one.reward_grad.double() * embedding.double()).sum(1)

        expected = sum(w * product(one) for w, one in zip(WEIGHTS, alone, strict=True))  # type: ignore[assignment]
        torch.testing.assert_close(product(got), expected, rtol=1e-5, atol=1e-7)


def test_a_reward_of_weight_0_is_scored_only(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled, tokenizer = rollout()
    asked = []
    real = RewardModel.score

    def watched(self: RewardModel, *arguments: Any, gradient: bool = True, **options: Any) -> ScoredRollout:
        asked.append(gradient)
        return real(self, *arguments, gradient=gradient, **options)

    monkeypatch.setattr(RewardModel, "score", watched)
    counted, watched_only = tiny(), tiny(1)
    rewards = weighted_rewards([counted, watched_only, brief], [1.0, 0.0, 0.0])
    got = score_rollout(rewards, sampled, tokenizer, (), gradient=True)
    assert asked == [True, False]
    alone = score_rollout(counted, sampled, tokenizer, (), gradient=True)
    for name in ("score", "reward_grad", "mapped", "frozen", "reward_embedding"):
        assert torch.equal(getattr(got, name), getattr(alone, name)), name
    assert set(got.parts) == {"reward_model", "reward_model_2", "brief"}


def test_the_credit_point_goes_to_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled, tokenizer = rollout()
    seen = []
    real = RewardModel.score

    def watched(self: RewardModel, *arguments: Any, **options: Any) -> ScoredRollout:
        seen.append((options["credit_point"], options["credit_passes"], options["credit_scale"]))
        return real(self, *arguments, **options)

    monkeypatch.setattr(RewardModel, "score", watched)
    for reward in (tiny(), weighted_rewards([tiny(), brief, tiny(1)], [1.0, 1.0, 0.0])):
        score_rollout(reward, sampled, tokenizer, (), gradient=True, point=CreditPoint("integrated", 2, 0.25))
    assert seen == [("integrated", 2, 0.25)] * 3


def test_none_is_no_part_of_a_sum() -> None:
    sampled, tokenizer = rollout()

    def some(**_: Any) -> list[float | None]:
        return [None, 2.0, None, 4.0]

    alone = score_rollout(tiny(), sampled, tokenizer, (), gradient=False)
    got = score_rollout(weighted_rewards([tiny(), some], [1.0, 0.5]), sampled, tokenizer, (), gradient=False)
    torch.testing.assert_close(got.score, alone.score + torch.tensor([0.0, 1.0, 0.0, 2.0]))
    assert got.parts["some"].isnan().tolist() == [True, False, True, False]
    with pytest.raises(ValueError, match=r"^reward: expected a number from some and some_2, got None for 'Name a hobby.'"):
        score_rollout(weighted_rewards([some, some]), sampled, tokenizer, (), gradient=False)
    with pytest.raises(ValueError, match=r"^reward: expected a number from some, got None for 'Name a hobby.'"):
        score_rollout(weighted_rewards([some, brief], [1.0, 0.0]), sampled, tokenizer, (), gradient=False)
    nan = float("nan")
    bad = RewardPart(lambda **_: [0.0, nan, 0.0, 0.0], 1.0, "bad")
    with pytest.raises(ValueError, match=r"^reward: expected finite float32 numbers from bad, got nan"):
        score_rollout(WeightedRewards((bad,)), sampled, tokenizer, (), gradient=False)


def test_a_sum_out_of_range() -> None:
    sampled, tokenizer = rollout()
    for rewards in ([brief], [tiny(), brief]):
        with pytest.raises(ValueError, match="^reward_weights: expected sums within float32's range"):
            score_rollout(weighted_rewards(rewards, [1e39] * len(rewards)), sampled, tokenizer, (), gradient=False)
