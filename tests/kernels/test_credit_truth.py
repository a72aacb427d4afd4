"""Every field of both ops against the extended-precision truth: within its budget, and twice the reference's error."""

import math
from dataclasses import replace

import pytest
import torch

from datc_kernels import linear_credit, logits_credit, missing_backends
from datc_kernels.testing import truth
from datc_kernels.testing.budgets import BUDGETS, CREDIT, SHARP, assert_as_good_as, assert_within_budget, worst
from datc_kernels.testing.inputs import CASES, Sizes, everything, masked, peaked, plain, with_options
from datc_kernels.testing.rounding import assert_rounded, rounding

V, D = Sizes.V, Sizes.D
# In float64: a sum over D for the logit, one over V; a gap of near 30 between logits, rewards 100 beside a spread of 1.
EXACT = dict.fromkeys(BUDGETS, rounding(torch.float64, length=V + D, condition=128))


@pytest.fixture
def backend(float32_backend):
    return float32_backend


@pytest.mark.parametrize("name", CASES)
def test_linear_credit(name, backend):
    case = CASES[name]()
    got = linear_credit(*case.args, **case.options, backend=backend)
    true = truth.linear_credit(*case.args, **case.options)
    reference = linear_credit(*case.args, **case.options, backend="reference")
    assert_within_budget(got, true, SHARP)
    # Beside an offset of 100 the library's own rounding of u, which differs with the tile's shape, is what one sees.
    assert_as_good_as(got, reference, true, floor=rounding(length=16, condition=100 if name == "reward offset 100" else 1))
    assert all(getattr(got, field).dtype == torch.float32 for field in got.__dataclass_fields__)


@pytest.mark.parametrize("name", CASES)
def test_logits_credit(name, backend):
    case = CASES[name]()
    logits, options = case.to(torch.float64).logits().float(), case.logits_options
    got = logits_credit(logits, case.token_ids, case.reward_grad, case.reward_embedding, **options, backend=backend)
    true = truth.logits_credit(logits, case.token_ids, case.reward_grad, case.reward_embedding, **options)
    assert_within_budget(got, true, SHARP)
    u = case.reward_grad @ case.reward_embedding.T
    from_u = logits_credit(logits, case.token_ids, reward=u, **options, backend=backend)
    assert_within_budget(from_u, truth.logits_credit(logits, case.token_ids, reward=u, **options), SHARP)


@pytest.mark.parametrize("name", CASES)
def test_float64_in_float64_out(name, float64_backend):
    case = CASES[name]().to(torch.float64)
    got = linear_credit(*case.args, **case.options, backend=float64_backend)
    assert all(getattr(got, field).dtype == torch.float64 for field in got.__dataclass_fields__)
    assert_within_budget(got, truth.linear_credit(*case.args, **case.options), EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["plain", "sharp", "p_y = 0.9995", "ties", "short reward vocabulary", "everything"])
def test_k12_half_inputs_are_rounded_nowhere_after_they_came_in(name, dtype, backend):
    """K12, K14, K21: float32 from the accumulator on, so half inputs are as exact as the same numbers in float32."""
    case = CASES[name]().to(dtype)
    if "temperature" in case.options:
        case = replace(case, options=case.options | {"temperature": 0.5})
    got = linear_credit(*case.args, **case.options, backend=backend)
    assert got.logprob.dtype == torch.float32
    assert_within_budget(got, truth.linear_credit(*case.args, **case.options), SHARP)


@pytest.mark.parametrize("halves", ["hidden", "weight", "reward_grad", "reward_embedding", "bias"])
def test_k42_mixed_dtypes_follow_the_promotion_rule(halves, backend):
    """K42: a float32 weight with a bfloat16 hidden, and every other single half tensor, promote to float32."""
    case = with_options(bias=torch.randn(301, generator=torch.Generator().manual_seed(5)))
    half = case.to(torch.bfloat16)
    if halves == "bias":
        mixed = replace(case, options=half.options)
    else:
        mixed = replace(case, **{halves: getattr(half, halves)})
    got = linear_credit(*mixed.args, **mixed.options, backend=backend)
    assert got.credit.dtype == torch.float32
    assert_within_budget(got, truth.linear_credit(*mixed.args, **mixed.options))


@pytest.mark.parametrize("wide", ["hidden", "weight", "reward_grad", "reward_embedding"])
def test_one_float64_input_makes_everything_float64(wide, float64_backend):
    case = plain()
    mixed = replace(case, **{wide: getattr(case, wide).double()})
    got = linear_credit(*mixed.args, backend=float64_backend)
    assert got.logprob.dtype == got.credit.dtype == torch.float64
    assert_within_budget(got, truth.linear_credit(*mixed.args), EXACT)


@pytest.mark.parametrize("rest", [5e-4, 1e-3, 1e-5])
def test_k13_credit_and_one_minus_p_near_certainty(rest, backend):
    """K13: 1 - p_y, A_y and d keep float32 digits relative to themselves at p_y = 0.9995, where p_y in bfloat16 is 1."""
    case = peaked(rest)
    got, true = linear_credit(*case.args, backend=backend), truth.linear_credit(*case.args)
    for name in ("credit", "advantage", "force_norm", "displacement_norm"):
        exact, ours = getattr(true, name), getattr(got, name)
        # Row by row, relative to the row's own value: next to no help from the batch. A logit near 20 becomes a probability.
        own, batch = rounding(length=V + D, condition=32), rounding(length=4)
        assert ((ours - exact).abs() <= own * exact.abs() + batch * exact.square().mean().sqrt()).all(), name
    rest = rounding(length=D, condition=32)
    torch.testing.assert_close(-torch.expm1(got.logprob.double()), -torch.expm1(true.logprob), rtol=rest, atol=0)


@pytest.mark.parametrize("V", [1, 2, 3, 63, 64, 65, 127, 129, 130, 1023, 1025])
def test_k1_any_vocabulary_size(V, backend):
    """K1: no column beyond V, however V lies to the tile; logprob <= 0. K46: D and K need not be multiples of anything."""
    case = plain(1, Sizes(N=7, V=V, D=5, K=3))
    got, true = linear_credit(*case.args, backend=backend), truth.linear_credit(*case.args)
    assert_within_budget(got, true)
    assert (got.logprob <= 0).all()


@pytest.mark.parametrize("backend", ["reference", "chunked", "cpu"])
def test_k9_a_vocabulary_of_262144(backend):
    """K9: float32 sums over more than 250,000 columns, flat and ordinary."""
    if backend in missing_backends():
        pytest.skip(missing_backends()[backend])
    for std in (0.01, 2.0):
        case = plain(2, Sizes(N=3, V=262_144, D=8, K=8), logit_std=std)
        got, true = linear_credit(*case.args, backend=backend), truth.linear_credit(*case.args)
        assert_within_budget(got, true)


@pytest.mark.parametrize("offset", [1e4, 1e6, 1e8])
def test_k10_common_offset_of_the_logits(offset, backend):
    """K10: log p_y is (z_y - max) - log sum, never z_y - logsumexp: equal logits at 1e8 give log 2."""
    equal = torch.full((1, 2), offset)
    assert logits_credit(equal, torch.tensor([0]), backend=backend).logprob.item() == pytest.approx(-math.log(2), rel=rounding())
    # Multiples of 8 are exact in float32 up to 1.3e8.
    steps = 8.0 * torch.randint(-3, 4, (16, 301), generator=torch.Generator().manual_seed(0))
    ids, u = torch.arange(16), torch.randn(16, 301, generator=torch.Generator().manual_seed(1))
    near = logits_credit(steps, ids, reward=u, temperature=4.0, backend=backend)
    far = logits_credit(steps + offset, ids, reward=u, temperature=4.0, backend=backend)
    for name in near.__dataclass_fields__:
        if name != "logsumexp":
            assert_rounded(getattr(far, name), getattr(near, name), length=V, name=name)
    head = torch.ones(1, 1), torch.full((2, 1), offset)
    assert linear_credit(*head, torch.tensor([1]), backend=backend).logprob.item() == pytest.approx(-math.log(2), rel=rounding())


def test_k10_gradient_at_a_common_offset(backend):
    """K10: the backward rebuilds p from the gap to the maximum, too."""
    logits = torch.full((1, 2), 1e8, requires_grad=True)
    logits_credit(logits, torch.tensor([0]), backend=backend).logprob.sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5, -0.5]]))


def test_k3_all_logits_negative(backend):
    """K3: nothing that does not exist has logit 0; here 0 would hold all of the probability."""
    case = with_options(bias=torch.full((301,), -80.0))
    assert_within_budget(
        linear_credit(*case.args, **case.options, backend=backend), truth.linear_credit(*case.args, **case.options)
    )


@pytest.mark.parametrize("kept", [1, 2, 40])
def test_k6_nearly_all_logits_masked(kept, backend):
    """K5, K6: -inf logits, whole tiles of them, are columns that do not exist; no NaN, entropy included."""
    case = masked(kept=kept)
    got = linear_credit(*case.args, **case.options, backend=backend)
    assert_within_budget(got, truth.linear_credit(*case.args, **case.options), SHARP)
    if kept == 1:
        for name in ("logprob", "entropy", "credit", "advantage", "force_norm", "displacement_norm", "cosine"):
            assert (getattr(got, name) == 0).all(), name


def test_k5_reward_rows_of_masked_columns_are_garbage(backend):
    """K5: 0 * NaN and 0 * inf: what lies in the reward row of a masked column never shows."""
    case = masked()
    table = case.reward_embedding.clone()
    gone = case.options["bias"].isinf()
    table[gone] = torch.tensor([torch.nan, torch.inf]).repeat(151)[: int(gone.sum()), None]
    clean = linear_credit(*case.args, **case.options, backend=backend)
    dirty = linear_credit(*replace(case, reward_embedding=table).args, **case.options, backend=backend)
    assert_same(dirty, clean)


def test_a_sampled_token_that_is_masked(backend):
    """Its logprob is -inf; everything else of the row is that of the columns that exist."""
    case = masked()
    ids = torch.zeros_like(case.token_ids)
    got = linear_credit(*replace(case, token_ids=ids).args, **case.options, backend=backend)
    assert (got.logprob == -torch.inf).all()
    assert_within_budget(
        replace(got, logprob=torch.zeros(16)),
        replace(truth.linear_credit(*replace(case, token_ids=ids).args, **case.options), logprob=torch.zeros(16).double()),
    )


def test_k17_the_transform_is_one_for_both_ops_and_all_fields(backend):
    """K17: soft-cap, logit scale, bias and temperature reach log-prob and credit alike, in this order, in both ops."""
    case = everything()
    logits, options = case.logits(), case.logits_options
    linear = linear_credit(*case.args, **case.options, backend=backend)
    direct = logits_credit(logits, case.token_ids, case.reward_grad, case.reward_embedding, **options, backend=backend)
    by_hand = 4.0 * torch.tanh(1.5 * logits / 4.0) / options["temperature"][:, None]
    plain_logits = logits_credit(
        by_hand, case.token_ids, case.reward_grad, case.reward_embedding, vocab_size=options["vocab_size"], backend=backend
    )
    true = truth.linear_credit(*case.args, **case.options)
    for got in (linear, direct, plain_logits):
        assert_within_budget(got, true)


def test_k18_logprob_is_the_log_probability_and_nothing_else(backend):
    """K18: no z-loss or other side term: exp(logprob) over all tokens sums to 1."""
    case = plain(3, Sizes(N=1, V=50))
    everyone = replace(case, hidden=case.hidden.expand(50, -1), token_ids=torch.arange(50))
    logprob = linear_credit(everyone.hidden, everyone.weight, everyone.token_ids, backend=backend).logprob
    assert logprob.double().exp().sum().item() == pytest.approx(1.0, rel=rounding(length=50 + D))


def test_logprob_only_mode_runs_no_reward_product(backend):
    case = plain()
    full, lean = linear_credit(*case.args, backend=backend), linear_credit(*case.args[:3], backend=backend)
    for name in ("credit", "advantage", "reward_mean", "displacement_norm", "force_norm", "cosine"):
        assert getattr(lean, name) is None
    for name in ("logprob", "entropy", "logsumexp", "sum_p2"):
        assert_rounded(getattr(lean, name), getattr(full, name), length=V + D, name=name)


def test_k20_the_anchored_form_beats_the_textbook_by_orders_of_magnitude():
    """K20: the error table is not empty talk: where p_y -> 1 the textbook's float32 loses what the ops keep."""
    from datc_kernels.testing.error_table import textbook

    case = peaked(1e-6)
    true = truth.linear_credit(*case.args)
    assert worst("credit", textbook(case), true) > 0.1
    assert worst("credit", linear_credit(*case.args), true) < CREDIT


def assert_same(a, b):
    for name in a.__dataclass_fields__:
        assert torch.equal(getattr(a, name), getattr(b, name)), name
