"""The last layer, worked out only where its output is read.

    keys and values    at every position: the pooled one attends to them
    the rest of it     at the pooled position: output projection and MLP, some three quarters of a layer's products

Both are per-position and end in a residual sum, so handing them one position of each row gives [R, 1, hidden], which the sum
broadcasts: right at that position, meaningless at the others, whose output nobody reads and no gradient reaches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# Layers of the shape x + o_proj(attention(x)), then x + mlp(x), with norms of single positions at will.
_FAMILIES = {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"}


@contextmanager
def read_only_at(backbone: nn.Module, place: Tensor) -> Iterator[None]:
    """Within it, the backbone's `last_hidden_state` is right at `place [R]` of each row, and only there.

    Backbones of other kinds work out everything, as ever.
    """
    with ExitStack() as hooks:
        for module in _per_position(backbone):
            hooks.enter_context(module.register_forward_pre_hook(_selecting(place)))
        yield


def _per_position(backbone: Any) -> list[nn.Module]:
    if backbone.config.model_type not in _FAMILIES or not type(backbone).__module__.startswith("transformers.models."):
        return []
    layer = backbone.layers[-1]
    recomputed = layer.training and getattr(layer, "gradient_checkpointing", False)  # in the backward pass, outside of hooks
    if recomputed or not type(layer).__module__.startswith("transformers.models."):
        return []
    return [layer.self_attn.o_proj, layer.mlp]


def _selecting(place: Tensor) -> Any:
    def select(module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        (hidden,) = inputs
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        return hidden[rows, place.to(hidden.device)].unsqueeze(1)

    return select
