"""`logits_credit` by the CUDA C++ row kernel: a block a row reads the logits, and rewards that exist, once.

Extra memory: [N] results; where the rewards are a product, 64 MiB of them at a time. With the rewards given or without any, a
row's bits do not depend on its batch; where they are a product, as far as the platform's matrix library does.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from ..finalise import REWARD_SUMS, SUMS
from ..native_cuda import ABSENT, DTYPES, LogitsCall, address, launch
from ..products import blocks, operand, product
from . import chunked
from .inputs import LogitsInputs

_REWARDS = 2**24  # float32 numbers of a product
_MAX_COLUMNS = 4096  # of a table's slice that is converted at once

backward = chunked.backward


def forward(x: LogitsInputs) -> Tensor:
    """The sums of all columns, [5 or 14, N], as `finalise.SUMS` names them."""
    n, device = len(x.token_ids), x.logits.device
    sums = x.logits.new_empty(len(SUMS) + len(REWARD_SUMS) * x.has_reward, n, dtype=torch.float32)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if x.reward_grad is None:
            return _fold(x, x.reward, sums)
        step = max(1, _REWARDS // x.support.rewarded_columns)
        for start, stop in blocks(n, step):
            rows = slice(start, stop)
            part = LogitsInputs(x.logits[rows], x.token_ids[rows], x.transform.rows(start, stop), x.support)
            sums[:, rows] = _fold(part, _rewards(x, start, stop), torch.empty_like(sums[:, rows]))
    return sums


def _fold(x: LogitsInputs, reward: Tensor | None, sums: Tensor) -> Tensor:
    """`sums`, contiguous, filled."""
    t = x.transform
    ids = x.token_ids.to(torch.int64).contiguous()
    temperatures = None if t.row_temperature is None else t.row_temperature.to(torch.float32).contiguous()
    call = LogitsCall(
        address(x.logits),
        address(reward),
        *x.logits.stride(),
        *((0, 0) if reward is None else reward.stride()),
        address(ids),
        address(temperatures),
        t.temperature,
        t.logit_scale,
        0.0 if t.softcap is None else t.softcap,
        len(ids),
        x.support.vocab_size,
        0 if reward is None else x.support.rewarded_columns,
        address(sums),
    )
    dtypes = DTYPES[x.logits.dtype], ABSENT if reward is None else DTYPES[reward.dtype]
    launch("datc_logits_credit", call, *dtypes, device=x.logits.device)
    return sums


def _rewards(x: LogitsInputs, start: int, stop: int) -> Tensor:
    """[stop - start, rewarded_columns] float32."""
    assert x.reward_grad is not None
    assert x.reward_embedding is not None
    columns = x.support.rewarded_columns
    left = operand(x.reward_grad[start:stop], x.reward_embedding, torch.float32)
    found = left.new_empty(stop - start, columns, dtype=torch.float32)
    for lo, hi in blocks(columns, _MAX_COLUMNS):
        found[:, lo:hi] = product(left, x.reward_embedding[lo:hi].T, torch.float32)
    return found
