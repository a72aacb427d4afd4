"""Every credit method of the study in the toy of `benchmarks.learning`: same worlds, prompts and random numbers, one row each.

    python -m benchmarks.learning_methods [--seeds 3] [--steps 150] [--learning-rate 1e-4] [--methods M ...] [--json FILE]

No position is frozen and no adapter is there: ARCA's residual is that of the whole policy to the pretrained one. OAR-P reads 32
shortened responses for every response and takes most of the time.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import learning as toy
from datc_kernels import TokenCredit, linear_credit
from datc_train.advantages import group_advantages
from datc_train.bench.machine import machine
from datc_train.credit import METHODS, CreditInputs
from datc_train.losses import grpo_loss


@torch.no_grad()
def token_rewards(world: toy.World, ids: Tensor) -> Tensor:  # [B, T] -> [B, RESPONSE]
    """The score after every token less the one before it."""
    model = world.reward
    so_far = model.score(model.model(input_ids=ids).last_hidden_state)[..., 0]
    return so_far[:, toy.PROMPT - 1 :].diff(dim=1)


@torch.no_grad()
def left_out_scores(world: toy.World, ids: Tensor) -> Tensor:  # [B, T] -> [B, RESPONSE]
    kept = [torch.cat([ids[:, :t], ids[:, t + 1 :]], 1) for t in range(toy.PROMPT, ids.shape[1])]
    scores = [toy._score(world.reward, world.reward.model.embed_tokens(shorter)) for shorter in kept]
    return torch.stack(scores, 1)


def token_advantages(
    name: str,
    world: toy.World,
    ids: Tensor,
    gradient: Tensor,
    score: Tensor,
    credit: TokenCredit,
    hidden: Tensor,
    seed: tuple[int, int],
) -> Tensor:
    """[N] of one rollout, with only what the method needs computed. gradient [B, T, K], hidden [N, D]."""
    method, b = METHODS[name], len(ids)
    rest, embed = ids[:, toy.PROMPT :], world.reward.model.embed_tokens
    base = None
    if method.needs_base_hidden:
        with torch.no_grad():
            base = world.policy.model(input_ids=ids).last_hidden_state[:, toy.PROMPT - 1 : -1].flatten(0, 1)
    with torch.no_grad():
        inputs = CreditInputs(
            credit=credit,
            advantage=group_advantages(score, toy.GROUP),
            lengths=torch.full((b,), toy.RESPONSE),
            frozen=torch.zeros(b * toy.RESPONSE, dtype=torch.bool),
            ceiling=4.0,
            utility="advantage",
            responses=torch.arange(b),
            seed=seed,
            score=score,
            reward_grad=gradient[:, toy.PROMPT :].flatten(0, 1),
            embedding=embed(rest).flatten(0, 1) if method.needs_embedding else None,
            pad_embedding=embed.weight[world.reward.config.pad_token_id] if method.needs_embedding else None,
            token_reward=token_rewards(world, ids).flatten() if method.needs_token_rewards else None,
            left_out_score=left_out_scores(world, ids).flatten() if method.needs_left_out_scores else None,
            hidden=hidden.detach(),
            base_hidden=base,
        )
        return method.token_advantage(inputs).value


def train(world: toy.World, name: str, *, seed: int, steps: int, learning_rate: float) -> dict[str, list[float]]:
    """Reward and true utility of every step's samples."""
    policy = copy.deepcopy(world.policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, weight_decay=0.01)
    generator = torch.Generator().manual_seed(10_000 + seed)
    lengths = torch.full((toy.PROMPTS * toy.GROUP,), toy.RESPONSE)
    curve: dict[str, list[float]] = {"reward": [], "utility": []}
    for step in range(steps):
        prompts = world.sequences(toy.PROMPTS, generator)[:, : toy.PROMPT].repeat_interleave(toy.GROUP, 0)
        ids = toy.sample(policy, prompts, generator)
        embedded = world.reward.model.embed_tokens(ids).requires_grad_(True)
        score = toy._score(world.reward, embedded)
        (gradient,) = torch.autograd.grad(score.sum(), embedded)
        score = score.detach()
        hidden = policy.model(input_ids=ids).last_hidden_state[:, toy.PROMPT - 1 : -1].flatten(0, 1)
        credit = linear_credit(
            hidden,
            policy.lm_head.weight,
            ids[:, toy.PROMPT :].flatten(),
            gradient[:, toy.PROMPT :].flatten(0, 1),
            world.reward.model.embed_tokens.weight,
        )
        value = token_advantages(name, world, ids, gradient, score, credit, hidden, (seed, step))
        grpo_loss(credit.logprob, credit.logprob.detach(), value, lengths).loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve["reward"].append(float(score.mean()))
        curve["utility"].append(float(world.utility(ids).mean()))
    return curve


def run(
    seeds: int, steps: int, learning_rate: float, methods: Sequence[str] = tuple(METHODS), say: Callable[[str], None] = print
) -> dict[str, Any]:
    """`final[method]` holds one mean of the last steps for every seed."""
    began = time.perf_counter()
    curves: dict[str, list[dict[str, list[float]]]] = {method: [] for method in methods}
    for seed in range(seeds):
        world = toy.World(seed)
        for method in methods:
            curves[method].append(train(world, method, seed=seed, steps=steps, learning_rate=learning_rate))
            reward = statistics.mean(curves[method][-1]["reward"][-toy.LAST :])
            say(f"seed {seed} {method:<14}{reward:.3f}   {time.perf_counter() - began:.0f} s")
    final = {
        method: {key: [statistics.mean(curve[key][-toy.LAST :]) for curve in by_seed] for key in ("reward", "utility")}
        for method, by_seed in curves.items()
    }
    start = statistics.mean(curve["reward"][0] for curve in next(iter(curves.values())))
    return {
        "final": final,
        "curves": curves,
        "start": start,
        "steps": steps,
        "learning_rate": learning_rate,
        "seconds": time.perf_counter() - began,
        "machine": machine(),
    }


def table(result: dict[str, Any]) -> str:
    lines = [f"{'method':<15}{'reward: mean (min to max over seeds)':<38}true utility"]
    for method, values in sorted(result["final"].items(), key=lambda item: -statistics.mean(item[1]["reward"])):
        r, u = values["reward"], values["utility"]
        reward = f"{statistics.mean(r):.3f} ({min(r):.3f} to {max(r):.3f})"
        lines.append(f"{method:<15}{reward:<38}{statistics.mean(u):.3f} ({min(u):.3f} to {max(u):.3f})")
    return "\n".join([*lines, f"reward at the start {result['start']:.3f}; {result['seconds']:.0f} s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = run(options.seeds, options.steps, options.learning_rate, options.methods, lambda line: print(line, flush=True))
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
