"""The last layer, worked out only where its output is read.

    keys and values      at every position, for the pooled one attends to them
    everything else      at the pooled position: query, attention, projections, MLP, norms

The layer is entered twice: once with all positions, up to where it hands its keys and values to the cache, and once with the
pooled position of each row alone, which gets those keys and values back. Both belong to one graph.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from datc_train.prefix import Rows
from datc_train.reward.scorer import Scorer

# Families whose layers do nothing with other positions but attend to their keys and values.
_FAMILIES = {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"}
_CACHE_NAMES = ("cache", "past_key_values")  # newer and older versions of transformers


def hidden_at(scorer: Scorer, inputs: Tensor, rows: Rows, cache: Cache | None, place: Tensor) -> Tensor:
    """[R, hidden] of the backbone's output at position `place [R]` of each row; other arguments as for `Scorer.hidden`."""
    layer = _last_layer(scorer.backbone)
    if layer is None:
        hidden = scorer.hidden(inputs, rows, cache)
        return hidden[torch.arange(len(hidden), device=hidden.device), place.to(hidden.device)]
    with layer.register_forward_pre_hook(_Narrowing(place), with_kwargs=True):
        return scorer.hidden(inputs, rows, cache)[:, 0]


def _last_layer(backbone: Any) -> nn.Module | None:
    """The last layer where it may be entered twice: the library's own, of a known family, not recomputed in the backward."""
    if backbone.config.model_type not in _FAMILIES or not type(backbone).__module__.startswith("transformers.models."):
        return None
    layer = backbone.layers[-1]
    recomputed = layer.training and getattr(layer, "gradient_checkpointing", False)
    return None if recomputed or not type(layer).__module__.startswith("transformers.models.") else layer


class _Reached(Exception):  # noqa: N818 - no error: the layer has been read as far as it is wanted
    pass


class _KeysAndValues:
    """Stands in for the cache: keeps what the layer hands over the first time, returns it the second time."""

    def __init__(self, cache: Cache | None) -> None:
        self._cache = cache
        self._kept: tuple[Tensor, Tensor] | None = None

    def update(self, keys: Tensor, values: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        if self._kept is not None:
            return self._kept
        self._kept = (keys, values) if self._cache is None else self._cache.update(keys, values, *arguments, **named)
        raise _Reached


class _Narrowing:
    """Forward pre-hook of the layer: its call with all positions becomes one with the position `place [R]` of each row."""

    def __init__(self, place: Tensor) -> None:
        self._place = place

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        (hidden,) = args
        name = next(name for name in _CACHE_NAMES if name in kwargs)
        kwargs = kwargs | {name: _KeysAndValues(kwargs[name])}
        with suppress(_Reached):
            layer.forward(hidden, **kwargs)
        place = self._place.to(hidden.device)

        def at_place(tensor: Tensor) -> Tensor:  # [R or 1, L, ...] -> [R, 1, ...]
            tensor = tensor.expand(len(place), *tensor.shape[1:])
            return tensor[torch.arange(len(place), device=place.device), place].unsqueeze(1)

        mask = kwargs["attention_mask"]
        if mask is not None and mask.ndim == 4:  # [R or 1, 1, queries, keys]; a [R, keys] one has no queries
            mask = at_place(mask.transpose(1, 2)).transpose(1, 2)
        narrow = {
            "attention_mask": mask,
            "position_ids": at_place(kwargs["position_ids"]),
            "position_embeddings": tuple(at_place(part) for part in kwargs["position_embeddings"]),
        }
        return (at_place(hidden),), kwargs | narrow
