"""What a run changed, in a few lines, from its own metrics."""

from __future__ import annotations

import math
import statistics
from typing import Any


def reward_change(metrics: list[dict[str, Any]]) -> tuple[float, float, float] | None:
    """(mean reward of the first quarter of the steps, of the last, standard error of the difference); None below 8 steps.

    The error is that of two independent samples of steps: sqrt(s1^2 / n + s2^2 / n), sample variances over steps.
    """
    quarter = len(metrics) // 4
    if quarter < 2:
        return None
    rewards = [line["reward_mean"] for line in metrics]
    first, last = rewards[:quarter], rewards[-quarter:]
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / quarter)
    return statistics.mean(first), statistics.mean(last), error


def summary(metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]], folder: str, checkpoint: str) -> str:
    lines = []
    change = reward_change(metrics)
    if change is not None:
        first, last, error = change
        gain = last - first
        times = f"{abs(gain) / error:.1f} standard errors" if error > 0 else "no spread between steps"
        verdict = "up" if gain > error else "down" if gain < -error else "not beyond noise"
        quarter = len(metrics) // 4
        lines.append(
            f"Reward {first:+.3f} -> {last:+.3f} (mean of the first and last {quarter} steps): "
            f"{gain:+.3f} +- {error:.3f}, {times}: {verdict}."
        )
    if len(evaluations) >= 2:
        a, b = evaluations[0], evaluations[-1]
        lines.append(
            f"Held-out prompts, same random numbers: reward {a['reward_mean']:+.3f} -> {b['reward_mean']:+.3f}, "
            f"length {a['length_mean']:.0f} -> {b['length_mean']:.0f}, finished {a['finished']:.0%} -> {b['finished']:.0%}."
        )
        for before, after in list(zip(a["samples"], b["samples"], strict=True))[:3]:
            lines.append(f"  Q: {before['prompt']}")
            if "started" in before:
                lines.append(f"    begun:  {before['started']}")
            lines += [f"    before: {before['response']}", f"    after:  {after['response']}"]
    cut = statistics.mean(line["frac_truncated"] for line in metrics)
    left_out = [line["frac_groups_left_out"] for line in metrics if line.get("frac_groups_left_out") is not None]
    if left_out and statistics.mean(left_out) > 0:
        lines.append(
            f"reward_shaping left {statistics.mean(left_out):.0%} of the groups out of the loss, for none of their responses "
            "finished: a larger max_new_tokens lets more of them count."
        )
    elif cut > 0.5:
        lines.append(f"{cut:.0%} of the responses were cut off at max_new_tokens: consider a larger one, or mask_truncated.")
    seconds = sum(line["seconds_step"] for line in metrics)
    lines += [f"{len(metrics)} steps in {seconds:.0f} s.", f"Run folder: {folder}", f"Adapter or weights: {checkpoint}"]
    return "\n".join(lines)
