"""From launches over segments of the vocabulary to `TokenCredit`'s fields: what the Triton backends share on the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import triton
from torch import Tensor

from .anchored_state import AnchoredState, RewardSums
from .finalise import REWARD_STATS, STATS, Fold, Support, finalise
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
    token_ids: Tensor, support: Support, segments: list[Segment], *, reward: bool, launch: Launch
) -> tuple[Tensor, Tensor]:
    """logprob [N] and stats, as `finalise` lays them out, block of rows after block of rows."""
    n, device = len(token_ids), token_ids.device
    logprob = torch.empty(n, dtype=torch.float32, device=device)
    stats = torch.empty(len(STATS) + len(REWARD_STATS) * reward, n, dtype=torch.float32, device=device)
    numbers = sum(s.slots * s.fields for s in segments)
    step = min(_MAX_ROWS, max(128, _PARTIALS // numbers // 128 * 128))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # Triton launches on the current one
        for start, stop in blocks(n, step):
            fold = _fold_rows(start, stop, device, segments, reward, launch)
            logprob[start:stop], stats[:, start:stop] = finalise(fold, token_ids[start:stop], support)
    return logprob, stats


def _fold_rows(start: int, stop: int, device: torch.device, segments: list[Segment], reward: bool, launch: Launch) -> Fold:
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
    z_t, Q, R, H = merged[:4]
    whole = AnchoredState(z_t, Q, R, H)
    if not reward:
        return Fold(whole, None, z_y, None)
    z_t, Q, R, H = merged[4:8]
    return Fold(whole, AnchoredState(z_t, Q, R, H, RewardSums(*merged[8:])), z_y, u_y)
