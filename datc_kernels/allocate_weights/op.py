"""`allocate_weights`: shares a response's advantage out over its tokens by their credit."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..dispatch import choose, implementation
from ..logit_transform import compute_dtype
from ..types import TokenWeights


def allocate_weights(
    credit: Tensor,  # [N] or [B, T]
    advantage: Tensor,  # [B]
    lengths: Tensor | None = None,  # [B]
    *,
    mask: Tensor | None = None,  # [B, T]
    frozen: Tensor | None = None,  # shape of credit
    ceiling: float = 4.0,
    utility: str = "advantage",
    backend: str | None = None,
) -> TokenWeights:
    """KL-regularised weights of a response's tokens; mean 1, within [1 / ceiling, ceiling], constants for autograd.

    Within each response, over its n free (not frozen, not padded) positions, with d the credit and A the advantage:

        s = (d - mean d) / (std d + 1e-3 mean|d|)       population std
        util = A s                                      utility="sign": sign(A) s
        w = n softmax(util / tau)                       maximises (1/n) sum w util - tau KL(w/n || uniform)
        tau = the smallest value >= 1 with max w <= ceiling and min w >= 1 / ceiling

    Frozen and padded positions have weight exactly 1, and so has every position where n < 2, A = 0, all d are equal or
    ceiling = 1; otherwise a response whose A, or whose d at a free position, is not finite has weights and temperature NaN. The
    token's advantage is A w: the response keeps its sign and its mean.

    Args:
        credit: d, responses end to end [N] with `lengths`, or padded [B, T] with `mask`; float.
        advantage: A, [B] float.
        lengths: tokens of each response, [B] int64 or int32, zeros allowed; None with credit [N]: one response. On GPUs they
            are not read back to be checked.
        mask: True at tokens, False at padding, [B, T] bool; None with credit [B, T]: no padding.
        frozen: True where the weight stays 1, bool in the shape of credit.
        ceiling: lambda, at least 1. utility: "advantage" or "sign".
        backend: None, "reference", "chunked", "cpu" (C++), "cuda" (CUDA C++) or "triton" (float32 inside, NaN where that does
            not hold A / std d; the others use float64).

    Returns:
        TokenWeights: weight in credit's shape and temperature [B], float32 (float64 for float64 credit).

    Raises:
        ValueError: beginning with the argument's name. RuntimeError: the backend asked for cannot run here.

    Example:
        >>> import torch
        >>> from datc_kernels import allocate_weights
        >>> w = allocate_weights(torch.tensor([0.1, 0.9, -0.4]), torch.tensor([1.0]))
        >>> round(w.weight.mean().item(), 4)
        1.0
    """
    padded = isinstance(credit, Tensor) and credit.ndim == 2
    checks.check_float("credit", credit, 2 if padded else 1, "[N] or [B, T]")
    checks.check_float("advantage", advantage, 1, "[B]")
    device = credit.device
    checks.check_device("advantage", advantage, "credit", device)
    if frozen is not None:
        _check_bool("frozen", frozen, credit)
    if padded:
        if lengths is not None:
            checks.fail("lengths", "None with padded credit [B, T] (use mask)", "a tensor")
        if mask is not None:
            _check_bool("mask", mask, credit)
            frozen = ~mask if frozen is None else frozen | ~mask
        lengths = torch.full((credit.shape[0],), credit.shape[1], dtype=torch.int64, device=device)
    else:
        if mask is not None:
            checks.fail("mask", "None with credit [N] laid end to end (use lengths)", "a tensor")
        if lengths is None:
            lengths = torch.full((1,), credit.shape[0], dtype=torch.int64, device=device)
        checks.check_tensor("lengths", lengths, 1, "[B]")
        if lengths.dtype not in checks.INTEGERS:
            checks.fail("lengths", "int64 or int32", lengths.dtype)
        checks.check_device("lengths", lengths, "credit", device)
    checks.check_size("advantage", advantage, 0, lengths.shape[0], "B")
    if isinstance(ceiling, bool) or not isinstance(ceiling, (int, float)) or not 1 <= ceiling <= checks.LARGEST:
        checks.fail("ceiling", f"a number from 1 to {checks.LARGEST:g}", checks.shown(ceiling))
    if utility not in ("advantage", "sign"):
        checks.fail("utility", '"advantage" or "sign"', repr(utility))
    flat = None if frozen is None else frozen.reshape(-1)
    weight, temperature = torch.ops.datc.allocate_weights(
        credit.detach().reshape(-1),
        advantage.detach(),
        lengths,
        flat,
        float(ceiling),
        utility,
        choose(backend, device, credit.dtype, compiled_takes_float64=True),
    )
    return TokenWeights(weight.view(credit.shape), temperature)


def _check_bool(name: str, value: object, credit: Tensor) -> None:
    flags = checks.check_tensor(name, value, credit.ndim, "in the shape of credit")
    if flags.dtype != torch.bool:
        checks.fail(name, "bool", flags.dtype)
    if flags.shape != credit.shape:
        checks.fail(name, f"the shape of credit {tuple(credit.shape)}", tuple(flags.shape))
    checks.check_device(name, flags, "credit", credit.device)


@torch.library.custom_op("datc::allocate_weights", mutates_args=())
def _op(
    credit: Tensor,
    advantage: Tensor,
    lengths: Tensor,
    frozen: Tensor | None,
    ceiling: float,
    utility: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    if lengths.device.type == "cpu" and (bool((lengths < 0).any()) or int(lengths.sum()) != credit.shape[0]):
        checks.fail("lengths", f"non-negative numbers that sum to N = {credit.shape[0]}", f"{lengths.tolist()[:8]}...")
    allocate = implementation("allocate_weights", backend, credit.device).allocate
    weight, temperature = allocate(credit.contiguous(), advantage, lengths.to(torch.int64), frozen, ceiling, utility)
    dtype = compute_dtype(credit)
    return weight.to(dtype), temperature.to(dtype)


@_op.register_fake
def _(
    credit: Tensor,
    advantage: Tensor,
    lengths: Tensor,
    frozen: Tensor | None,
    ceiling: float,
    utility: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(credit)
    return credit.new_empty(credit.shape, dtype=dtype), credit.new_empty(lengths.shape, dtype=dtype)
