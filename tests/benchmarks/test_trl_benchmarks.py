"""TRL's loop and this package's on one recipe, on the tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from benchmarks import trl_curves, trl_steps

pytestmark = pytest.mark.filterwarnings("ignore")


def test_steps_in_turn(tmp_path: Path) -> None:
    result = trl_steps.main(["--config", "tiny", "--rounds", "2", "--json", str(tmp_path / "s.json")])
    assert json.loads((tmp_path / "s.json").read_text())["ratios"].keys() == {f"{a} / {b}" for a, b in trl_steps.RATIOS}
    assert result["seconds"].keys() == {"own", "own_datc", "trl", "datc_trl"}
    for seconds in result["seconds"].values():
        phases = [value for name, value in seconds.items() if name != "step"]
        assert min(phases) > 0
        assert max(phases) <= seconds["step"]  # medians: what lies within a step in every round
    assert "credit" in result["seconds"]["datc_trl"]
    assert "credit" not in result["seconds"]["trl"]


def test_an_error_of_trl_is_raised_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ArithmeticError("no")

    monkeypatch.setattr(trl_steps.GRPOTrainer, "_compute_loss", fail)
    with pytest.raises(RuntimeError, match="GRPOTrainer stopped"):
        trl_steps.main(["--config", "tiny", "--rounds", "1"])


def test_curves_go_on_where_they_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--config", "tiny", "--out", str(tmp_path), "--methods", "datc_trl"]
    whole = tmp_path / "whole"
    trl_curves.main([*words, "--steps", "9", "--out", str(whole)])

    class Killed(BaseException):
        pass

    calls = 0
    compute = trl_curves.DATCTrainer._compute_loss

    def killed(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise Killed
        return compute(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trl_curves.DATCTrainer, "_compute_loss", killed)
        with pytest.raises(Killed):
            trl_curves.main([*words, "--steps", "9"])
    trl_curves.main([*words, "--steps", "9", "--json", str(tmp_path / "c.json"), "--plot", str(tmp_path / "c.png")])
    once, twice = (json.loads((folder / "datc_trl.json").read_text()) for folder in (whole, tmp_path))
    assert len(once) == len(twice) == 9
    assert [line["reward"] for line in once] == [line["reward"] for line in twice]
    assert (tmp_path / "c.png").stat().st_size > 5_000
    monkeypatch.setattr(trl_curves, "make_trainer", None)
    trl_curves.main([*words, "--steps", "9"])  # complete: not trained again
    (tmp_path / "datc_trl.json").unlink()
    trl_curves.main([*words, "--steps", "8"])  # nor from a checkpoint of its last step
    with pytest.raises(ValueError, match="^learning_rate: expected 0.001 as in .*settings.json, got 0.01"):
        trl_curves.main([*words, "--steps", "8", "--learning_rate", "1e-2"])


def test_runs_that_are_too_short_to_say_something(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for call, words in ((trl_steps.main, ["--rounds", "0"]), (trl_curves.main, ["--steps", "7", "--out", str(tmp_path / "c")])):
        with pytest.raises(SystemExit):
            call(["--config", "tiny", *words])
        assert f"{words[0]}: expected at least" in capsys.readouterr().err
