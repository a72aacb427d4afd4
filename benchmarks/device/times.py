"""Times of `linear_credit` on one real shape: against bare products, `chunked`, eager PyTorch and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from datc_kernels import linear_credit
from datc_kernels.testing.inputs import CreditCase

from . import rivals
from .clock import Clock, Times
from .report import Part
from .setting import Setting, Shape, draw

# Times of two bare products, at the largest N.
BAR_DEEP, BAR_SMALL, DEEP_FROM = 1.25, 1.5, 4096
NOISE = 1.05  # of the choice against the rival
PARTIALS_BYTES, ROW_BYTES = 64 * 2**20, 256  # extra memory: bounded partial states, and some numbers a row
GROWTH_ROW_BYTES = 512
MIB = 2**20


def run(part: Part, setting: Setting, shape: Shape, gemm_tflops: float | None) -> None:
    clock, tokens = Clock(setting), setting.tokens
    textbook = rivals.compiled(setting)
    whole = draw(setting, max(tokens), shape.V, shape.D, shape.K)
    for position, N in enumerate(sorted(tokens, reverse=True)):
        for reward in (True, False):

            def one(N: int = N, reward: bool = reward, position: int = position) -> None:
                x = whole.rows(slice(0, N))
                seconds = part.left_s / (2 * (len(tokens) - position))
                row = _measure(part, setting, clock, shape, x, reward, textbook, min(8.0, seconds), gemm_tflops)
                part.rows.append(row)
                if max(tokens) == N and reward and "over products" in row:
                    bar = BAR_DEEP if shape.D >= DEEP_FROM else BAR_SMALL
                    part.bar(f"{shape.name}, N = {N}: triton over two products", row["over products"], bar)

            part.attempt(f"N = {N}{'' if reward else ', log-prob only'}", one)
        clock.release()
    _memory_is_of_rows(part)


def _measure(
    part: Part, setting: Setting, clock: Clock, shape: Shape, x: CreditCase, reward: bool, textbook: Callable[..., Any],
    seconds: float, gemm_tflops: float | None,
) -> dict[str, Any]:  # fmt: skip
    N, args = len(x.hidden), x.args if reward else x.args[:3]
    calls: dict[str, Callable[[], object]] = {
        "products": rivals.two_products(x, reward=reward),
        "triton": lambda: linear_credit(*args, backend="triton"),
        "chunked": lambda: linear_credit(*args, backend="chunked"),
        "default": lambda: linear_credit(*args),
    }
    if reward:
        calls |= {"eager": lambda: rivals.textbook(*x.args), "compiled": lambda: textbook(*x.args)}
    with torch.no_grad():
        times, failed = clock.compare(calls, seconds=seconds)
        extra = {name: clock.peak_extra(calls[name]) for name in ("triton", "chunked") if name in times}
    part.notes += [f"{shape.name}, N = {N}, {name}: {why}" for name, why in failed.items()]
    for name in ("products", "triton", "chunked", "default"):
        if name in failed:
            part.check(f"{shape.name}, N = {N}, {name} runs", None, 0.0)
    if failed:
        part.require_device()
    row: dict[str, Any] = {"shape": shape.name, "N": N, "what": "credit" if reward else "log-prob"}
    row |= {f"{name} ms": _rounded(times.get(name)) for name in calls}
    if "products" in times and "triton" in times:
        row["over products"] = round(times["triton"].over(times["products"]), 3)
        flops = 2.0 * N * shape.V * (shape.D + shape.K * reward)
        row["TFLOP/s"] = round(flops / times["triton"].median / 1e9, 1)
        row["% of GEMM"] = round(100 * flops / times["triton"].median / 1e9 / gemm_tflops, 1) if gemm_tflops else None
    if "chunked" in times and "products" in times:
        row["chunked over products"] = round(times["chunked"].over(times["products"]), 3)
    if "chunked" in times and "triton" in times:
        row["over chunked"] = round(times["triton"].over(times["chunked"]), 3)
    if "chunked" in times and "default" in times:
        what = f"{shape.name}, N = {N}, {row['what']}: the choice of backend=None over chunked"
        part.bar(what, times["default"].over(times["chunked"]), NOISE)
    for name, peak in extra.items():
        row[f"{name} MiB"] = None if peak is None else round(peak / MIB, 1)
    peak = extra.get("triton")
    if peak is not None:
        allowed = PARTIALS_BYTES + ROW_BYTES * max(N, 8192)
        part.check(f"{shape.name}, N = {N}, {row['what']}: extra MiB of triton", peak / MIB, allowed / MIB)
    row |= {"V": shape.V, "D": shape.D, "K": shape.K}
    return row


def _rounded(times: Times | None) -> float | None:
    return None if times is None else round(times.median, 4)


def _memory_is_of_rows(part: Part) -> None:
    """Beyond some thousand rows, more of them cost their results alone."""
    rows = sorted((row for row in part.rows if row["what"] == "credit"), key=lambda row: row["N"])
    for name in ("triton", "chunked"):
        figures = [(row["N"], row[f"{name} MiB"]) for row in rows if row.get(f"{name} MiB") is not None]
        if len(figures) >= 2:
            (few, less), (many, more) = figures[-2:]
            part.check(f"extra bytes a row of {name}, {few} to {many}", (more - less) * MIB / (many - few), GROWTH_ROW_BYTES)


def ceilings(part: Part, setting: Setting) -> None:
    """What the library's products and a copy reach on this GPU: TFLOP/s and bytes read and written, TB/s."""
    clock, side = Clock(setting), setting.pick(8192, 64)

    def measure() -> None:
        a = torch.randn(side, side, device=setting.device, dtype=torch.bfloat16)
        b, out = torch.randn_like(a), torch.empty_like(a)
        source = torch.randint(0, 100, (setting.pick(2**31, 2**16),), dtype=torch.int8, device=setting.device)
        target = torch.empty_like(source)
        times, failed = clock.compare(
            {"gemm": lambda: torch.mm(a, b.T, out=out), "copy": lambda: target.copy_(source)}, seconds=1
        )
        if failed:
            raise RuntimeError(str(failed))
        part.rows += [
            {"ceiling": "bf16 product, TFLOP/s", "value": round(2 * side**3 / times["gemm"].median / 1e9, 1)},
            {"ceiling": "copy, TB/s", "value": round(2 * len(source) / times["copy"].median / 1e9, 3)},
        ]

    part.attempt("ceilings", measure)
