"""Time and memory of one credit computation, against the matrix products alone and against textbook PyTorch.

    python -m benchmarks.credit_cost [--json FILE] [--rounds 7]

Variants run in turn, round after round, and ratios are taken within a round, so that a machine whose speed drifts does not
favour one. Before any time is taken, every variant's credit is held against float64. Memory is the growth of the resident size
at its peak, each variant in a process of its own (Linux only).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from datc_kernels import linear_credit
from datc_train.bench.machine import machine

SHAPE = {"N": 512, "V": 49152, "D": 576, "K": 576}
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs(dtype: torch.dtype = torch.float32) -> Inputs:
    """hidden, weight, token_ids, reward_grad, reward_embedding of a policy like SmolLM2-135M."""
    generator = torch.Generator().manual_seed(0)
    n, v, d, k = SHAPE.values()

    def normal(*shape: int, scale: float) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    ids = torch.randint(v, (n,), generator=generator)
    return normal(n, d, scale=1.0), normal(v, d, scale=0.1), ids, normal(n, k, scale=1e-3), normal(v, k, scale=0.1)


def products(h: Tensor, W: Tensor, y: Tensor, g: Tensor, E: Tensor) -> None:
    """Nothing but the two matrix products, in columns of 1,024 that stay in cache."""
    z, u = torch.empty(len(h), 1024), torch.empty(len(h), 1024)
    for lo in range(0, len(W), 1024):
        torch.mm(h, W[lo : lo + 1024].T, out=z)
        torch.mm(g, E[lo : lo + 1024].T, out=u)


def eager(h: Tensor, W: Tensor, y: Tensor, g: Tensor, E: Tensor) -> Tensor:
    """The formulas as they stand, over [N, V] tensors."""
    p = torch.softmax(h @ W.T, dim=-1)
    u = g @ E.T
    A = u - (p * u).sum(-1, keepdim=True)
    pA = p * A
    return pA.gather(1, y[:, None]).squeeze(1) - (p * pA).sum(-1)


def chunked(h: Tensor, W: Tensor, y: Tensor, g: Tensor, E: Tensor) -> Tensor | None:
    return linear_credit(h, W, y, g, E, backend="chunked").credit


VARIANTS: dict[str, Callable[..., Tensor | None]] = {"products": products, "datc": chunked, "eager": eager}


def check(data: Inputs) -> dict[str, float]:
    """Largest error of the credit against float64, in units of |d| + rms d."""
    truth = eager(*(x.double() if x.is_floating_point() else x for x in data))
    scale = truth.abs() + truth.square().mean().sqrt()
    errors = {}
    for name in ("datc", "eager"):
        got = VARIANTS[name](*data)
        assert got is not None
        errors[name] = float(((got - truth).abs() / scale).max())
    if errors["datc"] > 1e-4:
        raise SystemExit(f"credit is wrong by {errors['datc']:.1e}; no times are taken")
    return errors


def measure(data: Inputs, rounds: int) -> dict[str, dict[str, float]]:
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(rounds + 1):  # the first round warms up
        for name, run in VARIANTS.items():
            start = time.perf_counter()
            run(*data)
            seconds[name].append(time.perf_counter() - start)
    result = {}
    for name, values in seconds.items():
        ratios = [a / b for a, b in zip(values[1:], seconds["products"][1:], strict=True)]
        result[name] = {"seconds": statistics.median(values[1:]), "over_products": statistics.median(ratios)}
    return result


def peak_growth(name: str) -> float:
    """MiB by which one call lets the process grow, in a process of its own."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.credit_cost", "--peak", name], capture_output=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peak", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        data = inputs()
        VARIANTS[options.peak](*(x[:8] if i in (0, 2, 3) else x for i, x in enumerate(data)))
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        before = _resident("VmRSS")
        VARIANTS[options.peak](*data)
        print(_resident("VmHWM") - before)
        return
    data = inputs()
    errors = check(data)
    table = measure(data, options.rounds)
    for name, row in table.items():
        row["extra_mib"] = peak_growth(name)
        if name in errors:
            row["error"] = errors[name]
        error = f"{row['error']:.1e}" if "error" in row else "-"
        print(
            f"{name:9} {row['seconds'] * 1e3:8.1f} ms  {row['over_products']:5.2f} x products  "
            f"{row['extra_mib']:7.1f} MiB  error {error}"
        )
    about = machine() | {"dtype": "float32"}
    print(about | SHAPE)
    if options.json:
        options.json.write_text(json.dumps(about | {"shape": SHAPE, "rounds": options.rounds, "variants": table}, indent=1))


def _resident(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    main()
