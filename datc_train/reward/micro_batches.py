"""Which rows the model reads together.

    rows -> prefix batches: distinct prefixes that are read once, without gradient
              -> micro-batches: rows of those prefixes that go forward and backward together

Sizes are padded tokens: count x longest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SplitRow:
    """A row of the reward model, cut where it stops being like the others of its group."""

    prefix: tuple[int, ...]  # read without gradient; rows of equal prefix share one reading; may be empty
    rest: list[int]  # at least one token, the pooled one


@dataclass(frozen=True)
class PrefixBatch:
    """Distinct prefixes that are read together, and the rows that go on from them."""

    prefixes: list[tuple[int, ...]]
    micro_batches: list[list[int]]  # indices of rows


def micro_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Rows of like length together, longest first, so that rows x longest row stays within `max_tokens`.

    A row longer than the budget is a batch of its own. Every row comes exactly once; the longest batch comes first, so
    a budget that memory cannot hold fails at once and not in the middle.
    """
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > max_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def prefix_batches(rows: Sequence[SplitRow], pending: Collection[int], max_tokens: int) -> Iterator[PrefixBatch]:
    """The `pending` ones of `rows`, each exactly once, longest prefixes first.

    Both passes stay within `max_tokens`: prefixes x longest prefix, and rows x (longest prefix of the batch + longest rest
    of the micro-batch); what is longer than the budget by itself is alone. Prefixes of less than half the longest one's
    length start a batch of their own, for every row attends over the longest.
    """
    rows_of: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for row in sorted(pending):
        rows_of[rows[row].prefix].append(row)
    batch: list[tuple[int, ...]] = []
    for prefix in sorted(rows_of, key=len, reverse=True):
        if batch and ((len(batch) + 1) * len(batch[0]) > max_tokens or 2 * len(prefix) < len(batch[0])):
            yield _batch(batch, rows_of, rows, max_tokens)
            batch = []
        batch.append(prefix)
    if batch:
        yield _batch(batch, rows_of, rows, max_tokens)


def _batch(
    prefixes: list[tuple[int, ...]], rows_of: dict[tuple[int, ...], list[int]], rows: Sequence[SplitRow], max_tokens: int
) -> PrefixBatch:
    members = [row for prefix in prefixes for row in rows_of[prefix]]
    lengths = [len(prefixes[0]) + len(rows[row].rest) for row in members]
    return PrefixBatch(prefixes, [[members[i] for i in batch] for batch in micro_batches(lengths, max_tokens)])
