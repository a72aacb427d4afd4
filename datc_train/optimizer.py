"""AdamW, its learning rate over the steps, and how far it moved the weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import get_constant_schedule_with_warmup

from datc_train.config import Config


def make_optimizer(parameters: Sequence[nn.Parameter], config: Config) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)


def make_schedule(optimizer: torch.optim.Optimizer, config: Config, length: int) -> torch.optim.lr_scheduler.LambdaLR:
    if config.schedule == "constant":
        return get_constant_schedule_with_warmup(optimizer, config.warmup_steps)
    floor, warmup = config.min_learning_rate_ratio, config.warmup_steps

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        progress = min(1.0, (step - warmup) / max(1, length - warmup))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@torch.no_grad()
def adamw_step_norm(optimizer: torch.optim.AdamW) -> Tensor:
    """|change of all parameters| of the step just made, 0-dimensional float64, from the optimizer's moments.

        change = -lr (adam + weight_decay before)                      before = (after + lr adam) / (1 - lr weight_decay)
        adam   = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

    No copy of the parameters is kept for it. A parameter that no gradient has reached yet counts as unmoved.
    """
    total = torch.zeros((), dtype=torch.float64)
    for group in optimizer.param_groups:
        lr, (b1, b2), decay = group["lr"], group["betas"], group["weight_decay"]
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if not state or parameter.grad is None:
                continue
            t = float(state["step"])
            adam = (state["exp_avg"] / (1 - b1**t)) / ((state["exp_avg_sq"] / (1 - b2**t)).sqrt() + group["eps"])
            before = (parameter + lr * adam) / (1 - lr * decay)
            total += (lr * (adam + decay * before)).double().square().sum().cpu()
    return total.sqrt()
