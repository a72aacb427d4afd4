"""DATCTrainer on two processes (gloo, data parallel through accelerate), with groups that lie on both."""

from __future__ import annotations

import pickle
import socket
from typing import Any

import numpy as np
import pytest
from torch import multiprocessing

pytest.importorskip("trl")

from test_trl import length_reward, reward_model
from tolerances import WEIGHT
from trl_ranks import run


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(run, (port, str(folder)), nprocs=2)  # type: ignore[no-untyped-call]
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(2)]


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("name", ["stock", "grpo", "ones", "datc"])
def test_processes_stay_together(ranks: list[dict[str, Any]], name: str) -> None:
    assert equal(ranks[0][name], ranks[1][name])


def test_without_weights_it_is_the_stock_trainer_bit_for_bit(ranks: list[dict[str, Any]]) -> None:
    assert equal(ranks[0]["stock"], ranks[0]["grpo"])
    assert equal(ranks[0]["stock"], ranks[0]["ones"])
    assert not equal(ranks[0]["stock"], ranks[0]["datc"])


def test_groups_that_span_processes_are_scored_as_groups(ranks: list[dict[str, Any]]) -> None:
    """The mean of a response's token advantages is its advantage within the group of both processes' responses."""
    assert len(ranks[0]["seen"]) == 2
    for step in ranks[0]["seen"]:
        prompts, ids, advantages = ([value for rank in step for value in rank[key]] for key in ("prompts", "ids", "advantages"))
        assert len(prompts) == 4
        assert all(prompt == prompts[0] for prompt in prompts)
        scores = np.array(reward_model().score([prompts[0]], ids, 4, gradient=False).score.tolist())
        scores += length_reward(ids)
        expected = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-4)
        # Scores of passes over other batches; trl divides by a deviation plus 1e-4.
        for found, advantage in zip(advantages, expected, strict=True):
            assert np.mean(found) == pytest.approx(advantage, rel=WEIGHT, abs=WEIGHT)
        assert any(max(found) - min(found) > 1e-3 for found in advantages)  # weights, not one number
        for rank in step:
            for padding, found in zip(rank["padding"], rank["advantages"], strict=True):
                assert padding == pytest.approx([np.mean(found)] * len(padding), rel=WEIGHT, abs=WEIGHT)


def test_metrics_are_of_both_processes(ranks: list[dict[str, Any]]) -> None:
    log = ranks[0]["log"]
    assert len(log) == 2
    assert all(0 < line["datc/ess"] <= 1 for line in log)


def test_several_models_are_normalised_within_groups_that_span_processes(ranks: list[dict[str, Any]]) -> None:
    """Each gradient by 1 / (deviation of that model's scores in the whole group + 1e-4), as TRL normalises the scores."""
    if "several" not in ranks[0]:
        pytest.skip("this TRL only normalises the sum")
    for rank in ranks:
        found = rank["several"]
        expected = []
        for part in range(2):
            scores = np.concatenate([other["several"]["parts"][part][0] for other in ranks]).astype(np.float64)
            assert len(scores) == 4
            expected.append(found["parts"][part][1] / (scores.std(ddof=1) + 1e-4))
        np.testing.assert_allclose(found["total"], np.concatenate(expected, axis=1), rtol=1e-4)
