"""Models and prompts for a first run: SmolLM2-135M-Instruct, a reward model for it, tiny random ones, some 400 prompts.

Importing this package loads neither torch nor transformers; each function imports what it needs.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datc_train.quickstart.reward_model import load_reward_model, load_untrained_reward_model
    from datc_train.quickstart.smollm2 import load_policy
    from datc_train.quickstart.tiny import load_tiny_policy, load_tiny_reward_model
    from datc_train.quickstart.utility import true_utility

__all__ = [
    "heldout_prompts",
    "load_policy",
    "load_reward_model",
    "load_tiny_policy",
    "load_tiny_reward_model",
    "load_untrained_reward_model",
    "long_prompts",
    "train_prompts",
    "true_utility",
]
BRIEF = " Answer in one short sentence."  # how every prompt ends


def train_prompts() -> list[dict[str, Any]]:
    """The prompts to train on: rows `{"prompt": [{"role": "user", "content": ...}]}`."""
    return _rows("train.jsonl")


def heldout_prompts() -> list[dict[str, Any]]:
    """The prompts to evaluate on, none of them among `train_prompts`."""
    return _rows("heldout.jsonl")


def long_prompts() -> list[dict[str, Any]]:
    """Twelve questions in one, some 200 tokens each: for measuring."""
    questions = [row["prompt"][0]["content"].removesuffix(BRIEF) for row in train_prompts()]
    return [
        {"prompt": [{"role": "user", "content": "Answer these, a sentence each. " + " ".join(questions[at : at + 12])}]}
        for at in range(0, len(questions) - 11, 12)
    ]


def _rows(name: str) -> list[dict[str, Any]]:
    text = (files(__package__) / "prompts" / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    match name:
        case "load_policy":
            module = "smollm2"
        case "load_reward_model" | "load_untrained_reward_model":
            module = "reward_model"
        case "load_tiny_policy" | "load_tiny_reward_model":
            module = "tiny"
        case "true_utility":
            module = "utility"
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
