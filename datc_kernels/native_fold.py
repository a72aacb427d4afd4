"""What the backends of the C++ extension share: arguments of the head, and the sums that come back."""

from __future__ import annotations

import torch
from torch import Tensor

from .anchored_state import AnchoredState, RewardSums
from .finalise import Fold
from .logit_transform import LogitTransform


def head_arguments(
    bias: Tensor | None, transform: LogitTransform
) -> tuple[Tensor | None, Tensor | None, float, float, float | None]:
    """bias, row_temperature, temperature, logit_scale and softcap, as every op of the extension takes them."""
    return (
        None if bias is None else bias.to(torch.float32).contiguous(),
        None if transform.row_temperature is None else transform.row_temperature.to(torch.float32).contiguous(),
        transform.temperature,
        transform.logit_scale,
        transform.softcap,
    )


def fold_of(sums: Tensor) -> Fold:
    """The rows of `sums` [5 or 14, N], in the order of csrc/fold.h."""
    z_t, Q, R, H, z_y, *reward = sums.unbind(0)
    whole = AnchoredState(z_t, Q, R, H)
    if not reward:
        return Fold(whole, None, z_y, None)
    z_t, Q, R, H, u_t, S1, S2, S3, u_y = reward
    return Fold(whole, AnchoredState(z_t, Q, R, H, RewardSums(u_t, S1, S2, S3)), z_y, u_y)
