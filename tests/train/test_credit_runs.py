"""Every credit method in the loop, and what it asks of the reward model. T numbers: reports against other trainers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_train import TINY, adapter, lines, same
from tolerances import FORWARD, NORM, assert_same_update

from datc_train import train
from datc_train.credit import METHODS
from datc_train.quickstart import load_tiny_policy, load_tiny_reward_model
from datc_train.reward import RewardModel
from datc_train.reward.left_out import left_out_scores

MESSAGES = [[{"role": "user", "content": "Hello"}], [{"role": "user", "content": "Name a colour, please."}]]
ANY_REWARD = {"grpo", "datc_random", "entropy", "delta", "arca"}


def by_length(completion_ids, **_):  # type: ignore[no-untyped-def]
    return [float(len(ids)) + 0.1 * (ids[0] % 7) for ids in completion_ids]


@pytest.fixture(scope="module")
def reward() -> RewardModel:
    model, tokenizer = load_tiny_reward_model()
    return RewardModel(model, tokenizer)


@pytest.fixture(scope="module")
def responses(reward: RewardModel) -> list[list[int]]:
    texts = ["Blue is a colour.", "I say hello", "", "Red, I think.\n"]
    eos = reward.policy_tokenizer.eos_token_id
    return [[*reward.policy_tokenizer(text)["input_ids"], eos] for text in texts]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(tmp_path: Path, method: str) -> None:
    run = train(TINY | {"method": method, "run_dir": str(tmp_path / "r")})
    first, second = lines(run, "metrics.jsonl")
    assert first["grad_norm"] > 0
    assert second["kl"] > 0
    assert 0 < second["ess_ratio"] <= 1
    assert 0.09 < second["top_tenth_share"] <= 1
    assert (second["negative_share"] is None) == (not METHODS[method].needs_credit)
    assert ("red_offset" in second) == (method == "red")
    assert ("p2t_varying_part" in second) == (method == "p2t")
    for line in lines(run, "samples.jsonl"):
        if "frozen" in METHODS[method].promises:
            assert all(w == 1.0 for w, frozen in zip(line["weight"], line["frozen"], strict=True) if frozen)


@pytest.mark.parametrize("method", METHODS)
def test_micro_batches_add_up(tmp_path: Path, method: str) -> None:
    """T31"""
    options = TINY | {"method": method, "steps": 1}
    norms = []
    for budget in (100_000, 1):
        run = train(options | {"run_dir": str(tmp_path / str(budget)), "micro_batch_tokens": budget})
        norms.append(lines(run, "metrics.jsonl")[0]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=NORM)


@pytest.mark.parametrize("method", METHODS)
def test_which_work_with_any_reward_function(tmp_path: Path, method: str) -> None:
    options = TINY | {"method": method, "run_dir": str(tmp_path / "r"), "steps": 1}
    if method in ANY_REWARD:
        run = train(options, reward=by_length)
        assert lines(run, "metrics.jsonl")[0]["grad_norm"] > 0
        if method in ("datc_random", "entropy"):
            assert lines(run, "metrics.jsonl")[0]["ess_ratio"] < 1  # only stop tokens are frozen
    else:
        with pytest.raises(
            ValueError, match=f"^reward: method '{method}' needs .* of a RewardModel, got function.*grpo, datc_ran"
        ):
            train(options, reward=by_length)
        assert not (tmp_path / "r").exists()


def test_arca_needs_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^method: 'arca' compares the policy with and without its adapter"):
        train(TINY | {"method": "arca", "lora": None, "run_dir": str(tmp_path / "r")})
    assert not (tmp_path / "r").exists()


def test_arca_takes_its_own_pass_where_nothing_else_does(tmp_path: Path) -> None:
    """beta 0 runs no reference pass; before the first update the adapter changes nothing."""
    run = train(TINY | {"method": "arca", "beta": 0.0, "run_dir": str(tmp_path / "r")})
    first, second = lines(run, "metrics.jsonl")
    assert first["kl"] is None
    assert first["ess_ratio"] == 1.0
    assert second["ess_ratio"] < 1.0
    grpo = train(TINY | {"method": "grpo", "beta": 0.0, "steps": 1, "run_dir": str(tmp_path / "grpo")})
    one = train(TINY | {"method": "arca", "beta": 0.0, "steps": 1, "run_dir": str(tmp_path / "arca")})
    assert same(grpo, one)


def test_p2t_needs_a_pad_token(tmp_path: Path) -> None:
    """T28: what is subtracted is named, not guessed."""
    model, tokenizer = load_tiny_reward_model()
    tokenizer.pad_token = None
    with pytest.raises(ValueError, match="^reward: method 'p2t' needs a reward model whose tokenizer has a pad token"):
        train(TINY | {"method": "p2t", "run_dir": str(tmp_path / "r")}, reward=RewardModel(model, tokenizer))


def test_red_rewards_are_scores_of_prefixes(reward: RewardModel, responses: list[list[int]]) -> None:
    """Every partial sum is the head's reading of the row cut there, and padding and batches change nothing."""
    got = reward.token_rewards(MESSAGES, responses, 2)
    rows, _, _ = reward._build(MESSAGES, responses, 2, {reward.policy_tokenizer.eos_token_id})
    start = 0
    for row, response in zip(rows, responses, strict=True):
        mapped = torch.as_tensor(row.position)
        tokens = (mapped >= 0).nonzero().flatten().tolist()
        assert (got[start : start + len(response)][mapped < 0] == 0).all()
        if tokens:
            ids = [row.ids[: int(mapped[tokens[0]])], *(row.ids[: int(mapped[t]) + 1] for t in tokens)]
            with torch.no_grad():
                scores = torch.cat([reward.model(torch.tensor([i])).logits.flatten() for i in ids])
            torch.testing.assert_close(got[start + tokens[0] : start + tokens[-1] + 1].cumsum(0)[-1], scores[-1] - scores[0])
            torch.testing.assert_close(
                got[start : start + len(response)][mapped >= 0], scores.diff(), rtol=FORWARD, atol=2 * FORWARD
            )  # a difference of two scores
        start += len(response)
    small = RewardModel(reward.model, reward.tokenizer, max_tokens_per_batch=1)
    torch.testing.assert_close(small.token_rewards(MESSAGES, responses, 2), got, rtol=FORWARD, atol=2 * FORWARD)


def test_left_out_scores_are_scores_of_shorter_responses(reward: RewardModel, responses: list[list[int]]) -> None:
    scored = reward.score(MESSAGES, responses, 2, gradient=False)
    got = left_out_scores(reward, MESSAGES, responses, 2, scored.score, scored.frozen)
    start = 0
    for index, response in enumerate(responses):
        for t in range(len(response)):
            expected = scored.score[index]
            if not scored.frozen[start + t]:
                shorter = response[:t] + response[t + 1 :]
                expected = reward.score([MESSAGES[index // 2]], [shorter], 1, gradient=False).score[0]
            torch.testing.assert_close(got[start + t], expected, rtol=FORWARD, atol=FORWARD)
        start += len(response)


def test_a_row_beyond_the_context_has_no_token_rewards(reward: RewardModel) -> None:
    limit = reward.model.config.max_position_embeddings
    neutral = RewardModel(reward.model, reward.tokenizer, on_overflow="neutral")
    ids = neutral.policy_tokenizer("a b c d e f g h")["input_ids"]
    with pytest.warns(RuntimeWarning, match="reward model: responses: expected rows of at most"):
        rewards = neutral.token_rewards(MESSAGES[:1], [ids, ids * limit], 2)
    assert (rewards[: len(ids)] != 0).any()
    assert (rewards[len(ids) :] == 0).all()


def test_full_fine_tuning_with_delta(tmp_path: Path) -> None:
    policy, tokenizer = load_tiny_policy()
    run = train(TINY | {"method": "delta", "lora": None, "steps": 1, "run_dir": str(tmp_path / "r")}, policy, tokenizer)
    line = lines(run, "metrics.jsonl")[0]
    assert line["seconds_old_policy"] > 0
    assert line["clip_fraction"] == 0.0
    assert line["kl"] == 0.0


def test_cached_weights_are_those_of_the_fused_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass before the update, in place of the same pass, changes no weight: the first update is the same one."""
    import datc_train.step as module

    fused = train(TINY | {"steps": 1, "run_dir": str(tmp_path / "fused")})
    real = module.Trainer.prepare
    monkeypatch.setattr(module.Trainer, "prepare", lambda self, *a, **k: real(self, *a, **k | {"updates": 2}))
    cached = train(TINY | {"steps": 1, "run_dir": str(tmp_path / "cached")})
    assert lines(cached, "metrics.jsonl")[0]["seconds_old_policy"] > 0
    one, other = adapter(fused), adapter(cached)
    assert_same_update(one, other, farthest=3 * TINY["learning_rate"])
    assert (fused / "samples.jsonl").read_text() == (cached / "samples.jsonl").read_text()


def test_red_and_p2t_with_a_policy_of_another_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that is several of the reward model's has their rewards' sum; the pad token is the reward model's own."""
    from test_reward_spelling import PROMPT, encode, other_tokenizer
    from test_reward_tiny import chatml_tokenizer, tiny_classifier

    monkeypatch.setenv("DATC_CACHE", str(tmp_path))
    fine, coarse, text = other_tokenizer(), chatml_tokenizer(), "Hello there. Thank you very much"
    fine.pad_token = "<|endoftext|>"
    model = tiny_classifier("llama", len(fine))
    with pytest.warns(RuntimeWarning, match="another vocabulary"):
        reward = RewardModel(model, fine, policy_tokenizer=coarse)
    own = RewardModel(model, fine)
    split = own.token_rewards([PROMPT], [encode(fine, text)], 1)
    whole = reward.token_rewards([PROMPT], [encode(coarse, text)], 1)
    rows, _, _ = reward._build([PROMPT], [encode(coarse, text)], 1, set())
    assert max(rows[0].width.tolist()) > 1
    assert min(rows[0].position.tolist()) >= 0
    torch.testing.assert_close(whole.sum(), split.sum(), rtol=FORWARD, atol=2 * FORWARD)
    start = 0
    for width, value in zip(rows[0].width.tolist(), whole, strict=True):
        torch.testing.assert_close(value, split[start : start + width].sum(), rtol=FORWARD, atol=2 * FORWARD)
        start += width
    assert torch.equal(reward.pad_embedding, model.get_input_embeddings().weight[fine.pad_token_id])
