"""Time and memory of one credit computation on a CPU, against the matrix products alone and against textbook PyTorch.

    python -m benchmarks.credit_cost [--json FILE] [--rounds 7] [--threads T] [--only small|large|bfloat16]

Three groups: the credit, log-probabilities alone, and the backward of logprob. In each the first variant is nothing but the
matrix products, in columns of 1,024 that stay in cache. Variants run in turn, round after round, and ratios are taken within a
round, so that a machine whose speed drifts does not favour one; the range over rounds stands beside each. `processor` ratios
compare the time that the process itself was given: what counts where other work shares the cores. Before any time is taken, the
credit is held against float64. Memory is the growth of the resident size at its peak, each variant in a process of its own
(Linux only).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datc_kernels import linear_credit, missing_backends
from datc_train.bench.machine import machine

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
COLUMNS = 1024


@dataclass(frozen=True)
class Shape:
    N: int
    V: int
    D: int
    K: int
    dtype: str


# A policy like SmolLM2-135M, and the vocabulary and width of Qwen3-0.6B.
SHAPES = {
    "small": Shape(512, 49_152, 576, 576, "float32"),
    "large": Shape(256, 151_936, 1024, 1024, "float32"),
    "bfloat16": Shape(256, 151_936, 1024, 1024, "bfloat16"),
}


def inputs(s: Shape) -> Inputs:
    """hidden, weight, token_ids, reward_grad, reward_embedding."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(*shape, generator=generator).mul_(scale).to(getattr(torch, s.dtype))

    ids = torch.randint(s.V, (s.N,), generator=generator)
    head = normal(s.N, s.D, scale=1.0), normal(s.V, s.D, scale=2.4 / s.D**0.5)
    return *head, ids, normal(s.N, s.K, scale=1e-3), normal(s.V, s.K, scale=0.1)


def products(*pairs: tuple[Tensor, Tensor]) -> None:
    """left table^T of each pair, nothing but that; other dtypes are upcast chunk by chunk."""
    left = [x.float() for x, _ in pairs]
    tiles = [torch.empty(len(x), COLUMNS) for x in left]
    for lo in range(0, len(pairs[0][1]), COLUMNS):
        for x, (_, table), tile in zip(left, pairs, tiles, strict=True):
            chunk = table[lo : lo + COLUMNS].float()
            torch.mm(x, chunk.T, out=tile[:, : len(chunk)])


def backward_products(h: Tensor, W: Tensor) -> None:
    """The logits again, and the gradient of hidden."""
    left, gradient, tile = h.float(), torch.zeros(h.shape), torch.empty(len(h), COLUMNS)
    for lo in range(0, len(W), COLUMNS):
        chunk = W[lo : lo + COLUMNS].float()
        out = torch.mm(left, chunk.T, out=tile[:, : len(chunk)])
        gradient.addmm_(out, chunk)


def eager(h: Tensor, W: Tensor, y: Tensor, g: Tensor, E: Tensor) -> Tensor:
    """The formulas as they stand, over [N, V] tensors; products in the inputs' dtype, the rest in float32 or float64."""
    wide = torch.promote_types(h.dtype, torch.float32)
    p = torch.softmax((h @ W.T).to(wide), dim=-1)
    u = (g @ E.T).to(wide)
    A = u - (p * u).sum(-1, keepdim=True)
    pA = p * A
    return pA.gather(1, y[:, None]).squeeze(1) - (p * pA).sum(-1)


def credit(backend: str, data: Inputs) -> Tensor | None:
    return linear_credit(*data, backend=backend).credit


def groups(data: Inputs) -> dict[str, dict[str, Callable[[], object]]]:
    """The variants of each group, its products first."""
    h, W, y, g, E = data
    backends = [b for b in ("cpu", "chunked") if b not in missing_backends()]
    logprob, stats = torch.ops.datc.linear_credit(
        h, W, y, None, None, None, None, 1.0, 1.0, None, len(W), -100, "", 0, backends[0]
    )
    incoming = torch.ones_like(logprob)

    def backward(backend: str) -> object:
        settings = (None, None, 1.0, 1.0, None, len(W), -100, "", 0, backend, [True, False, False])
        return torch.ops.datc.linear_credit_backward(incoming, logprob, stats, h, W, y, *settings)

    def ours(run: Callable[[str], object]) -> dict[str, Callable[[], object]]:
        return {b: lambda b=b: run(b) for b in backends}  # type: ignore[misc]

    return {
        "credit": {
            "products": lambda: products((h, W), (g, E)),
            **ours(lambda b: credit(b, data)),
            "eager": lambda: eager(*data),
        },
        "log-prob only": {
            "products": lambda: products((h, W)),
            **ours(lambda b: linear_credit(h, W, y, backend=b).logprob),
            "cross_entropy": lambda: torch.nn.functional.cross_entropy((h @ W.T).float(), y, reduction="none"),
        },
        "backward of logprob": {"products": lambda: backward_products(h, W), **ours(backward)},
    }


def check(data: Inputs, rows: int = 32) -> dict[str, float]:
    """Largest error of the credit of some rows against float64, in units of |d| + rms d."""
    h, W, y, g, E = data
    some = h[:rows], W, y[:rows], g[:rows], E
    truth = eager(*(x.double() if x.is_floating_point() else x for x in some))
    scale = truth.abs() + truth.square().mean().sqrt()
    got = {b: credit(b, some) for b in ("cpu", "chunked") if b not in missing_backends()} | {"eager": eager(*some)}
    errors = {name: float(((d - truth).abs() / scale).max()) for name, d in got.items() if d is not None}
    wrong = {name: error for name, error in errors.items() if name != "eager" and error > 1e-4}
    if wrong:
        raise SystemExit(f"credit is wrong by {wrong}; no times are taken")
    return errors


def measure(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, Any]]:
    wall: dict[str, list[float]] = {name: [] for name in variants}
    processor: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 1):  # the first round warms up
        for name, run in variants.items():
            start, own = time.perf_counter(), time.process_time()
            run()
            if turn:
                wall[name].append(time.perf_counter() - start)
                processor[name].append(time.process_time() - own)
    return {
        name: {
            "seconds": statistics.median(wall[name]),
            "processor_seconds": statistics.median(processor[name]),
            "over_products": _ratio(wall[name], wall["products"]),
            "processor_over_products": _ratio(processor[name], processor["products"]),
        }
        for name in variants
    }


def _ratio(values: list[float], base: list[float]) -> dict[str, float]:
    ratios = [a / b for a, b in zip(values, base, strict=True)]
    return {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}


def peak_growth(shape: str, group: str, name: str, threads: int) -> float:
    """MiB by which one call lets the process grow, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.credit_cost", "--threads", str(threads), "--peak", shape, group, name]
    return float(subprocess.run(command, capture_output=True, check=True).stdout)


def print_peak(shape: str, group: str, name: str) -> None:
    s = SHAPES[shape]
    groups(inputs(Shape(8, 2048, s.D, s.K, s.dtype)))[group][name]()
    run = groups(inputs(s))[group][name]
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _resident("VmRSS")
    run()
    print(_resident("VmHWM") - before)


def run_shape(shape: str, rounds: int, threads: int) -> dict[str, Any]:
    data = inputs(SHAPES[shape])
    errors = check(data)
    print(f"{shape}: {asdict(SHAPES[shape])}")
    table = {}
    for group, variants in groups(data).items():
        table[group] = measure(variants, rounds)
        for name, row in table[group].items():
            row["extra_mib"] = peak_growth(shape, group, name, threads)
            if group == "credit" and name in errors:
                row["error"] = errors[name]
            ratio, own = row["over_products"], row["processor_over_products"]
            print(
                f"  {group:20} {name:14} {row['seconds'] * 1e3:8.0f} ms {ratio['median']:6.3f} x products "
                f"({ratio['lowest']:.3f} to {ratio['highest']:.3f}); processor {own['median']:6.3f} x "
                f"({own['lowest']:.3f} to {own['highest']:.3f}) {row['extra_mib']:7.1f} MiB"
                + (f"  error {row['error']:.1e}" if "error" in row else ""),
                flush=True,
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=SHAPES, action="append")
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        print_peak(*options.peak)
        return
    shapes = options.only or list(SHAPES)
    results = {shape: run_shape(shape, options.rounds, options.threads) for shape in shapes}
    about = machine() | {"load": Path("/proc/loadavg").read_text().split()[:3], "rounds": options.rounds}
    print(about)
    if options.json:
        described = {name: asdict(SHAPES[name]) for name in shapes}
        options.json.write_text(json.dumps(about | {"shapes": described, "results": results}, indent=1) + "\n")


def _resident(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    main()
