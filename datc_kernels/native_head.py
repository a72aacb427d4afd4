"""What the backends of the C++ extension share: the arguments of the head."""

from __future__ import annotations

import torch
from torch import Tensor

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
