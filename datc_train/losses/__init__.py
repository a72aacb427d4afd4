"""The policy's losses: pure functions of log-probabilities and token advantages. A new one is a line in `LOSSES`, and where it
has a surrogate or a reduction of its own, a function beside those.

    grpo         min(rho a, clip(rho) a), mean over a response's tokens, then over responses            arXiv 2402.03300
    dapo         the same, mean over all tokens; its paper clips at 0.2 and, above, at 0.28             arXiv 2503.14476
    dr_grpo      the same, sum over tokens / max_tokens, mean over responses; A = r - mean, not over std   arXiv 2503.20783
    gspo_token   one ratio a response, each token's own gradient; its paper clips at 3e-4 and 4e-4      arXiv 2507.18071
    cispo        sg[min(rho, 1 + clip_high)] a log p, mean over all tokens                              arXiv 2506.13585

With one update a rollout rho is 1, and grpo, gspo_token and a bounded cispo have one gradient but for the reduction.
"""

from __future__ import annotations

from datc_train.losses.bounded import k3
from datc_train.losses.correction import importance_weights
from datc_train.losses.objective import Loss
from datc_train.losses.reductions import constant_length, count_responses, count_tokens, mean_of_means, token_mean
from datc_train.losses.surrogates import capped_weight, sequence_ratio, token_ratio
from datc_train.losses.types import LossTerms

grpo_loss = Loss(token_ratio, mean_of_means)

LOSSES: dict[str, Loss] = {
    "grpo": grpo_loss,
    "dapo": Loss(token_ratio, token_mean),
    "dr_grpo": Loss(token_ratio, constant_length, divides_by_deviation=False),
    "gspo_token": Loss(sequence_ratio, mean_of_means),
    "cispo": Loss(capped_weight, token_mean),
}

__all__ = ["LOSSES", "Loss", "LossTerms", "count_responses", "count_tokens", "grpo_loss", "importance_weights", "k3"]
