"""A thin GRPO/DATC training layer: a policy, a frozen reward model, and one loop that reads top-down (`loop.py`).

    from datc_train import train
    run = train({"policy": "quickstart", "reward": "quickstart", "prompts": "quickstart", "steps": 16})

Importing this package loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datc_train.config import Config
    from datc_train.loop import train

__all__ = ["Config", "train"]


def __getattr__(name: str) -> Any:
    if name == "train":
        from datc_train.loop import train

        return train
    if name == "Config":
        from datc_train.config import Config

        return Config
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
