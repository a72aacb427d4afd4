"""Seeded inputs of `linear_credit`: the ordinary ones and those on which careless arithmetic fails.

N tokens, V vocabulary, D policy hidden size, K reward-model hidden size. Everything is drawn on the CPU in float32, so that one
seed means the same numbers everywhere; `CreditCase.to` casts and moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    N: int = 16
    V: int = 301
    D: int = 24
    K: int = 20


@dataclass(frozen=True)
class CreditCase:
    """The arguments of one `linear_credit` call."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    token_ids: Tensor  # [N]
    reward_grad: Tensor  # [N, K]
    reward_embedding: Tensor  # [rows, K]
    options: dict[str, Any] = field(default_factory=dict)  # bias, temperature, softcap, logit_scale, vocab_size

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.hidden, self.weight, self.token_ids, self.reward_grad, self.reward_embedding

    def rows(self, index: Tensor | slice) -> CreditCase:
        """Some rows of a case without options a row."""
        return CreditCase(
            self.hidden[index], self.weight, self.token_ids[index], self.reward_grad[index], self.reward_embedding, self.options
        )

    def to(self, dtype: torch.dtype, device: str = "cpu") -> CreditCase:
        """Floats in `dtype`, everything on `device`."""

        def cast(x: Any) -> Any:
            return x if not isinstance(x, Tensor) else x.to(device, dtype if x.is_floating_point() else x.dtype)

        hidden, weight, ids, grad, table = map(cast, self.args)
        return CreditCase(hidden, weight, ids, grad, table, {name: cast(value) for name, value in self.options.items()})

    def logits(self) -> Tensor:
        """hidden weight^T + bias [N, V], as `logits_credit` wants them; the other options stay options."""
        raw = self.hidden @ self.weight.T
        return raw if self.options.get("bias") is None else raw + self.options["bias"]

    @property
    def logits_options(self) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if name != "bias"}


def plain(seed: int = 0, size: Sizes = Sizes(), *, logit_std: float = 2.0, reward_std: float = 1.0) -> CreditCase:
    """Normal logits and rewards; half of the ids are sampled from the policy, half from anywhere."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, weight = normal(size.N, size.D), normal(size.V, size.D) * (logit_std / size.D**0.5)
    grad, table = normal(size.N, size.K) * (reward_std / size.K**0.5), normal(size.V, size.K)
    sampled = torch.multinomial(torch.softmax(hidden @ weight.T, dim=1), 1, generator=generator).squeeze(1)
    anywhere = torch.randint(size.V, (size.N,), generator=generator)
    ids = torch.where(torch.arange(size.N) % 2 == 0, sampled, anywhere)
    return CreditCase(hidden, weight, ids, grad, table)


def _spotlight(seed: int, size: Sizes, rest: float, columns: tuple[int, ...]) -> CreditCase:
    """All columns but `columns` share the probability `rest`; `columns` share 1 - rest equally, exactly tied."""
    case = plain(seed, size)
    hidden, weight = case.hidden.clone(), case.weight.clone()
    # The last coordinate is a switch that only these columns have.
    weight[:, -1] = 0.0
    weight[list(columns)] = 0.0
    others = torch.logsumexp((hidden @ weight.T).double().index_fill(1, torch.tensor(columns), -torch.inf), dim=1)
    weight[list(columns), -1] = 1.0
    share = torch.tensor((1.0 - rest) / rest / len(columns), dtype=torch.float64)
    hidden[:, -1] = (others + share.log()).float()
    return replace(case, hidden=hidden, weight=weight)


def peaked(rest: float, seed: int = 0, size: Sizes = Sizes()) -> CreditCase:
    """The sampled token has p_y = 1 - rest."""
    t = size.V // 3
    case = _spotlight(seed, size, rest, (t,))
    return replace(case, token_ids=torch.full_like(case.token_ids, t))


def dominated(rest: float, seed: int = 0, size: Sizes = Sizes()) -> CreditCase:
    """Another token has p = 1 - rest."""
    t = size.V // 3
    case = _spotlight(seed, size, rest, (t,))
    return replace(case, token_ids=torch.where(case.token_ids == t, t + 1, case.token_ids))


def ties(seed: int = 0, size: Sizes = Sizes()) -> CreditCase:
    """Two tokens at the ends of the vocabulary share all but 1e-4, with equal logits; the first, the second or another is y."""
    pair = (1, size.V - 2)
    case = _spotlight(seed, size, 1e-4, pair)
    turn = torch.arange(size.N) % 3
    ids = torch.where(turn == 0, pair[0], torch.where(turn == 1, pair[1], case.token_ids))
    return replace(case, token_ids=ids)


def two_candidates(seed: int = 0, size: Sizes = Sizes(V=2)) -> CreditCase:
    return plain(seed, replace(size, V=2))


def short_reward_vocabulary(seed: int = 0, size: Sizes = Sizes()) -> CreditCase:
    """The last tenth of the columns has no reward row; row 0 samples one of them, in row 1 the most likely one lies there."""
    case = plain(seed, size)
    rows = size.V - max(1, size.V // 10)
    ids, hidden = case.token_ids % rows, case.hidden.clone()
    if size.N > 1:
        ids[0] = rows
        last = case.weight[-1]
        hidden[1] += last * (12.0 / last.square().sum())
    return replace(case, hidden=hidden, token_ids=ids, reward_embedding=case.reward_embedding[:rows].clone())


def reward_offset(seed: int = 0, size: Sizes = Sizes()) -> CreditCase:
    """All rewards share an offset of 100; credit must not see it."""
    case = plain(seed, size)
    grad, table = case.reward_grad.clone(), case.reward_embedding.clone()
    grad[:, -1], table[:, -1] = 100.0, 1.0
    return replace(case, reward_grad=grad, reward_embedding=table)


def masked(seed: int = 0, size: Sizes = Sizes(), *, kept: int = 40) -> CreditCase:
    """All but the columns 100 to 100 + kept have the logit -inf, so that whole tiles are empty."""
    case = plain(seed, size)
    start = min(100, size.V - 1)
    bias = torch.full((size.V,), -torch.inf)
    bias[start : start + kept] = 0.0
    ids = start + case.token_ids % min(kept, size.V - start)
    return replace(case, token_ids=ids, options={"bias": bias})


def with_options(seed: int = 0, size: Sizes = Sizes(), **options: Any) -> CreditCase:
    return replace(plain(seed, size), options=options)


def bias_and_temperature(seed: int = 0, size: Sizes = Sizes()) -> CreditCase:
    bias = torch.randn(size.V, generator=torch.Generator().manual_seed(seed + 1))
    return with_options(seed, size, bias=bias, temperature=0.7)


def everything(seed: int = 0, size: Sizes = Sizes()) -> CreditCase:
    """Bias, logit scale, soft-cap, a temperature a row, a bounded support and a reward table shorter than it."""
    case = bias_and_temperature(seed, size)
    support = size.V - 3
    rows = max(1, support - 5)
    options: dict[str, Any] = {
        "bias": case.options["bias"],
        "logit_scale": 1.5,
        "softcap": 4.0,
        "temperature": torch.linspace(0.5, 1.5, size.N),
        "vocab_size": support,
    }
    return CreditCase(
        case.hidden, case.weight, case.token_ids % support, case.reward_grad, case.reward_embedding[:rows].clone(), options
    )


CASES: dict[str, Callable[[], CreditCase]] = {
    "plain": plain,
    "flat": lambda: plain(logit_std=0.01),
    "sharp": lambda: plain(logit_std=12.0),
    "one token": lambda: plain(size=Sizes(N=1)),
    "p_y = 0.9995": lambda: peaked(5e-4),
    "p_y = 1 - 1e-6": lambda: peaked(1e-6),
    "p_y = 1 - 1e-12": lambda: peaked(1e-12),
    "p_other = 0.999": lambda: dominated(1e-3),
    "p_other = 1 - 1e-6": lambda: dominated(1e-6),
    "p_other = 1 - 1e-12": lambda: dominated(1e-12),
    "ties": ties,
    "two candidates": two_candidates,
    "short reward vocabulary": short_reward_vocabulary,
    "reward offset 100": reward_offset,
    "tiny gradient": lambda: plain(reward_std=1e-9),
    "huge gradient": lambda: plain(reward_std=1e9),
    "bias and temperature": bias_and_temperature,
    "soft-cap": lambda: with_options(softcap=3.0),
    "logit scale": lambda: with_options(logit_scale=0.0625),
    "masked columns": masked,
    "everything": everything,
}
