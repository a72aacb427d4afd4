"""The method's claim at toy scale: the order of the paper's ablation, over seeds."""

from __future__ import annotations

import statistics

import pytest

from benchmarks import learning


@pytest.mark.slow
def test_direction_helps() -> None:
    """DATC above GRPO above shuffled weights by more than the spread over seeds; without the angle below GRPO."""
    final = learning.run(3, 100)["final"]
    datc, grpo, shuffled = (final["0.0001"][method]["reward"] for method in ("datc", "grpo", "shuffled"))
    assert min(a - b for a, b in zip(datc, grpo, strict=True)) > 0  # on every seed
    assert statistics.mean(datc) - statistics.mean(grpo) > max(_spread(datc), _spread(grpo))
    assert statistics.mean(grpo) > statistics.mean(shuffled)
    high = final["0.0003"]
    assert statistics.mean(high["no_angle"]["reward"]) < statistics.mean(high["grpo"]["reward"])


def test_a_short_run_has_every_figure(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(learning, "LAST", 2)
    monkeypatch.setattr(learning, "PRETRAINING", 2)
    monkeypatch.setattr(learning, "REGRESSION", 2)
    result = learning.run(2, 3, {1e-4: list(learning.METHODS), 3e-4: list(learning.METHODS)})
    assert set(result["final"]) == {"0.0001", "0.0003"}
    for by_method in result["final"].values():
        assert set(by_method) == set(learning.METHODS)
        assert all(len(values["reward"]) == len(values["utility"]) == 2 for values in by_method.values())
    assert learning.table(result).count("\n") == 9
    learning.plot(result, tmp_path / "learning.png")
    assert (tmp_path / "learning.png").stat().st_size > 1000


def _spread(values: list[float]) -> float:
    return statistics.stdev(values)
