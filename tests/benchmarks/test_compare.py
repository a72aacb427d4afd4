"""GRPO, DATC and any other method side by side, on the tiny recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import compare
from datc_kernels.testing.rounding import rounding


def test_methods_side_by_side_and_again(tmp_path: Path, capsys: Any) -> None:
    words = ["--config", "tiny", "--steps", "2", "--out", str(tmp_path / "c"), "--methods", "grpo", "datc", "entropy"]
    compare.main(words)
    rows = json.loads((tmp_path / "c" / "compare.json").read_text())["runs"]
    assert [row["run"] for row in rows] == ["grpo-0", "datc-0", "entropy-0", "datc_rescaled-0"]
    by_run = {row["run"]: row for row in rows}
    ratio = by_run["datc_rescaled-0"]["learning_rate"] / by_run["datc-0"]["learning_rate"]
    assert abs(ratio - by_run["grpo-0"]["update_norm"] / by_run["datc-0"]["update_norm"]) <= rounding() * ratio
    assert (tmp_path / "c" / "report.html").stat().st_size > 10_000
    capsys.readouterr()
    compare.main([*words, "--no-rescaled"])
    assert "grpo-0" in capsys.readouterr().out
    again = json.loads((tmp_path / "c" / "compare.json").read_text())["runs"]
    assert again == rows[:3]
