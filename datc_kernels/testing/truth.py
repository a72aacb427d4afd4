"""The truth: the definitions, term by term, in extended precision. Slow, independent of the ops' own arithmetic.

For every row the textbook's vectors are formed: p, u, A = u - <p, u>, G = p * A, k = onehot(y) - p, d = <G, k>. Nothing in them
cancels, because each is written by what it consists of: z and u relative to the most likely column, 1 - p_y as the sum of all
other probabilities. NumPy's longdouble (80 bits on x86) does the rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..types import TokenCredit

Array = Any  # np.ndarray of longdouble

_FIELDS = ("credit", "advantage", "reward_mean", "displacement_norm", "force_norm")


def linear_credit(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    reward_grad: Tensor | None = None,
    reward_embedding: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    **options: Any,
) -> TokenCredit:
    """What `datc_kernels.linear_credit` should return, in float64."""
    logits = _wide(hidden) @ _wide(weight).T
    if bias is not None:
        logits = logits + _wide(bias)
    return logits_credit(logits, token_ids, reward_grad, reward_embedding, **options)


def logits_credit(
    logits: Tensor,
    token_ids: Tensor,
    reward_grad: Tensor | None = None,
    reward_embedding: Tensor | None = None,
    *,
    reward: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
    ignore_index: int = -100,
) -> TokenCredit:
    """What `datc_kernels.logits_credit` should return, in float64."""
    columns = logits.shape[1] if vocab_size is None else vocab_size
    if reward_grad is not None and reward_embedding is not None:
        reward = _wide(reward_grad) @ _wide(reward_embedding).T
    rows = []
    for n, y in enumerate(token_ids.tolist()):
        if y == ignore_index:
            rows.append(np.zeros(9))
            continue
        z = _long(logits[n, :columns]) * logit_scale
        if softcap is not None:
            z = softcap * np.tanh(z / softcap)
        z = z / (_long(temperature[n]) if isinstance(temperature, Tensor) else temperature)
        fields = _distribution(z, y)
        if reward is not None:
            fields += _credit(z, _long(reward[n, :columns]), y)
        rows.append(np.array(fields, dtype=np.float64))
    width = 4 if reward is None else 9
    values = torch.from_numpy(np.stack([row[:width] for row in rows], axis=1) if rows else np.zeros((width, 0)))
    names = ("logprob", "entropy", "logsumexp", "sum_p2", *_FIELDS)
    return TokenCredit(**dict(zip(names, values, strict=False)))


def _wide(x: Tensor) -> Tensor:
    return x.detach().cpu().double()


def _long(x: Tensor) -> Array:
    return _wide(x).numpy().astype(np.longdouble)


def _distribution(z: Array, y: int) -> list[Array]:
    """log p_y, entropy, logsumexp, sum p^2."""
    t = int(np.argmax(z))
    gap = z - z[t]
    e = np.exp(gap)
    log_sum = np.log1p(np.delete(e, t).sum())
    p = e / e.sum()
    surprise = np.where(p > 0, log_sum - np.where(p > 0, gap, 0), 0)
    return [gap[y] - log_sum, (p * surprise).sum(), z[t] + log_sum, (p * p).sum()]


def _credit(z: Array, u: Array, y: int) -> list[Array]:
    """d, A_y, mean u, |G|, |k| of the policy conditioned on the columns that have a reward."""
    z = z[: len(u)]
    if y >= len(u) or z.max() == -np.inf:
        return [np.longdouble(0)] * 5
    t = int(np.argmax(z))
    e = np.exp(z - z[t])
    p = e / e.sum()
    delta = u - u[t]
    mean = np.where(p > 0, p * delta, 0).sum()
    A = delta - mean
    G = np.where(p > 0, p * A, 0)
    k = -p
    k[y] = np.delete(p, y).sum()
    return [(G * k).sum(), A[y], u[t] + mean, np.sqrt((G * G).sum()), np.sqrt((k * k).sum())]


def logprob(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """log p_y in float64, differentiable by autograd alone: the truth of the gradients.

    It is -log(1 + sum_{v != y} exp(z_v - z_y)): the derivatives by z_y, sigmoid of the log of that sum, and by z_v keep their
    digits where p_y is nearly 1; those of log_softmax are 1 - p_y as it is left by a subtraction. y is not the only column.
    """
    raw = hidden.double() @ weight.double().T
    if bias is not None:
        raw = raw + bias.double()
    z = raw[:, :vocab_size] * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z / (temperature.double()[:, None] if isinstance(temperature, Tensor) else temperature)
    ignored = token_ids == ignore_index
    y = token_ids.long().masked_fill(ignored, 0)[:, None]
    others = torch.logsumexp(z.scatter(1, y, -torch.inf), dim=1) - z.gather(1, y).squeeze(1)
    return torch.where(ignored, 0.0, -torch.logaddexp(torch.zeros_like(others), others))


def allocate_weights(
    credit: Tensor,  # [N]
    advantage: Tensor,  # [B]
    lengths: Tensor,  # [B]
    frozen: Tensor | None = None,  # [N]
    ceiling: float = 4.0,
    utility: str = "advantage",
) -> tuple[Tensor, Tensor]:
    """Weights [N] and temperature [B] in float64, each bound's temperature by Newton's method instead of bisection."""
    weight = np.ones(len(credit), dtype=np.longdouble)
    temperature = np.ones(len(lengths), dtype=np.longdouble)
    stop = np.cumsum(lengths.tolist())
    for b, (hi, length) in enumerate(zip(stop, lengths.tolist(), strict=True)):
        free = np.arange(hi - length, hi)
        if frozen is not None:
            free = free[~frozen.numpy()[free]]
        d, A = _long(credit)[free], float(advantage[b])
        if len(d) < 2 or A == 0 or ceiling == 1 or d.max() == d.min():
            continue
        centred = d - d.mean()
        s = centred / (np.sqrt((centred * centred).mean()) + np.longdouble("1e-3") * np.abs(d).mean())
        util = (np.sign(A) if utility == "sign" else A) * s
        temperature[b] = 1 / _largest_rate(util, ceiling)
        e = np.exp((util - util.max()) / temperature[b])
        weight[free] = e / e.mean()
    return torch.from_numpy(weight.astype(np.float64)), torch.from_numpy(temperature.astype(np.float64))


def _largest_rate(util: Array, ceiling: float) -> Array:
    """The largest rate x = 1 / tau <= 1 for which n softmax(x util) stays within [1 / ceiling, ceiling].

    log max w = -log mean exp(x (util - max)) and log min w = -log mean exp(x (util - min)): both log-means are convex in x, so
    Newton's iteration is monotone from the left for the first (decreasing) and from the right for the second (increasing).
    """
    bound, one = np.log(np.longdouble(ceiling)), np.longdouble(1)
    below, above = util - util.max(), util - util.min()
    rate = one
    if _log_mean_exp(below) < -bound:
        rate = _newton(below, -bound, 0 * one)
    if _log_mean_exp(above) > bound:
        rate = min(rate, _newton(above, bound, one))
    return rate


def _log_mean_exp(a: Array) -> Array:
    return a.max() + np.log(np.exp(a - a.max()).mean())


def _newton(a: Array, target: Array, x: Array) -> Array:
    """The root of log mean exp(x a) = target."""
    for _ in range(1000):
        e = np.exp(x * a - (x * a).max())
        step = (target - _log_mean_exp(x * a)) * e.sum() / (a * e).sum()
        x = x + step
        if abs(step) <= 1e-18 * abs(x):
            break
    return x
