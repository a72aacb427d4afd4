"""What scoring costs beside the plain pass over whole rows, in pytest-benchmark's bookkeeping; the measuring is reward_cost's.

python -m pytest benchmarks/test_reward.py --benchmark-only
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import reward_cost


@pytest.mark.parametrize("preset", ["six-layer", "quickstart"])
def test_reward(benchmark: Any, preset: str) -> None:
    result = benchmark.pedantic(reward_cost.measure, (reward_cost.PRESETS[preset],), {"rounds": 3}, rounds=1)
    benchmark.extra_info |= result
    print(reward_cost.table(result))
    # The bars are judged in what is printed and kept. Here: sharing must pay whatever else the machine does meanwhile.
    assert result["gradient"]["cpu_ratio"] < 1.0
    assert result["score"]["cpu_ratio"] < 1.0
