"""Mean raw reward on fixed held-out prompts, with random numbers that are the same at every evaluation."""

from __future__ import annotations

from typing import Any

from datc_train.messages import asked, started_answer
from datc_train.metrics import part_metrics, part_scores
from datc_train.rollout import Sampler
from datc_train.score import Reward, score_rollout
from datc_train.types import Prompt

_SEED = 20_000_003  # apart from the seeds of training steps


def best_step(evaluations: list[dict[str, Any]]) -> int | None:
    """The step after training began whose held-out reward is highest, the earlier one of equals; None where there is none."""
    trained = [line for line in evaluations if line["step"] > 0]
    return max(trained, key=lambda line: (line["reward_mean"], -line["step"]))["step"] if trained else None


def _prompt(prompt: Prompt) -> dict[str, str]:
    started = started_answer(prompt.messages)
    return {"prompt": asked(prompt.messages), **({} if started is None else {"started": started})}


def evaluate(step: int, sampler: Sampler, reward: Reward, prompts: list[Prompt]) -> dict[str, Any]:
    """A line of eval.jsonl: two samples a prompt at the training temperature, scored without gradient; the first is kept.

    Of several rewards also reward_<name>_mean and reward_<name>_std, and each sample's `rewards`, as in metrics and samples.

    `started`, where a prompt has it, is the start of the answer that `response` goes on with.
    """
    sampler.sync(step)
    rollout = sampler.sample(prompts, seed=_SEED)
    scored = score_rollout(reward, rollout, sampler.tokenizer, sampler.stop_ids, gradient=False)
    parts = rollout.response_ids.split(rollout.lengths.tolist())
    first = range(0, len(parts), rollout.group_size)
    return {
        "step": step,
        "reward_mean": float(scored.score.double().mean()),
        **part_metrics(scored, rollout.group_size),
        "length_mean": float(rollout.lengths.double().mean()),
        "finished": float(rollout.finished.double().mean()),
        "samples": [
            {
                **_prompt(rollout.prompts[i // rollout.group_size]),
                "response": sampler.tokenizer.decode(parts[i], skip_special_tokens=True),
                "reward": float(scored.score[i]),
                **part_scores(scored, i),
            }
            for i in first
        ],
    }
