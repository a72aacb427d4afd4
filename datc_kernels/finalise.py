"""From the sums of one pass over the vocabulary to the fields of `TokenCredit`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .anchored_state import AnchoredState, RewardSums

# Rows of the `stats` tensor that ops return beside logprob. The first five always, the last five with a reward gradient.
STATS = ("entropy", "logsumexp", "sum_p2", "logit_max", "log_partition")
REWARD_STATS = ("credit", "advantage", "reward_mean", "displacement_norm", "force_norm")


# Rows of the `sums` tensor that a pass over the vocabulary leaves: of all columns and the sampled one, then, with a reward
# gradient, of the columns that have a reward row and the sampled one. csrc/fold.h writes them in this order.
SUMS = ("z_t", "Q", "R", "H", "z_y")
REWARD_SUMS = ("z_t", "Q", "R", "H", "u_t", "S1", "S2", "S3", "u_y")


@dataclass(frozen=True)
class Support:
    """Which columns exist, which of them have a reward row, and which id marks rows to skip."""

    vocab_size: int
    rewarded_columns: int
    ignore_index: int

    def sampled(self, token_ids: Tensor) -> Sampled:
        outside = (token_ids < 0) | (token_ids >= self.vocab_size)
        return Sampled(token_ids == self.ignore_index, outside, token_ids < self.rewarded_columns)


@dataclass(frozen=True)
class Sampled:
    """What is known of the sampled ids, each [N] bool."""

    ignored: Tensor
    outside: Tensor  # of the support
    rewarded: Tensor  # they have a reward row


@dataclass(frozen=True)
class Fold:
    """What one pass over the vocabulary leaves."""

    whole: AnchoredState  # all columns, without the reward half
    rewarded: AnchoredState | None  # the columns that have a reward row
    z_y: Tensor  # [N] logit of the sampled token, -inf where it is none of the columns
    u_y: Tensor | None  # [N] its first-order reward, 0 where it has no row

    @staticmethod
    def of(sums: Tensor) -> Fold:
        """From `sums` [5 or 14, N]."""
        z_t, Q, R, H, z_y, *reward = sums.unbind(0)
        whole = AnchoredState(z_t, Q, R, H)
        if not reward:
            return Fold(whole, None, z_y, None)
        z_t, Q, R, H, u_t, S1, S2, S3, u_y = reward
        return Fold(whole, AnchoredState(z_t, Q, R, H, RewardSums(u_t, S1, S2, S3)), z_y, u_y)

    def sums(self) -> Tensor:
        """As one tensor [5 or 14, N]."""
        s, r = self.whole, self.rewarded
        rows = [s.z_t, s.Q, s.R, s.H, self.z_y]
        if r is not None and r.reward is not None and self.u_y is not None:
            rows += [r.z_t, r.Q, r.R, r.H, r.reward.u_t, r.reward.S1, r.reward.S2, r.reward.S3, self.u_y]
        return torch.stack(rows)


def finalise(fold: Fold, sampled: Sampled) -> tuple[Tensor, Tensor]:
    """logprob [N] and stats [5 or 10, N], rows as `STATS` and `REWARD_STATS` name them.

    logit_max and log_partition = log sum exp(z - logit_max) are what the backward needs to rebuild p without losing the gap
    between large logits. Ignored rows are zeros, rows with an id outside the support NaN.
    """
    s = fold.whole
    log_partition = torch.log1p(s.Q)
    logprob = (fold.z_y - s.z_t) - log_partition
    Z = 1 + s.Q
    fields = [log_partition - s.H / Z, s.z_t + log_partition, (1 + s.R) / (Z * Z), s.z_t, log_partition]
    if fold.rewarded is not None and fold.u_y is not None:
        # A row whose rewarded columns are all masked has no conditional distribution; one with a NaN logit stays NaN.
        exists = (fold.rewarded.z_t > -torch.inf) | fold.rewarded.z_t.isnan()
        has_row = sampled.rewarded & exists
        fields += [torch.where(has_row, x, 0.0) for x in _reward_fields(fold.rewarded, fold.z_y, fold.u_y)]

    def settle(x: Tensor) -> Tensor:
        return x.masked_fill_(sampled.outside, torch.nan).masked_fill_(sampled.ignored, 0.0)

    return settle(logprob), settle(torch.stack(fields))


def _reward_fields(s: AnchoredState, z_y: Tensor, u_y: Tensor) -> list[Tensor]:
    """credit, A_y, mean u, |G|, |k| of the distribution whose state is s."""
    assert s.reward is not None
    u_t = s.reward.u_t
    Z = 1 + s.Q
    p_t = 1 / Z
    q, r = s.Q / Z, s.R / (Z * Z)
    s1, s2, s3 = s.reward.S1 / Z, s.reward.S2 / (Z * Z), s.reward.S3 / (Z * Z)
    p_y = torch.exp(z_y - s.z_t) / Z
    gain = u_y - u_t
    # Columns equal in z and u are exchangeable, so this needs no column index.
    on_anchor = (z_y == s.z_t) & (u_y == u_t)
    advantage = torch.where(on_anchor, 0.0, gain) - s1
    credit = torch.where(on_anchor, s1 * (r - p_t * q) - s2, p_y * gain - s2 + s1 * (p_t * p_t + r - p_y))
    force2 = torch.where(on_anchor, q * q + r, 1 - 2 * p_y + p_t * p_t + r)
    displacement2 = (p_t * s1).square() + (s3 - 2 * s1 * s2 + s1 * s1 * r).clamp(min=0)
    return [credit, advantage, u_t + s1, displacement2.sqrt(), force2.clamp(min=0).sqrt()]
