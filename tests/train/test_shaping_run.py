"""Reward shaping wired into a run: what advantages are made of, what is sampled again, what the loss leaves out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_train import TINY, adapter, lines
from tolerances import MEAN

from datc_train import train
from datc_train.advantages import group_advantages
from datc_train.reward.overflow import at_group_mean
from datc_train.reward.shaping import FLOOR, shaped_rewards
from datc_train.rollout import TransformersSampler
from datc_train.shaping import in_the_loss, rewards_of, sample_finished, with_groups
from datc_train.step import Trainer
from datc_train.types import Prompt, Rollout, ScoredRollout

SHAPED = TINY | {"reward_shaping": True, "shaping_prompts": 3}


def rollout_of(finished: Sequence[Sequence[bool]], first: int = 0) -> Rollout:
    """Groups whose responses are runs of one number each, counted from `first`."""
    size, count = len(finished[0]), sum(map(len, finished))
    lengths = torch.tensor([1 + (first + i) % 3 for i in range(count)])
    ids = torch.arange(first, first + count).repeat_interleave(lengths)
    return Rollout(
        prompts=tuple(Prompt(messages=[{"role": "user", "content": str(i)}]) for i in range(len(finished))),
        prompt_ids=tuple((i,) for i in range(len(finished))),
        group_size=size,
        response_ids=ids,
        lengths=lengths,
        sampler_logprob=-ids.float(),
        finished=torch.tensor([value for group in finished for value in group]),
    )


def responses(rollout: Rollout) -> list[list[int]]:
    return [part.tolist() for part in rollout.response_ids.split(rollout.lengths.tolist())]


@given(st.lists(st.lists(st.booleans(), min_size=2, max_size=2), min_size=1, max_size=5), st.data())
def test_groups_take_the_places_they_are_given(finished: list[list[bool]], data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(finished) - 1), min_size=1, unique=True))
    mine, theirs = rollout_of(finished), rollout_of([[True, False]] * len(places), first=100)
    found = with_groups(mine, places, theirs)
    expected, expected_finished = responses(mine), mine.finished.view(-1, 2).clone()
    for i, place in enumerate(places):
        expected[2 * place : 2 * place + 2] = responses(theirs)[2 * i : 2 * i + 2]
        expected_finished[place] = torch.tensor([True, False])
    assert responses(found) == expected
    assert torch.equal(found.finished.view(-1, 2), expected_finished)
    assert torch.equal(found.sampler_logprob, -found.response_ids.float())
    assert found.prompts == mine.prompts


class Scripted:
    """A sampler that gives what it is told and keeps what it was asked for."""

    def __init__(self, *rollouts: Rollout) -> None:
        self.rollouts, self.asked = list(rollouts), []

    def sample(self, prompts: list[Prompt], *, seed: int) -> Rollout:
        self.asked.append(([prompt.messages[-1]["content"] for prompt in prompts], seed))
        return self.rollouts.pop(0)


def test_only_groups_without_a_finished_response_are_sampled_again_and_only_once() -> None:
    first = rollout_of([[True, False], [False, False], [False, True], [False, False]])
    sampler: Any = Scripted(first, rollout_of([[True, True], [False, False]], first=50))
    found = sample_finished(sampler, list(first.prompts), seed=7)
    assert sampler.asked == [(["0", "1", "2", "3"], 7), (["1", "3"], 7 + 2**31)]
    assert found.finished.tolist() == [True, False, True, True, False, True, False, False]
    assert in_the_loss(found, mask_truncated=False, shaped=True).tolist() == [True] * 6 + [False] * 2  # type: ignore[union-attr]
    kept = in_the_loss(found, mask_truncated=True, shaped=True)
    assert kept is not None
    assert torch.equal(kept, found.finished)
    assert in_the_loss(found, mask_truncated=False, shaped=False) is None
    sampler = Scripted(rollout_of([[True, False]]))
    sample_finished(sampler, list(first.prompts[:1]), seed=7)
    assert len(sampler.asked) == 1


@pytest.fixture(scope="module")
def shaped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(SHAPED | {"run_dir": str(tmp_path_factory.mktemp("shaped") / "r"), "samples_per_step": 100})


def test_advantages_are_those_of_the_shaped_rewards(shaped_run: Path) -> None:
    sigma0 = json.loads((shaped_run / "sigma0.json").read_text())["sigma0"]
    assert sigma0 > 0
    for metrics in lines(shaped_run, "metrics.jsonl"):
        samples = [line for line in lines(shaped_run, "samples.jsonl") if line["step"] == metrics["step"]]
        size = TINY["group_size"]
        reward = shaped_rewards(
            torch.tensor([line["reward"] for line in samples]),
            torch.tensor([len(line["token_ids"]) for line in samples]),
            [line["response"] for line in samples],
            size,
            sigma0,
        )
        expected = group_advantages(reward, size, floor=FLOOR * sigma0)
        found = torch.tensor([line["advantage"] for line in samples])
        torch.testing.assert_close(found, expected, rtol=MEAN, atol=MEAN)
        assert metrics["reward_shaped_mean"] == pytest.approx(float(reward.mean()), rel=MEAN, abs=MEAN)
        assert metrics["reward_mean"] == pytest.approx(sum(line["reward"] for line in samples) / len(samples), rel=MEAN, abs=MEAN)
        assert 0 <= metrics["frac_groups_left_out"] <= 1


@given(st.lists(st.booleans(), min_size=4, max_size=4), st.integers(1, 40))
def test_rows_that_were_not_read_pay_nothing_and_have_no_advantage(unread: list[bool], length: int) -> None:
    rollout = rollout_of([[True, True], [True, False]])
    rollout = replace(rollout, lengths=torch.tensor([1, length, 3, 40]))
    rollout = replace(rollout, response_ids=torch.zeros(int(rollout.lengths.sum()), dtype=torch.long))
    holes = torch.tensor(unread)
    scores = at_group_mean(torch.tensor([1.0, -0.5, 0.25, 2.0]), holes, 2)
    nothing = torch.zeros(1, dtype=torch.bool)
    scored = ScoredRollout(scores, None, nothing, nothing, None, unread=holes if holes.any() else None)
    tokenizer: Any = type("Tokenizer", (), {"decode": lambda *_, **__: "x"})()
    reward = rewards_of(rollout, scored, tokenizer, 1.0)
    advantage = group_advantages(reward, 2, floor=FLOOR)
    assert advantage[holes].abs().sum() == 0
    paid = shaped_rewards(scores, rollout.lengths, ["x"] * 4, 2, 1.0)
    assert torch.equal(reward[~holes], paid[~holes])


def test_without_shaping_its_metrics_are_undefined(tmp_path: Path) -> None:
    run = train(TINY | {"run_dir": str(tmp_path / "r"), "steps": 1})
    assert lines(run, "metrics.jsonl")[0]["reward_shaped_mean"] is None
    assert not (run / "sigma0.json").exists()


def test_a_resumed_run_keeps_its_spread(shaped_run: Path, tmp_path: Path) -> None:
    options = SHAPED | {"run_dir": str(tmp_path / "r"), "samples_per_step": 100, "save_every": 1}
    train(options | {"steps": 1})
    run = train(options | {"resume": "auto"})
    assert (run / "sigma0.json").read_text() == (shaped_run / "sigma0.json").read_text()
    one, other = adapter(shaped_run), adapter(run)
    assert all(torch.equal(one[key], other[key]) for key in one)
    (run / "sigma0.json").unlink()
    with pytest.raises(ValueError, match=r"resume: expected .*sigma0\.json"):
        train(options | {"resume": "auto", "steps": TINY["steps"] + 1})


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_with_every_group_left_out_nothing_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str) -> None:
    sample = TransformersSampler.sample

    def unfinished(self: TransformersSampler, prompts: Sequence[Prompt], *, seed: int) -> Rollout:
        rollout = sample(self, prompts, seed=seed)
        return rollout.__class__(**vars(rollout) | {"finished": torch.zeros_like(rollout.finished)})

    monkeypatch.setattr(TransformersSampler, "sample", unfinished)
    run = train(SHAPED | {"run_dir": str(tmp_path / "r"), "steps": 1, "loss": loss})
    (metrics,) = lines(run, "metrics.jsonl")
    assert metrics["frac_groups_left_out"] == 1.0
    assert metrics["update_norm"] == 0.0
    assert metrics["reward_mean"] is not None


def test_shaping_without_the_spread_is_an_error() -> None:
    from datc_train.config import config_from

    missing: Any = None
    with pytest.raises(ValueError, match="sigma0: expected"):
        Trainer(config_from(SHAPED), missing, missing, missing, missing)


def test_shaped_rewards_with_a_reward_function(tmp_path: Path) -> None:
    def brief(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        return [-float(sum(ids) % 7) for ids in completion_ids]

    run = train(SHAPED | {"run_dir": str(tmp_path / "r"), "method": "grpo", "steps": 1}, reward=brief)
    assert lines(run, "metrics.jsonl")[0]["reward_shaped_mean"] is not None


def test_a_spread_of_nothing_is_an_error(tmp_path: Path) -> None:
    def alike(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        return [1.0] * len(completion_ids)

    with pytest.raises(ValueError, match="reward_shaping: expected scores that differ"):
        train(SHAPED | {"run_dir": str(tmp_path / "r"), "method": "grpo", "steps": 1}, reward=alike)


def test_a_run_from_before_these_keys_goes_on(tmp_path: Path) -> None:
    options = TINY | {"run_dir": str(tmp_path / "r")}
    run = train(options | {"steps": 1})
    path = run / "config.yaml"
    kept = [line for line in path.read_text().splitlines() if not line.startswith(("reward_shaping", "shaping_prompts"))]
    path.write_text("\n".join(kept) + "\n")
    assert len(lines(train(options | {"resume": "auto"}), "metrics.jsonl")) == TINY["steps"]
