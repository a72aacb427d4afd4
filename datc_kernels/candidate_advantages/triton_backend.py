"""`candidate_advantages` with the Triton row kernel: products of the library, candidates picked from the tiles that it sums.

Extra memory: two tiles of `products.tile_shape`, partial states, and some [N, k]; never [N, V].
"""

from __future__ import annotations

from torch import Tensor

from . import chunked
from .inputs import CandidateInputs


def forward(x: CandidateInputs) -> tuple[Tensor, Tensor]:
    """Ids [N, k] and values [1 or 2, N, k], as `reference.forward` gives them."""
    return chunked.forward(x, by_kernel=True)
