"""`allocate_weights` by CUDA C++, a block a response, without a read-back: float64 inside, any length."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from ..native_cuda import AllocateCall, address, launch


def allocate(
    credit: Tensor, advantage: Tensor, lengths: Tensor, frozen: Tensor | None, ceiling: float, utility: str
) -> tuple[Tensor, Tensor]:
    """weight [N] and temperature [B], float64, as `allocate_weights` defines them."""
    weight = torch.ones(credit.shape, dtype=torch.float64, device=credit.device)
    temperature = torch.ones(lengths.shape, dtype=torch.float64, device=credit.device)
    # Named, so that their memory lives until the launch is on the stream.
    d, A = credit.to(torch.float64).contiguous(), advantage.to(torch.float64).contiguous()
    flags = None if frozen is None else frozen.contiguous()
    ends, sizes = lengths.cumsum(0), lengths.contiguous()
    call = AllocateCall(
        *map(address, (d, flags, A, ends, sizes)),
        len(credit),
        len(lengths),
        ceiling,
        utility == "sign",
        address(weight),
        address(temperature),
    )
    with torch.cuda.device(credit.device) if credit.device.type == "cuda" else nullcontext():
        launch("datc_allocate_weights", call, device=credit.device)
    return weight, temperature
