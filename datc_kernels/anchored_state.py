"""Sums over the vocabulary relative to the most likely column, and how sets of columns merge.

For a set of columns with anchor t (an arg max of z), over the columns v != t:

    e = exp(z_v - z_t)   delta = u_v - u_t
    Q = sum e    R = sum e^2    H = sum e (z_v - z_t)    S1 = sum e delta    S2 = sum e^2 delta    S3 = sum e^2 delta^2

Nothing is subtracted that nearly cancels: 1 - p_t is Q / (1 + Q), and u enters only by differences. The empty set, or one
whose logits are all -inf, is z_t = -inf with zero sums: the identity of `merge`. The derivation is in
`linear_credit/README.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# What stands for z - z_t where a logit is -inf: exp of it is 0 in every dtype, and 0 * it is 0.
_MASKED = -1e5


@dataclass(frozen=True)
class RewardSums:
    """The half that needs u, each [N]."""

    u_t: Tensor
    S1: Tensor
    S2: Tensor
    S3: Tensor


@dataclass(frozen=True)
class AnchoredState:
    """The sums of one set of columns, each [N]; the reward half is None in log-prob-only mode."""

    z_t: Tensor
    Q: Tensor
    R: Tensor
    H: Tensor
    reward: RewardSums | None = None

    def without_reward(self) -> AnchoredState:
        return AnchoredState(self.z_t, self.Q, self.R, self.H)


def empty_state(rows: int, *, dtype: torch.dtype, device: torch.device) -> AnchoredState:
    """The identity of `merge`, with a reward half."""
    zero = torch.zeros(rows, dtype=dtype, device=device)
    return AnchoredState(torch.full_like(zero, -torch.inf), zero, zero, zero, RewardSums(zero, zero, zero, zero))


def tile_state_(z: Tensor, u: Tensor | None) -> AnchoredState:
    """The state of the columns of one tile. z [N, c] and u [N, c] are overwritten.

    A column whose logit is -inf contributes nothing, whatever its u is (NaN included).
    """
    z_t, t = z.max(dim=1)
    anchor = t[:, None]
    nothing = z_t == -torch.inf
    dz = z.sub_(torch.where(nothing, 0.0, z_t)[:, None])
    if u is not None:
        u_t = torch.where(nothing, 0.0, u.gather(1, anchor).squeeze(1))
        delta = u.sub_(u_t[:, None]).masked_fill_(dz == -torch.inf, 0.0)
    e = dz.clamp_(min=_MASKED).exp().scatter_(1, anchor, 0.0)
    Q = e.sum(dim=1)
    H = dz.mul_(e).sum(dim=1)
    e2 = torch.mul(e, e, out=dz)
    R = e2.sum(dim=1)
    if u is None:
        return AnchoredState(z_t, Q, R, H)
    S1 = e.mul_(delta).sum(dim=1)
    S2 = e2.mul_(delta).sum(dim=1)
    S3 = e2.mul_(delta).sum(dim=1)
    return AnchoredState(z_t, Q, R, H, RewardSums(u_t, S1, S2, S3))


def merge(a: AnchoredState, b: AnchoredState) -> AnchoredState:
    """The state of the union of two disjoint sets, a before b. Exact up to rounding; ties of z_t keep a's anchor."""
    swap = b.z_t > a.z_t

    def order(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """(of the set with the larger anchor, of the other). A NaN stays with a, whose sums are NaN already."""
        return torch.where(swap, y, x), torch.where(swap, x, y)

    z_hi, z_lo = order(a.z_t, b.z_t)
    Q_hi, Q_lo = order(a.Q, b.Q)
    R_hi, R_lo = order(a.R, b.R)
    H_hi, H_lo = order(a.H, b.H)
    gap = torch.where(z_lo == -torch.inf, _MASKED, z_lo - z_hi).clamp(min=_MASKED)
    f = gap.exp()
    f2 = f * f
    Q = Q_hi + f * (1 + Q_lo)
    R = R_hi + f2 * (1 + R_lo)
    H = H_hi + f * (H_lo + gap * (1 + Q_lo))
    if a.reward is None or b.reward is None:
        return AnchoredState(z_hi, Q, R, H)
    u_hi, u_lo = order(a.reward.u_t, b.reward.u_t)
    S1_hi, S1_lo = order(a.reward.S1, b.reward.S1)
    S2_hi, S2_lo = order(a.reward.S2, b.reward.S2)
    S3_hi, S3_lo = order(a.reward.S3, b.reward.S3)
    D = u_lo - u_hi
    S1 = S1_hi + f * (D * (1 + Q_lo) + S1_lo)
    S2 = S2_hi + f2 * (D * (1 + R_lo) + S2_lo)
    S3 = S3_hi + f2 * (D * D * (1 + R_lo) + 2 * D * S2_lo + S3_lo)
    return AnchoredState(z_hi, Q, R, H, RewardSums(u_hi, S1, S2, S3))
