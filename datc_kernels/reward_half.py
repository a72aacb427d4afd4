"""What `linear_credit` and `logits_credit` share at their edges: checks of the reward half, and the public record."""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks
from .finalise import REWARD_STATS, STATS
from .types import TokenCredit


def to_token_credit(logprob: Tensor, stats: Tensor) -> TokenCredit:
    """Fields of their own memory where the backward reads `stats`: a caller may write into a constant."""
    names = STATS if stats.shape[0] == len(STATS) else STATS + REWARD_STATS
    constants = stats.detach().clone() if logprob.requires_grad else stats.detach()
    fields = dict(zip(names, constants.unbind(0), strict=True))
    del fields["logit_max"], fields["log_partition"]
    return TokenCredit(logprob=logprob, **fields)


def check_reward(
    reward_grad: Tensor | None, reward_embedding: Tensor | None, n: int, device: torch.device, *, may_be_empty: bool = False
) -> None:
    """Both halves or neither, of one width, on the policy's device; `may_be_empty`: a table without rows is one."""
    if reward_grad is None or reward_embedding is None:
        if reward_grad is not None:
            checks.fail("reward_embedding", "a tensor [rows, K] beside reward_grad", None)
        if reward_embedding is not None:
            checks.fail("reward_grad", "a tensor [N, K] beside reward_embedding", None)
        return
    checks.check_float("reward_grad", reward_grad, 2, "[N, K]")
    checks.check_size("reward_grad", reward_grad, 0, n, "N")
    checks.check_float("reward_embedding", reward_embedding, 2, "[rows, K]")
    if not may_be_empty:
        checks.check_not_empty("reward_embedding", reward_embedding)
    checks.check_size("reward_embedding", reward_embedding, 1, reward_grad.shape[1], "K of reward_grad")
    checks.check_device("reward_grad", reward_grad, "the policy's tensors", device)
    checks.check_device("reward_embedding", reward_embedding, "the policy's tensors", device)
