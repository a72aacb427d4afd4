"""Time of every op on every backend that runs here, correctness first.

    python -m pytest benchmarks/test_kernels.py --benchmark-only [--benchmark-json FILE]

Inputs are those of the kernels' tests, scaled up. `extra_info` has shape, dtype, floating-point operations, the bytes that have
to be read and written once, extra memory at its peak, the error against float64 that was found before, and the machine. On a
GPU each call is synchronised. Small shapes on a CPU, those of real models on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from datc_kernels import allocate_weights, candidate_advantages, linear_credit, logits_credit, missing_backends
from datc_train.bench.machine import machine
from datc_train.bench.memory import peak_memory

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = {"N": 8192, "V": 151_936, "D": 4096, "K": 4096} if DEVICE.type == "cuda" else {"N": 256, "V": 49_152, "D": 576, "K": 576}
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
BACKENDS = [b for b in ("chunked", "cpu", "triton") if b not in missing_backends()]
TOLERANCE = 2e-2 if torch.bfloat16 == DTYPE else 1e-4  # of |credit| + its root mean square

Case = dict[str, Any]


@pytest.fixture(scope="module")
def case() -> Case:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(DEVICE, DTYPE)

    n, v, d, k = SHAPE.values()
    return {
        "hidden": normal(n, d, scale=1.0),
        "weight": normal(v, d, scale=2.4 / d**0.5),
        "token_ids": torch.randint(v, (n,), generator=generator).to(DEVICE),
        "reward_grad": normal(n, k, scale=1e-3),
        "reward_embedding": normal(v, k, scale=0.1),
    }


def run(benchmark: Any, call: Callable[[], object], *, error: float, flops: float, moved: float, backend: str) -> None:
    def timed() -> None:
        call()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    before = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else _resident()
    with peak_memory(DEVICE) as peak:
        timed()
    benchmark.extra_info |= {
        "backend": backend,
        "shape": SHAPE,
        "dtype": str(DTYPE),
        "error": error,
        "flops": flops,
        "bytes": moved,
        "peak_extra_bytes": max(0, peak.bytes - before),
        "machine": machine(),
    }
    benchmark.pedantic(timed, rounds=5, warmup_rounds=1)
    benchmark.extra_info["gflop_per_second"] = flops / benchmark.stats.stats.median / 1e9


def worst(got: Tensor | None, truth: Tensor | None, rows: slice) -> float:
    """Largest error in units of |truth| + its root mean square."""
    assert got is not None
    assert truth is not None
    error = (got[rows].double() - truth).abs() / (truth.abs() + truth.square().mean().sqrt())
    assert float(error.max()) <= TOLERANCE, float(error.max())
    return float(error.max())


def in_float64(case: Case, rows: slice) -> Case:
    """The arguments of some rows in float64, which `reference` computes in."""
    part = {"hidden", "token_ids", "reward_grad"}
    return {k: (v[rows] if k in part else v).double() if v.is_floating_point() else v[rows] for k, v in case.items()}


ROWS = slice(0, 16)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reward", [True, False], ids=["credit", "logprob only"])
def test_linear_credit(benchmark: Any, case: Case, backend: str, reward: bool) -> None:
    inputs = case if reward else {k: v for k, v in case.items() if not k.startswith("reward")}
    truth = linear_credit(**in_float64(inputs, ROWS), backend="reference")
    got = linear_credit(**inputs, backend=backend)
    error = worst(got.credit if reward else got.logprob, truth.credit if reward else truth.logprob, ROWS)
    n, v, d, k = SHAPE.values()
    width = d + k if reward else d
    size = case["weight"].element_size()
    run(
        benchmark,
        lambda: linear_credit(**inputs, backend=backend),
        error=error,
        flops=2.0 * n * v * width,
        moved=float(size * width * (n + v)),
        backend=backend,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_logprob_backward(benchmark: Any, case: Case, backend: str) -> None:
    hidden = case["hidden"].clone().requires_grad_(True)
    wide = in_float64(case, ROWS)
    leaf = wide["hidden"].requires_grad_(True)
    (truth,) = torch.autograd.grad(
        linear_credit(leaf, wide["weight"], wide["token_ids"], backend="reference").logprob.sum(), leaf
    )

    def gradient() -> Tensor:
        return torch.autograd.grad(
            linear_credit(hidden, case["weight"], case["token_ids"], backend=backend).logprob.sum(), hidden
        )[0]

    error = worst(gradient(), truth, ROWS)
    n, v, d, _ = SHAPE.values()
    run(
        benchmark,
        gradient,
        error=error,
        flops=6.0 * n * v * d,
        moved=float(case["weight"].element_size() * 3 * d * (n + v)),
        backend=backend,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_credit(benchmark: Any, case: Case, backend: str) -> None:
    logits = case["hidden"] @ case["weight"].T
    rest = {k: case[k] for k in ("token_ids", "reward_grad", "reward_embedding")}
    wide = in_float64(rest, ROWS)
    truth = logits_credit(logits[ROWS].double(), **wide, backend="reference")
    error = worst(logits_credit(logits, **rest, backend=backend).credit, truth.credit, ROWS)
    n, v, _, k = SHAPE.values()
    size = logits.element_size()
    run(
        benchmark,
        lambda: logits_credit(logits, **rest, backend=backend),
        error=error,
        flops=2.0 * n * v * k,
        moved=float(size * (n * v + k * (n + v))),
        backend=backend,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_allocate_weights(benchmark: Any, backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 513, (64,), generator=generator)
    credit = torch.randn(int(lengths.sum()), generator=generator)
    advantage = torch.randn(64, generator=generator)
    truth = allocate_weights(credit.double(), advantage.double(), lengths, backend="reference").weight
    arguments = (credit.to(DEVICE), advantage.to(DEVICE), lengths.to(DEVICE))
    error = worst(allocate_weights(*arguments, backend=backend).weight.cpu(), truth, slice(None))
    run(
        benchmark,
        lambda: allocate_weights(*arguments, backend=backend),
        error=error,
        flops=0.0,
        moved=float(8 * len(credit)),
        backend=backend,
    )


def test_candidate_advantages(benchmark: Any, case: Case) -> None:
    names = ("hidden", "weight", "reward_grad", "reward_embedding")
    wide = in_float64(case, ROWS)
    truth = candidate_advantages(*(wide[name] for name in names), top_k=5, backend="reference")
    got = candidate_advantages(*(case[name] for name in names), top_k=5)
    n, v, d, k = SHAPE.values()
    run(
        benchmark,
        lambda: candidate_advantages(*(case[name] for name in names), top_k=5),
        error=worst(got.probability, truth.probability, ROWS),
        flops=2.0 * n * v * (d + k),
        moved=float(case["weight"].element_size() * (d + k) * (n + v)),
        backend="chunked",
    )


def _resident() -> int:
    with peak_memory(torch.device("cpu")) as peak:
        torch.empty(1).fill_(1.0)
        import time

        time.sleep(0.02)
    return peak.bytes
