"""Every credit method of the study in the toy of `benchmarks.learning`: same world, prompts and random numbers, one row each.

    python -m benchmarks.toy_methods [--seeds 3] [--steps 100] [--learning-rate 1e-4] [--methods M ...] [--json FILE]

No position is frozen and no adapter is there: ARCA's residual is that of the whole policy to the pretrained one. OAR-P reads 32
shortened responses for every response and takes most of the time.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import learning as toy
from datc_train.credit import METHODS, CreditInputs


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


def by_method(world: toy.World, name: str, seed: int) -> toy.TokenAdvantages:
    """The token advantages of a method of `datc_train.credit`, with only what it needs computed."""
    method, embed = METHODS[name], world.reward.model.embed_tokens

    @torch.no_grad()
    def token_advantages(x: toy.Scored) -> Tensor:
        base = None
        if method.needs_base_hidden:
            base = world.policy.model(input_ids=x.ids).last_hidden_state[:, toy.PROMPT - 1 : -1].flatten(0, 1)
        inputs = CreditInputs(
            credit=x.credit,
            advantage=x.advantage,
            lengths=x.lengths,
            frozen=torch.zeros(len(x.hidden), dtype=torch.bool),
            ceiling=4.0,
            utility="advantage",
            responses=torch.arange(len(x.ids)),
            seed=(seed, x.step),
            score=x.score,
            reward_grad=x.gradient[:, toy.PROMPT :].flatten(0, 1),
            embedding=embed(x.ids[:, toy.PROMPT :]).flatten(0, 1) if method.needs_embedding else None,
            pad_embedding=embed.weight[world.reward.config.pad_token_id] if method.needs_embedding else None,
            token_reward=token_rewards(world, x.ids).flatten() if method.needs_token_rewards else None,
            left_out_score=left_out_scores(world, x.ids).flatten() if method.needs_left_out_scores else None,
            hidden=x.hidden,
            base_hidden=base,
        )
        return method.token_advantage(inputs).value

    return token_advantages


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    plan = {options.learning_rate: options.methods}
    result = toy.run(options.seeds, options.steps, plan, toy.print_now, by_method, workers=os.cpu_count() or 1)
    print(toy.table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
