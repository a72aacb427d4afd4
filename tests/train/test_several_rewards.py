"""Several rewards as one: score, gradient and credit of the weighted sum against autograd and sums by hand, in float64."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train import TINY, lines, same
from torch import Tensor

from datc_kernels import linear_credit
from datc_train import train
from datc_train.credit import METHODS
from datc_train.credit_point import CreditPoint
from datc_train.quickstart import load_tiny_policy, load_tiny_reward_model
from datc_train.reward import RewardModel
from datc_train.reward.several import JoinedTables, RewardPart, WeightedRewards, distinct_names, weighted_rewards, weighted_sum
from datc_train.score import check_reward, score_rollout
from datc_train.types import Prompt, Rollout, ScoredRollout

ONE = TINY | {"steps": 1, "save_every": None, "prompts_per_step": 1}
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


def test_a_list_of_one_is_bit_equal_to_the_model_alone(tmp_path: Path) -> None:
    alone = train(ONE | {"run_dir": str(tmp_path / "a"), "steps": 2})
    listed = train(ONE | {"run_dir": str(tmp_path / "b"), "steps": 2, "reward": ["tiny"]})
    assert same(alone, listed)
    one, other = (lines(run, "metrics.jsonl")[1] for run in (alone, listed))
    assert {k: v for k, v in one.items() if "second" not in k}.items() <= other.items()
    assert other["reward_tiny_mean"] == other["reward_mean"]
    assert other["reward_tiny_std"] == other["reward_std"]


def test_a_model_and_rules_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line: metrics, samples, evaluations and the report know the parts; resuming wants the same."""
    from datc_train.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rules_1.py").write_text(
        "def brief(completion_ids, **_):\n    return [-float(len(x)) for x in completion_ids]\n"
        "async def even(completion_ids, **_):\n    return [None if len(x) % 2 else 1.0 for x in completion_ids]\n"
    )
    words = ["train", "--config", "tiny", "--run_dir", "r", "--eval_prompts", "quickstart", "--eval_limit", "2", "--save_every=1"]
    words += ["--reward", "[tiny, my_rules_1:brief, my_rules_1:even]", "--max_new_tokens", "8", "--samples_per_step", "2"]
    main([*words, "--reward_weights", "[1, 0.5, -0.1]", "--steps", "2"])
    for line in lines(Path("r"), "metrics.jsonl"):
        parts = [line[f"reward_{name}_mean"] for name in ("tiny", "brief", "even")]
        assert line["reward_mean"] == pytest.approx(parts[0] + 0.5 * parts[1] - 0.1 * parts[2], abs=1e-5)
        assert line["reward_brief_std"] == 0.0
    for line in lines(Path("r"), "samples.jsonl"):
        assert line["rewards"]["brief"] == -8.0
        assert line["reward"] == pytest.approx(line["rewards"]["tiny"] - 4.0 - 0.1, abs=1e-5)
    evaluated = lines(Path("r"), "eval.jsonl")[-1]
    assert evaluated["reward_brief_mean"] == -8.0
    assert evaluated["samples"][0]["rewards"]["even"] == 1.0
    assert Path("r/figures/reward_brief.png").is_file()
    assert "1 x tiny + 0.5 x my_rules_1:brief + -0.1 x my_rules_1:even" in Path("r/report.html").read_text()
    with pytest.raises(SystemExit):
        main([*words, "--reward_weights", "[1, 2, 3]", "--steps", "3", "--resume", "auto"])
    main([*words, "--reward_weights", "[1, 0.5, -0.1]", "--steps", "3", "--resume", "auto", "--reward_timeout", "60"])
    assert len(lines(Path("r"), "metrics.jsonl")) == 3
    from datc_train.bench.overhead import measure
    from datc_train.config import config_from
    from datc_train.doctor import dry_run, examine

    config = config_from(ONE | {"reward": ["tiny", "my_rules_1:brief"], "reward_weights": [1.0, 0.5]})
    assert not [finding for finding in examine(config, say=lambda _: None) if finding.state == "wrong"]
    dry_run(config, say=lambda _: None)
    assert measure(config, minutes=0)["parameters"]["reward"] > 0


def test_given_rewards_must_be_given_again(tmp_path: Path) -> None:
    config = ONE | {"run_dir": str(tmp_path / "r"), "save_every": 1}
    train(config, reward=[tiny(), brief])
    assert json.loads((tmp_path / "r" / "sources.json").read_text())["rewards"] == ["reward_model", "brief"]
    more = config | {"resume": "auto", "steps": 2}
    for other in ([tiny()], tiny(), [brief, tiny()]):
        with pytest.raises(ValueError, match="^reward: expected those that the run in .* began with, reward_model, brief, got"):
            train(more, reward=other)
    train(more, reward=[tiny(), brief])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"reward": []}, "reward: expected a name, or a list of at least one, got"),
        ({"reward": ["tiny", ""]}, "reward: expected a name, or a list"),
        ({"reward": ["tiny", "tiny"], "reward_weights": [1.0]}, "reward_weights: expected 2, one for each reward, got 1"),
        ({"reward_weights": [1.0, 2.0]}, "reward_weights: expected 1, one for each reward, got 2"),
        ({"reward_weights": [float("inf")]}, "reward_weights: expected null or finite numbers"),
        ({"reward_weights": [0.0]}, "reward_weights: expected null or finite numbers, one of them not 0"),
        ({"reward_weights": []}, "reward_weights: expected null or finite numbers"),
        ({"reward_weights": ["much"]}, "reward_weights: expected a list of numbers or null"),
        ({"reward_timeout": 0}, "reward_timeout: expected null or a finite number above 0"),
        ({"reward": "no_such_module_1:brief"}, "reward: expected quickstart, tiny, a folder, a hub name or module:function"),
        ({"reward": "json:nothing"}, "reward: expected a function in the module json"),
        ({"reward": "json:JSONDecoder"}, "reward: expected a function, got 'json:JSONDecoder', which is the class"),
        ({"reward": "json:dumps"}, "reward: method 'datc' needs the gradient of a RewardModel, got function"),
        (
            {"reward": ["tiny", "json:dumps"], "reward_weights": [0.0, 1.0]},
            "reward: method 'datc' needs the gradient of a RewardModel, got RewardModel of weight 0, function",
        ),
    ],
)
def test_what_is_refused_by_the_doctor_and_by_training(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    from datc_train.config import config_from
    from datc_train.doctor import examine

    config = ONE | {"run_dir": str(tmp_path / "r")} | change
    with pytest.raises(ValueError, match=".") as refused:
        train(config)
    assert str(refused.value).startswith(says)
    assert not (tmp_path / "r").exists()
    try:
        wrong = [finding.text for finding in examine(config_from(config), say=lambda _: None) if finding.state == "wrong"]
    except ValueError as error:
        wrong = [str(error)]
    assert any(text.startswith(says) for text in wrong), wrong


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "reward: expected at least one, got none"),
        ([lambda **_: []], "reward: method 'datc' needs the gradient of a RewardModel, got function"),
        ([tiny, [brief]], "reward: expected reward models and functions in the list, got list"),
        (["tiny"], "reward: expected a RewardModel or a function, got str"),
    ],
)
def test_lists_that_are_none(tmp_path: Path, given: list[Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        train(ONE | {"run_dir": str(tmp_path / "r")}, reward=given)
    with pytest.raises(ValueError, match="^reward: expected RewardModel.* around it"):
        check_reward(weighted_rewards([load_tiny_reward_model()[0]]), "grpo")


def test_what_is_a_function_and_what_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datc_train.rewards import is_function

    monkeypatch.chdir(tmp_path)
    assert is_function("rules:brief")
    assert is_function("my.rules:Judge.score")
    for name in (r"C:\models\rm", "C:/models/rm", "C:rm", "tiny", "org/model", "./a:b", "rules:", ":f", "a:b:c", "a-b:c"):
        assert not is_function(name), name
    (tmp_path / "rules:brief").mkdir()
    assert not is_function("rules:brief")


def test_names_are_distinct_and_fit_a_metric() -> None:
    names = distinct_names(["tiny", "tiny", "<lambda>", "Qwen/RM 0.6B", "shaped", "tiny_2", "ü"])
    assert names == ["tiny", "tiny_2", "lambda", "Qwen_RM_0.6B", "shaped_2", "tiny_2_2", "reward"]


def test_shaping_and_several_updates_take_sums(tmp_path: Path) -> None:
    options = {"reward_shaping": True, "shaping_prompts": 2, "epochs_per_rollout": 2, "updates_per_epoch": 2, "steps": 4}
    run = train(TINY | options | {"run_dir": str(tmp_path / "r"), "reward_weights": [1.0, 0.1]}, reward=[tiny(), odd])
    first, second = lines(run, "metrics.jsonl")[:2]
    assert first["reward_odd_mean"] != second["reward_odd_mean"]  # of the responses that this update learned from
    assert first["reward_shaped_mean"] is not None


def odd(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(response) % 11) for response in completion_ids]


def test_a_sum_trains_with_every_method(tmp_path: Path) -> None:
    for method in METHODS:
        run = train(ONE | {"run_dir": str(tmp_path / method), "method": method}, reward=[tiny(), tiny(1), odd])
        assert lines(run, "metrics.jsonl")[0]["update_norm"] > 0
