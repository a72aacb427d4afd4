"""The truth on the device: the definitions in float64, rows in blocks and the vocabulary in slices, so that any shape fits.

For p, u, A = u - <p, u>, G = p * A, k = onehot(y) - p and d = <G, k>, each is formed from what it consists of, relative to the
most likely column: nothing cancels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from datc_kernels.types import TokenCredit

_NAMES = ("logprob", "entropy", "logsumexp", "sum_p2", "credit", "advantage", "reward_mean", "displacement_norm", "force_norm")
_SLICE = 16_384


def linear_credit(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    reward_grad: Tensor | None = None,
    reward_embedding: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    block: int = 64,  # rows
    **options: Any,
) -> TokenCredit:
    """What `datc_kernels.linear_credit` should return; fields [N] float64 on the CPU."""
    fields = []
    for start in range(0, len(hidden), block):
        rows = slice(start, start + block)
        logits = _product(hidden[rows], weight)
        if bias is not None:
            logits += bias.double()
        reward = None
        if reward_grad is not None and reward_embedding is not None:
            reward = _product(reward_grad[rows], reward_embedding)
        heat = temperature[rows] if isinstance(temperature, Tensor) else temperature
        fields.append(_fields(logits, token_ids[rows], reward, temperature=heat, **options))
    return TokenCredit(**dict(zip(_NAMES, torch.cat(fields, dim=1).cpu(), strict=False)))


def logits_credit(
    logits: Tensor, token_ids: Tensor, reward: Tensor | None = None, *, temperature: float | Tensor = 1.0, **options: Any
) -> TokenCredit:
    """What `datc_kernels.logits_credit` should return for rewards [N, rows] that exist; fields [N] float64 on the CPU."""
    fields = []
    for start in range(0, len(logits), 64):
        rows = slice(start, start + 64)
        heat = temperature[rows] if isinstance(temperature, Tensor) else temperature
        given = None if reward is None else reward[rows].double()
        fields.append(_fields(logits[rows].double(), token_ids[rows], given, temperature=heat, **options))
    return TokenCredit(**dict(zip(_NAMES, torch.cat(fields, dim=1).cpu(), strict=False)))


def _product(left: Tensor, table: Tensor) -> Tensor:
    wide = left.double()
    return torch.cat([wide @ part.double().T for part in table.split(_SLICE)], dim=1)


def _fields(
    raw: Tensor,
    token_ids: Tensor,
    reward: Tensor | None,
    *,
    temperature: float | Tensor,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """[4 or 9, n]: the first four without a reward."""
    z = raw[:, :vocab_size] * logit_scale
    if softcap is not None:  # a masked column (-inf) stays masked
        z = torch.where(z == -torch.inf, z, softcap * torch.tanh(z / softcap))
    z = z / (temperature.double()[:, None] if isinstance(temperature, Tensor) else temperature)
    ignored = token_ids == ignore_index
    y = token_ids.long().masked_fill(ignored, 0)[:, None]
    p, gap, log_sum = _distribution(z)
    surprise = torch.where(p > 0, log_sum - torch.where(p > 0, gap, 0.0), 0.0)
    top = z.amax(dim=1, keepdim=True)
    fields = [gap.gather(1, y) - log_sum, (p * surprise).sum(1, True), top + log_sum, p.square().sum(1, True)]
    if reward is not None:
        fields += _credit(z, reward[:, : z.shape[1]], y)
    return torch.cat(fields, dim=1).masked_fill(ignored[:, None], 0.0).T


def _distribution(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """p, z relative to the largest, log of the sum of its exponentials."""
    t = z.argmax(dim=1, keepdim=True)
    gap = z - z.gather(1, t)
    e = gap.exp()
    others = e.scatter(1, t, 0.0).sum(1, True)
    return e / (1 + others), gap, others.log1p()


def _credit(z: Tensor, u: Tensor, y: Tensor) -> list[Tensor]:
    """d, A_y, mean u, |G|, |k| of the policy conditioned on the columns that have a reward, [n, 1] each."""
    z = z[:, : u.shape[1]]
    without = (y >= u.shape[1]) | (z.amax(dim=1, keepdim=True) == -torch.inf)
    y = y.masked_fill(y >= u.shape[1], 0)
    p, _, _ = _distribution(z)
    t = z.argmax(dim=1, keepdim=True)
    delta = u - u.gather(1, t)
    mean = (p * delta).where(p > 0, 0.0).sum(1, True)
    A = delta - mean
    G = (p * A).where(p > 0, 0.0)
    k = (-p).scatter(1, y, p.scatter(1, y, 0.0).sum(1, True))
    fields = [(G * k).sum(1, True), A.gather(1, y), u.gather(1, t) + mean, G.norm(dim=1)[:, None], k.norm(dim=1)[:, None]]
    return [field.masked_fill(without, 0.0) for field in fields]
