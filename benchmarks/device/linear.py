"""`linear_credit` against float64: load paths, tiles, dtypes, options, real shapes; the rows without a token; strange layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from datc_kernels import linear_credit
from datc_kernels.testing import inputs as cases
from datc_kernels.testing.budgets import BUDGETS, error, field_names
from datc_kernels.testing.inputs import CreditCase, Sizes
from datc_kernels.testing.variants import using
from datc_kernels.types import TokenCredit

from . import truth
from .report import Part
from .setting import Setting, draw

CHUNKED_MAY = 4.0  # times the budget of float32 results, for half-precision products of the library
Options = dict[str, Any]


@dataclass(frozen=True)
class Case:
    name: str
    args: tuple[Tensor, ...]
    options: Options
    variant: str = "triton"


def excess(got: TokenCredit, true: TokenCredit, rival: TokenCredit | None = None) -> tuple[float, str]:
    """The largest error in units of what it may be, and its field: the budget, or twice the rival's error if that is more."""
    if field_names(got) != field_names(true):
        raise ValueError(f"fields {field_names(got)}, expected {field_names(true)}")
    ratios = {}
    for name in field_names(true):
        allowed = BUDGETS[name]
        if rival is not None:
            allowed = max(allowed, 2 * float(error(name, rival, true).max()))
        value = float(error(name, got, true).max()) / allowed
        ratios[name] = value if value == value else float("inf")
    worst = max(ratios, key=lambda name: ratios[name])
    return ratios[worst], worst


def judge(
    part: Part, name: str, run: Callable[[str], TokenCredit], true: TokenCredit, variant: str = "triton", *, half: bool
) -> None:
    """Checks a Triton variant and, beside it, `chunked`."""
    rival = run("chunked")
    with using(variant) as backend:
        got = run(backend)
    ours, field = excess(got, true, rival)
    theirs, _ = excess(rival, true)
    part.check(f"{name}, {variant}", ours, 1.0)
    part.check(f"{name}, chunked", theirs, CHUNKED_MAY if half else 1.0)
    figures: dict[str, Any] = {f: float(error(f, got, true).max()) for f in ("logprob", "credit") if f in field_names(true)}
    part.rows.append({"case": name, "variant": variant, **figures, "of budget": ours, "field": field, "chunked": theirs})


def run(part: Part, setting: Setting) -> None:
    for make in _all(setting):

        def one(make: Callable[[], Case] = make) -> None:
            case = make()
            true = truth.linear_credit(*case.args, **case.options)
            half = case.args[0].dtype in (torch.bfloat16, torch.float16)
            call = lambda backend: linear_credit(*case.args, **case.options, backend=backend)  # noqa: E731
            judge(part, case.name, call, true, case.variant, half=half)

        part.attempt(make.__name__, one)
    part.attempt("ignored rows", lambda: _ignored_rows(part, setting))
    if setting.device.type == "cuda":
        part.attempt("an id outside the support", lambda: _outside(part, setting))


def calls(setting: Setting) -> Iterator[Callable[[], object]]:
    """Every case's call alone, as it is shipped: what has to be compiled."""
    for make in _all(setting):

        def call(make: Callable[[], Case] = make) -> object:
            case = make()
            with using(case.variant) as backend:
                return linear_credit(*case.args, **case.options, backend=backend)

        yield call


def _all(setting: Setting) -> Iterator[Callable[[], Case]]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    yield from _by_tile(setting, bf16)
    yield from _real_shapes(setting)
    yield from _golden(setting, fp32)
    if not setting.dry:
        yield from _golden(setting, bf16)
        yield from _by_tile(setting, fp16)
        yield from _golden(setting, fp16)


def _named(name: str, make: Callable[[], Case]) -> Callable[[], Case]:
    make.__name__ = name
    return make


def _by_tile(setting: Setting, dtype: torch.dtype) -> Iterator[Callable[[], Case]]:
    """Wide and narrow tiles with every kind of tail, by descriptors and by pointers; the reward half, or none; cuts."""
    N, V = setting.pick(150, 5), setting.pick(1500, 650)  # 5 x 256 + 128 + 92 or 2 x 256 + 128 + 10 columns
    kinds: dict[str, tuple[Options, int | None, bool]] = {  # options, reward rows (None: V), reward half
        "": ({}, None, True),
        ", log-prob only": ({}, None, False),
        ", cut": ({"vocab_size": V - 37}, V - 180, True),
        ", bias, soft-cap, row temperature": ({"softcap": 5.0, "logit_scale": 1.5}, None, True),
    }
    for tile, (D, K) in {"wide": setting.wide, "narrow": (128, 96), "unaligned": (127, 95)}.items():
        for variant in ("triton", "triton by pointers"):
            if variant != "triton" and tile != "narrow":
                continue
            for kind, (options, rows, reward) in kinds.items():
                if kind and (tile == "unaligned" or (setting.dry and tile == "wide")):
                    continue
                name = f"{_short(dtype)} {tile}{kind}"

                def make(
                    D: int = D, K: int = K, options: Options = options, rows: int | None = rows, reward: bool = reward,
                    name: str = name, variant: str = variant,
                ) -> Case:  # fmt: skip
                    x = draw(setting, N, V, D, K, dtype)
                    support = options.get("vocab_size", V)
                    args = (x.hidden, x.weight, x.token_ids % support, x.reward_grad, x.reward_embedding[:rows])
                    more = dict(options)
                    if "softcap" in options:
                        more["bias"] = torch.linspace(-1, 1, V, device=setting.device).to(dtype)
                        more["temperature"] = torch.linspace(0.5, 1.5, N, device=setting.device)
                    return Case(name, args if reward else args[:3], more, variant)

                yield _named(f"{name}, {variant}", make)


def _real_shapes(setting: Setting) -> Iterator[Callable[[], Case]]:
    for shape in setting.shapes:
        for reward in (True, False):
            name = f"{shape.name}{'' if reward else ', log-prob only'}"

            def make(shape: Any = shape, reward: bool = reward, name: str = name) -> Case:
                x = draw(setting, setting.pick(96, 3), shape.V, shape.D, shape.K, seed=1)
                return Case(name, x.args if reward else x.args[:3], {})

            yield _named(name, make)


def _golden(setting: Setting, dtype: torch.dtype) -> Iterator[Callable[[], Case]]:
    """Certain tokens, ties, offsets, masks and options on which careless arithmetic fails."""
    size = Sizes(N=setting.pick(65, 6), V=setting.pick(1100, 301), D=setting.pick(64, 24), K=setting.pick(72, 16))
    makers: dict[str, Callable[[], CreditCase]] = {
        "ties": lambda: cases.ties(0, size),
        "p_y = 1 - 1e-6": lambda: cases.peaked(1e-6, 0, size),
        "p_other = 1 - 1e-6": lambda: cases.dominated(1e-6, 0, size),
        "everything": lambda: cases.everything(0, size),
        "masked columns": lambda: cases.masked(0, size),
        "short reward vocabulary": lambda: cases.short_reward_vocabulary(0, size),
        "reward offset 100": lambda: cases.reward_offset(0, size),
        "flat": lambda: cases.plain(0, size, logit_std=0.01),
        "sharp": lambda: cases.plain(0, size, logit_std=12.0),
        "huge gradient": lambda: cases.plain(0, size, reward_std=1e9 if dtype != torch.float16 else 1e3),
    }
    for name, golden in makers.items():

        def make(golden: Callable[[], CreditCase] = golden, name: str = name) -> Case:
            case = golden().to(dtype, str(setting.device))
            return Case(f"{_short(dtype)} {name}", case.args, case.options)

        yield _named(f"{_short(dtype)} {name}", make)


def _ignored_rows(part: Part, setting: Setting) -> None:
    """Exact zeros where there is no token, whatever lies there, and a transposed head beside it."""
    x = draw(setting, setting.pick(150, 6), 400, 64, 64)
    whole = replace(x, weight=x.weight.T.contiguous().T)
    true = truth.linear_credit(*whole.args)
    hidden, ids = x.hidden.clone(), x.token_ids.clone()
    hidden[::3], ids[::3] = float("nan"), -100
    got = linear_credit(hidden, whole.weight, ids, x.reward_grad, x.reward_embedding, backend="triton")
    values = [getattr(got, name) for name in field_names(got) if name != "cosine"]
    part.holds("ignored rows are exact zeros", all(bool((value[::3] == 0).all()) for value in values))
    kept = torch.arange(len(ids)) % 3 != 0
    for name in ("logprob", "credit"):
        errors = error(name, TokenCredit(*(v.cpu() for v in values)), true)[kept]
        part.check(f"rows beside ignored ones, transposed head, {name}", float(errors.max()) / BUDGETS[name], CHUNKED_MAY)


def _outside(part: Part, setting: Setting) -> None:
    x = draw(setting, 8, 400, 64, 64)
    ids = x.token_ids.clone()
    ids[0], ids[1] = 400, -1
    got = linear_credit(x.hidden, x.weight, ids, x.reward_grad, x.reward_embedding, backend="triton")
    part.holds(
        "an id outside the support gives NaN", bool(got.logprob[:2].isnan().all()) and bool(got.logprob[2:].isfinite().all())
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
