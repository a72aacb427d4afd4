"""The study of what each method learns: runs that go on, a rate that is chosen apart, intervals that are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import learning_methods as study


def line(arm: str, rate: float, seed: int, after: float, before: float = 0.1) -> dict[str, Any]:
    return {
        "arm": arm,
        "rate": rate,
        "seed": seed,
        "reward_before": before,
        "reward_after": after,
        "utility_before": 2 * before,
        "utility_after": 2 * after,
        "finished_after": 1.0,
        "seconds": 1.0,
    }


def test_the_rate_is_chosen_by_other_seeds_than_those_that_judge() -> None:
    lines = [line("grpo", rate, seed, after) for rate, after in ((1e-4, 0.3), (1e-3, 0.6)) for seed in (100, 101)]
    lines += [line("grpo", 1e-4, 0, 9.0), line("grpo", 1e-3, 0, 0.5), line("grpo", 1e-2, 100, 7.0)]  # a rate of one tuning seed
    assert study.best_rate(lines, "grpo", (100, 101)) == 1e-3
    found = study.summary(lines, (0,), (100, 101))["arms"]["grpo"]
    assert found["rate"] == 1e-3
    assert found["reward_gains"] == [pytest.approx(0.4)]


def test_differences_are_paired_by_seed() -> None:
    """Student's t by hand: differences 0.1, 0.2, 0.3 have the mean 0.2 and a half width of 4.302653 x 0.1 / sqrt 3."""
    lines = [line(arm, 1e-3, seed, 0.5) for arm in ("grpo", "datc_tangent") for seed in (100, 101)]
    for seed, level in ((0, 0.5), (1, 1.5), (2, 0.2)):
        lines += [line("grpo", 1e-3, seed, level), line("datc_tangent", 1e-3, seed, level + 0.1 * (seed + 1))]
    result = study.summary(lines, (0, 1, 2), (100, 101))
    low, high = result["arms"]["datc_tangent"]["reward_difference"]
    half = 4.302652729911275 * 0.1 / 3**0.5
    assert (low, high) == (pytest.approx(0.2 - half), pytest.approx(0.2 + half))
    gains = [0.4, 1.4, 0.1]
    assert result["arms"]["datc_tangent"]["reward_ratio"] == pytest.approx((sum(gains) + 0.6) / sum(gains))
    assert "datc_tangent | 0.001 | 3 |" in study.table(result)


def test_a_study_of_the_tiny_pair_and_again(tmp_path: Path, capsys: Any) -> None:
    words = ["--out", str(tmp_path), "--arms", "grpo", "datc_integrated", "--seeds", "0", "1", "--tuning-seeds", "100"]
    words += ["--rates", "1e-3", "2e-3", "--config", "tiny", "--workers", "1", "--steps", "1", "--eval_limit", "2"]
    study.main([*words, "--eval_prompts", "quickstart"])
    result = json.loads((tmp_path / "learning_methods.json").read_text())
    assert set(result["arms"]) == {"grpo", "datc_integrated"}
    assert len(result["runs"]) == 2 * (2 + 2)
    assert {run["seed"] for run in result["runs"]} == {100, 0, 1}
    assert (tmp_path / "learning_methods.png").stat().st_size > 5_000
    capsys.readouterr()
    before = (tmp_path / "runs.jsonl").read_text()
    study.main([*words, "--eval_prompts", "quickstart"])
    assert (tmp_path / "runs.jsonl").read_text() == before  # nothing is run twice
    assert "is done" not in capsys.readouterr().out


def test_seeds_that_chose_the_rate_do_not_judge(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        study.main(["--out", str(tmp_path), "--seeds", "0", "1", "--tuning-seeds", "1"])
