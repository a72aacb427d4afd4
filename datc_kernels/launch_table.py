"""Tile shapes of the fused kernels: by architecture, dtype and sizes, never by the number of rows.

So a row's order of summation, and with it its bits, are the same alone and in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

# Blocks of rows that take the same slice together: their hidden states and reward gradients stay in L2.
GROUP = 16


@dataclass(frozen=True)
class Tiling:
    rows: int
    columns: int
    depth: int  # of one step of the product
    warps: int
    stages: int
    slice: int = 1024  # columns of one program: some hundred slices of a large vocabulary, so that a few rows fill the chip


# Hopper and data-centre Blackwell, tensor descriptors, half precision. The wide tile asks least of L2, but its exponentials
# wait in registers beside the second accumulator: it pays where the products are deep.
WIDE = Tiling(128, 256, 64, warps=8, stages=3)
NARROW = Tiling(128, 128, 64, warps=8, stages=3)
# Ampere, Ada and consumer Blackwell: below 99 KB of shared memory. Also where descriptors cannot take the layout.
POINTERS = Tiling(128, 128, 32, warps=8, stages=4)
# float32 products, exact: no tensor cores.
FLOAT32 = Tiling(64, 64, 32, warps=8, stages=3)
# Logits in memory and no product: one warp a row.
ROWS = Tiling(1, 1024, 0, warps=1, stages=1, slice=8192)

WIDE_FROM = 3072  # D + K


def choose_tilings(width: int, *, half: bool, descriptors: bool, plain: bool = True) -> tuple[Tiling, ...]:
    """Tilings from the widest tile to the narrowest, each for what the ones before leave over; the last also takes ragged ends.

    width is D + K, `half` whether every product is one of half-precision tensors, `descriptors` whether the architecture has them
    and the operands allow them, `plain` that there is neither bias nor soft-cap, for which the wide tile has no registers left.
    """
    if not half:
        return (FLOAT32,)
    if not descriptors:
        return (POINTERS,)
    return (WIDE, NARROW) if plain and width >= WIDE_FROM else (NARROW,)


def has_descriptors(capability: tuple[int, int]) -> bool:
    """Whether the architecture's copy engine takes tensor descriptors."""
    return capability[0] in (9, 10)


@dataclass(frozen=True)
class Segment:
    """Columns [first, stop) that one launch takes."""

    first: int
    stop: int
    rewarded: bool
    tiling: Tiling

    @property
    def ragged(self) -> bool:
        """The last tile reaches beyond `stop`."""
        return (self.stop - self.first) % self.tiling.columns != 0

    @property
    def slots(self) -> int:
        return -(-(self.stop - self.first) // self.tiling.slice)

    @property
    def fields(self) -> int:
        return 8 if self.rewarded else 4


def split_columns(
    vocab_size: int, rewarded_columns: int, tilings: tuple[Tiling, ...], others: tuple[Tiling, ...] | None = None
) -> list[Segment]:
    """Segments in column order, those with reward rows first; whole tiles apart from the ragged ends.

    `others` are the tilings of columns without a reward row, where they differ.
    """
    segments = []
    for first, stop, rewarded in ((0, rewarded_columns, True), (rewarded_columns, vocab_size, False)):
        choice = tilings if rewarded or others is None else others
        for tiling in choice:
            whole = (stop - first) // tiling.columns * tiling.columns
            if whole:
                segments.append(Segment(first, first + whole, rewarded, tiling))
            first += whole
        if first < stop:
            segments.append(Segment(first, stop, rewarded, choice[-1]))
    return segments
