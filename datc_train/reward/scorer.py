"""The parts of a sequence classifier that a score needs."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache


@dataclass(frozen=True)
class Scorer:
    """Embedding, backbone and head, each frozen."""

    embedding: nn.Module  # ids -> [.., K]
    backbone: nn.Module  # takes inputs_embeds, gives last_hidden_state
    head: nn.Module  # hidden state -> [.., 1]
    vocab_size: int  # rows of the embedding
    device: torch.device  # of the embedding

    def hidden(self, inputs: Tensor, mask: Tensor, positions: Tensor, cache: Cache | None = None) -> Tensor:
        """[R, L, hidden] of `inputs [R, L, K]` behind what the cache holds, C tokens a row; the cache grows by them.

        Args:
            inputs: embeddings.
            mask: [R, C + L] 1 where a token is attended to, cached tokens first.
            positions: [R, L] of the inputs in their rows.
            cache: None runs rows without a past.
        """
        past: dict[str, Any] = {} if cache is None else {cache_argument(self.backbone): cache}
        output = self.backbone(
            inputs_embeds=inputs, attention_mask=mask, position_ids=positions, use_cache=cache is not None, **past
        )
        return output.last_hidden_state


def cache_argument(backbone: nn.Module) -> str:
    """What the backbone calls its cache: `cache` in newer versions of transformers, `past_key_values` in older ones."""
    return "cache" if "cache" in inspect.signature(backbone.forward).parameters else "past_key_values"
