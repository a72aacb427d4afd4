"""The worker's process with transformers in it instead of vLLM: the same questions, answered. Run as `fake_engine.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from test_vllm_sampler import TransformersEngine

from datc_train.vllm_engine import worker


class Small(TransformersEngine):
    def __init__(self, alive: Any) -> None:
        TransformersEngine.made = []
        super().__init__(Path("unused"), timeout=0.0, environment={})

    def shut_down(self) -> None:
        pass


if __name__ == "__main__":
    worker.Worker = Small  # type: ignore[assignment, misc]
    worker.main()
