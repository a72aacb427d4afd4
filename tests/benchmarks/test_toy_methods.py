"""The toy with every credit method."""

from __future__ import annotations

import pytest
import torch

from benchmarks import learning, toy_methods
from datc_kernels.testing.rounding import rounding, terms
from datc_train.credit import METHODS


def test_a_short_run_has_every_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "PRETRAINING", 2)
    monkeypatch.setattr(learning, "REGRESSION", 2)
    monkeypatch.setattr(learning, "LAST", 1)
    result = learning.run(1, 2, {1e-3: list(METHODS)}, lambda _: None, toy_methods.by_method)
    assert set(result["final"]["0.001"]) == set(METHODS)
    assert learning.table(result).count("\n") == len(METHODS) + 1
    curves = result["curves"]["0.001"]
    first = {curve["reward"][0] for (curve,) in curves.values()}
    second = {curve["reward"][1] for (curve,) in curves.values()}
    assert len(first) == 1  # all start from the same samples
    assert len(second) > len(METHODS) // 2  # and part


def test_grpo_and_datc_are_those_of_the_other_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "PRETRAINING", 2)
    monkeypatch.setattr(learning, "REGRESSION", 2)
    world = learning.World(0)
    for method in ("grpo", "datc"):
        here, there = (
            learning.train(world, method, seed=0, steps=3, learning_rate=1e-3, maker=maker)
            for maker in (toy_methods.by_method, learning.by_weights)
        )
        assert here["reward"] == pytest.approx(there["reward"])


def test_token_rewards_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "PRETRAINING", 2)
    monkeypatch.setattr(learning, "REGRESSION", 2)
    world = learning.World(0)
    ids = world.sequences(3, torch.Generator().manual_seed(0))
    rewards = toy_methods.token_rewards(world, ids)
    assert rewards.shape == (3, learning.RESPONSE)
    with torch.no_grad():
        whole, prompt = (
            learning._score(world.reward, world.reward.model.embed_tokens(part)) for part in (ids, ids[:, : learning.PROMPT])
        )
    allowed = rounding(length=terms(world.reward.model), condition=4)  # scores near 1, differences of which add up
    torch.testing.assert_close(rewards.sum(1), whole - prompt, rtol=allowed, atol=2 * allowed)
