"""Which token ids keep weight 1 whatever their credit."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

# Layout carries no content whose share of the advantage could mean anything: blank tokens, and a full stop that only
# ends a line.
_LAYOUT = re.compile(r"\s*|\.[ \t\r]*\n\s*")


def is_layout(token: bytes) -> bool:
    r"""True for bytes that are only whitespace (`^\s*$`) or a full stop, blanks and a newline (`^\.[ \t\r]*\n\s*$`)."""
    try:
        text = token.decode()
    except UnicodeDecodeError:
        return False
    return _LAYOUT.fullmatch(text) is not None


def frozen_table(bytes_of: Sequence[bytes | None], special_ids: Collection[int], size: int) -> Tensor:
    """[size] bool over token ids: layout tokens, special tokens, and ids that no token has.

    Args:
        bytes_of: bytes of every id, None for an id without a token (`token_bytes`).
        special_ids: end-of-turn, stop and other special tokens.
        size: rows of the table, at least `len(bytes_of)`.
    """
    table = torch.ones(size, dtype=torch.bool)
    table[: len(bytes_of)] = torch.tensor([token is None or is_layout(token) for token in bytes_of], dtype=torch.bool)
    table[sorted(special_ids)] = True
    return table
