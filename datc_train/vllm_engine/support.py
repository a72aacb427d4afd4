"""Keeps the ids that stand for no token from being sampled: models pad their vocabulary.

Only the engine loads this module. vLLM has two model runners, each with an interface of its own for logits processors; one
class serves both.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor as FirstRunnersProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SecondRunnersProcessor

KEY = "datc_vocab_size"  # in the engine's additional_config


class Support(FirstRunnersProcessor, SecondRunnersProcessor):
    """logits[:, vocab_size:] = -inf, before the temperature: log-probabilities are over the support."""

    def __init__(self, vllm_config: Any, *_: Any) -> None:
        self.vocab_size = int(vllm_config.additional_config[KEY])

    def apply(self, logits: Tensor, *_: Any) -> Tensor:
        logits[:, self.vocab_size :] = float("-inf")
        return logits

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        """Nothing of it depends on the batch."""
