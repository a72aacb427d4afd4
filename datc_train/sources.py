"""What a run was made of that its config cannot say: parts given in Python, and the prompts themselves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datc_train.types import Prompt

FILE = "sources.json"


@dataclass(frozen=True)
class Sources:
    given: tuple[str, ...] = ()  # of policy, reward and prompts, those that `train` was handed
    prompts: str | None = None  # SHA-256 of the prompts, in their order
    eval_prompts: str | None = None
    rewards: tuple[str, ...] | None = None  # names of several rewards that `train` was handed, in their order

    def check_same(self, run: Path) -> None:
        """Raises ValueError where the run in this folder was made of other things; an older run has said nothing."""
        saved = read_sources(run)
        if saved is None:
            return
        if saved.given != self.given:
            raise ValueError(
                f"resume: expected the same parts as at the start of {run}, where train(...) was given {_list(saved.given)} in "
                f"Python, got {_list(self.given)}"
            )
        if saved.rewards != self.rewards:
            raise ValueError(
                f"reward: expected those that the run in {run} began with, {_list(saved.rewards or ('a single one',))}, got "
                f"{_list(self.rewards or ('a single one',))}"
            )
        for name in ("prompts", "eval_prompts"):
            if getattr(saved, name) != getattr(self, name):
                raise ValueError(
                    f"{name}: expected those that the run in {run} began with, got others: what they hold has changed"
                )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def sources(
    prompts: list[Prompt], eval_prompts: list[Prompt], /, *, rewards: tuple[str, ...] | None = None, **given: Any
) -> Sources:
    names = tuple(name for name, value in given.items() if value is not None)
    return Sources(names, _digest(prompts), _digest(eval_prompts), rewards)


def read_sources(run: Path) -> Sources | None:
    """None for a run that has none written down."""
    path = run / FILE
    if not path.is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    rewards = found.get("rewards")
    return Sources(tuple(found["given"]), found["prompts"], found["eval_prompts"], None if rewards is None else tuple(rewards))


def _digest(prompts: Iterable[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps(asdict(prompt), sort_keys=True, default=str).encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "nothing"
