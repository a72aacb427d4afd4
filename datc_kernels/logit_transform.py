"""From what the LM head gives to the policy's logits, in one place for every op and backend.

    z = softcap * tanh(logit_scale * raw / softcap) / temperature          raw = hidden weight^T + bias

without the parts that are not given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitTransform:
    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    row_temperature: Tensor | None = None  # [N], instead of `temperature`

    def rows(self, start: int, stop: int) -> LogitTransform:
        """The transform of rows start to stop."""
        if self.row_temperature is None:
            return self
        return LogitTransform(self.logit_scale, self.softcap, 1.0, self.row_temperature[start:stop])

    def apply_(self, raw: Tensor) -> Tensor:
        """raw [n, c] to z [n, c], in place."""
        if self.softcap is not None:
            masked = raw == -torch.inf  # a masked column stays one: the cap would lift it to -softcap
            raw.mul_(self.logit_scale / self.softcap).tanh_().mul_(self.softcap / self.temperature).masked_fill_(
                masked, -torch.inf
            )
        elif self.logit_scale != self.temperature:
            raw.mul_(self.logit_scale / self.temperature)
        if self.row_temperature is not None:
            raw.div_(self.row_temperature.to(raw.dtype)[:, None])
        return raw

    def chain_(self, grad_z: Tensor, z: Tensor) -> Tensor:
        """Gradient with respect to z [n, c] into the one with respect to raw, in place; z is overwritten."""
        temperature = self.temperature if self.row_temperature is None else self.row_temperature.to(z.dtype)[:, None]
        if self.softcap is not None:
            tanh = z.mul_(temperature).div_(self.softcap).clamp_(min=-1.0)  # -inf where masked
            grad_z.mul_(tanh.square_().neg_().add_(1.0))
        if isinstance(temperature, Tensor):
            return grad_z.div_(temperature).mul_(self.logit_scale)
        return grad_z.mul_(self.logit_scale / temperature) if self.logit_scale != temperature else grad_z


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 where any input is float64, else float32: the dtype of every accumulator and result."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32
