"""The norm of a step's change, taken from AdamW's moments, is that of the change."""

from __future__ import annotations

import pytest
import torch

from datc_kernels.testing.rounding import rounding
from datc_train.config import Config
from datc_train.optimizer import adamw_step_norm, make_optimizer


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_step_norm_is_the_norm_of_the_change(decay: float) -> None:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(7, 5)), torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.ones(2))]
    optimizer = make_optimizer(parameters, Config(learning_rate=1e-2, weight_decay=decay))
    for _ in range(3):
        before = [p.detach().clone() for p in parameters]
        for p in parameters[:2]:  # the third gets no gradient
            p.grad = torch.randn_like(p)
        optimizer.step()
        change = torch.cat([(p - b).flatten().double() for p, b in zip(parameters, before, strict=True)])
        allowed = rounding(length=40, condition=1 / 1e-2)  # changes of 1e-2 of numbers near 1
        assert float(adamw_step_norm(optimizer)) == pytest.approx(float(change.norm()), rel=allowed)
