"""The fused kernels as tests need them: as shipped, by pointers, and in tiles small or large enough for small inputs.

The interpreter's time goes with the number of operations, not with their size: large tiles are for suites of many small calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from .. import triton_fold, triton_operands, triton_rows
from ..candidate_advantages import chunked as candidates
from ..launch_table import Tiling
from ..linear_credit import chunked
from ..linear_credit import triton_backend as linear
from ..logits_credit import chunked as logits_chunked
from ..logits_credit import triton_backend as logits

# A wide tile, a narrow one for what it leaves, slices of two or four of them; two rows of blocks are one group's worth.
SMALL = (Tiling(16, 32, 16, warps=4, stages=2, slice=64), Tiling(16, 16, 16, warps=4, stages=2, slice=64))
SMALL_ROWS = Tiling(8, 64, 0, warps=4, stages=1, slice=128)
LARGE = (Tiling(16, 256, 32, warps=4, stages=2), Tiling(16, 64, 32, warps=4, stages=2))
LARGE_ROWS = Tiling(16, 512, 0, warps=4, stages=1)


ROW_KERNEL = "chunked by the row kernel"  # as `chunked` runs on GPUs


def _yes(*_: Any) -> bool:
    return True


def small_tilings(*_: Any, **__: Any) -> tuple[Tiling, ...]:
    return SMALL


def large_tilings(*_: Any, **__: Any) -> tuple[Tiling, ...]:
    return LARGE


def no_descriptors(*_: torch.Tensor) -> bool:
    return False


@contextmanager
def using_triton(variant: str) -> Iterator[str]:
    """The name to pass as `backend`; inside, the kernels run as the variant says."""
    patches: list[Any] = []
    if variant == ROW_KERNEL:
        patches += [patch.object(module, "row_kernel_runs", _yes) for module in (chunked, logits_chunked, candidates)]
        patches += [patch.object(triton_rows, "ROWS", LARGE_ROWS)]
    if "pointers" in variant:
        patches += [patch.object(module, "use_descriptors", no_descriptors) for module in (linear, logits, triton_operands)]
    if "small tiles" in variant:
        patches += [patch.object(module, "choose_tilings", small_tilings) for module in (linear, logits)]
        patches += [patch.object(linear, "GROUP", 2), patch.object(logits, "ROWS", SMALL_ROWS)]
        patches += [patch.object(triton_fold, "_MAX_ROWS", 128)]
    if "large tiles" in variant:
        patches += [patch.object(module, "choose_tilings", large_tilings) for module in (linear, logits)]
        patches += [patch.object(module, "ROWS", LARGE_ROWS) for module in (logits, triton_rows)]
    for each in patches:
        each.start()
    try:
        yield "chunked" if variant == ROW_KERNEL else "triton"
    finally:
        for each in patches:
            each.stop()
