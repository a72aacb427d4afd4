"""Length terms, degenerate responses and sigma0, against numbers worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from datc_kernels.testing.rounding import rounding
from datc_train.advantages import group_advantages
from datc_train.reward.shaping import cached_spread, is_degenerate, shaped_rewards, spread, unfinished_groups


def test_sigma0_is_the_median_of_population_deviations() -> None:
    score = torch.tensor([0.0, 2.0, 5.0, 5.0, 0.0, 8.0])  # deviations 1, 0, 4
    assert spread(score, 2) == 1.0
    assert spread(torch.tensor([0.0, 2.0, 0.0, 8.0]), 2) == 2.5  # an even number of groups: the middle of 1 and 4
    assert spread(torch.full((8,), 16777216.0) + torch.arange(8) % 2 * 2, 8) == 1.0  # float32 sums would lose it


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0.5), (1, 0.4375), (4, 0.25), (8, 0.0), (9, 0.0), (1024, 0.0), (1280, 0.5), (1536, 1.0), (2048, 2.0), (5000, 2.0)],
)
def test_length_terms(length: int, penalty: float) -> None:
    for sigma0 in (0.0, 1.0, 3.03):
        reward = shaped_rewards(torch.tensor([1.5]), torch.tensor([length]), ["x"], 1, sigma0)
        assert reward.dtype == torch.float64
        assert reward.item() == pytest.approx(1.5 - penalty * sigma0, rel=rounding(torch.float64, length=16))


def test_degenerate_responses_fall_below_their_group() -> None:
    score = torch.tensor([3.0, 9.0, 1.0, -4.0, 2.0, 2.0])
    texts = ["good", " \n\t ", "fine", "a" + "\n" * 32 + "b", "", "x"]
    reward = shaped_rewards(score, torch.full((6,), 20), texts, 3, 1.0)
    assert reward.tolist() == [3.0, 0.0, 1.0, -5.0, -5.0, 2.0]


def test_short_length_counts_before_the_group_minimum() -> None:
    reward = shaped_rewards(torch.tensor([1.0, 1.0]), torch.tensor([4, 20]), ["ok", ""], 2, 2.0)
    assert reward.tolist() == [0.5, -0.5]


@pytest.mark.parametrize(
    ("text", "degenerate"),
    [
        ("", True),
        ("\u00a0\u3000\n", True),
        ("a" + "\n" * 31, False),
        ("\n" * 32 + "a", True),
        (("\n" * 31 + " ") * 2 + "a", False),
    ],
)
def test_degenerate(text: str, degenerate: bool) -> None:
    assert is_degenerate(text) == degenerate


def test_equal_scores_stay_without_advantage() -> None:
    score = torch.full((4,), 12.3)
    reward = shaped_rewards(score, torch.full((4,), 30), ["x"] * 4, 4, 3.0)
    assert group_advantages(reward, 4, floor=1.5).tolist() == [0.0] * 4


def test_groups_without_a_finished_response() -> None:
    finished = torch.tensor([True, False, False, False, True, True])
    assert unfinished_groups(finished, 2).tolist() == [False, True, False]


def test_sigma0_is_measured_once(tmp_path: Path) -> None:
    path = tmp_path / "sigma0.json"
    assert cached_spread(path, lambda: 3.03) == 3.03
    assert cached_spread(path, lambda: pytest.fail("measured again")) == 3.03
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"sigma0.json: expected"):
        cached_spread(path, lambda: 1.0)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_what_cannot_be(bad: float) -> None:
    with pytest.raises(ValueError, match="^sigma0: expected a finite number"):
        shaped_rewards(torch.tensor([1.0]), torch.tensor([9]), ["x"], 1, bad)
    with pytest.raises(ValueError, match=r"^score: expected finite numbers, got nan for response 1 of prompt 1"):
        spread(torch.tensor([1.0, 2.0, 3.0, math.nan]), 2)
    with pytest.raises(ValueError, match="^score: expected whole groups of 2"):
        spread(torch.tensor([1.0]), 2)
    with pytest.raises(ValueError, match="^score: expected at least one group"):
        spread(torch.tensor([]), 2)
    with pytest.raises(ValueError, match="^texts: expected 2"):
        shaped_rewards(torch.tensor([1.0, 2.0]), torch.tensor([9, 9]), ["x"], 2, 1.0)
