"""Where the check runs and at which sizes: a GPU at the sizes of real models, or the interpreter at tiny ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from datc_kernels.testing.inputs import CreditCase


@dataclass(frozen=True)
class Shape:
    """A policy and a reward model: V columns, D and K hidden sizes."""

    name: str
    V: int
    D: int
    K: int


@dataclass(frozen=True)
class Setting:
    device: torch.device
    dry: bool  # CPU tensors in Triton's interpreter, tiny, with a clock on the wall

    @property
    def shapes(self) -> tuple[Shape, ...]:
        if self.dry:
            return Shape("deep", 300, 96, 64), Shape("small", 300, 32, 32)
        return (
            Shape("Qwen3-14B + 8B", 151_936, 5120, 4096),
            Shape("Llama-3.1-8B", 128_256, 4096, 4096),
            Shape("small", 151_936, 1024, 1024),
        )

    @property
    def tokens(self) -> tuple[int, ...]:
        """N of the timings."""
        return (4, 8) if self.dry else (2048, 8192, 32_768)

    @property
    def wide(self) -> tuple[int, int]:
        """D and K at which the launch table takes the wide tile."""
        return (1536, 1544) if self.dry else (2048, 1536)

    def pick(self, on_a_gpu: int, dry: int) -> int:
        return dry if self.dry else on_a_gpu


def draw(setting: Setting, N: int, V: int, D: int, K: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> CreditCase:
    """Logits and rewards of spread 2 and 1, drawn on the device itself.

    The interpreter's products are NumPy's, whose order of summation follows the shape: its inputs are eighths, so that every
    order gives the same bits.
    """
    generator = torch.Generator(setting.device).manual_seed(seed)

    def normal(rows: int, columns: int, spread: float) -> Tensor:
        if setting.dry:
            whole = torch.randint(-8, 9, (rows, columns), generator=generator, device=setting.device)
            return (whole * (2.0 ** round(torch.tensor(spread).log2().item()) / 8)).to(dtype)
        result = torch.empty(rows, columns, dtype=dtype, device=setting.device)
        for part in result.split(16_384):  # no float32 copy of a whole head
            part.copy_(torch.randn(part.shape, generator=generator, device=setting.device) * spread)
        return result

    ids = torch.randint(V, (N,), generator=generator, device=setting.device)
    return CreditCase(normal(N, D, 1.0), normal(V, D, 2 / D**0.5), ids, normal(N, K, 1.0), normal(V, K, 1 / K**0.5))
