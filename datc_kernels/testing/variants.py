"""The ways in which the ops are run by tests: every backend, and some with tiles so small that small inputs cross them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from .. import native
from ..candidate_advantages import chunked as candidates_chunked
from ..linear_credit import chunked
from ..logits_credit import chunked as logits_chunked

VARIANTS = ("reference", "chunked", "chunked in small tiles")
CPU_VARIANTS = ("cpu", "cpu in portable code", "cpu in small tiles")  # of the C++ extension: float32 results
TRITON_VARIANTS = ("triton", "triton by pointers", "triton in small tiles", "triton in large tiles", "chunked by the row kernel")
SMALL_TILE = (5, 64)


@contextmanager
def using(variant: str, tile: tuple[int, int] = SMALL_TILE) -> Iterator[str]:
    """The name to pass as `backend`; inside, the op runs as the variant says; small tiles are `tile` (rows, columns)."""
    if variant in TRITON_VARIANTS:
        from .triton_variants import using_triton

        with using_triton(variant) as name:
            yield name
        return
    if variant == "cpu in portable code":
        with patch.object(native, "LEVEL", 1):
            yield "cpu"
        return
    if "small tiles" not in variant:
        yield variant
        return

    def small(device: torch.device | int) -> tuple[int, int]:
        return tile

    if variant in CPU_VARIANTS:
        with patch.object(native, "tile_shape", small):
            yield "cpu"
        return
    with (
        patch.object(chunked, "tile_shape", small),
        patch.object(logits_chunked, "tile_shape", small),
        patch.object(candidates_chunked, "tile_shape", small),
    ):
        yield "chunked"
