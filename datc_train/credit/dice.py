"""Random numbers of one response: they depend on the run's seed, the rollout and the response, not on micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from datc_train.credit.types import CreditInputs


def dice(inputs: CreditInputs) -> Iterator[tuple[slice, np.random.Generator]]:
    """The tokens and a fresh generator of each response, in order."""
    start = 0
    for length, response in zip(inputs.lengths.tolist(), inputs.responses.tolist(), strict=True):
        yield slice(start, start + length), np.random.default_rng([*inputs.seed, response])
        start += length
