"""What rows have behind them, and how prefixes and what follows them lie in a batch.

Prefixes are padded on the left and rests on the right: cached tokens and new ones are neighbours, and distances along the
cache, which sliding windows go by, are distances in the row.

    [ pad pad | prefix | rest      ]
    [ longer prefix    | rest | pad]
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache


@dataclass(frozen=True)
class Past:
    """Keys and values of prefixes, padded on the left to `width`."""

    cache: Cache
    lengths: Tensor  # [R] int64, of the prefixes
    width: int

    def select(self, places: Sequence[int]) -> Past:
        """A past of its own for one pass, row i with a copy of row `places[i]`.

        The pass that it is for grows the cache and ties its graph to it.
        """
        index = torch.tensor(places, device=self.lengths.device)
        fresh = copy.copy(self.cache)
        fresh.layers = [copy.copy(layer) for layer in self.cache.layers]
        fresh.batch_select_indices(index)
        return Past(fresh, self.lengths[index], self.width)


@dataclass(frozen=True)
class Rows:
    """A padded batch of tokens as a backbone takes it."""

    ids: Tensor  # [R, L] int64; padding repeats a neighbour: nothing compares ids with a pad token
    positions: Tensor  # [R, L] int64, in the whole row
    attended: Tensor  # [R, past + L] int64, 1 where a token is attended to
    lengths: Tensor  # [R] int64


def prefix_rows(prefixes: Sequence[Sequence[int]], device: torch.device) -> Rows:
    """Prefixes, none empty, padded on the left."""
    width = max(map(len, prefixes))
    ids = torch.tensor([[prefix[0]] * (width - len(prefix)) + list(prefix) for prefix in prefixes], device=device)
    lengths = torch.tensor([len(prefix) for prefix in prefixes], device=device)
    positions = torch.arange(width, device=device) - (width - lengths[:, None])
    return Rows(ids, positions.clamp(min=0), (positions >= 0).long(), lengths)


def rest_rows(rests: Sequence[Sequence[int]], past: Past | None, device: torch.device) -> Rows:
    """What goes on from row i of the past, or from nothing; none empty, padded on the right.

    Behind a past padding is not masked: where pasts are read on from attention is causal, and no token comes after the padding.
    """
    longest = max(map(len, rests))
    ids = torch.tensor([[*rest, *[rest[-1]] * (longest - len(rest))] for rest in rests], device=device)
    lengths = torch.tensor([len(rest) for rest in rests], device=device)
    positions = torch.arange(longest, device=device).expand(len(rests), -1)
    if past is None:
        return Rows(ids, positions, (positions < lengths[:, None]).long(), lengths)
    starts = past.lengths[:, None].to(device)
    behind = (torch.arange(past.width, device=device) >= past.width - starts).long()
    return Rows(ids, positions + starts, torch.cat([behind, torch.ones_like(ids)], dim=1), lengths)


def backbone_hidden(backbone: nn.Module, inputs: Tensor | None, rows: Rows, cache: Cache | None = None) -> Tensor:
    """[R, L, hidden] of the rows behind what the cache holds; the cache grows by them.

    inputs: [R, L, K] the rows' embeddings; None: the backbone looks up their ids itself.
    cache: None runs rows without a past.
    """
    named: dict[str, Any] = {"input_ids": rows.ids} if inputs is None else {"inputs_embeds": inputs}
    if cache is not None:
        named[cache_argument(backbone)] = cache
    output = backbone(attention_mask=rows.attended, position_ids=rows.positions, use_cache=cache is not None, **named)
    return output.last_hidden_state


def read_prefixes(backbone: Any, prefixes: Sequence[Sequence[int]], device: torch.device) -> Past:
    """Keys and values of the prefixes, none empty; with their graph, where gradients are on."""
    rows = prefix_rows(prefixes, device)
    cache = DynamicCache(config=backbone.config)
    backbone_hidden(backbone, None, rows, cache)
    return Past(cache, rows.lengths, rows.ids.shape[1])


def read_shared(backbone: nn.Module, prefixes: Sequence[tuple[int, ...]], device: torch.device) -> Past:
    """A past for a row of each prefix, none empty, with every distinct one read once."""
    distinct = list(dict.fromkeys(prefixes))
    place = {prefix: index for index, prefix in enumerate(distinct)}
    return read_prefixes(backbone, distinct, device).select([place[prefix] for prefix in prefixes])


def any_shared(prefixes: Sequence[tuple[int, ...]]) -> bool:
    """Whether there is something to read once: no prefix is empty, and one comes twice."""
    return all(prefixes) and len(set(prefixes)) < len(prefixes)


def cache_argument(backbone: nn.Module) -> str:
    """What the backbone calls its cache: `cache` in newer versions of transformers, `past_key_values` in older ones."""
    return "cache" if "cache" in inspect.signature(backbone.forward).parameters else "past_key_values"
