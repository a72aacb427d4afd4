"""From hidden states to one score a row."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call


def last_attended(attention_mask: Tensor) -> Tensor:
    """[R] position of the last 1 in each row of a [R, L] mask, whichever side the padding is on.

    The mask decides, never an id: padding is an ordinary token (often EOS) in many vocabularies.
    """
    length = attention_mask.shape[1]
    return length - 1 - attention_mask.flip(1).to(torch.int32).argmax(1)


def pooled_score(head: nn.Module, hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """[R] float32: `head` on the hidden state of each row's last attended position, computed in float32.

    In a low-precision last product, responses of nearly equal quality tie; the head's parameters stay as they are.
    """
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    return head_score(head, hidden[rows, last_attended(attention_mask)])


def head_score(head: nn.Module, hidden: Tensor) -> Tensor:
    """[R] float32: `head` on hidden states [R, hidden], computed in float32."""
    parameters = {name: tensor.float() for name, tensor in [*head.named_parameters(), *head.named_buffers()]}
    return functional_call(head, parameters, (hidden.float(),)).squeeze(-1)
