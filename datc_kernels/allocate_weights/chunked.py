"""All responses at once by segment reductions: a fixed number of bisections, no read-back. Any device; float64 inside."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .segments import Segments

# Each halves [1, tau_hi]; 48 leave less than 1e-14 of it.
_BISECTIONS = 48


def allocate(
    credit: Tensor, advantage: Tensor, lengths: Tensor, frozen: Tensor | None, ceiling: float, utility: str
) -> tuple[Tensor, Tensor]:
    """weight [N] and temperature [B], as `allocate_weights` defines them."""
    segments = Segments(lengths, credit.shape[0])
    free = torch.ones_like(credit, dtype=torch.bool) if frozen is None else ~frozen
    # Whatever lies in a frozen position (a NaN too) must not reach the sums.
    d = torch.where(free, credit.double(), 0.0)
    A = advantage.double()
    n = segments.reduce(free.double(), "sum")
    at_least_one = n.clamp(min=1)
    highest = segments.reduce(torch.where(free, d, -torch.inf), "max")
    lowest = segments.reduce(torch.where(free, d, torch.inf), "min")
    # From the smallest value on: equal credits leave exact zeros, and a common offset does not cost digits.
    shift = torch.where(n > 0, lowest, 0.0)
    above = torch.where(free, d - segments.spread(shift), 0.0)
    mean = segments.reduce(above, "sum") / at_least_one
    centred = torch.where(free, above - segments.spread(mean), 0.0)
    std = (segments.reduce(centred.square(), "sum") / at_least_one).sqrt()
    floor = 1e-3 * segments.reduce(d.abs(), "sum") / at_least_one
    scale = torch.where(std + floor > 0, std + floor, 1.0)
    direction = A.sign() if utility == "sign" else A
    util = segments.spread(direction / scale) * centred
    top = segments.reduce(torch.where(free, util, -torch.inf), "max")
    bottom = segments.reduce(torch.where(free, util, torch.inf), "min")
    finite = A.isfinite() & (segments.reduce((free & ~credit.isfinite()).double(), "sum") == 0)
    uniform = (n < 2) | (A == 0) | (finite & (highest == lowest))
    if ceiling == 1.0:
        uniform = torch.ones_like(uniform)
    span = torch.where(uniform, 0.0, top - bottom)
    relative = torch.where(free, util - segments.spread(torch.where(uniform, 0.0, top)), -torch.inf)

    def extremes(tau: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """exp((util - max) / tau) [N], and the largest and smallest weight [B]."""
        e = torch.exp(relative / segments.spread(tau))
        largest = n / segments.reduce(e, "sum")
        return e, largest, largest * torch.exp(-span / tau)

    low = torch.ones_like(span)
    high = (span / math.log(ceiling)).clamp(min=1.0) if ceiling > 1.0 else low
    _, largest, smallest = extremes(low)
    high = torch.where((largest <= ceiling) & (smallest >= 1 / ceiling), low, high)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        _, largest, smallest = extremes(middle)
        feasible = (largest <= ceiling) & (smallest >= 1 / ceiling)
        high = torch.where(feasible, middle, high)
        low = torch.where(feasible, low, middle)
    e, largest, _ = extremes(high)
    # clamp: at the bound itself the last bit of the rounding may stand above it.
    weight = (e * segments.spread(largest)).clamp(1 / ceiling, ceiling)
    weight = torch.where(segments.spread(finite), weight, torch.nan)
    temperature = torch.where(finite, high, torch.nan)
    keep = free & ~segments.spread(uniform)
    return torch.where(keep, weight, 1.0), torch.where(uniform, 1.0, temperature)
