"""Rows, columns and memory at the edges: ignored, empty, padded, strided, poisoned, repeated."""

from dataclasses import replace

import pytest
import torch

from datc_kernels import linear_credit, logits_credit
from datc_kernels.testing.inputs import Sizes, everything, plain, short_reward_vocabulary, with_options
from datc_kernels.testing.rounding import assert_rounded, rounding

NAN = float("nan")


@pytest.fixture
def backend(float32_backend):
    return float32_backend


def fields(result):
    return {name: getattr(result, name) for name in result.__dataclass_fields__}


def assert_same(a, b, rows=slice(None)):
    for name, value in fields(a).items():
        other = getattr(b, name)
        assert value is other is None or torch.equal(value[rows], other[rows]), name


def both_ops(case, backend):
    """The same call to both ops; the logits are those of this very case."""
    yield linear_credit(*case.args, **case.options, backend=backend)
    yield logits_credit(case.logits(), *case.args[2:], **case.logits_options, backend=backend)


@pytest.mark.parametrize("ignore_index", [-100, 0, 7, -1])
def test_k22_all_tokens_ignored(ignore_index, backend):
    """K22: exact zeros everywhere, no 0/0; the gradients are zeros, too."""
    case = plain()
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    ids = torch.full_like(case.token_ids, ignore_index)
    got = linear_credit(hidden, weight, ids, *case.args[3:], ignore_index=ignore_index, backend=backend)
    for name, value in [*fields(got).items(), ("cosine", got.cosine)]:
        assert (value == 0).all(), name
    got.logprob.sum().backward()
    assert (hidden.grad == 0).all()
    assert (weight.grad == 0).all()


def test_k23_ignored_rows_do_not_contribute_even_if_they_hold_nan(backend):
    """K23: zeros forward; the other rows and the head's gradient are bit for bit those without the NaN."""
    case = everything()
    ids = case.token_ids.clone()
    ids[[0, 5, 15]] = -100
    bad = {"hidden": case.hidden.clone(), "reward_grad": case.reward_grad.clone()}
    for x in bad.values():
        x[[0, 15]], x[5] = NAN, float("inf")
    options = {k: v for k, v in case.options.items() if k != "temperature"}
    temperature = torch.linspace(0.5, 1.5, 16)
    temperature[5] = NAN
    results = []
    for this, t in (
        (replace(case, token_ids=ids), torch.linspace(0.5, 1.5, 16)),
        (replace(case, token_ids=ids, **bad), temperature),
    ):
        h, w, b = (x.clone().requires_grad_() for x in (this.hidden, this.weight, this.options["bias"]))
        got = linear_credit(h, w, *this.args[2:], **(options | {"bias": b, "temperature": t}), backend=backend)
        got.logprob.sum().backward()
        results.append((got, h.grad, w.grad, b.grad))
    clean, dirty = results
    assert_same(dirty[0], clean[0])
    for name, value in fields(dirty[0]).items():
        assert (value[[0, 5, 15]] == 0).all(), name
    for a, b in zip(clean[1:], dirty[1:], strict=True):
        assert torch.equal(a, b)
    assert (dirty[1][[0, 5, 15]] == 0).all()


def test_k23_an_incoming_nan_gradient_at_an_ignored_row(backend):
    case = plain()
    ids = case.token_ids.clone()
    ids[3] = -100
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    incoming = torch.ones(16)
    incoming[3] = NAN
    linear_credit(hidden, weight, ids, backend=backend).logprob.backward(incoming)
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()
    logits = case.logits().requires_grad_()
    logits_credit(logits, ids, backend=backend).logprob.backward(incoming)
    assert (logits.grad[3] == 0).all()


@pytest.mark.parametrize("poison", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["hidden", "reward_grad"])
def test_a_bad_row_does_not_touch_its_neighbours(where, poison, backend):
    case = plain()
    x = getattr(case, where).clone()
    x[6] = poison
    bad = replace(case, **{where: x})
    good_rows = [n for n in range(16) if n != 6]
    for got, clean in zip(both_ops(bad, backend), both_ops(case, backend), strict=True):
        assert_same(got, clean, good_rows)
        assert got.credit[6].isnan()
        assert got.cosine[6].isnan()
        if where == "hidden":
            assert got.logprob[6].isnan()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_k26_the_ignore_index_is_never_used_as_an_address(dtype, backend):
    """K26: however far outside it lies; int32 ids give the bits of int64 ids."""
    case = plain()
    ids = case.token_ids.clone()
    ids[2] = far = -(2**31)
    got = linear_credit(case.hidden, case.weight, ids.to(dtype), *case.args[3:], ignore_index=far, backend=backend)
    ids[2] = -100
    assert_same(got, linear_credit(case.hidden, case.weight, ids, *case.args[3:], backend=backend))


def test_no_tokens(backend):
    """N = 0: empty fields and zero gradients."""
    case = plain()
    hidden, weight = torch.zeros(0, 24, requires_grad=True), case.weight.clone().requires_grad_()
    ids, grad = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 20)
    for got in (
        linear_credit(hidden, weight, ids, grad, case.reward_embedding, backend=backend),
        logits_credit(hidden @ weight.T, ids, grad, case.reward_embedding, backend=backend),
        logits_credit(hidden @ weight.T, ids, reward=torch.zeros(0, 301), backend=backend),
    ):
        assert all(value.shape == (0,) for value in fields(got).values())
        assert got.cosine.shape == (0,)
        got.logprob.sum().backward()
    assert hidden.grad.shape == (0, 24)
    assert (weight.grad == 0).all()


def test_k3_columns_beyond_vocab_size_do_not_exist(backend):
    """K3, K4: padded rows of W, of the bias and of E are never read, be they zero, NaN or infinite."""
    case = everything()
    support = case.options["vocab_size"]
    results = []
    for fill in (0.0, NAN, float("inf")):
        weight, bias = case.weight.clone(), case.options["bias"].clone()
        weight[support:], bias[support:] = fill, fill
        h, w, b = (x.requires_grad_() for x in (case.hidden.clone(), weight, bias))
        table = torch.cat([case.reward_embedding, torch.full((11, 20), fill)])[: support + 6]
        table[case.reward_embedding.shape[0] : support] = 1.0
        got = linear_credit(h, w, case.token_ids, case.reward_grad, table, **(case.options | {"bias": b}), backend=backend)
        got.logprob.sum().backward()
        logits = logits_credit(
            case.logits().index_fill(1, torch.arange(support, 301), fill),
            *case.args[2:4],
            table,
            **case.logits_options,
            backend=backend,
        )
        results.append((got, logits, h.grad, w.grad, b.grad))
    for other in results[1:]:
        assert_same(other[0], results[0][0])
        assert_same(other[1], results[0][1])
        assert all(torch.equal(a, b) for a, b in zip(other[2:], results[0][2:], strict=True))


@pytest.mark.parametrize("extra", [1, 64, 300])
def test_k4_reward_rows_beyond_the_support_are_never_read(extra, backend):
    """K4: reward models often carry pad rows; a longer E, NaN beyond the support, gives the same bits."""
    case = plain()
    longer = torch.cat([case.reward_embedding, torch.full((extra, 20), NAN)])
    for got, same in zip(both_ops(replace(case, reward_embedding=longer), backend), both_ops(case, backend), strict=True):
        assert_same(got, same)


def test_k4_a_token_without_a_reward_row_has_no_credit(backend):
    """K4: zero credit, A_y, mean u, |G|, |k| and cosine, finite log-prob; also with a single reward row."""
    case = short_reward_vocabulary()
    for table in (case.reward_embedding, case.reward_embedding[:1]):
        for got in both_ops(replace(case, reward_embedding=table), backend):
            for name in ("credit", "advantage", "reward_mean", "displacement_norm", "force_norm", "cosine"):
                assert getattr(got, name)[0] == 0, name
            assert got.logprob[0] < 0


def test_all_rewarded_columns_masked(backend):
    """No conditional distribution: zero reward fields, no NaN."""
    case = short_reward_vocabulary()
    rows = len(case.reward_embedding)
    bias = torch.zeros(301)
    bias[:rows] = -torch.inf
    for got in both_ops(replace(case, options={"bias": bias}), backend):
        for name in ("credit", "advantage", "reward_mean", "displacement_norm", "force_norm", "cosine"):
            assert (getattr(got, name) == 0).all(), name


def test_k8_square_heads_are_not_transposed(backend):
    """K8: V == D == K: the layout is the contract, nothing is guessed."""
    case = plain(0, Sizes(V=24, D=24, K=24))
    assert not torch.allclose(case.weight, case.weight.T)
    got = linear_credit(*case.args, backend=backend)
    by_hand = torch.log_softmax(case.hidden @ case.weight.T, dim=1).gather(1, case.token_ids[:, None]).squeeze(1)
    torch.testing.assert_close(got.logprob, by_hand)


def test_k39_the_head_is_the_tensor_that_is_given(backend):
    """K39: a LoRA adapter on the LM head counts where the caller passes the merged weight, as the op's page says."""
    case = plain()
    generator = torch.Generator().manual_seed(2)
    A, B = torch.randn(2, 24, generator=generator), 0.1 * torch.randn(301, 2, generator=generator)
    merged = linear_credit(case.hidden, case.weight + B @ A, *case.args[2:], backend=backend)
    by_module = torch.log_softmax(case.hidden @ case.weight.T + case.hidden @ A.T @ B.T, dim=1)
    assert_rounded(merged.logprob, by_module.gather(1, case.token_ids[:, None]).squeeze(1), length=301 + 24 + 2)
    assert (merged.logprob - linear_credit(*case.args, backend=backend).logprob).abs().max() > 1e-2


def strided(x, how):
    """The same numbers in another layout, NaN in the gaps."""
    if how == "transposed":
        return x.T.contiguous().T if x.ndim == 2 else x
    if how == "every other column":
        wide = (
            torch.full((*x.shape[:-1], 2 * x.shape[-1]), NAN).to(x.dtype) if x.is_floating_point() else x.repeat_interleave(2, -1)
        )
        view = wide[..., ::2]
        return view.copy_(x)
    offset = torch.zeros(x.numel() + 3, dtype=x.dtype)[3:].view(x.shape)
    return offset.copy_(x)


@pytest.mark.parametrize("how", ["transposed", "every other column", "unaligned offset"])
def test_k34_any_layout(how, backend):
    """K34: transposed, strided and unaligned views of every input, forward and backward."""
    case = with_options(bias=torch.linspace(-1, 1, 301), temperature=torch.linspace(0.5, 2, 16))
    results = []
    for this in (case, replace(case, options=dict(case.options))):
        changed = results != []
        args = [strided(x, how) if changed else x for x in this.args]
        options = {k: strided(v, how) if changed else v for k, v in this.options.items()}
        h, w = (x.detach().requires_grad_() for x in args[:2])
        got = linear_credit(h, w, *args[2:], **options, backend=backend)
        got.logprob.sum().backward()
        logits = strided(case.logits(), how) if changed else case.logits()
        u = case.reward_grad @ case.reward_embedding.T
        direct = logits_credit(logits, args[2], reward=strided(u, how) if changed else u, backend=backend)
        results.append((got, direct, h.grad, w.grad))
    (a, c, *grads), (b, d, *others) = results
    for x, y in ((a, b), (c, d)):
        for name, value in fields(x).items():
            assert_rounded(getattr(y, name), value, length=301 + 24, condition=2, name=name)
    for x, y in zip(grads, others, strict=True):
        assert_rounded(y, x, length=301 + 24)


def test_k34_expanded_inputs(backend):
    """K34: stride 0: one hidden state and one reward gradient for every token of the vocabulary."""
    case = plain(0, Sizes(N=1, V=50))
    ids = torch.arange(50)
    args = (case.hidden.expand(50, -1), case.weight, ids, case.reward_grad.expand(50, -1), case.reward_embedding)
    copied = [x.contiguous() for x in args]
    temperature = torch.tensor([0.5]).expand(50)
    assert_same(
        linear_credit(*args, temperature=temperature, backend=backend), linear_credit(*copied, temperature=0.5, backend=backend)
    )
    z = (case.hidden @ case.weight.T).expand(50, -1)
    assert_same(logits_credit(z, ids, backend=backend), logits_credit(z.contiguous(), ids, backend=backend))


def test_k41_nothing_is_modified_in_place(backend):
    """K41: inputs are read only, in forward and backward, in both ops."""
    case = everything()
    hidden, weight, bias = (x.clone().requires_grad_() for x in (case.hidden, case.weight, case.options["bias"]))
    u = case.reward_grad @ case.reward_embedding.T
    logits = case.logits().requires_grad_()
    options = case.options | {"bias": bias}
    watched = [hidden, weight, bias, logits, u, *case.args[2:], options["temperature"]]
    before = [x.detach().clone() for x in watched]
    linear_credit(hidden, weight, *case.args[2:], **options, backend=backend).logprob.sum().backward()
    logits_credit(logits, case.token_ids, reward=u, **case.logits_options, backend=backend).logprob.sum().backward()
    assert all(torch.equal(x.detach(), y) for x, y in zip(watched, before, strict=True))


def test_bitwise_repeatability(backend):
    case = everything()
    runs = []
    for _ in range(3):
        h, w = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
        got = linear_credit(h, w, *case.args[2:], **case.options, backend=backend)
        got.logprob.sum().backward()
        runs.append((got, h.grad, w.grad))
    for got, *grads in runs[1:]:
        assert_same(got, runs[0][0])
        assert all(torch.equal(a, b) for a, b in zip(grads, runs[0][1:], strict=True))


def test_k65_a_row_alone_and_in_a_batch(backend):
    """K64, K65: the split of the vocabulary is a constant, so a row moves by the matrix library's last bits only."""
    case = plain(4, Sizes(N=13, V=301))
    together = linear_credit(*case.args, backend=backend)
    for n in (0, 6, 12):
        row = slice(n, n + 1)
        alone = linear_credit(
            case.hidden[row], case.weight, case.token_ids[row], case.reward_grad[row], case.reward_embedding, backend=backend
        )
        for name, value in fields(together).items():
            # Of the largest of the batch; differences of differences.
            allowed = rounding(length=301 + 24, condition=2) * float(value.abs().max())
            torch.testing.assert_close(getattr(alone, name), value[row], rtol=0, atol=allowed)


def test_k65_rows_of_existing_logits_are_batch_invariant_to_the_bit(backend):
    """K65: with the logits and rewards given there is no matrix product: alone, in a batch, permuted, the same bits."""
    case = plain(4, Sizes(N=13, V=301))
    z, u = case.logits(), case.reward_grad @ case.reward_embedding.T
    together = logits_credit(z, case.token_ids, reward=u, backend=backend)
    order = torch.randperm(13, generator=torch.Generator().manual_seed(0))
    shuffled = logits_credit(z[order], case.token_ids[order], reward=u[order], backend=backend)
    for name, value in fields(together).items():
        assert torch.equal(getattr(shuffled, name), value[order]), name
    for n in range(13):
        row = slice(n, n + 1)
        assert_same(logits_credit(z[row], case.token_ids[row], reward=u[row], backend=backend), replace_rows(together, row))


def replace_rows(result, rows):
    return replace(result, **{name: value[rows] for name, value in fields(result).items()})


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_softcap_leaves_masked_columns_masked(backend: str) -> None:
    from datc_kernels import logits_credit

    logits = torch.tensor([[1.0, -torch.inf, 2.0]], dtype=torch.float64, requires_grad=True)
    out = logits_credit(logits, torch.tensor([0]), softcap=3.0, backend=backend)
    capped = 3 * torch.tanh(torch.tensor([1.0, 2.0], dtype=torch.float64) / 3)
    torch.testing.assert_close(out.logprob, torch.log_softmax(capped, 0)[:1])
    out.logprob.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 1] == 0
