"""A row's bits do not depend on its batch, nor on the run: bitwise comparisons, never tolerances."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from datc_kernels import allocate_weights, linear_credit, logits_credit
from datc_kernels.testing.budgets import field_names
from datc_kernels.testing.inputs import CreditCase
from datc_kernels.testing.variants import using
from datc_kernels.types import TokenCredit

from .report import Part
from .setting import Setting, draw

Run = Callable[[CreditCase], TokenCredit]
NAN_EVERY = 3


def same(a: TokenCredit, b: TokenCredit, rows_a: Tensor | slice = slice(None), rows_b: Tensor | slice = slice(None)) -> bool:
    """Whether every field has the same bits in the rows chosen."""
    names = [name for name in field_names(a) if name != "cosine"]
    return all(torch.equal(getattr(a, name)[rows_a], getattr(b, name)[rows_b]) for name in names)


def _kernels(setting: Setting) -> dict[str, tuple[Run, Callable[[], CreditCase], str]]:
    """Each kernel as a call on some rows, with its inputs and the variant it runs in."""
    N, V = setting.pick(257, 5), setting.pick(2500, 280)

    def linear(x: CreditCase) -> TokenCredit:
        return linear_credit(*x.args, backend="triton")

    def alone(x: CreditCase) -> TokenCredit:
        return linear_credit(*x.args[:3], backend="triton")

    def existing(x: CreditCase) -> TokenCredit:  # hidden has as many columns as the vocabulary: it is the logits
        return logits_credit(x.hidden, x.token_ids, backend="triton")

    def given(x: CreditCase) -> TokenCredit:
        return logits_credit(x.hidden, x.token_ids, reward=x.hidden, backend="triton")

    def product(x: CreditCase) -> TokenCredit:
        return logits_credit(x.hidden, *x.args[2:], backend="triton")

    def inputs(D: int, K: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[], CreditCase]:
        return lambda: draw(setting, N, V, D, K, dtype, seed=5)

    kernels: dict[str, tuple[Run, Callable[[], CreditCase], str]] = {
        "wide tile": (linear, inputs(*setting.wide), "triton"),
        "narrow tile": (linear, inputs(128, 96), "triton"),
        "pointers": (linear, inputs(128, 96), "triton by pointers"),
        "float32": (linear, inputs(64, 64, torch.float32), "triton"),
        "log-prob only": (alone, inputs(128, 96), "triton"),
        "logits": (existing, inputs(V, 8), "triton"),
        "logits, u given": (given, inputs(V, 8), "triton"),
        "logits, u a product": (product, inputs(V, 96), "triton"),
    }
    return kernels


def run(part: Part, setting: Setting) -> None:
    for name, (call, inputs, variant) in _kernels(setting).items():

        def one(name: str = name, call: Run = call, inputs: Callable[[], CreditCase] = inputs, variant: str = variant) -> None:
            with using(variant):
                rows(part, setting, name, call, inputs())

        part.attempt(name, one)
    part.attempt("many rows", lambda: _many_rows(part, setting))
    part.attempt("again", lambda: _again(part, setting))
    part.attempt("weights", lambda: _weights(part, setting))


def rows(part: Part, setting: Setting, name: str, call: Run, x: CreditCase) -> None:
    N = len(x.hidden)
    device = x.hidden.device
    whole = call(x)
    finite = all(bool(getattr(whole, field).isfinite().all()) for field in field_names(whole))
    part.holds(f"{name}: finite", finite)
    sizes = (2,) if setting.dry else range(1, N + 1)
    wrong = [n for n in sizes if not same(call(x.rows(slice(0, n))), whole, rows_b=slice(0, n))]
    part.check(f"{name}: first rows alone, N from 1 to {N}", len(wrong), 0)
    shifts = (2,) if setting.dry else range(1, 129)
    order = torch.arange(N, device=device)
    wrong = [s for s in shifts if not same(call(x.rows(order.roll(s))), whole, rows_b=order.roll(s))]
    part.check(f"{name}: at every place of a block", len(wrong), 0)
    mixed = torch.randperm(N, generator=torch.Generator().manual_seed(0)).to(device)
    part.holds(f"{name}: permuted", same(call(x.rows(mixed)), whole, rows_b=mixed))
    single = [N - 1] if setting.dry else [0, 1, 63, 127, 128, 200, N - 1]
    wrong = [r for r in single if not same(call(x.rows(slice(r, r + 1))), whole, rows_b=slice(r, r + 1))]
    part.check(f"{name}: alone", len(wrong), 0)
    hidden, grad = x.hidden.clone(), x.reward_grad.clone()
    hidden[::NAN_EVERY], grad[::NAN_EVERY] = torch.nan, torch.inf
    kept = order[order % NAN_EVERY != 0]
    spoilt = call(CreditCase(hidden, x.weight, x.token_ids, grad, x.reward_embedding))
    part.holds(f"{name}: beside NaN", same(spoilt, whole, kept, kept))


def _many_rows(part: Part, setting: Setting) -> None:
    """Several launches of rows, a real vocabulary; part of the rows in a call of their own."""
    V = setting.pick(151_936, 330)
    x = draw(setting, setting.pick(8192 + 257, 140), V, setting.pick(512, 32), setting.pick(512, 32))
    whole = linear_credit(*x.args, backend="triton")
    some = slice(setting.pick(8000, 100), setting.pick(8300, 140))
    part.holds("many rows: some alone", same(linear_credit(*x.rows(some).args, backend="triton"), whole, rows_b=some))
    wrong = 0
    for _ in range(setting.pick(10, 1)):
        wrong += not same(linear_credit(*x.args, backend="triton"), whole)
    part.check("many rows: again", wrong, 0)


def _again(part: Part, setting: Setting) -> None:
    """The backward gives the same bits on every run."""
    x = draw(setting, setting.pick(300, 6), setting.pick(9000, 130), setting.pick(512, 32), 8)
    leaves = [t.clone().requires_grad_(True) for t in (x.hidden, x.weight)]

    def gradients(backend: str) -> tuple[Tensor, ...]:
        out = linear_credit(leaves[0], leaves[1], x.token_ids, backend=backend).logprob
        return torch.autograd.grad(out.sum(), leaves)

    for backend in ("triton", "chunked"):
        first = gradients(backend)
        again = [gradients(backend) for _ in range(setting.pick(5, 1))]
        equal = all(torch.equal(a, b) for other in again for a, b in zip(first, other, strict=True))
        part.holds(f"gradients: again, {backend}", equal)


def _weights(part: Part, setting: Setting) -> None:
    """A response's weights are the same alone and among others."""
    lengths = torch.tensor([7, 40, 300] if setting.dry else [7, 512, 2048, 5000], device=setting.device)
    generator = torch.Generator().manual_seed(2)
    credit = torch.randn(int(lengths.sum()), generator=generator).to(setting.device)
    advantage = torch.randn(len(lengths), generator=generator).to(setting.device)
    whole = allocate_weights(credit, advantage, lengths, backend="triton").weight.split(lengths.tolist())
    equal = [
        torch.equal(allocate_weights(d, advantage[b : b + 1], backend="triton").weight, whole[b])
        for b, d in enumerate(credit.split(lengths.tolist()))
    ]
    part.holds("weights: alone", all(equal))
