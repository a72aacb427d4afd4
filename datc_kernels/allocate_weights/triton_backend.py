"""`allocate_weights` by one Triton program a response, without a read-back: float32 inside, any length."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from torch import Tensor

from .triton_kernel import allocate_kernel

_BLOCK = 2048


def allocate(
    credit: Tensor, advantage: Tensor, lengths: Tensor, frozen: Tensor | None, ceiling: float, utility: str
) -> tuple[Tensor, Tensor]:
    """weight [N] and temperature [B], float32, as `allocate_weights` defines them."""
    weight = torch.ones(credit.shape, dtype=torch.float32, device=credit.device)
    temperature = torch.ones(lengths.shape, dtype=torch.float32, device=credit.device)
    if len(lengths):
        with torch.cuda.device(credit.device) if credit.device.type == "cuda" else nullcontext():
            allocate_kernel[(len(lengths),)](
                credit,
                credit if frozen is None else frozen.contiguous(),
                advantage.contiguous(),
                lengths.cumsum(0),
                lengths.contiguous(),
                weight,
                temperature,
                len(credit),
                ceiling,
                math.log(ceiling) if ceiling > 1.0 else 1.0,
                SIGN=utility == "sign",
                HAS_FROZEN=frozen is not None,
                BLOCK=_BLOCK,
                num_warps=8,
                enable_fp_fusion=True,
            )
    return weight, temperature
