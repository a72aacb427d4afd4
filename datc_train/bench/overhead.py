"""Steps of GRPO and DATC on the same tokens, in turn, and what the second costs over the first.

    overhead = median over rounds of DATC's step / median of GRPO's               1.07: 7 % more

A round samples once, from the same weights every time, and both methods learn from that rollout; sampling is the same work
for both and its seconds count in both steps. The weights are put back after every update. Which method goes first alternates.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from datc_train.bench.machine import machine
from datc_train.bench.memory import peak_memory
from datc_train.clock import Clock
from datc_train.config import Config, Method
from datc_train.credit import METHODS as CREDIT_METHODS
from datc_train.credit_point import CreditPoint
from datc_train.data import find_train_prompts
from datc_train.models import load_policy, resolve_device
from datc_train.optimizer import make_optimizer
from datc_train.policy import Policy
from datc_train.rewards import load_rewards, models_of
from datc_train.rollout import TransformersSampler
from datc_train.score import Reward, check_reward, score_rollout
from datc_train.step import Trainer

METHODS: tuple[Method, Method] = ("grpo", "datc")
PHASES = ("sample", "score", "reference", "update", "credit", "weights")
OF_THE_METHOD = ("score", "credit", "weights")  # what DATC does otherwise; the other phases are the same work in both
# The points at which the reward's gradient may be taken; each is timed in every round, for the scoring phase differs alone.
POINTS = {
    "embedding": CreditPoint("embedding"),
    "tangent": CreditPoint("tangent"),
    "integrated": CreditPoint("integrated"),
    "integrated, 2 passes": CreditPoint("integrated", 2),
    "integrated, 4 passes": CreditPoint("integrated", 4),
}
PAPER = (1.057, 1.091)  # arXiv 2610.32772: cumulative GPU time, actor, reward model and sampler on a GPU each


def measure(
    config: Config, *, equal_size: bool = False, minutes: float = 8.0, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """At least three rounds, and more while `minutes` last.

    `overhead` of the result is the ratio of the medians, `methods` has the medians of every phase in seconds, and
    `overhead_by_phase` counts only the phases in which the methods differ, so that noise of the others drops out:

        1 + (score + credit + weights of DATC - the same of GRPO) / GRPO's step

    `points` has the same for every credit point, with the scoring phase at that point; `overhead` is at the config's.
    """
    # Candidates are for people to look at, and without stop ids shaping would leave every response out.
    config = replace(config, candidates_per_token=0, reward_shaping=False)
    config = replace(config, reward="untrained-full", reward_weights=None) if equal_size else config
    device = resolve_device(config.device)
    actor = load_policy(config, device)
    reward = load_rewards(config, device, actor.tokenizer)
    check_reward(reward, METHODS[1])
    sampler = endless_sampler(config, actor)
    prompts = find_train_prompts(config)[: config.prompts_per_step]
    start = [p.detach().clone() for p in actor.trainable]
    trainers = {
        method: Trainer(replace(config, method=method), actor, reward, sampler, make_optimizer(actor.trainable, config))
        for method in METHODS
    }
    for trainer in trainers.values():  # first calls allocate, import and compile
        short = endless_sampler(replace(config, max_new_tokens=4), actor)
        trainer.learn(0, short.sample(prompts[:1], seed=0), Clock(device))
        _put_back(actor, start)

    rounds: list[dict[str, dict[str, float]]] = []
    began = time.perf_counter()
    while len(rounds) < 3 or (time.perf_counter() - began) * (1 + 1 / len(rounds)) < 60 * minutes:
        clock = Clock(device)
        rollout = trainers["grpo"].sample(1, prompts, len(rounds), clock)
        line: dict[str, dict[str, float]] = {}
        for method in METHODS if len(rounds) % 2 == 0 else METHODS[::-1]:
            with peak_memory(device) as peak:
                step = trainers[method].learn(1, rollout, Clock(device))
            _put_back(actor, start)
            line[method] = dict(clock.seconds) | dict(step.clock.seconds)
            line[method]["step"] = sum(line[method].values())
            line[method]["peak_bytes"] = float(peak.bytes)
        line["points"] = {}
        for name, point in POINTS.items():
            clock = Clock(device)
            with clock(name):
                score_rollout(
                    reward, rollout, actor.tokenizer, sampler.stop_ids, gradient=True, method=CREDIT_METHODS["datc"], point=point
                )
            line["points"] |= clock.seconds
        rounds.append(line)
        say(f"round {len(rounds)}: " + ", ".join(f"{m} {line[m]['step']:.1f} s" for m in METHODS))
    return _result(config, rounds, len(rollout.response_ids), sum(map(len, rollout.prompt_ids)), reward, actor)


def endless_sampler(config: Config, actor: Policy) -> TransformersSampler:
    """No stop ids: every response has max_new_tokens tokens, so that rounds and machines do the same work."""
    return TransformersSampler(
        actor.model,
        actor.tokenizer,
        group_size=config.group_size,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        stop_ids=[],
    )


def _result(
    config: Config, rounds: list[dict[str, dict[str, float]]], tokens: int, prompt_tokens: int, reward: Reward, actor: Policy
) -> dict[str, Any]:
    def median(method: str, key: str) -> float:
        return statistics.median(line[method].get(key, 0.0) for line in rounds)

    def size(model: torch.nn.Module) -> int:
        return sum(p.numel() for p in model.parameters())

    def by_phase(score: float) -> float:
        others = sum(methods["datc"][p] - methods["grpo"][p] for p in OF_THE_METHOD if p != "score")
        return 1 + (score - methods["grpo"]["score"] + others) / methods["grpo"]["step"]

    methods = {m: {key: median(m, key) for key in (*PHASES, "step", "peak_bytes")} for m in METHODS}
    return {
        "overhead": methods["datc"]["step"] / methods["grpo"]["step"],
        "overhead_of_each_round": [line["datc"]["step"] / line["grpo"]["step"] for line in rounds],
        "overhead_by_phase": by_phase(methods["datc"]["score"]),
        "points": {
            name: {"score": median("points", name), "overhead_by_phase": by_phase(median("points", name))} for name in POINTS
        },
        "score_gradient_seconds": methods["datc"]["score"] - methods["grpo"]["score"],
        "methods": methods,
        "response_tokens": tokens,
        "prompt_tokens": prompt_tokens,
        "parameters": {"policy": size(actor.model), "reward": sum(size(one.model) for one in models_of(reward))},
        "paper": PAPER,
        "settings": config.to_dict(),
        "machine": machine(),
    }


def table(result: dict[str, Any]) -> str:
    """The result for a terminal."""
    grpo, datc = (result["methods"][m] for m in METHODS)
    lines = [f"{'seconds (medians)':<20}{'GRPO':>9}{'DATC':>9}"]
    lines += [f"{phase:<20}{grpo[phase]:>9.2f}{datc[phase]:>9.2f}" for phase in (*PHASES, "step")]
    if grpo["peak_bytes"] and datc["peak_bytes"]:
        lines.append(f"{'peak memory, MiB':<20}{grpo['peak_bytes'] / 2**20:>9.0f}{datc['peak_bytes'] / 2**20:>9.0f}")
    lines += [f"{'credit point':<24}{'score, s':>10}{'overhead by phase':>20}"]
    lines += [f"{name:<24}{at['score']:>10.2f}{at['overhead_by_phase']:>20.3f}" for name, at in result["points"].items()]
    share = result["parameters"]["reward"] / result["parameters"]["policy"]
    lines += [
        f"score's gradient: {result['score_gradient_seconds']:.2f} s; score, credit and weights alone: "
        f"{result['overhead_by_phase']:.3f}",
        f"overhead {result['overhead']:.3f}, over {len(result['overhead_of_each_round'])} rounds "
        f"{min(result['overhead_of_each_round']):.3f} to {max(result['overhead_of_each_round']):.3f} "
        f"(reward model with {share:.2f} of the policy's parameters; the paper: 1.057 to 1.091 on GPUs)",
    ]
    return "\n".join(lines)


def save(result: dict[str, Any], path: Path) -> None:
    """The JSON, and beside it a figure of the same name."""
    from datc_train.bench.figure import draw

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw(result, path.with_suffix(".png"))


def _put_back(actor: Policy, start: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(actor.trainable, start, strict=True):
            parameter.copy_(value)
