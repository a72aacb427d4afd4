"""The ways in which the ops are run by tests: every backend, and some with tiles so small that small inputs cross them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from ..candidate_advantages import chunked as candidates_chunked
from ..linear_credit import chunked
from ..logits_credit import tiled

VARIANTS = ("reference", "chunked", "chunked in small tiles")
TRITON_VARIANTS = ("triton", "triton by pointers", "triton in small tiles", "triton in large tiles")
SMALL_TILE = (5, 64)


@contextmanager
def using(variant: str, tile: tuple[int, int] = SMALL_TILE) -> Iterator[str]:
    """The name to pass as `backend`; inside, the op runs as the variant says, `chunked` in tiles of `tile` (rows, columns)."""
    if variant in TRITON_VARIANTS:
        from .triton_variants import using_triton

        with using_triton(variant) as name:
            yield name
        return
    if "small tiles" not in variant:
        yield variant
        return

    def small(device: torch.device) -> tuple[int, int]:
        return tile

    with (
        patch.object(chunked, "tile_shape", small),
        patch.object(tiled, "tile_shape", small),
        patch.object(candidates_chunked, "tile_shape", small),
    ):
        yield "chunked"
