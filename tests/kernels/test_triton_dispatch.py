"""Where the Triton backends run, what they say where they cannot, and that PyTorch sees proper ops."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from datc_kernels import allocate_weights, linear_credit, logits_credit
from datc_kernels.testing.inputs import Sizes, plain

CASE = plain(0, Sizes(N=6, V=40, D=8, K=8))
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def backend(run_variant):
    with run_variant("triton") as name:
        yield name


def calls(case, credit):
    yield lambda: linear_credit(*case.args, backend="triton")
    yield lambda: logits_credit(case.logits(), *case.args[2:], backend="triton")
    yield lambda: allocate_weights(credit, torch.ones(1, dtype=credit.dtype), backend="triton")


def test_float64_is_refused_with_the_reason():
    """The kernels compute in float32: not a silent loss of digits."""
    for call in calls(CASE.to(torch.float64), torch.randn(6).double()):
        with pytest.raises(RuntimeError, match="^backend: 'triton' cannot run here: .*float64"):
            call()


def test_k59_without_a_gpu_and_without_the_interpreter():
    """K59, K63: a RuntimeError that says what is missing; importing and every other backend work."""
    code = """
import torch
import datc_kernels as dk
print(dk.missing_backends()["triton"])
h, w, y = torch.randn(4, 8), torch.randn(20, 8), torch.arange(4)
for call in (lambda b: dk.linear_credit(h, w, y, backend=b), lambda b: dk.logits_credit(h @ w.T, y, backend=b),
             lambda b: dk.allocate_weights(torch.randn(4), torch.ones(1), backend=b)):
    call(None)
    try:
        call("triton")
    except RuntimeError as error:
        print(str(error).partition(" here: ")[0])
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    reason, *errors = done.stdout.splitlines()
    assert "no CUDA device" in reason, done.stderr
    assert errors == ["backend: 'triton' cannot run"] * 3, done.stdout


def test_k58_opcheck():
    """K58: schema, fake, autograd registration, dynamic shapes."""
    settings = (None, 0.8, 1.0, 20.0, 37, -100, "", 0, "triton")
    ids = CASE.token_ids % 37
    hidden, weight = CASE.hidden.clone().requires_grad_(), CASE.weight.clone().requires_grad_()
    torch.library.opcheck(
        torch.ops.datc.linear_credit.default, (hidden, weight, ids, CASE.reward_grad, CASE.reward_embedding, None, *settings)
    )
    torch.library.opcheck(
        torch.ops.datc.logits_credit.default, (CASE.logits().requires_grad_(), ids, None, None, None, *settings)
    )
    credit, lengths = torch.randn(6), torch.tensor([2, 0, 4])
    torch.library.opcheck(
        torch.ops.datc.allocate_weights.default, (credit, torch.ones(3), lengths, None, 4.0, "advantage", "triton")
    )
