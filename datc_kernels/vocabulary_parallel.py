"""A head whose columns lie on the ranks of a process group, a slice each, in rank order.

Every rank folds its own columns as if there were no others, one all_gather brings the packed sums [5 or 14, N] together, and
every rank merges them in rank order: the same bits on every rank, and those of one process that folds the same slices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from . import checks
from .anchored_state import empty_state, merge
from .finalise import Fold, Sampled, Support, finalise

_IGNORED, _ABSENT = -1, -2  # local ids: no place in the slice has such a number


class Columns(Protocol):
    """The arguments of one op on one set of columns."""

    @property
    def token_ids(self) -> Tensor: ...
    @property
    def support(self) -> Support: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def has_reward(self) -> bool: ...
    def without_reward(self) -> Self: ...


Inputs = TypeVar("Inputs", bound=Columns)


@dataclass(frozen=True)
class Slice:
    """The head's columns that an op is given: all of them, or under a process group this rank's share."""

    group: str  # an op's arguments are no objects: the group travels as its name; "" without one
    start: int
    columns: int  # rows of the head here
    reward_rows: int  # of the reward embedding here; 0 without one
    vocab_size: int  # of all ranks together; checks.ALL_COLUMNS: every column that some rank has
    ignore_index: int

    @property
    def support(self) -> Support:
        """The support within the slice, its first column being 0."""
        everything = self.vocab_size == checks.ALL_COLUMNS
        here = self.columns if everything else max(0, min(self.columns, self.vocab_size - self.start))
        return Support(here, min(self.reward_rows, here), _IGNORED if self.group else self.ignore_index)

    def local_ids(self, token_ids: Tensor) -> Tensor:
        """[N] places in the slice; under a group the support's own ignore_index, and another negative number for ids of other
        ranks."""
        if not self.group:
            return token_ids
        here = (token_ids >= self.start) & (token_ids < self.start + self.support.vocab_size)
        ids = torch.where(here, token_ids.to(torch.int64) - self.start, _ABSENT)
        return torch.where(token_ids == self.ignore_index, _IGNORED, ids)

    def fields(self, x: Inputs, forward: Callable[[Inputs], Tensor], token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """logprob [N] and stats, as `finalise` lays them out. x has this slice's support and local ids."""
        if not self.group:
            checks.check_ids_in_support(token_ids, x.support.vocab_size, x.support.ignore_index)
            return finalise(Fold.of(forward(x)), x.support.sampled(token_ids))
        return finalise(*_gather(fold_of_slice(x, forward).sums(), self, token_ids))

    def sum_over_ranks(self, gradient: Tensor) -> Tensor:
        """What the columns of all ranks give to hidden, in place."""
        if self.group:
            dist.all_reduce(gradient, group=_group_of(self.group))
        return gradient

    def header(self) -> tuple[int, int, int, int]:
        return self.start, self.columns, self.reward_rows, self.vocab_size


def _group_of(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def fold_of_slice(x: Inputs, forward: Callable[[Inputs], Tensor]) -> Fold:
    """What `forward(x)` folds, also where this rank has no column or no reward row."""
    if x.support.vocab_size and (x.support.rewarded_columns or not x.has_reward):
        return Fold.of(forward(x))
    n, device = len(x.token_ids), x.token_ids.device
    empty = empty_state(n, dtype=x.dtype, device=device)
    zero = torch.zeros(n, dtype=x.dtype, device=device)
    if x.support.vocab_size:
        fold = Fold.of(forward(x.without_reward()).to(x.dtype))
    else:
        fold = Fold(empty.without_reward(), None, torch.full_like(zero, -torch.inf), None)
    return replace(fold, rewarded=empty, u_y=zero) if x.has_reward else fold


def _gather(sums: Tensor, part: Slice, token_ids: Tensor) -> tuple[Fold, Sampled]:
    """The fold over all ranks' columns, and what is known of the sampled ids.

    Raises ValueError on CPUs for slices that do not follow each other and for ids outside the support; elsewhere, where raising
    would wait for the device, such rows, or all of them, become NaN.
    """
    group, local = _group_of(part.group), part.local_ids(token_ids)
    here = local >= 0
    flags = torch.stack([here, here & (local < part.support.rewarded_columns)]).to(sums.dtype)
    header = torch.zeros(len(sums) + 2, 1, dtype=sums.dtype, device=sums.device)
    for i, number in enumerate(part.header()):  # not copied from the host, which would wait for the device
        header[i].fill_(number)
    mine = torch.cat([torch.cat([sums, flags]), header], dim=1)
    everyone = mine.new_empty(group.size(), *mine.shape)
    dist.all_gather(list(everyone.unbind(0)), mine, group=group)
    headers, everyone = everyone[:, :4, -1], everyone[:, :, :-1]
    fold = merge_in_order([Fold.of(one[:-2]) for one in everyone.unbind(0)])
    owners, with_row = everyone[:, -2].sum(0), everyone[:, -1].sum(0) > 0
    sampled = Sampled(token_ids == part.ignore_index, (owners != 1) | ~_fit(headers), with_row)
    if sums.device.type == "cpu":
        _check_slices(headers)
        _check_ids(token_ids, sampled)
    return fold, sampled


def merge_in_order(folds: list[Fold]) -> Fold:
    """The fold over the union of disjoint sets of columns, in their order."""
    first, *others = folds
    for fold in others:
        u_y = None if first.u_y is None or fold.u_y is None else first.u_y + fold.u_y
        rewarded = None if first.rewarded is None or fold.rewarded is None else merge(first.rewarded, fold.rewarded)
        first = Fold(merge(first.whole, fold.whole), rewarded, torch.maximum(first.z_y, fold.z_y), u_y)
    return first


def _fit(headers: Tensor) -> Tensor:
    """[] bool: slices follow each other from column 0 on, agree on the support, which they hold, and so do the reward rows."""
    start, columns, rows, vocab_size = headers.unbind(1)
    end = start + columns
    follow = (start[0] == 0) & (start[1:] == end[:-1]).all()
    agree = (vocab_size == vocab_size[0]).all() & (vocab_size[0] <= end[-1])
    # Reward rows run short only once, and what a rank has beyond its columns would be another rank's.
    prefix = ((rows[:-1] == columns[:-1]) | ((rows[:-1] < columns[:-1]) & (rows[1:] == 0))).all()
    return follow & agree & (prefix | (rows == 0).all())


def _check_slices(headers: Tensor) -> None:
    if bool(_fit(headers)):
        return
    start, columns, rows, vocab_size = (x.to(torch.int64).tolist() for x in headers.unbind(1))
    ends = [a + b for a, b in zip(start, columns, strict=True)]
    if start != [0, *ends[:-1]]:
        checks.fail("vocab_start", f"{[0, *ends[:-1]]}, slices in rank order that follow each other ({columns} columns)", start)
    if len(set(vocab_size)) > 1 or vocab_size[0] > ends[-1]:
        checks.fail("vocab_size", f"one number of at most {ends[-1]} (the columns of all ranks)", vocab_size)
    checks.fail("reward_embedding", f"this rank's rows, from vocab_start on, of one table ({columns} columns)", f"{rows} rows")


def _check_ids(token_ids: Tensor, sampled: Sampled) -> None:
    wrong = sampled.outside & ~sampled.ignored
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        checks.fail("token_ids", "ids within the support of all ranks", f"{int(token_ids[row])} in row {row}")
