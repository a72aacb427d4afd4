"""The parts of a sequence classifier that a score needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import Cache

from datc_train.prefix import Rows, backbone_hidden


@dataclass(frozen=True)
class Scorer:
    """Embedding, backbone and head, each frozen."""

    embedding: nn.Module  # ids -> [.., K]
    backbone: nn.Module  # takes inputs_embeds, gives last_hidden_state
    head: nn.Module  # hidden state -> [.., 1]
    vocab_size: int  # rows of the embedding
    device: torch.device  # of the embedding

    def hidden(self, inputs: Tensor, rows: Rows, cache: Cache | None = None) -> Tensor:
        """`backbone_hidden` of this backbone."""
        return backbone_hidden(self.backbone, inputs, rows, cache)
