"""The definition, one response after the other."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def allocate(
    credit: Tensor, advantage: Tensor, lengths: Tensor, frozen: Tensor | None, ceiling: float, utility: str
) -> tuple[Tensor, Tensor]:
    """weight [N] and temperature [B], as `allocate_weights` defines them; float64 inside."""
    weight = torch.ones(credit.shape, dtype=torch.float64, device=credit.device)
    temperature = torch.ones(lengths.shape, dtype=torch.float64, device=credit.device)
    start = 0
    for b, length in enumerate(lengths.tolist()):
        tokens = torch.arange(start, start + length, device=credit.device)
        start += length
        free = tokens if frozen is None else tokens[~frozen[tokens]]
        d, A = credit[free].double(), advantage[b].double()
        if len(free) < 2 or A == 0 or ceiling == 1.0:
            continue
        if not (d.isfinite().all() and A.isfinite()):
            weight[free], temperature[b] = torch.nan, torch.nan
            continue
        if d.max() == d.min():
            continue
        s = (d - d.mean()) / (d.std(correction=0) + 1e-3 * d.abs().mean())
        util = (A.sign() if utility == "sign" else A) * s
        temperature[b] = tau = smallest_temperature(util, ceiling)
        weight[free] = (len(free) * torch.softmax(util / tau, dim=0)).clamp(1 / ceiling, ceiling)
    return weight, temperature


def smallest_temperature(util: Tensor, ceiling: float) -> float:
    """The smallest tau >= 1 with max w <= ceiling and min w >= 1 / ceiling; the feasible set is [tau*, inf)."""

    def feasible(tau: float) -> bool:
        w = len(util) * torch.softmax(util / tau, dim=0)
        return bool(w.max() <= ceiling and w.min() >= 1 / ceiling)

    if feasible(1.0):
        return 1.0
    low, high = 1.0, max(1.0, float(util.max() - util.min()) / math.log(ceiling))
    for _ in range(64):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if feasible(middle) else (middle, high)
    return high
