"""What the Triton backends pass to their kernels: operands of a product, and the logit transform."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch_table import has_descriptors
from .logit_transform import LogitTransform
from .products import HALF


def interpreting() -> bool:
    return bool(triton.knobs.runtime.interpret)


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; the interpreter takes the tiles of Hopper."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def use_descriptors(*operands: Tensor) -> bool:
    """Whether the architecture has tensor descriptors and every operand [rows, width] can be described by one."""
    return has_descriptors(capability(operands[0].device)) and all(map(_describable, operands))


def _describable(x: Tensor) -> bool:
    """Rows of contiguous numbers, the first number and every row 16-byte aligned."""
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    return x.numel() > 0 and x.stride(1) == 1 and x.stride(0) >= x.shape[1] and aligned


def operand(x: Tensor, block: tuple[int, int], descriptors: bool) -> Tensor | TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block)) if descriptors else x


def native_product(a: Tensor, b: Tensor) -> bool:
    """Whether the tensor cores multiply a and b as they are; everything else is multiplied in float32."""
    return a.dtype == b.dtype and a.dtype in HALF


def must_upcast(a: Tensor, b: Tensor) -> bool:
    """Whether a kernel converts its tiles to float32 before it multiplies. The interpreter takes bfloat16 for integers."""
    return not native_product(a, b) or interpreting()


@dataclass(frozen=True)
class TransformArguments:
    """z = c x with x = softcap tanh(scale raw / softcap), or raw itself, and c = factor / (the row's temperature)."""

    row_temperature: Tensor | None  # [N] float32
    scale: float
    softcap: float
    factor: float
    constants: dict[str, bool]

    @classmethod
    def of(cls, transform: LogitTransform) -> TransformArguments:
        per_row, softcap = transform.row_temperature, transform.softcap
        factor = (transform.logit_scale if softcap is None else 1.0) / transform.temperature
        return cls(
            None if per_row is None else per_row.float().contiguous(),
            transform.logit_scale,
            1.0 if softcap is None else softcap,
            factor,
            {"SOFTCAP": softcap is not None, "HAS_ROW_TEMPERATURE": per_row is not None},
        )

    def temperatures(self, start: int, stop: int, otherwise: Tensor) -> Tensor:
        """Of rows start to stop; `otherwise` is a pointer that no kernel follows."""
        return otherwise if self.row_temperature is None else self.row_temperature[start:stop]

    @property
    def numbers(self) -> tuple[float, float, float]:
        return self.scale, self.softcap, self.factor
