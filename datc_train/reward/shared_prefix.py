"""Where the rows of a group part, and the two passes over them.

    prefix    read once per group, without gradient; its keys and values are copied to each row of the group
    rest      response and closing tokens; forward and backward

What a token's gradient needs lies at and after the token (attention is causal), so nothing is lost by the prompt's missing
backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from datc_train.credit_point import EMBEDDING, CreditPoint
from datc_train.prefix import Past, Rows, prefix_rows, rest_rows
from datc_train.reward.gradient_point import off_the_ray
from datc_train.reward.last_layer import hidden_at
from datc_train.reward.mapped_rows import MappedRow
from datc_train.reward.micro_batches import SplitRow
from datc_train.reward.pooling import head_score
from datc_train.reward.scorer import Scorer


def split_rows(rows: Sequence[MappedRow], group_size: int) -> list[SplitRow]:
    """Each row cut behind the ids of its prompt that all rows of its group begin with, and before the last one."""
    split = []
    for start in range(0, len(rows), group_size):
        group = rows[start : start + group_size]
        cut = min(min(row.head, len(row.ids) - 1) for row in group)
        low, high = min(row.ids for row in group), max(row.ids for row in group)  # what these two share, all do
        cut = next((i for i in range(cut) if low[i] != high[i]), cut)
        split += [SplitRow(tuple(row.ids[:cut]), row.ids[cut:]) for row in group]
    return split


def whole(rows: Sequence[MappedRow]) -> list[SplitRow]:
    """Rows with nothing before them."""
    return [SplitRow((), row.ids) for row in rows]


def read_prefixes(scorer: Scorer, prefixes: Sequence[tuple[int, ...]]) -> Past:
    """Keys and values of the prefixes, none empty, without gradient."""
    rows = prefix_rows(prefixes, scorer.device)
    width = rows.ids.shape[1]
    cache = DynamicCache(config=scorer.backbone.config)
    with torch.no_grad():
        hidden_at(scorer, scorer.embedding(rows.ids), rows, cache, torch.full_like(rows.lengths, width - 1))
    return Past(cache, rows.lengths, width)


def read_rests(
    scorer: Scorer,
    rests: Sequence[Sequence[int]],
    past: Past | None,
    places: Sequence[int],
    gradient: bool,
    point: CreditPoint = EMBEDDING,
    turns: Sequence[Sequence[int]] = (),
) -> tuple[Tensor, Tensor | None]:
    """Raw scores [R] float32, and d score / d input embedding [R, longest rest, K] with `gradient`.

    Args:
        scorer: the frozen classifier's parts.
        rests: ids behind the prefix, none empty.
        past: what the rows have behind them; None: nothing, they are whole.
        places: [R] which row of `past` each one goes on from.
        gradient: False runs one forward pass without a graph.
        point: where the gradient is taken; the scores are those of the row as it is.
        turns: for a point that moves, in which pass each place of each rest does (`gradient_point.turns`); the gradient is 0
            where none does.
    """
    behind = None if past is None else past.select(places)
    rows = rest_rows(rests, behind, scorer.device)
    with torch.no_grad():
        inputs = scorer.embedding(rows.ids)
    if not (gradient and point.moves):
        score, found = _read(scorer, inputs, rows, behind, gradient)
        return score, off_the_ray(found, inputs) if found is not None and point.kind == "tangent" else found
    score, _ = _read(scorer, inputs, rows, behind, False)
    longest = inputs.shape[1]
    turn = torch.tensor([[*row, *[-1] * (longest - len(row))] for row in turns], device=inputs.device)[..., None]  # [R, L, 1]
    total = torch.zeros_like(inputs)
    for number in range(int(turn.max()) + 1):
        moved = torch.where(turn == number, inputs * point.scale, inputs)
        behind = None if past is None else past.select(places)
        _, found = _read(scorer, moved, rows, behind, True)
        assert found is not None
        total = torch.where(turn == number, found, total)
    return score, total


def _read(scorer: Scorer, inputs: Tensor, rows: Rows, past: Past | None, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """One pass over input embeddings [R, L, K]; `past` is used up."""
    inputs = inputs.detach().requires_grad_(gradient)
    with torch.set_grad_enabled(gradient):
        cache = None if past is None else past.cache
        score = head_score(scorer.head, hidden_at(scorer, inputs, rows, cache, rows.lengths - 1))
    # Rows do not see each other, so the gradient of the sum is each row's own.
    return score.detach().to(scorer.device), torch.autograd.grad(score.sum(), inputs)[0] if gradient else None
