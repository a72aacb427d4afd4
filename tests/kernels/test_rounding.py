"""The tolerances' own formula: it holds what rounding does, in any order of a sum, and not much more."""

import math

import pytest
import torch

from datc_kernels.testing.rounding import assert_rounded, rounding, terms


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_units(dtype):
    assert rounding(dtype) == 4 * torch.finfo(dtype).eps
    assert rounding(dtype, length=9, condition=2.5) == pytest.approx(7.5 * rounding(dtype))


@pytest.mark.parametrize("length", [10, 1000, 30_000])
def test_sums_in_any_order_are_within_it_and_within_a_hundredfold(length):
    """Random orders of a recursive float32 sum of positive numbers against an exact one."""
    generator = torch.Generator().manual_seed(length)
    x = torch.rand(length, generator=generator)
    exact = math.fsum(x.tolist())
    orders = torch.stack([x[torch.randperm(length, generator=generator)] for _ in range(200)])
    total = torch.zeros(200)
    for column in orders.T:
        total = total + column
    errors = (total.double() - exact).abs() / exact
    assert rounding(length=length) / 100 <= errors.max() <= rounding(length=length)


def test_assert_rounded_sees_one_digit_a_nan_and_a_shape():
    true = torch.tensor([1.0, -3.0, 1e-9, torch.inf, torch.nan], dtype=torch.float64)
    near = torch.tensor([1.0, -3.0, 1e-9 + rounding(), torch.inf, torch.nan])
    assert_rounded(near, true)
    for wrong in (near.where(near != 1, 1 + 4 * rounding()), near.nan_to_num(nan=0.0), near.nan_to_num(posinf=1.0), near[:4]):
        with pytest.raises(AssertionError, match="^field"):
            assert_rounded(wrong, true, name="field")


def test_terms_of_a_model():
    model = torch.nn.Sequential(torch.nn.Embedding(7, 5), torch.nn.Linear(5, 11), torch.nn.GELU(), torch.nn.Linear(11, 3))
    assert terms(model) == 16
