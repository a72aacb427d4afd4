"""`allocate_weights` by the C++ extension: one response after the other on each thread, float64 inside.

A response's weights have the same bits whatever lies beside it and however many threads there are.
"""

from __future__ import annotations

import torch
from torch import Tensor


def allocate(
    credit: Tensor, advantage: Tensor, lengths: Tensor, frozen: Tensor | None, ceiling: float, utility: str
) -> tuple[Tensor, Tensor]:
    """weight [N] and temperature [B], as `allocate_weights` defines them."""
    weight, temperature = torch.ops.datc_cpu.allocate_weights(
        credit.to(torch.float64).contiguous(),
        advantage.to(torch.float64).contiguous(),
        lengths.contiguous(),
        None if frozen is None else frozen.contiguous(),
        ceiling,
        utility == "sign",
    )
    return weight, temperature
