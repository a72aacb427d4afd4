"""token_advantages, what a loop of one's own calls, against the formula written out, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tolerances import FORWARD, WEIGHT

from datc_train.integrations import token_advantages
from datc_train.types import ScoredRollout

D, K, V = 8, 6, 23
LENGTHS = torch.tensor([5, 1, 7])
N = int(LENGTHS.sum())


def inputs(seed: int = 0) -> dict[str, Any]:
    dice = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=dice)

    frozen = torch.zeros(N, dtype=torch.bool)
    frozen[[2, 9]] = True
    scored = ScoredRollout(
        score=draw(3),
        reward_grad=draw(N, K) * ~frozen[:, None],
        mapped=~frozen,
        frozen=frozen,
        reward_embedding=draw(V, K),
    )
    return {
        "hidden": draw(N, D),
        "head_weight": draw(V, D),
        "response_ids": torch.randint(V, (N,), generator=dice),
        "lengths": LENGTHS,
        "scored": scored,
        "advantage": torch.tensor([1.5, -0.3, -0.8]),
    }


@pytest.mark.parametrize("backend", [None, "reference", "chunked"])
@pytest.mark.parametrize("utility", ["advantage", "sign"])
def test_the_formula_written_out(backend: str | None, utility: str) -> None:
    given = inputs()
    scored = given["scored"]
    p = torch.softmax((given["hidden"].double() @ given["head_weight"].double().T + torch.arange(V) / 10) / 0.7, -1)
    u = scored.reward_grad.double() @ scored.reward_embedding.double().T
    rows = torch.arange(N)
    direction = -p
    direction[rows, given["response_ids"]] += 1
    credit = (p * (u - (p * u).sum(-1, keepdim=True)) * direction).sum(-1)

    made = token_advantages(
        **given, head_bias=torch.arange(V) / 10, temperature=0.7, ceiling=3.0, utility=utility, backend=backend
    )
    torch.testing.assert_close(made.credit.credit.double(), credit, rtol=FORWARD, atol=FORWARD)
    for response, at in enumerate(rows.split(LENGTHS.tolist())):
        value, weight = made.value[at].double(), made.weights.weight[at].double()
        advantage = given["advantage"][response].double()
        torch.testing.assert_close(value, advantage * weight)
        free = at[~scored.frozen[at]]
        assert (made.weights.weight[scored.frozen] == 1).all()
        if len(free) < 2:
            assert (weight == 1).all()
            continue
        d = credit[free]
        utilities = (
            (advantage if utility == "advantage" else advantage.sign())
            * (d - d.mean())
            / (d.std(unbiased=False) + 1e-3 * d.abs().mean())
        )
        tau = made.weights.temperature[response].double()
        expected = len(free) * torch.softmax(utilities / tau, 0)
        torch.testing.assert_close(made.weights.weight[free].double(), expected, rtol=WEIGHT, atol=FORWARD)
        assert expected.max() <= 3.001
        assert expected.min() >= 1 / 3.001


def test_no_gradient_reaches_the_policy() -> None:
    given = inputs()
    given["hidden"].requires_grad_()
    given["advantage"].requires_grad_()
    made = token_advantages(**given)
    assert not made.value.requires_grad
    assert not made.credit.logprob.requires_grad


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"advantage": torch.tensor([1.0, float("nan"), 0.0])}, "advantage: expected finite numbers, got nan for response 1"),
        ({"advantage": torch.tensor([1.0, 0.0, float("-inf")])}, "advantage: expected finite numbers, got -inf for response 2"),
        ({"advantage": torch.tensor([1.0, 1e300, 0.0], dtype=torch.float64)}, "advantage: expected finite numbers, got inf"),
        ({"response_ids": torch.full((N,), V)}, "response_ids: "),
        ({"response_ids": torch.zeros(N - 1, dtype=torch.int64)}, "response_ids: "),
        ({"head_weight": torch.ones(V, D + 1)}, "head_weight: "),
        ({"head_bias": torch.ones(V + 1)}, "head_bias: "),
        ({"scored": replace(inputs()["scored"], reward_grad=torch.ones(N + 1, K))}, "scored: reward_grad: "),
        ({"scored": replace(inputs()["scored"], frozen=torch.zeros(N + 1, dtype=torch.bool))}, "scored: frozen: "),
        ({"advantage": torch.ones(N)}, "advantage: "),
        ({"advantage": [1.0, 2.0, 3.0]}, "advantage: "),
        ({"lengths": torch.tensor([5, 1, 6])}, "lengths: "),
        ({"scored": replace(inputs()["scored"], reward_grad=None)}, "scored: expected a rollout scored with gradient=True"),
        ({"utility": "rank"}, "utility: "),
        ({"backend": "gpu"}, "backend: "),
    ],
)
def test_what_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        token_advantages(**inputs() | wrong)
