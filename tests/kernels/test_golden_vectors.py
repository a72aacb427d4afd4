"""Numbers of an independent float64 program, on every backend."""

from pathlib import Path

import numpy as np
import pytest
import torch

from datc_kernels import TokenCredit, allocate_weights, linear_credit, logits_credit
from datc_kernels.testing import truth
from datc_kernels.testing.budgets import BUDGETS, CREDIT, LOGPROB, TEMPERATURE32, WEIGHT, assert_within_budget
from datc_kernels.testing.rounding import rounding

VECTORS = Path(__file__).parent / "vectors"
CREDIT_FILES = sorted(path.stem for path in VECTORS.glob("credit_*.npz"))
# Two float64 programs: sums over a response of at most 512 tokens, A s of up to some 30, credits that cancel to a thousandth.
EXACT = rounding(torch.float64, length=512, condition=32 * 1000)
FIELDS = {"advantage": "advantage_y", "displacement_norm": "grad_norm", "force_norm": "score_norm"}


@pytest.fixture
def backend(float32_backend):
    return float32_backend


def load(name):
    with np.load(VECTORS / f"{name}.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def arguments(data):
    options = {key: float(data[key]) for key in ("temperature", "softcap") if key in data}
    args = [data[key] for key in ("hidden", "weight", "token_ids", "reward_grad", "reward_embedding")]
    return args, options | ({"bias": data["bias"]} if "bias" in data else {})


def expected(data):
    names = TokenCredit.__dataclass_fields__
    return TokenCredit(**{name: data[f"out_{FIELDS.get(name, name)}"] for name in names})


def test_the_vectors_are_there():
    assert len(CREDIT_FILES) == 16
    assert (VECTORS / "allocation.npz").exists()


@pytest.mark.parametrize("name", CREDIT_FILES)
def test_linear_credit(name, backend):
    data = load(name)
    args, options = arguments(data)
    got, true = linear_credit(*args, **options, backend=backend), expected(data)
    # The two that the vectors themselves demand, spelled out; then every field.
    d = true.credit
    assert ((got.credit - d).abs() <= CREDIT * (d.abs() + d.square().mean().sqrt())).all()
    assert ((got.logprob - true.logprob).abs() <= LOGPROB).all()
    assert_within_budget(got, true)
    torch.testing.assert_close(got.cosine.double(), data["out_cosine"], rtol=0, atol=BUDGETS["cosine"])


@pytest.mark.parametrize("given", ["reward_grad", "reward"])
@pytest.mark.parametrize("name", CREDIT_FILES)
def test_logits_credit(name, given, backend):
    data = load(name)
    (hidden, weight, ids, grad, table), options = arguments(data)
    # Logits of float64 products: rounding them once to float32 costs p_y = 1 - 1e-12 nothing.
    logits = hidden.double() @ weight.double().T + options.pop("bias", torch.zeros(())).double()
    logits, u = logits.float(), (grad.double() @ table.double().T).float()
    reward = {"reward": u} if given == "reward" else {"reward_grad": grad, "reward_embedding": table}
    got = logits_credit(logits, ids, **reward, **options, backend=backend)
    assert_within_budget(got, expected(data))


@pytest.mark.parametrize("name", CREDIT_FILES)
def test_our_truth_agrees(name):
    """The truth that the other tests compare with is the same to float64's last digits."""
    data = load(name)
    args, options = arguments(data)
    got, true = truth.linear_credit(*args, **options), expected(data)
    # Two programs in float64; a gap of 28 between logits leaves 1e-12 of a probability to the other columns.
    assert_within_budget(got, true, dict.fromkeys(BUDGETS, rounding(torch.float64, length=512, condition=512)))


@pytest.mark.parametrize("utility", ["advantage", "sign"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_allocate_weights(utility, dtype, allocating_backend):
    """float64 credit as given; float32 credit is another input where two credits nearly tie, so it is judged by the truth."""
    data = load("allocation")
    suffix = "_sign" if utility == "sign" else ""
    credit, advantage = data["credit"].to(dtype), data["advantage"].to(dtype)
    start = 0
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), data["lengths"].cumsum(0)])
    for ceiling in data["ceiling"].unique().tolist():
        chosen = (data["ceiling"] == ceiling).nonzero().squeeze(1)
        tokens = torch.cat([torch.arange(int(offsets[b]), int(offsets[b + 1])) for b in chosen])
        got = allocate_weights(
            credit[tokens],
            advantage[chosen],
            data["lengths"][chosen],
            frozen=data["frozen"][tokens],
            ceiling=ceiling,
            utility=utility,
            backend=allocating_backend,
        )
        start += len(tokens)
        assert got.weight.dtype == got.temperature.dtype == dtype
        torch.testing.assert_close(got.weight.double(), data[f"out_weight{suffix}"][tokens], rtol=0, atol=WEIGHT)
        temperature = data[f"out_temperature{suffix}"][chosen]
        torch.testing.assert_close(got.temperature.double(), temperature, rtol=TEMPERATURE32, atol=0)
    assert start == len(credit)


@pytest.mark.parametrize("utility", ["advantage", "sign"])
def test_our_truth_of_the_allocation_agrees(utility):
    data = load("allocation")
    suffix = "_sign" if utility == "sign" else ""
    start = 0
    for b, length in enumerate(data["lengths"].tolist()):
        part = slice(start, start + length)
        start += length
        one = slice(b, b + 1)
        weight, temperature = truth.allocate_weights(
            data["credit"][part],
            data["advantage"][one],
            data["lengths"][one],
            data["frozen"][part],
            float(data["ceiling"][b]),
            utility,
        )
        torch.testing.assert_close(weight, data[f"out_weight{suffix}"][part], rtol=0, atol=EXACT)
        torch.testing.assert_close(temperature, data[f"out_temperature{suffix}"][one], rtol=EXACT, atol=0)
