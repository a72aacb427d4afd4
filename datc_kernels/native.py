"""The compiled extension of csrc: loaded once, when the package is imported, or the reason why it is not there."""

from __future__ import annotations

from pathlib import Path

import torch

# The instruction set: 0 is the widest of this machine. Others give other last bits; only tests choose one.
LEVEL = 0


def _load() -> str | None:
    """None where `torch.ops.datc_cpu` is there, else why not."""
    folder = Path(__file__).parent / "_native"
    library = next(iter(sorted(folder.glob("datc_cpu.*so"))), None)
    if library is None:
        note = folder / "missing.txt"
        return note.read_text(encoding="utf-8").strip() if note.exists() else "the C++ extension was not built"
    try:
        torch.ops.load_library(str(library))
    except (OSError, RuntimeError) as error:
        return f"the C++ extension does not load: {error}"
    return None


WHY_MISSING = _load()


def tile_shape(width: int) -> tuple[int, int]:
    """(rows, columns) of the tile of the vocabulary for operands of `width` numbers a row; never a function of N.

    A float32 tile of 512 x 1024 is 2 MiB and stays in cache. Two of them, a slice of two tables in float32 (at most 16 MiB each)
    and a block of two left operands in float32 (at most 8 MiB each) are the whole workspace: 52 MiB, and nothing but the tiles
    where the inputs are float32.
    """
    return min(512, max(1, 2**21 // max(1, width))), min(1024, max(1, 2**22 // max(1, width)))
