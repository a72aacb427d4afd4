"""The toy of the paper's ablation: what held on every seed, and that its pieces run."""

from __future__ import annotations

import pytest

from benchmarks import learning


@pytest.mark.slow
def test_where_the_weights_go_matters() -> None:
    """On every seed: DATC above its own weights in another order, and without the angle below GRPO.

    DATC above GRPO is not asserted: at 1e-4 it came out on two seeds of three (`benchmarks/results/learning_cpu.json`), with a
    reward model that explains less than half of the utility.
    """
    final = learning.run(3, 100, {1e-4: ["datc", "shuffled"], 3e-4: ["grpo", "no_angle"]})["final"]
    low, high = final["0.0001"], final["0.0003"]
    assert all(a > b for a, b in zip(low["datc"]["reward"], low["shuffled"]["reward"], strict=True))
    assert all(a < b for a, b in zip(high["no_angle"]["reward"], high["grpo"]["reward"], strict=True))


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
