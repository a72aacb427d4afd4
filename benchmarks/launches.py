"""Every launch that the Triton backends make for a call, recorded instead of run, compiled for a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from datc_kernels import triton_fold, triton_gradient, triton_operands, triton_rows
from datc_kernels.allocate_weights import triton_backend as allocate_backend
from datc_kernels.finalise import Support
from datc_kernels.linear_credit import triton_backend as linear_backend
from datc_kernels.linear_credit.inputs import LinearInputs
from datc_kernels.logit_transform import LogitTransform
from datc_kernels.logits_credit import triton_backend as logits_backend
from datc_kernels.logits_credit.inputs import LogitsInputs

_KERNELS = (
    (linear_backend, "linear_credit_kernel"),
    (triton_rows, "logits_credit_kernel"),
    (allocate_backend, "allocate_kernel"),
    (triton_fold, "merge_partials_kernel"),
    (triton_gradient, "logit_gradient_kernel"),
)
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Launch:
    kernel: Any  # triton.JITFunction
    grid: tuple[int, ...]
    values: dict[str, Any]  # by parameter
    options: dict[str, Any]  # num_warps and the like

    def compile(self, capability: tuple[int, int]) -> Any:
        """Triton's compiled kernel, specialised as Triton itself would: integers of 1, and what is a multiple of 16."""
        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(self.kernel.params):
            value, multiple = self.values[parameter.name], False
            general = parameter.do_not_specialize
            if parameter.is_constexpr or (isinstance(value, int) and value == 1 and not general):
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, TensorDescriptor):
                signature[parameter.name] = f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>"
            elif isinstance(value, Tensor):
                signature[parameter.name] = "*" + _TYPES[value.dtype]
                multiple = value.data_ptr() % 16 == 0 and not parameter.do_not_specialize_on_alignment
            elif isinstance(value, int):
                signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                multiple = value % 16 == 0 and not general
            else:
                signature[parameter.name] = "fp32"
            if multiple:
                attributes[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=GPUTarget("cuda", 10 * capability[0] + capability[1], 32), options=self.options)


@dataclass
class _Recorder:
    kernel: Any
    launches: list[Launch] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def record(*arguments: Any, **named: Any) -> None:
            values = dict(zip(self.kernel.arg_names, arguments, strict=False))
            values |= {name: value for name, value in named.items() if name in self.kernel.arg_names}
            options = {name: value for name, value in named.items() if name not in self.kernel.arg_names}
            self.launches.append(Launch(self.kernel, grid, values, options))

        return record


@contextmanager
def _recording(capability: tuple[int, int]) -> Iterator[list[Launch]]:
    launches: list[Launch] = []
    with ExitStack() as stack:
        for module, name in _KERNELS:
            stack.enter_context(patch.object(module, name, _Recorder(getattr(module, name), launches)))
        stack.enter_context(patch.object(triton_operands, "capability", lambda device: capability))
        yield launches


def linear_credit(
    capability: tuple[int, int],
    dtype: torch.dtype,
    *,
    N: int = 8192,
    V: int = 151_936,
    D: int,
    K: int | None,
    rows: int | None = None,  # of the reward table
    table_dtype: torch.dtype | None = None,
    bias: bool = False,
    softcap: float | None = None,
    row_temperature: bool = False,
) -> list[Launch]:
    """Of one call on CPU tensors of these shapes, which are reserved but never touched."""
    temperature = torch.empty(N) if row_temperature else None
    inputs = LinearInputs(
        torch.empty(N, D, dtype=dtype),
        torch.empty(V, D, dtype=dtype),
        torch.zeros(N, dtype=torch.int64),
        torch.empty(V, dtype=dtype) if bias else None,
        LogitTransform(1.0, softcap, 1.0, temperature),
        Support(V, 0 if K is None else min(V, rows or V), -100),
        None if K is None else torch.empty(N, K, dtype=table_dtype or dtype),
        None if K is None else torch.empty(rows or V, K, dtype=table_dtype or dtype),
    )
    with _recording(capability) as launches:
        linear_backend.forward(inputs)
    return launches


def logits_credit(
    capability: tuple[int, int], dtype: torch.dtype, *, N: int = 64, V: int = 151_936, K: int | None = None, given: bool = False
) -> list[Launch]:
    inputs = LogitsInputs(
        torch.empty(N, V, dtype=dtype),
        torch.zeros(N, dtype=torch.int64),
        LogitTransform(),
        Support(V, V if K or given else 0, -100),
        None if K is None else torch.empty(N, K, dtype=dtype),
        None if K is None else torch.empty(V, K, dtype=dtype),
        torch.empty(N, V, dtype=dtype) if given else None,
    )
    with _recording(capability) as launches:
        logits_backend.forward(inputs)
        if K is None and not given:
            logits_backend.backward(inputs, torch.ones(N), torch.zeros(N), torch.zeros(5, N))
    return launches


def allocate_weights(capability: tuple[int, int]) -> list[Launch]:
    credit = torch.zeros(64)
    with _recording(capability) as launches:
        allocate_backend.allocate(
            credit, torch.ones(2), torch.tensor([32, 32]), torch.zeros(64, dtype=torch.bool), 4.0, "advantage"
        )
    return launches
