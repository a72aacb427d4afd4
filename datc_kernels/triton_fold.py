"""From launches over segments of the vocabulary to the sums of all columns: what the Triton backends share on the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import triton
from torch import Tensor

from .finalise import REWARD_SUMS, SUMS
from .launch_table import Segment
from .products import blocks
from .triton_partials import merge_partials_kernel

# Float32 numbers of partial states that one round of launches may hold: 64 MiB.
_PARTIALS = 2**24
_MAX_ROWS = 8192
_MERGE_ROWS = 32

# (segment, first row, last row + 1, partials of the segment, z_y, u_y) -> one launch
Launch = Callable[[Segment, int, int, Tensor, Tensor, Tensor], None]


def fold_segments(
    n: int, device: torch.device, segments: list[Segment], *, reward: bool, launch: Launch, most_rows: int = _MAX_ROWS
) -> Tensor:
    """`sums` [5 or 14, n], block of rows after block of rows."""
    sums = torch.empty(len(SUMS) + len(REWARD_SUMS) * reward, n, dtype=torch.float32, device=device)
    numbers = sum(s.slots * s.fields for s in segments)
    step = min(_MAX_ROWS, most_rows, max(128, _PARTIALS // numbers // 128 * 128))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # Triton launches on the current one
        for start, stop in blocks(n, step):
            sums[:, start:stop] = _fold_rows(start, stop, device, segments, reward, launch)
    return sums


def _fold_rows(start: int, stop: int, device: torch.device, segments: list[Segment], reward: bool, launch: Launch) -> Tensor:
    rows = stop - start
    partials = torch.empty(rows * sum(s.slots * s.fields for s in segments), dtype=torch.float32, device=device)
    z_y = torch.full((rows,), -torch.inf, dtype=torch.float32, device=device)
    u_y = torch.zeros_like(z_y)
    at = 0
    for segment in segments:
        launch(segment, start, stop, partials[at:], z_y, u_y)
        at += segment.slots * segment.fields * rows
    merged = torch.empty(12 if reward else 4, rows, dtype=torch.float32, device=device)
    merge_partials_kernel[(triton.cdiv(rows, _MERGE_ROWS),)](
        partials,
        merged,
        rows,
        sum(s.slots for s in segments if s.rewarded),
        sum(s.slots for s in segments if not s.rewarded),
        REWARD=reward,
        ROWS=_MERGE_ROWS,
        num_warps=1,
    )
    whole = [merged[:4], z_y[None]]
    return torch.cat([*whole, merged[4:], u_y[None]] if reward else whole)
