"""What a pass with gradient keeps for its backward.

    bytes(rows, prefix, rest) = rows (a rest + b prefix + c rest (prefix + rest))

a: activations of a token that goes forward and backward; b: keys and values of a token that is attended to only; c: what
attention keeps for each pair of tokens (a mask, or probabilities). A budget of M padded tokens holds rows of M in all, so
`bytes` of its rows is what `max_tokens_per_batch` costs, beside the model and what the allocator adds on the way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from datc_train.reward.scorer import Scorer
from datc_train.reward.shared_prefix import read_prefixes, read_rests

_SHAPES = ((64, 64), (256, 64), (64, 192))  # prefix, rest: as many as there are unknowns


@dataclass(frozen=True)
class PassMemory:
    """Bytes that grow with the tokens of a pass."""

    rest_token: float  # a
    prefix_token: float  # b
    pair: float  # c

    def bytes(self, rows: int, prefix: int, rest: int) -> float:
        """Of `rows` rows, each with `prefix` tokens behind it and `rest` of its own."""
        return rows * (self.rest_token * rest + self.prefix_token * prefix + self.pair * rest * (prefix + rest))


def pass_memory(scorer: Scorer) -> PassMemory:
    """The three numbers of a model, from three passes of some hundred tokens."""
    kept = torch.tensor([_kept(scorer, prefix, rest) for prefix, rest in _SHAPES], dtype=torch.float64)
    sizes = torch.tensor([[rest, prefix, rest * (prefix + rest)] for prefix, rest in _SHAPES], dtype=torch.float64)
    a, b, c = torch.linalg.solve(sizes, kept).tolist()
    return PassMemory(a, b, c)


def _kept(scorer: Scorer, prefix: int, rest: int) -> int:
    """Bytes of all storages that the backward of one row keeps, parameters aside."""
    parameters = {tensor.untyped_storage().data_ptr() for tensor in [*scorer.backbone.parameters(), *scorer.head.parameters()]}
    storages: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no address comes twice

    def see(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            alive.append(tensor)
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = [i % scorer.vocab_size for i in range(prefix + rest)]
    past = read_prefixes(scorer, [tuple(ids[:prefix])])
    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        read_rests(scorer, [ids[prefix:]], past, [0], True)
    return sum(storages.values())
