"""Times beside `linear_credit`: the row kernel over stored logits, the allocation, and the backward over its own products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from datc_kernels import allocate_weights, linear_credit, logits_credit

from .clock import Clock, Times
from .report import Part
from .setting import Setting, Shape, draw

COPY_SHARE, PRODUCT, ALLOCATION = 0.85, 1.25, 0.01
BACKWARD_DEEP, BACKWARD_SMALL, DEEP_FROM = 1.15, 1.5, 4096
MIB = 2**20


def _timed(part: Part, clock: Clock, calls: dict[str, Callable[[], object]], seconds: float = 2.0) -> dict[str, Times]:
    """Times of all calls; RuntimeError if one fails."""
    times, failed = clock.compare(calls, seconds=seconds)
    if failed:
        raise RuntimeError(str(failed))
    return times


def stored_logits(part: Part, setting: Setting) -> None:
    """Row kernel against the copy bandwidth; rewards computed on the fly against that one product; the gradient of the logits."""
    part.attempt("stored logits", lambda: _stored_logits(part, setting))
    part.attempt("allocation", lambda: _allocation(part, setting))


def _stored_logits(part: Part, setting: Setting) -> None:
    clock, shape = Clock(setting), setting.shapes[0]
    x = draw(setting, setting.pick(8192, 4), shape.V, 64 if setting.dry else 256, shape.K)
    z = x.hidden @ x.weight.T
    u, out = z.flip(0).contiguous(), torch.empty_like(z)
    leaf = z.detach().requires_grad_(True)
    logprob = logits_credit(leaf, x.token_ids, backend="triton").logprob
    ones = torch.ones_like(logprob)
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: out.copy_(z),
        "logits alone": lambda: logits_credit(z, x.token_ids, backend="triton"),
        "u given": lambda: logits_credit(z, x.token_ids, reward=u, backend="triton"),
        "u a product": lambda: logits_credit(z, *x.args[2:], backend="triton"),
        "u a product, chunked": lambda: logits_credit(z, *x.args[2:], backend="chunked"),
        "the product": lambda: torch.mm(x.reward_grad, x.reward_embedding.T, out=out),
        "gradient": lambda: torch.autograd.grad(logprob, leaf, ones, retain_graph=True),
    }
    times = _timed(part, clock, calls, 3.0)
    read = z.numel() * z.element_size()
    copied = 2 * read / times["copy"].median
    moved = {"copy": 2 * read, "logits alone": read, "u given": 2 * read, "gradient": 2 * read}
    for name, taken in times.items():
        speed = moved[name] / taken.median if name in moved else None
        part.rows.append(
            {
                "call": name,
                "N": len(z),
                "V": shape.V,
                "ms": round(taken.median, 4),
                "spread": round(taken.spread, 3),
                "GB/s": None if speed is None else round(speed / 1e6, 1),
                "of copy": None if speed is None else round(speed / copied, 3),
                "over product": round(taken.over(times["the product"]), 3) if name.startswith("u a product") else None,
            }
        )
    for name in ("logits alone", "u given"):
        share = moved[name] / times[name].median / copied
        part.bar(f"stored logits, {name}: share of the copy bandwidth", share, COPY_SHARE, at_least=True)
    part.bar("stored logits, u a product: over the product", times["u a product"].over(times["the product"]), PRODUCT)


def _allocation(part: Part, setting: Setting) -> None:
    clock, shape, N = Clock(setting), setting.shapes[0], setting.pick(8192, 8)
    x = draw(setting, N, shape.V, shape.D, shape.K)
    credit = torch.randn(N, device=setting.device)
    for length in (setting.pick(512, 4), N):
        lengths = torch.full((N // length,), length, device=setting.device)
        advantage = torch.randn(len(lengths), device=setting.device)
        calls: dict[str, Callable[[], object]] = {
            "allocation": lambda: allocate_weights(credit, advantage, lengths, backend="triton"),  # noqa: B023
            "credit": lambda: linear_credit(*x.args, backend="triton"),
        }
        times = _timed(part, clock, calls)
        share = times["allocation"].over(times["credit"])
        part.rows.append(
            {
                "call": f"allocation, {len(lengths)} x {length}",
                "N": N,
                "V": shape.V,
                "ms": round(times["allocation"].median, 4),
                "spread": round(times["allocation"].spread, 3),
            }
        )
        if length < N:
            part.bar(f"allocation, {len(lengths)} responses of {length}: share of the credit's time", share, ALLOCATION)


def backward(part: Part, setting: Setting) -> None:
    """Of log-probabilities: the hidden states' gradient over two products, the head's too over three."""
    for shape in (setting.shapes[0], setting.shapes[-1]):
        for trained in (False, True):
            what = f"{shape.name}, {'hidden and weight' if trained else 'hidden'}"
            part.attempt(what, lambda: _backward(part, setting, shape, trained, what))  # noqa: B023


def _backward(part: Part, setting: Setting, shape: Shape, trained: bool, what: str) -> None:
    clock, N = Clock(setting), setting.pick(8192, 8)
    x = draw(setting, N, shape.V, shape.D, 8)
    hidden, weight = x.hidden.requires_grad_(True), x.weight.requires_grad_(trained)
    leaves = [hidden, weight] if trained else [hidden]
    z = torch.empty(N, shape.V, dtype=hidden.dtype, device=hidden.device)
    into_hidden, into_weight = torch.empty_like(hidden), torch.empty_like(weight) if trained else None

    def products() -> None:
        with torch.no_grad():
            torch.mm(hidden, weight.T, out=z)
            torch.mm(z, weight, out=into_hidden)
            if into_weight is not None:
                torch.mm(z.T, hidden, out=into_weight)

    calls: dict[str, Callable[[], object]] = {"products": products}
    for backend in ("triton", "chunked"):
        logprob = linear_credit(hidden, weight, x.token_ids, backend=backend).logprob
        ones = torch.ones_like(logprob)
        calls[backend] = partial(torch.autograd.grad, logprob, leaves, ones, retain_graph=True)
    times = _timed(part, clock, calls, 3.0)
    peak = clock.peak_extra(calls["triton"])
    row = {"call": f"backward, {what}", "N": N} | {f"{name} ms": round(t.median, 4) for name, t in times.items()}
    ratio = times["triton"].over(times["products"])
    part.rows.append(row | {"over products": round(ratio, 3), "triton MiB": None if peak is None else round(peak / MIB, 1)})
    part.bar(f"backward, {what}: over its products", ratio, BACKWARD_DEEP if shape.D >= DEEP_FROM else BACKWARD_SMALL)
    if peak is not None and not trained:
        # The float32 sum, one product's share of it, the result; and a few tiles of 64 MiB.
        part.check(f"backward, {what}: extra MiB", peak / MIB, (14 * N * shape.D) / MIB + 512)
