"""The most likely alternatives at every position of the responses that samples.jsonl keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from datc_kernels import Candidates, candidate_advantages
from datc_train.config import Config
from datc_train.micro_batches import MicroBatch
from datc_train.policy import Policy
from datc_train.types import Rollout, ScoredRollout


class KeptCandidates:
    """Fills a `Candidates` [M, k] micro-batch by micro-batch, for the M tokens of a rollout's first `samples_per_step` responses.

    Advantages only where `scored` has a reward gradient. k is `candidates_per_token`, or the support where that is smaller.
    """

    def __init__(self, policy: Policy, rollout: Rollout, scored: ScoredRollout, config: Config, vocab_size: int) -> None:
        self.policy, self.scored, self.config, self.vocab_size = policy, scored, config, vocab_size
        self.tokens = int(rollout.lengths[: config.samples_per_step].sum())
        self.k = min(config.candidates_per_token, vocab_size)
        shape = self.tokens, self.k
        self._ids = torch.zeros(shape, dtype=torch.int64, device=policy.device)
        self._probability, self._advantage = (torch.zeros(shape, device=policy.device) for _ in range(2))

    @torch.no_grad()
    def add(self, batch: MicroBatch, hidden: Tensor) -> None:
        """hidden [n, D]: the states that predict the batch's tokens."""
        kept = batch.tokens < self.tokens
        rows = batch.tokens[kept]
        if self.k == 0 or len(rows) == 0:
            return
        gradient, policy = self.scored.reward_grad, self.policy
        found = candidate_advantages(
            hidden[kept],
            policy.weight,
            None if gradient is None else gradient[rows.to(gradient.device)].to(policy.device),
            None if gradient is None else self.scored.reward_embedding,
            top_k=self.k,
            bias=policy.bias,
            temperature=self.config.temperature,
            softcap=policy.softcap,
            logit_scale=policy.logit_scale,
            vocab_size=self.vocab_size,
        )
        self._ids[rows], self._probability[rows] = found.token_ids, found.probability.float()
        if found.advantage is not None:
            self._advantage[rows] = found.advantage.float()

    def result(self) -> Candidates | None:
        """None where nothing is kept."""
        if self.k == 0 or self.tokens == 0:
            return None
        return Candidates(self._ids, self._probability, None if self.scored.reward_grad is None else self._advantage)
