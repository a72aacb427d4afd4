"""Errors against the extended-precision truth, case by case: `python -m datc_kernels.testing.error_table`.

Each cell is the largest error of a field over rows, measured as `budgets.error` says. The last column is the textbook
form in float32 (softmax, u - <p, u>, products, one sum), the way a trainer would write it from the paper.
"""

from __future__ import annotations

import torch

from ..linear_credit import linear_credit
from ..types import TokenCredit
from . import truth
from .budgets import worst
from .inputs import CASES, CreditCase, Sizes, plain

_COLUMNS = ("logprob", "entropy", "credit", "advantage", "cosine")


def textbook(case: CreditCase) -> TokenCredit:
    """d = <p * A, onehot(y) - p> in float32 as it stands on paper; bias, soft-cap and the like are left out."""
    z, u = case.hidden @ case.weight.T, case.reward_grad @ case.reward_embedding.T
    logp = torch.log_softmax(z, dim=1)
    p = logp.exp()
    A = u - (p * u).sum(dim=1, keepdim=True)
    G = p * A
    k = torch.nn.functional.one_hot(case.token_ids, len(case.weight)) - p
    y = case.token_ids[:, None]
    return TokenCredit(
        logprob=logp.gather(1, y).squeeze(1),
        entropy=-(p * logp).sum(dim=1),
        logsumexp=z.logsumexp(dim=1),
        sum_p2=p.square().sum(dim=1),
        credit=(G * k).sum(dim=1),
        advantage=A.gather(1, y).squeeze(1),
        reward_mean=(p * u).sum(dim=1),
        displacement_norm=G.norm(dim=1),
        force_norm=k.norm(dim=1),
    )


def rows() -> list[tuple[str, list[float | None]]]:
    """(case, errors): the fields of `chunked`, then credit of `reference` and of the textbook form where it applies."""
    cases = {name: make() for name, make in CASES.items()}
    large = Sizes(N=4, V=151_936, D=32, K=32)
    cases["plain, V = 151,936"] = plain(1, large)
    cases["flat, V = 151,936"] = plain(1, large, logit_std=0.01)
    table: list[tuple[str, list[float | None]]] = []
    for name, case in cases.items():
        true = truth.linear_credit(*case.args, **case.options)
        chunked = linear_credit(*case.args, **case.options, backend="chunked")
        reference = linear_credit(*case.args, **case.options, backend="reference")
        errors: list[float | None] = [worst(column, chunked, true) for column in _COLUMNS]
        errors.append(worst("credit", reference, true))
        simple = not case.options and len(case.reward_embedding) == len(case.weight)
        errors.append(worst("credit", textbook(case), true) if simple else None)
        table.append((name, errors))
    return table


def main() -> None:
    heads = ["case", *_COLUMNS, "credit, `reference`", "credit, textbook float32"]
    print("| " + " | ".join(heads) + " |")
    print("|" + "---|" * len(heads))
    for name, errors in rows():
        cells = ["" if e is None else f"{e:.1e}" for e in errors]
        print("| " + " | ".join([name, *cells]) + " |")


if __name__ == "__main__":
    main()
