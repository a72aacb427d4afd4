"""What the kernels are timed against: bare products, the formulas in eager PyTorch, and those under torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from datc_kernels.testing.inputs import CreditCase

from .setting import Setting


def two_products(x: CreditCase, *, reward: bool = True) -> Callable[[], None]:
    """Logits and rewards by the matrix library, each whole and into one buffer that exists before."""
    out = torch.empty(len(x.hidden), len(x.weight), dtype=x.hidden.dtype, device=x.hidden.device)

    def run() -> None:
        torch.mm(x.hidden, x.weight.T, out=out)
        if reward:
            torch.mm(x.reward_grad, x.reward_embedding.T, out=out)

    return run


def textbook(hidden: Tensor, weight: Tensor, token_ids: Tensor, grad: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """log p_y and d = p_y A_y - sum p^2 A as a trainer would write them, float32 after the products."""
    logp = torch.log_softmax((hidden @ weight.T).float(), dim=-1)
    p, u = logp.exp(), (grad @ table.T).float()
    pA = p * (u - (p * u).sum(-1, keepdim=True))
    y = token_ids[:, None]
    return logp.gather(1, y).squeeze(1), pA.gather(1, y).squeeze(1) - (p * pA).sum(-1)


def compiled(setting: Setting) -> Callable[..., Any]:
    """`textbook` under torch.compile, once for all shapes."""
    return torch.compile(textbook, dynamic=True, backend="aot_eager" if setting.dry else "inductor")
