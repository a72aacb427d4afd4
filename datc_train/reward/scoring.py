"""Every row scored, in as many passes as memory asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from datc_train.credit_point import EMBEDDING, CreditPoint
from datc_train.prefix import Past
from datc_train.reward.micro_batches import SplitRow, prefix_batches
from datc_train.reward.scorer import Scorer
from datc_train.reward.shared_prefix import read_prefixes, read_rests

Result = TypeVar("Result")


def score_rows(
    scorer: Scorer,
    rows: Sequence[SplitRow],
    max_tokens: int,
    on_gradient: Callable[[int, Tensor], None] | None,
    say: Callable[[str], None],
    point: CreditPoint = EMBEDDING,
    turns: Sequence[Sequence[int]] = (),
) -> tuple[Tensor, int]:
    """Raw score of every row, and the gradient of each score with respect to the input embeddings of its rest.

    Where memory runs out the budget is halved and the rows that are left go on; `say` gets a line about it.

    Args:
        scorer: the frozen classifier's parts.
        rows: what to read.
        max_tokens: budget of a pass in padded tokens, see `prefix_batches`.
        on_gradient: called once a row as `on_gradient(row, gradient [len(rest), K])`, gradient in the embedding's dtype;
            without it, forward passes only.
        say: called with words for people.
        point, turns: where the gradient is taken, and with one that moves when each place of each row's rest does, see
            `read_rests`.

    Returns:
        [len(rows)] float32 scores, on the embedding's device, in the order of `rows`; and the budget that held.

    Raises:
        torch.OutOfMemoryError (on CPUs RuntimeError): memory does not hold one row alone.
    """
    scores = torch.zeros(len(rows), dtype=torch.float32, device=scorer.device)
    pending = set(range(len(rows)))

    def keep(batch: list[int], score: Tensor, gradient: Tensor | None) -> None:
        scores[batch] = score
        if on_gradient is not None and gradient is not None:
            for place, row in enumerate(batch):
                on_gradient(row, gradient[place, : len(rows[row].rest)])
        pending.difference_update(batch)

    def read(members: list[int], past: Past | None, places: list[int]) -> tuple[Tensor, Tensor | None]:
        when = [turns[row] for row in members] if turns else ()
        return read_rests(scorer, [rows[row].rest for row in members], past, places, on_gradient is not None, point, when)

    while (failed := _run(scorer, rows, sorted(pending), max_tokens, read, keep)) is not None:
        max_tokens = max(1, min(max_tokens, failed) // 2)
        if scorer.device.type == "cuda":
            torch.cuda.empty_cache()
        say(f"out of memory in a pass of {failed} tokens; going on with at most {max_tokens}")
    return scores, max_tokens


def _run(
    scorer: Scorer,
    rows: Sequence[SplitRow],
    pending: list[int],
    max_tokens: int,
    read: Callable[[list[int], Past | None, list[int]], tuple[Tensor, Tensor | None]],
    keep: Callable[[list[int], Tensor, Tensor | None], None],
) -> int | None:
    """Pass after pass until one does not fit: its padded tokens, or None when all is done."""
    for batch in prefix_batches(rows, pending, max_tokens):
        count, width = len(batch.prefixes), len(batch.prefixes[0])
        past = _if_it_fits(count == 1, read_prefixes, scorer, batch.prefixes) if width else None
        if width and past is None:
            return count * width
        place = {prefix: index for index, prefix in enumerate(batch.prefixes)}
        for members in batch.micro_batches:
            places = [place[rows[row].prefix] for row in members]
            alone = len(members) == count == 1
            result = _if_it_fits(alone, read, members, past, places)
            if result is None:
                return len(members) * (width + max(len(rows[row].rest) for row in members))
            keep(members, *result)
    return None


def _if_it_fits(alone: bool, read: Callable[..., Result], *arguments: Any) -> Result | None:
    """What `read` returns, or None when memory ran out and there is something to take out of the pass (it is not `alone`).

    The error is dropped here, and with it the frames whose tensors filled the memory.
    """
    try:
        return read(*arguments)
    except RuntimeError as error:
        # GPU allocators raise a type of their own, the CPU's says so in words.
        if alone or not (isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)):
            raise
        return None
