"""Tolerances from the arithmetic: what rounding alone may do, on any processor, in any order of a sum.

Instruction sets, thread counts and libraries add the same numbers in other orders, so what one machine shows bounds nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

# Deviations of a random walk of roundings that are let pass: beyond eight lies 2 exp(-8^2 / 2) = 3e-14 of them.
_DEVIATIONS = 8.0


def rounding(dtype: torch.dtype = torch.float32, *, length: int = 1, condition: float = 1.0) -> float:
    """The largest relative error that rounding explains: 8 sqrt(length) condition u.

    dtype      in which the result is computed or, where that is coarser, stored; u = eps / 2 is its unit roundoff
    length     roundings in sequence: terms of the sums on the way (a product over D, then one over V: D + V)
    condition  by how much an error on the way grows beside the result: |term| / |sum| where terms cancel; |z| where a logit z
               becomes a probability, whose relative error is the absolute one of z; products of both

    sqrt(length) and not length: roundings are as good as independent (Higham and Mary, A new approach to probabilistic rounding
    error analysis, SIAM J. Sci. Comput. 41, 2019: |error| <= lambda sqrt(n) u but for a share 2 exp(-lambda^2 / 2); lambda = 8).
    """
    return _DEVIATIONS * math.sqrt(length) * condition * torch.finfo(dtype).eps / 2


def terms(model: nn.Module) -> int:
    """`length` of a forward pass: the terms of every sum that its linear layers take, one after the other."""
    return sum(module.weight.shape[1] for module in model.modules() if isinstance(module, nn.Linear))


def assert_rounded(
    got: Tensor, true: Tensor, dtype: torch.dtype = torch.float32, *, length: int = 1, condition: float = 1.0, name: str = ""
) -> None:
    """|got - true| <= rounding(...) of the largest finite |true|, everywhere; NaN and infinities in the same places.

    For vectors and tables whose entries are sums over the same terms: small ones are as exact as the large ones beside them.
    """
    got, true = got.detach(), true.detach()
    assert got.shape == true.shape, f"{name} {got.shape} for {true.shape}"
    finite = true.isfinite()
    scale = float(true[finite].abs().max()) if finite.any() else 0.0
    allowed = rounding(dtype, length=length, condition=condition) * scale
    torch.testing.assert_close(
        got.double(), true.double(), rtol=0, atol=allowed, equal_nan=True, msg=lambda m: f"{name} {m}", check_device=False
    )
