"""Steps of this package's loop, of TRL's GRPOTrainer and of DATCTrainer, in turn, on one recipe.

    python -m benchmarks.trl_steps [--json FILE] [--rounds 7] [--config quickstart] [--key value ...]

    own      datc_train's step, method grpo
    own_datc the same, method datc
    trl      TRL's GRPOTrainer with the RewardModel as reward function
    datc_trl DATCTrainer, method datc

Every step answers the same prompts, samples as many tokens (nothing ends a response before max_new_tokens), scores, and updates
a LoRA adapter once. TRL's loops are its own: each runs in a thread, which waits between its steps until its turn comes. The order
turns by one every round, and ratios are medians of ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate
import transformers
import trl
from transformers import TrainerCallback
from trl import GRPOTrainer

from benchmarks.trl_recipe import make_trainer
from datc_train.bench.machine import machine
from datc_train.bench.overhead import endless_sampler
from datc_train.cli import config_of
from datc_train.clock import Clock
from datc_train.config import Config, Method
from datc_train.data import find_train_prompts
from datc_train.integrations.trl import DATCTrainer
from datc_train.models import load_policy, load_reward, resolve_device
from datc_train.optimizer import make_optimizer
from datc_train.step import Trainer

RATIOS = (("own", "trl"), ("own_datc", "datc_trl"), ("own_datc", "own"), ("datc_trl", "trl"))
Seconds = dict[str, float]  # of a step and of its phases


class OwnSteps:
    """`Trainer.step` of this package."""

    def __init__(self, config: Config, method: Method) -> None:
        config = replace(config, method=method, candidates_per_token=0, reward_shaping=False)
        self.device = resolve_device(config.device)
        actor = load_policy(config, self.device)
        reward = load_reward(config, self.device, actor.tokenizer)
        self.prompts = find_train_prompts(config)[: config.prompts_per_step]
        sampler = endless_sampler(config, actor)
        self.trainer = Trainer(config, actor, reward, sampler, make_optimizer(actor.trainable, config))
        self.steps = 0

    def step(self) -> Seconds:
        self.steps += 1
        started, clock = time.perf_counter(), Clock(self.device)
        rollout = self.trainer.sample(self.steps, self.prompts, self.steps, clock)
        self.trainer.learn(self.steps, rollout, clock)
        seconds = dict(clock.seconds)
        # Its phases by the names of TRL's: the credit is read in the update's own forward pass.
        rest = sum(seconds.get(phase, 0.0) for phase in ("update", "credit", "weights"))
        return {
            "step": time.perf_counter() - started,
            "sample": seconds["sample"],
            "score": seconds["score"],
            "reference": seconds.get("reference", 0.0),
            "update": rest,
        }

    def close(self) -> None:
        pass


class TRLSteps:
    """A TRL trainer, halted between its steps."""

    def __init__(self, kind: type[GRPOTrainer], config: Config, steps: int, folder: Path, extra: dict[str, Any]) -> None:
        prompts = find_train_prompts(config)[: config.prompts_per_step]
        endless = {"generation_kwargs": {"min_new_tokens": config.max_new_tokens}}
        self.trainer = make_trainer(kind, config, prompts, folder, extra, max_steps=steps, **endless)
        self.phases: Seconds = {}
        for phase, name in (("sample", "_generate"), ("score", "_calculate_rewards"), ("credit", "_token_advantages")):
            if hasattr(self.trainer, name):
                setattr(self.trainer, name, self._timed(phase, getattr(self.trainer, name)))
        self.trainer.add_callback(_Turns(self))
        self._mine, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._done.acquire()  # until its first step would begin
        self._raise()

    def _timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - started

        return timed

    def _run(self) -> None:
        try:
            self.trainer.train()
        except _End:
            pass
        except BaseException as error:
            self._error = error
        self._done.release()

    def hand_over(self) -> None:
        self._done.release()
        self._mine.acquire()
        if self._closing:
            raise _End

    def step(self) -> Seconds:
        self.phases.clear()
        started = time.perf_counter()
        self._mine.release()
        self._done.acquire()
        step = time.perf_counter() - started
        self._raise()
        phases = dict(self.phases)
        # TRL reads the reference inside the making of the rollout; the rest of the step is left to reference and update.
        return {"step": step} | phases | {"reference and update": step - sum(phases.values())}

    def _raise(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"{type(self.trainer).__name__} stopped") from self._error

    def close(self) -> None:
        self._closing = True
        self._mine.release()
        self._thread.join()
        self._raise()


class _End(BaseException):
    """Out of TRL's loop, before a step that nobody measures."""


class _Turns(TrainerCallback):
    def __init__(self, steps: TRLSteps) -> None:
        self.steps = steps

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.steps.hand_over()


@contextmanager
def contestants(config: Config, rounds: int, folder: Path) -> Iterator[dict[str, OwnSteps | TRLSteps]]:
    steps = rounds + 2  # one to warm up, one that is never begun
    made: dict[str, OwnSteps | TRLSteps] = {
        "own": OwnSteps(config, "grpo"),
        "own_datc": OwnSteps(config, "datc"),
        "trl": TRLSteps(GRPOTrainer, config, steps, folder / "trl", {}),
        "datc_trl": TRLSteps(DATCTrainer, config, steps, folder / "datc_trl", {"datc": {"method": "datc"}}),
    }
    yield made
    for one in made.values():
        one.close()


def measure(config: Config, rounds: int) -> dict[str, Any]:
    lines: list[dict[str, Seconds]] = []
    with tempfile.TemporaryDirectory() as folder, contestants(config, rounds, Path(folder)) as made:
        names = list(made)
        for turn in range(rounds + 1):  # the first warms up
            first = turn % len(names)
            line = {name: made[name].step() for name in names[first:] + names[:first]}
            if turn:
                lines.append(line)
                print(f"round {turn}: " + ", ".join(f"{name} {line[name]['step']:.1f} s" for name in names), flush=True)
    ratios = {}
    for a, b in RATIOS:
        each = [line[a]["step"] / line[b]["step"] for line in lines]
        ratios[f"{a} / {b}"] = {"median": statistics.median(each), "lowest": min(each), "highest": max(each)}
    phases = {name: {key: statistics.median(line[name][key] for line in lines) for key in lines[0][name]} for name in names}
    versions = {m.__name__: m.__version__ for m in (trl, transformers, accelerate)}
    return {"ratios": ratios, "seconds": phases, "rounds": rounds, "settings": config.to_dict(), "machine": machine() | versions}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--config", default="quickstart")
    options, rest = parser.parse_known_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {options.rounds}")
    result = measure(config_of(["--config", options.config, *rest]), options.rounds)
    for name, seconds in result["seconds"].items():
        print(f"{name:<10}" + ", ".join(f"{phase} {value:.2f}" for phase, value in seconds.items()))
    for name, ratio in result["ratios"].items():
        print(f"{name:<20}{ratio['median']:.3f} ({ratio['lowest']:.3f} to {ratio['highest']:.3f})")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
