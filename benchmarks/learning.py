"""Does direction help? A toy whose true utility is known: GRPO, DATC, and two ablations of DATC, over several seeds.

    python -m benchmarks.learning [--seeds 3] [--steps 100] [--world 0] [--learning-rate 1e-4 --methods grpo datc] [--json FILE]
        [--plot FILE]

The policy is a small Llama that has learned a random Markov chain over 128 tokens. The utility of a sequence is the sum over
its bigrams of a sparse random table over 16 kinds of tokens: a tenth of the pairs are good or bad, the others do not matter. A
reward model of the same kind as the policy is trained by regression on it. Then the policy is trained against the reward
model, every method on the same prompts and random numbers, with one AdamW step a rollout of 8 prompts x 8 responses x 32
tokens, no KL term.

    grpo       w = 1
    datc       w from the directional credit d = <G, k>
    shuffled   DATC's weights, permuted within each response: as uneven, without knowing where
    no_angle   w from |G| |k|: how strong reward and score are, not whether they point the same way

Seeds are of the prompts and samples; chain, utility, policy and reward model are one world's (`--world`). Reported: the reward
model's mean score of the last 15 steps, the true utility beside it, and their spread over seeds.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from datc_kernels import TokenCredit, allocate_weights, linear_credit
from datc_train.advantages import group_advantages
from datc_train.bench.machine import machine
from datc_train.losses import grpo_loss
from datc_train.prefix import cache_argument

VOCABULARY, PROMPT, RESPONSE = 128, 4, 32
PROMPTS, GROUP = 8, 8
KINDS = 16
PRETRAINING, REGRESSION = 200, 1500  # steps of 32 sequences
UNIT = 0.3  # of the utility: sums over 35 bigrams then spread by about 0.6
LAST = 15  # steps whose mean is reported

Weights = Callable[[TokenCredit, Tensor, Tensor, torch.Generator], Tensor]


def weights_of(credit: Tensor, advantage: Tensor, lengths: Tensor) -> Tensor:
    return allocate_weights(credit, advantage, lengths).weight


def shuffled(credit: TokenCredit, advantage: Tensor, lengths: Tensor, generator: torch.Generator) -> Tensor:
    assert credit.credit is not None
    weight = weights_of(credit.credit, advantage, lengths).view(-1, RESPONSE)
    return weight.gather(1, torch.rand(weight.shape, generator=generator).argsort(1)).flatten()


METHODS: dict[str, Weights] = {
    "grpo": lambda credit, advantage, lengths, _: torch.ones_like(credit.logprob),
    "datc": lambda credit, advantage, lengths, _: weights_of(credit.credit, advantage, lengths),  # type: ignore[arg-type]
    "shuffled": shuffled,
    "no_angle": lambda credit, advantage, lengths, _: weights_of(
        credit.displacement_norm * credit.force_norm,  # type: ignore[operator]
        advantage,
        lengths,
    ),
}


class World:
    """A chain, a utility, a pretrained policy and a trained reward model."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        self.chain = torch.softmax(2.0 * torch.randn(VOCABULARY, VOCABULARY, generator=generator), -1)
        kind = torch.randint(KINDS, (VOCABULARY,), generator=generator)
        matters = torch.rand(KINDS, KINDS, generator=generator) < 0.1
        between = torch.randn(KINDS, KINDS, generator=generator) * matters
        self.table = between[kind[:, None], kind[None, :]]  # [VOCABULARY, VOCABULARY] of a bigram
        self.policy = self._policy(generator)
        self.reward = self._reward(generator)

    def utility(self, ids: Tensor) -> Tensor:  # [B, T] -> [B]
        return UNIT * self.table[ids[:, :-1], ids[:, 1:]].sum(1)

    def sequences(self, count: int, generator: torch.Generator) -> Tensor:  # [count, PROMPT + RESPONSE]
        ids = torch.randint(VOCABULARY, (count, 1), generator=generator)
        for _ in range(PROMPT + RESPONSE - 1):
            ids = torch.cat([ids, torch.multinomial(self.chain[ids[:, -1]], 1, generator=generator)], 1)
        return ids

    def _policy(self, generator: torch.Generator) -> LlamaForCausalLM:
        model = LlamaForCausalLM(_settings(96))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(PRETRAINING):
            ids = self.sequences(32, generator)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.eval()

    def _reward(self, generator: torch.Generator) -> LlamaForSequenceClassification:
        """Regression at every position on the utility that the whole would have if it went on like this; the last one is used."""
        model = LlamaForSequenceClassification(_settings(128))
        steps = REGRESSION
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
        for _ in range(steps):
            # Some tokens by chance: a reward model has to know more than the policy's own habits.
            ids = self.sequences(32, generator)
            chance = torch.rand(ids.shape, generator=generator) < torch.rand(len(ids), 1, generator=generator) ** 2
            ids = torch.where(chance, torch.randint(VOCABULARY, ids.shape, generator=generator), ids)
            rate = self.table[ids[:, :-1], ids[:, 1:]].cumsum(1) / torch.arange(1, ids.shape[1])
            so_far = model.score(model.model(input_ids=ids).last_hidden_state)[:, 1:, 0]
            (so_far - UNIT * rate * (ids.shape[1] - 1)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return model.eval().requires_grad_(False)

    def fit(self) -> float:
        """Share of the utility's variance that the reward model explains on the pretrained policy's samples."""
        generator = torch.Generator().manual_seed(999)
        ids = sample(self.policy, self.sequences(256, generator)[:, :PROMPT], generator)
        with torch.no_grad():
            error = _score(self.reward, self.reward.model.embed_tokens(ids)) - self.utility(ids)
        return float(1 - error.var() / self.utility(ids).var())


def _settings(hidden: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        num_labels=1,
        tie_word_embeddings=False,
        pad_token_id=0,
    )


def _score(model: LlamaForSequenceClassification, embedded: Tensor) -> Tensor:  # [B, T, K] -> [B]
    return model.score(model.model(inputs_embeds=embedded).last_hidden_state[:, -1])[:, 0]


@torch.no_grad()
def sample(
    policy: LlamaForCausalLM, prompts: Tensor, generator: torch.Generator
) -> Tensor:  # [B, PROMPT] -> [B, PROMPT + RESPONSE]
    ids, new = prompts, prompts
    past: dict[str, Any] = {cache_argument(policy): DynamicCache(config=policy.config)}
    for _ in range(RESPONSE):
        logits = policy(input_ids=new, use_cache=True, logits_to_keep=1, **past).logits[:, -1]
        new = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)
        ids = torch.cat([ids, new], 1)
    return ids


@dataclass(frozen=True)
class Scored:
    """One step's samples, scored, with the policy's credit: B responses, N = B RESPONSE tokens."""

    step: int
    ids: Tensor  # [B, PROMPT + RESPONSE]
    score: Tensor  # [B]
    gradient: Tensor  # [B, PROMPT + RESPONSE, K] of the score by the input embeddings
    hidden: Tensor  # [N, D] of the policy, without its graph
    credit: TokenCredit
    advantage: Tensor  # [B]
    lengths: Tensor  # [B]


TokenAdvantages = Callable[[Scored], Tensor]  # [N]
Maker = Callable[["World", str, int], TokenAdvantages]  # of a world, a method's name and the seed


def by_weights(world: World, method: str, seed: int) -> TokenAdvantages:
    """A w with the weights of `METHODS`."""
    order = torch.Generator().manual_seed(seed)

    def token_advantages(x: Scored) -> Tensor:
        return x.advantage.repeat_interleave(RESPONSE) * METHODS[method](x.credit, x.advantage, x.lengths, order)

    return token_advantages


def train(
    world: World, method: str, *, seed: int, steps: int, learning_rate: float, maker: Maker = by_weights
) -> dict[str, list[float]]:
    """Reward and true utility of every step's samples."""
    policy = copy.deepcopy(world.policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, weight_decay=0.01)
    generator = torch.Generator().manual_seed(10_000 + seed)
    token_advantages = maker(world, method, seed)
    lengths = torch.full((PROMPTS * GROUP,), RESPONSE)
    curve: dict[str, list[float]] = {"reward": [], "utility": []}
    for step in range(steps):
        prompts = world.sequences(PROMPTS, generator)[:, :PROMPT].repeat_interleave(GROUP, 0)
        ids = sample(policy, prompts, generator)
        embedded = world.reward.model.embed_tokens(ids).requires_grad_(True)
        score = _score(world.reward, embedded)
        (gradient,) = torch.autograd.grad(score.sum(), embedded)
        score = score.detach()
        hidden = policy.model(input_ids=ids).last_hidden_state[:, PROMPT - 1 : -1].flatten(0, 1)
        credit = linear_credit(
            hidden,
            policy.lm_head.weight,
            ids[:, PROMPT:].flatten(),
            gradient[:, PROMPT:].flatten(0, 1),
            world.reward.model.embed_tokens.weight,
        )
        x = Scored(step, ids, score, gradient, hidden.detach(), credit, group_advantages(score, GROUP), lengths)
        grpo_loss(credit.logprob, credit.logprob.detach(), token_advantages(x), lengths).loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve["reward"].append(float(score.mean()))
        curve["utility"].append(float(world.utility(ids).mean()))
    return curve


Job = tuple[float, str, int]  # learning rate, method, seed


def _curves(world: World, jobs: list[Job], steps: int, maker: Maker, workers: int) -> Iterator[dict[str, list[float]]]:
    """In the order of the jobs. Models so small are fastest with one thread each, several at once."""
    if workers == 1:
        yield from (train(world, m, seed=s, steps=steps, learning_rate=rate, maker=maker) for rate, m, s in jobs)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        made = [pool.submit(train, world, m, seed=s, steps=steps, learning_rate=rate, maker=maker) for rate, m, s in jobs]
        yield from (future.result() for future in made)


# What the paper's ablation compares; without the angle it takes the larger rate to see anything.
PLAN = {1e-4: ["grpo", "datc", "shuffled"], 3e-4: ["grpo", "datc", "no_angle"]}


def run(
    seeds: int,
    steps: int,
    plan: dict[float, list[str]] | None = None,
    say: Callable[[str], None] = print,
    maker: Maker = by_weights,
    world: int = 0,
    workers: int = 1,
) -> dict[str, Any]:
    """Every learning rate, method and seed of the samples, in one world.

    `final[rate][method]` holds one mean of the last steps for every seed.
    """
    plan = PLAN if plan is None else plan
    began = time.perf_counter()
    made = World(world)
    fit = made.fit()
    say(f"the reward model explains {fit:.2f} of the utility's variance, {time.perf_counter() - began:.0f} s")
    jobs = [(rate, method, seed) for seed in range(seeds) for rate, methods in plan.items() for method in methods]
    curves: dict[str, Any] = {str(rate): {method: [] for method in methods} for rate, methods in plan.items()}
    for (rate, method, seed), curve in zip(jobs, _curves(made, jobs, steps, maker, workers), strict=True):
        curves[str(rate)][method].append(curve)
        reward = statistics.mean(curve["reward"][-LAST:])
        say(f"seed {seed}  {rate:g} {method:<14}{reward:.3f}   {time.perf_counter() - began:.0f} s")
    final = {
        rate: {
            method: {key: [statistics.mean(curve[key][-LAST:]) for curve in by_seed] for key in ("reward", "utility")}
            for method, by_seed in by_method.items()
        }
        for rate, by_method in curves.items()
    }
    return {
        "final": final,
        "curves": curves,
        "start": statistics.mean(c["reward"][0] for c in next(iter(next(iter(curves.values())).values()))),
        "world": world,
        "reward_model_fit": fit,
        "steps": steps,
        "seconds": time.perf_counter() - began,
        "machine": machine(),
    }


def table(result: dict[str, Any]) -> str:
    lines = [f"{'rate':<8}{'method':<15}{'reward: mean (min to max over seeds)':<40}true utility"]
    for rate, by_method in result["final"].items():
        for method, values in by_method.items():
            r, u = values["reward"], values["utility"]
            lines.append(
                f"{rate:<8}{method:<15}{statistics.mean(r):.3f} ({min(r):.3f} to {max(r):.3f}){'':<17}"
                f"{statistics.mean(u):.3f} ({min(u):.3f} to {max(u):.3f})"
            )
    return "\n".join([*lines, f"reward at the start {result['start']:.3f}; {result['seconds']:.0f} s"])


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import numpy as np
    from matplotlib.figure import Figure

    colours = {"grpo": "#999999", "datc": "#0072B2", "shuffled": "#E69F00", "no_angle": "#CC79A7"}
    figure = Figure(figsize=(4.2 * len(result["curves"]), 3.4), layout="constrained")
    for axes, (rate, by_method) in zip(
        figure.subplots(1, len(result["curves"]), sharey=True, squeeze=False)[0], result["curves"].items(), strict=True
    ):
        for method, by_seed in by_method.items():
            values = np.array([np.convolve(curve["reward"], np.ones(LAST) / LAST, "valid") for curve in by_seed])
            steps = np.arange(values.shape[1]) + LAST
            axes.plot(steps, values.mean(0), color=colours[method], label=method)
            axes.fill_between(steps, values.min(0), values.max(0), color=colours[method], alpha=0.2, lw=0)
        axes.set_title(f"learning rate {rate}", fontsize=10)
        axes.set_xlabel(f"step (mean of the last {LAST}; band: seeds)")
    figure.axes[0].set_ylabel("reward")
    shown = {label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(shown.values(), shown, loc="outside upper center", ncols=len(shown), frameon=False)
    figure.savefig(path, dpi=150)


def print_now(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, nargs="+", help="default: 1e-4 and 3e-4, each with the methods to compare")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), help="with --learning-rate")
    parser.add_argument("--world", type=int, default=0, help="another number: another chain, utility and models")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at once")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    plan = dict.fromkeys(options.learning_rate, options.methods) if options.learning_rate else None
    result = run(options.seeds, options.steps, plan, print_now, world=options.world, workers=options.workers)
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        plot(result, options.plot)


if __name__ == "__main__":
    main()
