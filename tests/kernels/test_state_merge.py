"""The state of a set of columns: however the vocabulary is cut, merged states are those of the whole."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datc_kernels.anchored_state import AnchoredState, empty_state, merge, tile_state_
from datc_kernels.testing.rounding import rounding

ROWS, V = 3, 40


def columns(seed, *, ties=False, holes=False):
    generator = torch.Generator().manual_seed(seed)
    z = 4 * torch.randn(ROWS, V, generator=generator, dtype=torch.float64)
    if ties:
        z = z.round()
    if holes:
        z[torch.rand(ROWS, V, generator=generator) < 0.7] = -torch.inf
        z[:, :8] = -torch.inf
    return z, 3 + torch.randn(ROWS, V, generator=generator, dtype=torch.float64)


def state(z, u, lo=0, hi=V):
    return tile_state_(z[:, lo:hi].clone(), u[:, lo:hi].clone())


def numbers(s: AnchoredState, *, by_anchor=True):
    """Fields as one tensor. Where exact ties have different u the anchor is free: then what does not depend on it."""
    r = s.reward
    Z = 1 + s.Q
    if by_anchor:
        return torch.stack([s.z_t, s.Q, s.R, s.H, r.u_t, r.S1, r.S2, r.S3])
    mean = r.u_t + r.S1 / Z
    # sum e^2 (u - mean) and sum e^2 (u - mean)^2 over all columns, the anchor among them.
    shift = r.u_t - mean
    first = shift * (1 + s.R) + r.S2
    second = shift * shift * (1 + s.R) + 2 * shift * r.S2 + r.S3
    return torch.stack([s.z_t, s.Q, s.R, s.H, mean, first, second])


def close(a, b, **how):
    allowed = rounding(torch.float64, length=V, condition=256)  # gaps of up to 30 between logits, rewards near 6, twice
    torch.testing.assert_close(numbers(a, **how), numbers(b, **how), rtol=allowed, atol=allowed)


@given(
    seed=st.integers(0, 10_000),
    cuts=st.lists(st.integers(1, V - 1), max_size=8, unique=True).map(sorted),
    ties=st.booleans(),
    holes=st.booleans(),
)
def test_any_split_gives_the_same_state(seed, cuts, ties, holes):
    z, u = columns(seed, ties=ties, holes=holes)
    edges = [0, *cuts, V]
    parts = [state(z, u, lo, hi) for lo, hi in pairwise(edges)]
    folded = parts[0]
    for part in parts[1:]:
        folded = merge(folded, part)
    whole = state(z, u)
    close(folded, whole, by_anchor=not ties)
    # A tree of merges: associativity.
    while len(parts) > 1:
        parts = [merge(*parts[i : i + 2]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    close(parts[0], whole, by_anchor=not ties)


@given(seed=st.integers(0, 10_000), cut=st.integers(1, V - 1))
def test_merging_commutes(seed, cut):
    z, u = columns(seed)
    a, b = state(z, u, 0, cut), state(z, u, cut, V)
    close(merge(a, b), merge(b, a))


def test_ties_keep_the_earlier_anchor():
    z, u = torch.zeros(1, 4, dtype=torch.float64), torch.arange(4.0, dtype=torch.float64)[None]
    assert merge(state(z, u, 0, 2), state(z, u, 2, 4)).reward.u_t.item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k6_the_empty_set_is_the_identity(dtype):
    """K6: bit for bit on both sides, also two empty ones, also as a tile of -inf columns with NaN rewards."""
    z, u = (x.to(dtype) for x in columns(0))
    some = state(z, u)
    nothing = empty_state(ROWS, dtype=dtype, device=torch.device("cpu"))
    masked_tile = tile_state_(torch.full((ROWS, 5), -torch.inf, dtype=dtype), torch.full((ROWS, 5), torch.nan, dtype=dtype))
    for empty in (nothing, masked_tile):
        assert torch.equal(numbers(merge(some, empty)), numbers(some))
        assert torch.equal(numbers(merge(empty, some)), numbers(some))
        assert torch.equal(numbers(merge(empty, nothing)), numbers(nothing))


def test_a_nan_stays_a_nan_on_either_side():
    z, u = columns(0)
    bad = z.clone()
    bad[:, 7] = torch.nan
    for pair in ((state(bad, u, 0, 20), state(z, u, 20, V)), (state(z, u, 20, V), state(bad, u, 0, 20))):
        assert merge(*pair).Q.isnan().all()
