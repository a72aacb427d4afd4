"""`candidate_advantages` by the C++ extension: the pass of `linear_credit`, and the candidates picked from the same tiles.

Extra memory: at most 64 MiB, and some [N, k].
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native
from ..finalise import Fold
from ..native_head import head_arguments
from .chunked import candidate_values
from .inputs import CandidateInputs
from .picks import Picks

_BYTES_OF_A_CANDIDATE = 16


def forward(x: CandidateInputs) -> tuple[Tensor, Tensor]:
    """Ids [N, k] and values [1 or 2, N, k], as `reference.forward` gives them."""
    widths = [m.shape[1] for m in (x.hidden, x.reward_grad) if m is not None]
    rows, columns = native.tile_shape(max(widths))
    if x.candidate_ids is None:
        rows = max(1, min(rows, 2**24 // (_BYTES_OF_A_CANDIDATE * x.top_k)))
    ids, z, u, sums = torch.ops.datc_cpu.candidate_advantages(
        x.hidden,
        x.weight,
        x.reward_grad,
        x.reward_embedding,
        None if x.candidate_ids is None else x.candidate_ids.contiguous(),
        x.top_k,
        *head_arguments(x.bias, x.transform),
        x.support.vocab_size,
        rows,
        columns,
        native.LEVEL,
    )
    picks = Picks(ids, z.dtype)
    picks.z, picks.u = z, u
    return ids, candidate_values(Fold.of(sums), picks, x.support.rewarded_columns)
