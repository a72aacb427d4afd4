"""`logits_credit`, `allocate_weights`, `candidate_advantages` and the gradients of log-probabilities against float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from datc_kernels import allocate_weights, candidate_advantages, linear_credit, logits_credit
from datc_kernels.testing import truth as definitions
from datc_kernels.testing.budgets import WEIGHT
from datc_kernels.testing.inputs import CreditCase

from . import truth
from .linear import judge
from .report import Part
from .setting import Setting, draw

# Of a gradient's norm: the factor and the result are rounded once to the inputs' dtype.
ROUNDING = {torch.float32: 2e-5, torch.float16: 1.5e-3, torch.bfloat16: 8e-3}
BACKENDS = ("triton", "chunked")


def logits(part: Part, setting: Setting, backend: str = "triton") -> None:
    """Rewards absent, given and as a product; whole and ragged vocabularies; options; a masked column; a real vocabulary."""
    sizes = [("", 600 if setting.dry else 2500), (", vocabulary of a model", setting.shapes[0].V)]
    options: dict[str, dict[str, Any]] = {"": {}, ", options": {"softcap": 5.0, "logit_scale": 1.5, "vocab_size": 511}}
    for dtype in (torch.bfloat16, torch.float32):
        for size, V in sizes:
            for kind, extra in options.items():
                for way in ("none", "given", "product"):
                    name = f"{str(dtype).removeprefix('torch.')}, u {way}{kind}{size}"
                    if size and kind:
                        continue
                    part.attempt(name, lambda: _existing(part, setting, name, V, dtype, way, extra, backend))  # noqa: B023


def _existing(
    part: Part, setting: Setting, name: str, V: int, dtype: torch.dtype, way: str, options: dict[str, Any], variant: str
) -> None:
    x = draw(setting, setting.pick(70, 5), V, 64, 72, dtype)
    z = x.hidden @ x.weight.T
    z[:, 3] = -torch.inf
    ids = x.token_ids % options.get("vocab_size", V)
    ids = torch.where(ids == 3, 4, ids)
    u = x.reward_grad.double() @ x.reward_embedding.double().T
    given: dict[str, Any] = {}
    if way == "given":
        given = {"reward": u.to(dtype)}
        u = given["reward"].double()
    elif way == "product":
        given = {"reward_grad": x.reward_grad, "reward_embedding": x.reward_embedding}
    options = dict(options)
    if options:
        options["temperature"] = torch.linspace(0.5, 1.5, len(z), device=z.device)
    true = truth.logits_credit(z, ids, None if way == "none" else u, **options)
    half = dtype == torch.bfloat16
    judge(part, name, lambda backend: logits_credit(z, ids, **given, **options, backend=backend), true, variant, half=half)


def weights(part: Part, setting: Setting, backends: tuple[str, ...] = BACKENDS) -> None:
    """Responses of no token to 32k tokens, end to end and padded, with frozen tokens, both utilities."""
    lengths = torch.tensor([1, 0, 2, 3, 40, 130] if setting.dry else [1, 0, 2, 3, 17, 512, 2047, 2048, 2049, 4097, 32_768])
    generator = torch.Generator().manual_seed(0)
    credit = torch.randn(int(lengths.sum()), generator=generator)
    advantage = torch.randn(len(lengths), generator=generator)
    frozen = torch.rand(len(credit), generator=generator) < 0.1
    move = lambda x: x.to(setting.device)  # noqa: E731

    def one(ceiling: float, utility: str, frozen: Tensor | None) -> None:
        name = f"ceiling {ceiling}, {utility}{', frozen tokens' if frozen is not None else ''}"
        weight, temperature = definitions.allocate_weights(credit, advantage, lengths, frozen, ceiling, utility)
        options: dict[str, Any] = {"frozen": None if frozen is None else move(frozen), "ceiling": ceiling, "utility": utility}
        for backend in backends:
            got = allocate_weights(move(credit), move(advantage), move(lengths), **options, backend=backend)
            part.check(f"{name}, {backend}", float((got.weight.cpu() - weight).abs().max()) / WEIGHT, 1.0)
            heat = (got.temperature.cpu() / temperature - 1).abs().max()
            part.check(f"{name}, {backend}, temperature", float(heat) / 1e-5, 1.0)

    for ceiling, utility, flags in ((4.0, "advantage", frozen), (1.5, "sign", None), (30.0, "advantage", None)):
        part.attempt(f"ceiling {ceiling}", lambda: one(ceiling, utility, flags))  # noqa: B023
    part.attempt("padded", lambda: _padded(part, setting, backends[0]))


def _padded(part: Part, setting: Setting, backend: str) -> None:
    B, T = setting.pick(64, 3), setting.pick(700, 20)
    generator = torch.Generator().manual_seed(1)
    credit, advantage = torch.randn(B, T, generator=generator), torch.randn(B, generator=generator)
    lengths = torch.randint(1, T + 1, (B,), generator=generator)
    mask = torch.arange(T) < lengths[:, None]
    weight, _ = definitions.allocate_weights(credit[mask], advantage, lengths)
    got = allocate_weights(
        credit.to(setting.device), advantage.to(setting.device), mask=mask.to(setting.device), backend=backend
    ).weight.cpu()
    part.check("padded", float((got[mask] - weight).abs().max()) / WEIGHT, 1.0)
    part.holds("padding has weight 1", bool((got[~mask] == 1).all()))


def gradients(part: Part, setting: Setting) -> None:
    """Of hidden, weight, bias and logits, with ignored rows and every option."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for options in (False, True):
            name = f"{str(dtype).removeprefix('torch.')}{', options' if options else ''}"
            part.attempt(name, lambda: _gradients(part, setting, name, dtype, options))  # noqa: B023
    part.attempt("candidates", lambda: _candidates(part, setting))


def _gradients(part: Part, setting: Setting, name: str, dtype: torch.dtype, with_options: bool) -> None:
    V = setting.pick(5000, 130)  # more than one of the tiles of 4096 columns
    x = draw(setting, setting.pick(70, 6), V, setting.pick(512, 32), 8, dtype)
    ids = torch.where(torch.arange(len(x.hidden), device=setting.device) % 5 == 0, -100, x.token_ids % (V - 7))
    options: dict[str, Any] = {}
    if with_options:
        heat = torch.linspace(0.5, 1.5, len(ids), device=setting.device)
        options = {"softcap": 5.0, "logit_scale": 1.5, "vocab_size": V - 7, "temperature": heat}
    incoming = torch.linspace(-1, 1, len(ids), device=setting.device)
    bias = torch.linspace(-1, 1, V, device=setting.device).to(dtype) if with_options else None
    leaves = [t.clone().requires_grad_(True) for t in (x.hidden, x.weight, bias) if t is not None]

    def grads(call: Any) -> list[Tensor]:
        named = {"bias": leaves[2]} if len(leaves) == 3 else {}
        out = call(leaves[0], leaves[1], ids, **named, **options)
        return list(torch.autograd.grad((out if isinstance(out, Tensor) else out.logprob).double() @ incoming.double(), leaves))

    true = grads(lambda *a, **o: definitions.logprob(a[0].double(), a[1].double(), a[2], **o))
    for backend in BACKENDS:
        for leaf, got, exact in zip(("hidden", "weight", "bias"), grads(_with(linear_credit, backend)), true, strict=False):
            part.check(f"{name}, {leaf}, {backend}", _distance(got, exact) / ROUNDING[dtype], 1.0)
            if leaf == "hidden":
                part.holds(f"{name}, ignored rows have no gradient, {backend}", bool((got[::5] == 0).all()))
    z = (x.hidden @ x.weight.T).requires_grad_(True)
    eye = torch.eye(V, dtype=torch.float64, device=setting.device)
    (exact,) = torch.autograd.grad(definitions.logprob(z.double(), eye, ids, **options) @ incoming.double(), z)
    for backend in BACKENDS:
        (got,) = torch.autograd.grad(logits_credit(z, ids, **options, backend=backend).logprob.double() @ incoming.double(), z)
        part.check(f"{name}, logits, {backend}", _distance(got, exact) / ROUNDING[dtype], 1.0)


def _with(op: Any, backend: str) -> Any:
    return lambda *args, **options: op(*args, **options, backend=backend)


def _distance(got: Tensor, exact: Tensor) -> float:
    """|got - exact| / |exact|; infinite for NaN."""
    ratio = float((got.double() - exact.double()).norm() / exact.double().norm())
    return ratio if ratio == ratio else float("inf")


def _candidates(part: Part, setting: Setting) -> None:
    x: CreditCase = draw(setting, setting.pick(64, 4), setting.pick(5000, 130), 64, 64)
    ids = x.token_ids[:, None].expand(-1, 3).contiguous()
    args = (x.hidden, x.weight, x.reward_grad, x.reward_embedding)
    got = candidate_advantages(*args, candidate_ids=ids, backend="chunked")
    true = candidate_advantages(*(t.double() for t in args), candidate_ids=ids, backend="reference")
    assert got.advantage is not None
    assert true.advantage is not None
    part.check("candidates, probability", _distance(got.probability, true.probability) / 2e-5, 1.0)
    part.check("candidates, advantage", _distance(got.advantage, true.advantage) / 2e-5, 1.0)
