"""Probability and local advantage of candidates: float64 truth, properties, golden vectors, memory, torch, errors."""

import dataclasses
import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from datc_kernels import candidate_advantages, linear_credit, missing_backends
from datc_kernels.testing.inputs import CASES, Sizes, everything, masked, plain, short_reward_vocabulary, ties
from datc_kernels.testing.rounding import rounding
from datc_kernels.testing.variants import CPU_VARIANTS, VARIANTS, using

VECTORS = sorted((Path(__file__).parent / "vectors").glob("credit_*.npz"))
CPU = pytest.param("cpu", marks=pytest.mark.skipif("cpu" in missing_backends(), reason=missing_backends().get("cpu", "")))
BACKENDS = ["reference", "chunked", CPU]
VARIANTS_HERE = [v for v in (*VARIANTS, *CPU_VARIANTS) if v not in CPU_VARIANTS or "cpu" not in missing_backends()]
V, D = Sizes.V, Sizes.D
RELATIVE = rounding(length=V + D, condition=2)  # of float32 results, against float64
ROW = rounding(torch.float64, length=V + D, condition=8)  # advantages of up to 8, in another order of the sums
P = rounding(length=V + D, condition=16)  # a logit z has |z| times the error of its sum, and p the absolute error of z


@pytest.fixture
def backend(float32_backend):
    return float32_backend


def arguments(case):
    """Positional arguments and options of `candidate_advantages`."""
    return (case.hidden, case.weight, case.reward_grad, case.reward_embedding), case.options


def truth(case):
    """p and A of all columns, [N, V] float64, each term relative to the most likely column."""
    case, o = case.to(torch.float64), case.to(torch.float64).options
    columns = o.get("vocab_size", len(case.weight))
    z = case.logits()[:, :columns] * o.get("logit_scale", 1.0)
    if "softcap" in o:
        z = (o["softcap"] * torch.tanh(z / o["softcap"])).masked_fill(z == -torch.inf, -torch.inf)
    temperature = o.get("temperature", 1.0)
    z = z / (temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature)
    u = case.reward_grad @ case.reward_embedding[:columns].T
    rows = u.shape[1]
    conditioned = torch.softmax(z[:, :rows], dim=1)
    delta = u - u.gather(1, z[:, :rows].argmax(dim=1, keepdim=True))
    A = delta - (conditioned * delta).sum(dim=1, keepdim=True)
    return torch.softmax(z, dim=1), torch.cat([A, A.new_zeros(len(A), columns - rows)], dim=1)


def assert_close(got, true):
    """|error| at most `RELATIVE` of the value plus the rms of its row: a row's advantages share one scale."""
    scale = true.abs() + true.square().mean(dim=1, keepdim=True).sqrt()
    assert ((got.double() - true).abs() <= RELATIVE * scale).all()


@pytest.mark.parametrize("name", CASES)
def test_the_most_likely_candidates(name, backend):
    case = CASES[name]()
    args, options = arguments(case)
    p, A = truth(case)
    k = min(7, p.shape[1])
    got = candidate_advantages(*args, **options, top_k=k, backend=backend)
    assert got.token_ids.dtype == torch.int64
    assert got.probability.dtype == got.advantage.dtype == torch.float32
    assert got.token_ids.shape == got.probability.shape == got.advantage.shape == (len(case.hidden), k)
    assert (got.probability.diff(dim=1) <= 0).all()
    # Float32 may swap near ties; the probabilities that it finds are the largest ones all the same.
    torch.testing.assert_close(got.probability.double(), p.topk(k, dim=1).values, rtol=P, atol=rounding())
    torch.testing.assert_close(got.probability.double(), p.gather(1, got.token_ids), rtol=P, atol=rounding())
    chosen = A.gather(1, got.token_ids)
    rms = A.square().mean(dim=1, keepdim=True).sqrt()
    tolerance = RELATIVE * (100 if name == "reward offset 100" else 1)  # rounding of u itself, 100 times the spread
    assert ((got.advantage.double() - chosen).abs() <= tolerance * (chosen.abs() + rms)).all()


@pytest.mark.parametrize("name", CASES)
def test_float64_is_the_truth(name, float64_backend):
    case = CASES[name]().to(torch.float64)
    args, options = arguments(case)
    p, A = truth(case)
    ids = torch.arange(p.shape[1]).expand(len(p), -1)
    got = candidate_advantages(*args, **options, candidate_ids=ids, backend=float64_backend)
    assert got.probability.dtype == got.advantage.dtype == torch.float64
    # Logits of up to some 60; rewards of 100 and more beside advantages near 1, both sides' errors.
    allowed = rounding(torch.float64, length=V + D, condition=2 * 64)
    torch.testing.assert_close(got.probability, p, rtol=allowed, atol=rounding(torch.float64))
    scale = A.abs().max()
    torch.testing.assert_close(got.advantage / scale, A / scale, rtol=0, atol=allowed)


@pytest.mark.parametrize("name", CASES)
def test_probabilities_sum_to_one_and_advantages_average_to_nothing(name, float64_backend):
    """sum_v p_v = 1; sum_v p_v A_v = 0 over the columns that have a reward row."""
    case = CASES[name]().to(torch.float64)
    args, options = arguments(case)
    k = options.get("vocab_size", len(case.weight))
    got = candidate_advantages(*args, **options, top_k=k, backend=float64_backend)
    torch.testing.assert_close(got.probability.sum(dim=1), torch.ones(len(case.hidden), dtype=torch.float64))
    mean = (got.probability * got.advantage).sum(dim=1)
    assert (mean.abs() <= rounding(torch.float64, length=V + D, condition=2) * got.advantage.abs().max()).all()


@pytest.mark.parametrize("path", VECTORS, ids=lambda p: p.stem)
def test_golden_vectors(path, backend):
    """The sampled token as the only candidate: p_y and A_y of the independent program."""
    with np.load(path) as file:
        data = {key: torch.from_numpy(file[key]) for key in file.files}
    options = {key: float(data[key]) for key in ("temperature", "softcap") if key in data}
    options |= {"bias": data["bias"]} if "bias" in data else {}
    args = [data[key] for key in ("hidden", "weight", "reward_grad", "reward_embedding")]
    got = candidate_advantages(*args, **options, candidate_ids=data["token_ids"][:, None], backend=backend)
    torch.testing.assert_close(got.probability[:, 0].double(), data["out_logprob"].exp(), rtol=P, atol=0)
    true = data["out_advantage_y"]
    assert ((got.advantage[:, 0] - true).abs() <= RELATIVE * (true.abs() + true.square().mean().sqrt())).all()


@given(
    seed=st.integers(0, 2**16),
    N=st.integers(1, 12),
    V=st.integers(2, 200),
    missing=st.integers(0, 20),
    temperature=st.floats(0.3, 3.0),
    variant=st.sampled_from(["reference", "chunked", "chunked in small tiles"]),
)
def test_agrees_with_linear_credit(seed, N, V, missing, temperature, variant):
    """The sampled token's p and A_y, and sum_v p_v A_v = 0, for any size, support and reward table."""
    case = plain(seed, Sizes(N=N, V=V, D=6, K=5)).to(torch.float64)
    table = case.reward_embedding[: max(1, V - missing)]
    with using(variant) as backend:
        options = {"temperature": temperature, "backend": backend}
        credit = linear_credit(*case.args[:4], table, **options)
        args = case.hidden, case.weight, case.reward_grad, table
        mine = candidate_advantages(*args, candidate_ids=case.token_ids[:, None], **options)
        whole = candidate_advantages(*args, top_k=V, **options)
    torch.testing.assert_close(mine.probability[:, 0], credit.logprob.exp())
    allowed = rounding(torch.float64, length=V + 6, condition=64)  # logits up to some 8 / 0.3, advantages below 8
    torch.testing.assert_close(mine.advantage[:, 0], credit.advantage, rtol=allowed, atol=allowed)
    assert torch.equal(whole.token_ids.sort(dim=1).values, torch.arange(V).expand(N, -1))
    assert ((whole.probability * whole.advantage).sum(dim=1).abs() < allowed).all()
    assert (whole.advantage[whole.token_ids >= len(table)] == 0).all()


@given(seed=st.integers(0, 2**16), k=st.integers(1, 30), levels=st.integers(1, 4))
def test_ties_go_to_the_lower_id(seed, k, levels):
    """Logits of a few exact levels: the order is that of (-p, id), on every backend and whatever the tiles."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(levels, (150, 1), generator=generator).float()
    grad, table = torch.randn(3, 4, generator=generator), torch.randn(150, 4, generator=generator)
    expected = sorted(range(150), key=lambda v: (-float(weight[v]), v))[:k]
    for variant in VARIANTS_HERE:
        with using(variant) as backend:
            got = candidate_advantages(torch.ones(3, 1), weight, grad, table, top_k=k, backend=backend)
        assert got.token_ids.tolist() == [expected] * 3


def test_exact_ties_share_a_probability(backend):
    case = ties()
    got = candidate_advantages(*arguments(case)[0], top_k=2, backend=backend)
    assert got.token_ids.tolist() == [[1, 299]] * len(case.hidden)
    assert torch.equal(got.probability[:, 0], got.probability[:, 1])


def test_given_candidates_are_the_same_numbers(backend):
    """Asked for by id, in any order and repeatedly, the best candidates have the very same values."""
    case = everything()
    args, options = arguments(case)
    best = candidate_advantages(*args, **options, top_k=6, backend=backend)
    order = torch.tensor([3, 0, 0, 5])
    again = candidate_advantages(*args, **options, candidate_ids=best.token_ids[:, order].int(), backend=backend)
    assert torch.equal(again.token_ids, best.token_ids[:, order])
    assert torch.equal(again.probability, best.probability[:, order])
    assert torch.equal(again.advantage, best.advantage[:, order])


def test_a_row_does_not_depend_on_its_place(float64_backend):
    case = everything().to(torch.float64)
    (hidden, weight, grad, table), options = arguments(case)
    whole = candidate_advantages(hidden, weight, grad, table, **options, top_k=5, backend=float64_backend)
    order = torch.randperm(len(hidden), generator=torch.Generator().manual_seed(0))
    turned = options | {"temperature": options["temperature"][order]}
    got = candidate_advantages(hidden[order], weight, grad[order], table, **turned, top_k=5, backend=float64_backend)
    assert torch.equal(got.token_ids, whole.token_ids[order])
    torch.testing.assert_close(got.advantage, whole.advantage[order], rtol=ROW, atol=ROW)
    for i in (0, 7):
        alone = options | {"temperature": options["temperature"][i : i + 1]}
        one = candidate_advantages(hidden[i : i + 1], weight, grad[i : i + 1], table, **alone, top_k=5, backend=float64_backend)
        assert torch.equal(one.token_ids[0], whole.token_ids[i])
        torch.testing.assert_close(one.advantage[0], whole.advantage[i], rtol=ROW, atol=ROW)


def test_where_no_reward_row_is(backend):
    """Columns without a row have advantage 0 but their own probability; the rest average over the conditioned policy."""
    case = short_reward_vocabulary()
    args, _ = arguments(case)
    rows = len(case.reward_embedding)
    got = candidate_advantages(*args, top_k=301, backend=backend)
    outside = got.token_ids >= rows
    assert (got.advantage[outside] == 0).all()
    assert (got.probability[outside] > 0).all()
    inner = torch.where(outside, 0.0, got.probability.double() * got.advantage.double())
    assert (inner.sum(dim=1).abs() < rounding(length=V + D, condition=4)).all()  # advantages are up to 4


def test_everything_with_a_reward_row_masked(backend):
    """No conditioned distribution: advantages 0, never NaN; masked columns come last, in the order of their ids."""
    case = masked(kept=3)
    args, options = arguments(case)
    got = candidate_advantages(*args[:3], case.reward_embedding[:100], **options, top_k=5, backend=backend)
    assert (got.advantage == 0).all()
    assert (got.probability[:, 3:] == 0).all()
    assert got.token_ids[:, 3:].tolist() == [[0, 1]] * len(case.hidden)
    torch.testing.assert_close(got.probability.sum(dim=1), torch.ones(len(case.hidden)))


def test_without_a_reward_gradient(backend):
    case = everything()
    (hidden, weight, *_), options = arguments(case)
    got = candidate_advantages(hidden, weight, None, None, **options, top_k=4, backend=backend)
    full = candidate_advantages(*arguments(case)[0], **options, top_k=4, backend=backend)
    assert got.advantage is None
    assert torch.equal(got.token_ids, full.token_ids)
    torch.testing.assert_close(got.probability, full.probability)


def test_no_tokens_no_candidates(backend):
    case = plain(0, Sizes(N=0))
    args, _ = arguments(case)
    for how in ({"top_k": 3}, {"candidate_ids": torch.zeros(0, 3, dtype=torch.int64)}):
        got = candidate_advantages(*args, **how, backend=backend)
        assert got.token_ids.shape == got.probability.shape == got.advantage.shape == (0, 3)
    none = candidate_advantages(*arguments(plain())[0], candidate_ids=torch.zeros(16, 0, dtype=torch.int64), backend=backend)
    assert none.probability.shape == (16, 0)


def test_nan_stays_in_its_row(backend):
    case = plain()
    (hidden, weight, grad, table), _ = arguments(case)
    spoiled = hidden.clone()
    spoiled[3] = torch.nan
    got = candidate_advantages(spoiled, weight, grad, table, top_k=4, backend=backend)
    clean = candidate_advantages(hidden, weight, grad, table, top_k=4, backend=backend)
    assert got.probability[3].isnan().all()
    assert got.advantage[3].isnan().all()
    rest = torch.arange(16) != 3
    assert torch.equal(got.token_ids[rest], clean.token_ids[rest])
    assert torch.equal(got.advantage[rest], clean.advantage[rest])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_taken_as_they_are(dtype, backend):
    """Accumulated in float32: the values are those of the same numbers given in float32."""
    case = plain().to(dtype)
    got = candidate_advantages(*arguments(case)[0], top_k=5, backend=backend)
    wide = candidate_advantages(*arguments(case.to(torch.float32))[0], top_k=5, backend=backend)
    assert torch.equal(got.token_ids, wide.token_ids)
    torch.testing.assert_close(got.advantage, wide.advantage)


def watch(f):
    """(peak of the bytes beyond those before, largest single allocation)."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        f()
    alive = peak = largest = 0
    for e in sorted((e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        alive += e.nbytes()
        peak, largest = max(peak, alive), max(largest, e.nbytes())
    return peak, largest


def test_no_n_by_v_tensor_exists():
    """N = 512, V = 65,536: [N, V] in float32 would be 128 MiB; the reference, to show that the meter sees it, holds it."""
    args, _ = arguments(plain(0, Sizes(N=512, V=65_536, D=16, K=16)))
    small, _ = arguments(plain(0, Sizes(N=256, V=4096, D=8, K=8)))
    _, largest = watch(lambda: candidate_advantages(*small, top_k=5, backend="reference"))
    assert largest >= 256 * 4096 * 4
    for how in ({"top_k": 5}, {"candidate_ids": torch.arange(512)[:, None] * 100}):
        peak, largest = watch(lambda how=how: candidate_advantages(*args, **how, backend="chunked"))
        assert peak < 24 * 2**20
        assert largest <= 4 * 2**20 + 4096


def samples():
    """Positional arguments of datc::candidate_advantages in its modes."""
    size = Sizes(N=6, V=40, D=5, K=4)
    for name, case in {
        "plain": plain(0, size),
        "everything": everything(0, size),
        "float64": plain(0, size).to(torch.float64),
        "no tokens": plain(0, Sizes(N=0, V=40, D=5, K=4)),
    }.items():
        (hidden, weight, grad, table), o = arguments(case)
        t = o.get("temperature", 1.0)
        per_row, scalar = (t, 1.0) if isinstance(t, torch.Tensor) else (None, t)
        ids = (torch.arange(len(hidden) * 3) % 30).view(-1, 3)
        settings = scalar, o.get("logit_scale", 1.0), o.get("softcap"), o.get("vocab_size", 40)
        for mode, half, given_ids in (("top", (grad, table), None), ("given", (grad, table), ids), ("p only", (None, None), ids)):
            yield f"{name}, {mode}", (hidden, weight, *half, given_ids, o.get("bias"), per_row, 3, *settings)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("args", [pytest.param(a, id=n) for n, a in samples()])
def test_opcheck(args, backend):
    if backend == "cpu" and args[0].dtype == torch.float64:
        with pytest.raises(RuntimeError, match="expected float32"):
            torch.ops.datc.candidate_advantages(*args, backend)
        return
    torch.library.opcheck(torch.ops.datc.candidate_advantages.default, (*args, backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph(backend):
    """`torch.compile(fullgraph=True)` finds one graph, and the numbers stay."""
    (hidden, weight, grad, table), options = arguments(everything())

    def best(hidden):
        return candidate_advantages(hidden, weight, grad, table, **options, top_k=4, backend=backend)

    torch._dynamo.reset()
    eager, compiled = best(hidden), torch.compile(best, fullgraph=True, backend="aot_eager")(hidden)
    for field in dataclasses.fields(eager):
        assert torch.equal(getattr(eager, field.name), getattr(compiled, field.name))


def test_constant_under_every_mode(backend):
    """No gradient flows, autocast changes no number, and inputs stay as they are."""
    args, options = arguments(everything())
    before = [x.clone() for x in args]
    plain_result = candidate_advantages(*args, **options, top_k=4, backend=backend)
    trained = [x.clone().requires_grad_() for x in args]
    with torch.autocast("cpu", torch.bfloat16):
        got = candidate_advantages(*trained, **options, top_k=4, backend=backend)
    with torch.inference_mode():
        inferred = candidate_advantages(*args, **options, top_k=4, backend=backend)
    assert not got.probability.requires_grad
    assert not got.advantage.requires_grad
    assert torch.equal(got.advantage, plain_result.advantage)
    assert torch.equal(inferred.advantage, plain_result.advantage)
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))


IDS = torch.zeros(16, 2, dtype=torch.int64)
REFUSED = [
    ("candidate_ids", {}, {}),
    ("top_k", {}, {"top_k": 2, "candidate_ids": IDS}),
    ("top_k", {}, {"top_k": 0}),
    ("top_k", {}, {"top_k": 302}),
    ("top_k", {}, {"top_k": 11, "vocab_size": 10}),
    ("top_k", {}, {"top_k": True}),
    ("top_k", {}, {"top_k": 2.0}),
    ("candidate_ids", {}, {"candidate_ids": [[1, 2]]}),
    ("candidate_ids", {}, {"candidate_ids": IDS[:, 0]}),
    ("candidate_ids", {}, {"candidate_ids": IDS[:5]}),
    ("candidate_ids", {}, {"candidate_ids": IDS.float()}),
    ("candidate_ids", {}, {"candidate_ids": IDS.to("meta")}),
    ("candidate_ids", {}, {"candidate_ids": IDS - 1}),
    ("candidate_ids", {}, {"candidate_ids": IDS + 301}),
    ("candidate_ids", {}, {"candidate_ids": IDS + 10, "vocab_size": 10}),
    ("hidden", {"hidden": None}, {"top_k": 2}),
    ("weight", {"weight": torch.zeros(301, 25)}, {"top_k": 2}),
    ("weight", {"weight": torch.zeros(0, 24)}, {"top_k": 2}),
    ("reward_grad", {"reward_grad": None}, {"top_k": 2}),
    ("reward_grad", {"reward_grad": torch.zeros(15, 20)}, {"top_k": 2}),
    ("reward_embedding", {"reward_embedding": None}, {"top_k": 2}),
    ("reward_embedding", {"reward_embedding": torch.zeros(301, 21)}, {"top_k": 2}),
    ("bias", {}, {"top_k": 2, "bias": torch.zeros(300)}),
    ("temperature", {}, {"top_k": 2, "temperature": 0.0}),
    ("temperature", {}, {"top_k": 2, "temperature": torch.zeros(16)}),
    ("temperature", {}, {"top_k": 2, "temperature": torch.ones(15)}),
    ("softcap", {}, {"top_k": 2, "softcap": -1.0}),
    ("logit_scale", {}, {"top_k": 2, "logit_scale": 0.0}),
    ("vocab_size", {}, {"top_k": 2, "vocab_size": 302}),
    ("backend", {}, {"top_k": 2, "backend": "cudnn"}),
]


@pytest.mark.parametrize(("name", "tensors", "options"), REFUSED)
def test_what_is_refused(name, tensors, options):
    args = dict(zip(("hidden", "weight", "reward_grad", "reward_embedding"), arguments(plain())[0], strict=True)) | tensors
    with pytest.raises(ValueError, match=rf"^{name}: expected "):
        candidate_advantages(**args, **options)


def test_a_backend_without_candidates_says_so():
    with pytest.raises(RuntimeError, match="^backend: 'cuda' "):
        candidate_advantages(*arguments(plain())[0], top_k=2, backend="cuda")
