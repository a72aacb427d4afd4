"""Where the rows of a group part, and the two passes over them.

    prefix    read once per group, without gradient; its keys and values are copied to each row of the group
    rest      response and closing tokens; forward and backward

What a token's gradient needs lies at and after the token (attention is causal), so nothing is lost by the prompt's missing
backward pass. Prefixes are padded on the left and rests on the right: cached tokens and new ones are neighbours, and distances
along the cache, which sliding windows go by, are distances in the row.

    [ pad pad | prefix | rest      ]
    [ longer prefix    | rest | pad]
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

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


@dataclass(frozen=True)
class Past:
    """What rows have behind them: keys and values of prefixes, padded on the left to `width`."""

    cache: Cache
    lengths: Tensor  # [R] int64, of the prefixes
    width: int

    def select(self, places: Sequence[int]) -> Past:
        """A past of its own for a micro-batch, row i with a copy of row `places[i]`.

        The pass that it is for grows the cache and ties its graph to it.
        """
        index = torch.tensor(places, device=self.lengths.device)
        fresh = copy.copy(self.cache)
        fresh.layers = [copy.copy(layer) for layer in self.cache.layers]
        fresh.batch_select_indices(index)
        return Past(fresh, self.lengths[index], self.width)


def read_prefixes(scorer: Scorer, prefixes: Sequence[tuple[int, ...]]) -> Past:
    """Keys and values of the prefixes, none empty, without gradient."""
    width = max(map(len, prefixes))
    # Padding repeats the prefix's own first id, as the rests' repeats their last: nothing compares ids with a pad token.
    ids = torch.tensor([[prefix[0]] * (width - len(prefix)) + list(prefix) for prefix in prefixes], device=scorer.device)
    lengths = torch.tensor([len(prefix) for prefix in prefixes], device=scorer.device)
    positions = torch.arange(width, device=scorer.device) - (width - lengths[:, None])
    cache = DynamicCache(config=scorer.backbone.config)
    with torch.no_grad():
        inputs, last = scorer.embedding(ids), torch.full_like(lengths, width - 1)
        hidden_at(scorer, inputs, (positions >= 0).long(), positions.clamp(min=0), cache, last)
    return Past(cache, lengths, width)


def read_rests(
    scorer: Scorer, rests: Sequence[Sequence[int]], past: Past | None, places: Sequence[int], gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Raw scores [R] float32, and d score / d input embedding [R, longest rest, K] with `gradient`.

    Args:
        scorer: the frozen classifier's parts.
        rests: ids behind the prefix, none empty.
        past: what the rows have behind them; None: nothing, they are whole.
        places: [R] which row of `past` each one goes on from.
        gradient: False runs one forward pass without a graph.
    """
    device = scorer.device
    longest = max(map(len, rests))
    ids = torch.tensor([[*rest, *[rest[-1]] * (longest - len(rest))] for rest in rests], device=device)
    columns = torch.arange(longest, device=device)
    lengths = torch.tensor([len(rest) for rest in rests], device=device)
    mask = (columns < lengths[:, None]).long()
    positions, attended, cache = columns.expand(len(rests), -1), mask, None
    if past is not None:
        past = past.select(places)
        starts, cache = past.lengths[:, None], past.cache
        behind = (torch.arange(past.width, device=device) >= past.width - starts).long()
        positions, attended = positions + starts, torch.cat([behind, mask], dim=1)
    with torch.no_grad():
        inputs = scorer.embedding(ids)
    inputs.requires_grad_(gradient)
    with torch.set_grad_enabled(gradient):
        score = head_score(scorer.head, hidden_at(scorer, inputs, attended, positions, cache, lengths - 1))
    # Rows do not see each other, so the gradient of the sum is each row's own.
    return score.detach().to(device), torch.autograd.grad(score.sum(), inputs)[0] if gradient else None
