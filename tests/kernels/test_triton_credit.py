"""The fused kernels of both credit ops beyond what every backend is tested with: load paths, tiles, slices, launches, bits."""

import itertools
from dataclasses import replace

import pytest
import torch

from datc_kernels import linear_credit, logits_credit
from datc_kernels.launch_table import FLOAT32, NARROW, POINTERS, WIDE, Tiling, choose_tilings, split_columns
from datc_kernels.testing import truth
from datc_kernels.testing.budgets import BUDGETS, SHARP, assert_within_budget
from datc_kernels.testing.inputs import CASES, Sizes, everything, masked, plain, short_reward_vocabulary

REWARD_WAYS = ("product", "given", "none")


def assert_same(a, b, rows_a=slice(None), rows_b=slice(None)):
    for name in a.__dataclass_fields__:
        x, y = getattr(a, name), getattr(b, name)
        assert x is y is None or torch.equal(x[rows_a], y[rows_b]), name


def exact_products(seed, size):
    """A plain case in eighths: every order of a product's sum gives the same bits, as NumPy's in the interpreter is not ours."""
    case = plain(seed, size)
    eighths = {name: (getattr(case, name) * 8).round() / 8 for name in ("hidden", "weight", "reward_grad", "reward_embedding")}
    return replace(case, **eighths)


def rewards(case, way):
    if way == "product":
        return {"reward_grad": case.reward_grad, "reward_embedding": case.reward_embedding}
    if way == "given":
        return {"reward": (case.reward_grad.double() @ case.reward_embedding.double().T).to(case.reward_grad.dtype)}
    return {}


@pytest.mark.parametrize("name", CASES)
def test_every_case_in_small_tiles(name, run_variant):
    case = CASES[name]()
    with run_variant("triton in small tiles") as backend:
        got = linear_credit(*case.args, **case.options, backend=backend)
    assert_within_budget(got, truth.linear_credit(*case.args, **case.options), SHARP if "1e-12" in name else BUDGETS)


@pytest.mark.parametrize("make", [plain, everything])
def test_as_shipped(make, triton_backend):
    case = make()
    got = linear_credit(*case.args, **case.options, backend=triton_backend)
    assert_within_budget(got, truth.linear_credit(*case.args, **case.options))


@pytest.mark.parametrize("way", REWARD_WAYS)
@pytest.mark.parametrize(
    ("make", "variant"),
    [(plain, "triton"), (everything, "triton by pointers")]
    + [(make, "triton in small tiles") for make in (plain, everything, masked, short_reward_vocabulary)],
)
def test_existing_logits(make, variant, way, run_variant):
    case = make()
    logits, reward = case.to(torch.float64).logits().float(), rewards(case, way)
    with run_variant(variant) as backend:
        got = logits_credit(logits, case.token_ids, **reward, **case.logits_options, backend=backend)
    assert_within_budget(got, truth.logits_credit(logits, case.token_ids, **reward, **case.logits_options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_k31_half_precision_on_both_load_paths(dtype, triton_backend):
    """K31: 16-byte rows for the descriptors (D and K are multiples of 8), and the interpreter's own trouble with bfloat16."""
    case = everything(0, Sizes(N=9, V=150, D=24, K=40)).to(dtype)
    options = case.options | {"temperature": case.options["temperature"].float()}
    got = linear_credit(*case.args, **options, backend=triton_backend)
    assert_within_budget(got, truth.linear_credit(*case.args, **options))
    logits = case.logits()
    got = logits_credit(logits, *case.args[2:], **case.logits_options, backend=triton_backend)
    assert_within_budget(got, truth.logits_credit(logits, *case.args[2:], **case.logits_options))


@pytest.mark.parametrize(("V", "rows"), [(16, 16), (17, 1), (64, 48), (65, 64), (95, 33), (112, 112), (129, 70), (160, 200)])
def test_k1_every_split_of_the_columns(V, rows, run_variant):
    """K1, K4: wide tiles, narrow tiles and ragged ends, in columns with a reward row and without; E may be longer, too."""
    case = plain(0, Sizes(N=6, V=max(V, rows), D=8, K=8))
    arguments = (case.hidden, case.weight[:V], case.token_ids % V, case.reward_grad, case.reward_embedding[:rows])
    with run_variant("triton in small tiles") as backend:
        got = linear_credit(*arguments, backend=backend)
    assert_within_budget(got, truth.linear_credit(*arguments))


def test_log_probabilities_alone_are_those_of_the_full_kernel(triton_backend):
    """Without the reward half the same sums run: the same bits where the columns split alike, and no reward field."""
    case = plain(0, Sizes(N=9, V=90, D=8, K=8))
    full, alone = (linear_credit(*args, temperature=0.8, backend=triton_backend) for args in (case.args, case.args[:3]))
    assert alone.credit is alone.cosine is None
    for name in ("logprob", "entropy", "logsumexp", "sum_p2"):
        assert torch.equal(getattr(full, name), getattr(alone, name)), name


def test_k64_k65_a_rows_bits_do_not_depend_on_its_batch(run_variant):
    """K64, K65: alone, at every place of a block of rows, in a launch of its own, beside NaN; bit for bit."""
    case = exact_products(3, Sizes(N=140, V=70, D=16, K=8))
    with run_variant("triton in small tiles") as backend:  # 16 rows a block, 2 blocks a group, 128 rows a launch

        def run(rows):
            return linear_credit(*(x[rows] if x is not None and len(x) == 140 else x for x in case.args), backend=backend)

        whole = run(torch.arange(140))
        for row in (0, 17, 139):
            assert_same(whole, run(torch.tensor([row])), rows_a=[row])
        order = torch.randperm(140, generator=torch.Generator().manual_seed(0))
        assert_same(whole, run(order), rows_a=order)
        assert_same(whole, run(torch.arange(33)), rows_a=slice(0, 33))
        case.hidden[::3], case.reward_grad[::3] = float("nan"), float("inf")
        kept = torch.arange(140) % 3 != 0
        assert_same(whole, run(torch.arange(140)), kept, kept)


@pytest.mark.parametrize("way", REWARD_WAYS)
def test_k65_existing_logits(way, run_variant):
    case = exact_products(3, Sizes(N=40, V=100, D=16, K=8))
    logits, reward = case.logits(), rewards(case, way)
    with run_variant("triton in small tiles") as backend:
        whole = logits_credit(logits, case.token_ids, **reward, backend=backend)
        for row in (0, 17, 39):
            one = {name: x if name == "reward_embedding" else x[row : row + 1] for name, x in reward.items()}
            alone = logits_credit(logits[row : row + 1], case.token_ids[row : row + 1], **one, backend=backend)
            assert_same(whole, alone, rows_a=[row])


@pytest.mark.parametrize("how", ["transposed", "strided", "expanded", "unaligned"])
def test_k34_layouts_that_descriptors_cannot_take(how, triton_backend):
    """K34: the pointer path reads any strides; the numbers are those of contiguous tensors."""
    case = plain(0, Sizes(N=9, V=90, D=16, K=16))

    def view(x):
        if how == "transposed":
            return x.T.contiguous().T
        if how == "strided":
            wide = x.new_full((x.shape[0], 2 * x.shape[1]), float("nan"))
            wide[:, ::2] = x
            return wide[:, ::2]
        if how == "unaligned":
            longer = x.new_full((x.numel() + 1,), float("nan"))
            longer[1:] = x.reshape(-1)
            return longer[1:].view(x.shape)
        return x[:1].expand(x.shape) if len(x) == 9 else x  # one hidden state for every token

    arguments = [view(x) if x.ndim == 2 else x for x in case.args]
    got = linear_credit(*arguments, backend=triton_backend)
    assert_within_budget(got, truth.linear_credit(*(x.contiguous() for x in arguments)))
    logits = view(case.logits())
    got = logits_credit(logits, case.token_ids, reward=view(logits.sin()), backend=triton_backend)
    assert_within_budget(got, truth.logits_credit(logits, case.token_ids, reward=view(logits.sin())))


def test_no_tokens(triton_backend):
    case = plain(0, Sizes(N=0, V=40, D=8, K=8))
    got = linear_credit(*case.args, backend=triton_backend)
    assert got.logprob.shape == got.credit.shape == (0,)
    hidden = case.hidden.requires_grad_()
    linear_credit(hidden, *case.args[1:], backend=triton_backend).logprob.sum().backward()
    assert hidden.grad.shape == (0, 8)
    assert logits_credit(torch.zeros(0, 40), case.token_ids, backend=triton_backend).logprob.shape == (0,)


def test_tilings_follow_sizes_and_dtypes():
    assert choose_tilings(9216, half=True, descriptors=True) == (WIDE, NARROW)
    assert choose_tilings(2048, half=True, descriptors=True) == (NARROW,)
    assert choose_tilings(9216, half=True, descriptors=True, plain=False) == (NARROW,)
    assert choose_tilings(9216, half=True, descriptors=False) == (POINTERS,)
    assert choose_tilings(9216, half=False, descriptors=True) == (FLOAT32,)


def test_segments_cover_every_column_once():
    """Columns with a reward row first, in order, whole tiles but for one ragged end of each kind."""
    tilings = (Tiling(16, 32, 16, 4, 2, slice=64), Tiling(16, 16, 16, 4, 2, slice=64))
    for V, rewarded in itertools.product((1, 15, 16, 31, 32, 48, 64, 129, 300), (0, 1, 16, 40, 300)):
        segments = split_columns(V, min(rewarded, V), tilings)
        assert [s.first for s in segments] == [0, *(s.stop for s in segments[:-1])]
        assert segments[-1].stop == V
        assert all(s.rewarded == (s.stop <= rewarded) for s in segments)
        assert sum(s.ragged for s in segments) <= 2
        assert all(not s.ragged or s.tiling == tilings[-1] for s in segments)
    qwen = split_columns(151_936, 151_936, (WIDE, NARROW))
    assert [(s.first, s.stop, s.ragged) for s in qwen] == [(0, 151_808, False), (151_808, 151_936, False)]
