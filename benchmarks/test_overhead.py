"""What a DATC step costs over a GRPO step, in pytest-benchmark's bookkeeping; the measuring is `datc bench overhead`'s.

python -m pytest benchmarks/test_overhead.py --benchmark-only
"""

from __future__ import annotations

from typing import Any

import pytest

from datc_train.bench import overhead
from datc_train.cli import config_of


@pytest.mark.parametrize("equal_size", [False, True], ids=["reward model 0.58", "reward model 1.00"])
def test_overhead(benchmark: Any, equal_size: bool) -> None:
    config = config_of(["--config", "overhead_cpu", "--max_new_tokens", "48"])
    result = benchmark.pedantic(overhead.measure, (config,), {"equal_size": equal_size, "minutes": 3.0}, rounds=1)
    benchmark.extra_info |= {
        key: result[key] for key in ("overhead", "overhead_of_each_round", "methods", "parameters", "machine")
    }
    print(overhead.table(result))
    assert 0.9 < result["overhead"] < 2.5  # below: not the same work; above: something else than the credit grew
