"""Candidates for the launch table: other tiles, pipelines, slices and groups, against what is shipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from datc_kernels import linear_credit, logits_credit
from datc_kernels.launch_table import GROUP, NARROW, ROWS, WIDE, Tiling
from datc_kernels.linear_credit import triton_backend as linear
from datc_kernels.logits_credit import triton_backend as logits
from datc_kernels.types import TokenCredit

from .clock import Clock
from .report import Part
from .setting import Setting, Shape, draw


@dataclass(frozen=True)
class Candidate:
    name: str
    tilings: tuple[Tiling, ...]
    group: int = GROUP

    @contextmanager
    def used(self) -> Iterator[None]:
        def choose(*_: Any, **__: Any) -> tuple[Tiling, ...]:
            return self.tilings

        with patch.object(linear, "choose_tilings", choose), patch.object(linear, "GROUP", self.group):
            yield


def candidates(setting: Setting) -> list[Candidate]:
    """For products of half-precision tensors by descriptors, the likeliest first."""
    both = (WIDE, NARROW)
    found = [
        Candidate("narrow alone", (NARROW,)),
        Candidate("wide, narrow", both),
        Candidate("wide, 4 stages", (replace(WIDE, stages=4), NARROW)),
        Candidate("narrow, 4 stages", (replace(NARROW, stages=4),)),
        Candidate("wide, slices of 2048", tuple(replace(t, slice=2048) for t in both)),
        Candidate("wide, groups of 8", both, 8),
        Candidate("wide, groups of 32", both, 32),
        Candidate("256 x 128", (Tiling(256, 128, 64, warps=8, stages=3), NARROW)),
        Candidate("narrow, slices of 2048", (replace(NARROW, slice=2048),)),
        Candidate("narrow, depth 128, 2 stages", (replace(NARROW, depth=128, stages=2),)),
        Candidate("64 x 256, 4 warps", (Tiling(64, 256, 64, warps=4, stages=3), Tiling(64, 128, 64, warps=4, stages=3))),
        Candidate("narrow, 4 warps", (replace(NARROW, warps=4),)),
    ]
    return found[:1] if setting.dry else found


def row_candidates(setting: Setting) -> dict[str, Tiling]:
    """For the kernel that reads stored logits."""
    found = {
        "1 x 2048, 2 warps": Tiling(1, 2048, 0, warps=2, stages=1, slice=8192),
        "1 x 4096, 4 warps": Tiling(1, 4096, 0, warps=4, stages=1, slice=8192),
        "1 x 1024, slices of 16384": replace(ROWS, slice=16_384),
        "1 x 1024, 2 stages": replace(ROWS, stages=2),
        "4 x 1024, 4 warps": Tiling(4, 1024, 0, warps=4, stages=1, slice=8192),
    }
    return dict(list(found.items())[:1]) if setting.dry else found


def run(part: Part, setting: Setting) -> None:
    clock = Clock(setting)
    part.attempt("stored logits", lambda: _rows(part, setting, clock))
    for shape in (setting.shapes[0], setting.shapes[-1]):
        part.attempt(shape.name, lambda: _tiles(part, setting, clock, shape))  # noqa: B023
    best: dict[str, dict[str, Any]] = {}
    for row in part.rows:
        if row["over shipped"] is not None and row["difference"] < 1e-3:
            best[row["shape"]] = min(best.get(row["shape"], row), row, key=lambda r: r["over shipped"])
    part.notes += [f"{shape}: best {row['candidate']}, {row['over shipped']:.3g} x shipped" for shape, row in best.items()]


def _tiles(part: Part, setting: Setting, clock: Clock, shape: Shape) -> None:
    x = draw(setting, setting.pick(8192, 4), shape.V, shape.D, shape.K)

    def shipped() -> TokenCredit:
        return linear_credit(*x.args, backend="triton")

    for candidate in candidates(setting):

        def call(candidate: Candidate = candidate) -> TokenCredit:
            with candidate.used():
                return shipped()

        _compare(part, clock, shape.name, candidate.name, shipped, call)


def _rows(part: Part, setting: Setting, clock: Clock) -> None:
    V = setting.shapes[0].V
    x = draw(setting, setting.pick(8192, 4), V, setting.pick(256, 64), 8)
    z = x.hidden @ x.weight.T
    for way, given in (("stored logits", None), ("stored logits and rewards", z.flip(0).contiguous())):

        def shipped(given: Any = given) -> TokenCredit:
            return logits_credit(z, x.token_ids, reward=given, backend="triton")

        for name, tiling in row_candidates(setting).items():

            def call(tiling: Tiling = tiling, shipped: Callable[[], TokenCredit] = shipped) -> TokenCredit:
                with patch.object(logits, "ROWS", tiling):
                    return shipped()

            _compare(part, clock, way, name, shipped, call)


def _compare(
    part: Part, clock: Clock, shape: str, name: str, shipped: Callable[[], TokenCredit], call: Callable[[], TokenCredit]
) -> None:
    """One row: a candidate that does not run is noted; it is not shipped, so nothing fails."""
    if part.left_s <= 0:
        part.skipped.append(f"{shape}, {name}")
        return
    times, failed = clock.compare({"shipped": shipped, "candidate": call}, seconds=0.8, most=9)
    row: dict[str, Any] = {"shape": shape, "candidate": name, "ms": None, "over shipped": None, "difference": None}
    if "candidate" in times and "shipped" in times:
        row["ms"] = round(times["candidate"].median, 4)
        row["over shipped"] = round(times["candidate"].over(times["shipped"]), 3)
        row["difference"] = _difference(call(), shipped())
    else:
        part.notes.append(f"{shape}, {name}: {failed}")
        part.require_device()
    part.rows.append(row)


def _difference(a: TokenCredit, b: TokenCredit) -> float:
    """Largest difference of the credit (of log-probabilities without one), over |value| + its root mean square."""
    x, y = (a.logprob, b.logprob) if a.credit is None or b.credit is None else (a.credit, b.credit)
    return float(((x - y).abs() / (y.abs() + y.square().mean().sqrt())).max())
