"""Every op of the C++ extension on drawn shapes, layouts, dtypes, tiles and numbers, NaN and infinities among them.

An input lies in a larger buffer, or exactly in its own (where a sanitizer sees a read beyond it). What surrounds it, rows beyond
the support and frozen positions are painted twice: the bits of the results must not change, and they agree with `reference`
wherever that is defined. `make test-sanitize` draws many more examples.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datc_kernels import allocate_weights, candidate_advantages, linear_credit, logits_credit, missing_backends, native
from datc_kernels.testing.budgets import WEIGHT
from datc_kernels.testing.rounding import rounding

pytestmark = pytest.mark.skipif("cpu" in missing_backends(), reason=missing_backends().get("cpu", ""))

PAINTS = (float("nan"), 1e4)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Sums over up to 1025 columns of products over up to 17 numbers; logits of up to 30 that become probabilities, and credits that
# are differences of differences of them. A gradient in half precision is cast from sums of its own.
CONDITION = 64
ROUNDING = {dtype: rounding(length=1025 + 17, condition=CONDITION) + 2 * torch.finfo(dtype).eps for dtype in DTYPES}
MATRIX = ["tight", "sliced", "strided", "transposed", "unaligned", "rows expanded", "columns expanded", "overlapping"]
VECTOR = ["tight", "sliced", "strided", "expanded"]


def _levels():
    found = []
    for level in (1, 2, 3) if "cpu" not in missing_backends() else ():
        try:
            torch.ops.datc_cpu.instruction_set(level)
            found.append(level)
        except RuntimeError:
            pass
    return found


@dataclass
class Placed:
    """A tensor in a buffer: `view` is what an op gets, `small` the part of the buffer that it shows."""

    base: torch.Tensor
    small: torch.Tensor
    view: torch.Tensor
    values: torch.Tensor = field(init=False)
    unread: torch.Tensor | None = None  # flags over `small`: nobody may look there

    def paint(self, paint):
        self.base.fill_(paint if self.base.is_floating_point() else paint == paint)
        self.small.copy_(self.values)
        if self.unread is not None:
            self.small[self.unread] = paint


def place(shape, layout, dtype):
    """Storage for a matrix [r, c] or a vector [n] in that layout."""

    def empty(*size):
        return torch.empty(*size, dtype=dtype)

    if len(shape) == 1:
        (n,) = shape
        base = empty({"tight": n, "sliced": n + 3, "strided": 3 * n + 2, "expanded": 3}[layout])
        small = {"tight": base, "sliced": base[2 : n + 2], "strided": base[1 : 1 + 3 * n : 3], "expanded": base[1:2]}[layout]
        return Placed(base, small, small.expand(n) if layout == "expanded" else small)
    r, c = shape
    if layout == "overlapping":
        base = empty(r + c + 2)
        return Placed(base, base[1 : r + c], base.as_strided((r, c), (1, 1), 1))
    if layout in ("tight", "unaligned"):
        base = empty(r * c + (layout == "unaligned"))
        small = base[layout == "unaligned" :].view(r, c)
    elif layout in ("sliced", "rows expanded", "columns expanded"):
        base = empty((1 if layout == "rows expanded" else r) + 2, (1 if layout == "columns expanded" else c) + 3)
        small = base[1:-1, 2:-1]
    elif layout == "strided":
        base = empty(2 * r + 1, 3 * c + 1)
        small = base[1 : 1 + 2 * r : 2, 1 : 1 + 3 * c : 3]
    else:
        base = empty(c + 2, r + 1)
        small = base[1:-1, 1:].T
    return Placed(base, small, small.expand(r, c))


class Drawn:
    """Draws an op's inputs; keeps them to be painted."""

    def __init__(self, data):
        self.data, self.placed, self.unhappy = data, [], False
        self.generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))

    def one(self, choices):
        return self.data.draw(st.sampled_from(choices))

    def floats(self, *shape, dtype=None, scale=1.0, spoil=True, unread_from=None):
        """Normal numbers; in a few of the draws some of them are NaN or infinite."""
        dtype = dtype or self.one(DTYPES)
        x = place(shape, self.one(MATRIX if len(shape) == 2 else VECTOR), dtype)
        values = scale * torch.randn(x.small.shape, generator=self.generator)
        special = self.one([None] * 9 + [float("nan"), float("inf"), -float("inf")]) if spoil else None
        if special is not None:
            values[torch.rand(values.shape, generator=self.generator) < 0.1] = special
        return self.keep(x, values, shape, unread_from)

    def keep(self, x, values, shape, unread_from=None):
        x.values = values.to(x.base.dtype)
        if unread_from is not None and x.small.shape == torch.Size(shape):
            x.unread = torch.zeros(x.small.shape, dtype=torch.bool)
            x.unread[unread_from:] = True
        self.placed.append(x)
        x.paint(PAINTS[0])
        return x.view

    def ids(self, n, stop, ignore):
        fits = abs(ignore) < 2**31
        ids = torch.randint(stop, (n,), generator=self.generator)
        ids[torch.rand(n, generator=self.generator) < 0.2] = ignore
        return ids.to(self.one([torch.int64, torch.int32] if fits else [torch.int64]))

    def head(self, n, V):
        temperature = self.one([1.0, 0.7, None])
        if temperature is None:
            temperature = torch.rand(n, generator=self.generator) + 0.5
        options = {"temperature": temperature, "logit_scale": self.one([1.0, 0.3])}
        return options | {"softcap": self.one([None, 5.0]), "vocab_size": self.one([V, max(1, V - 2)])}


def same_for_every_paint(drawn, run):
    """The results of run() under the first paint, as a dictionary."""
    found = []
    for paint in PAINTS:
        for x in drawn.placed:
            x.paint(paint)
        found.append(run())
    for name, value in found[0].items():
        other = found[1][name]
        assert torch.equal(value.isnan(), other.isnan()), name
        assert torch.equal(value[~value.isnan()], other[~value.isnan()]), name
    return found[0]


def assert_agrees(name, got, expected, rounding):
    """Wherever `expected` is finite."""
    keep = expected.isfinite()
    got, expected = got[keep].float(), expected[keep].float()
    if expected.numel():
        torch.testing.assert_close(got, expected, rtol=rounding, atol=rounding * (0.1 + float(expected.abs().max())), msg=name)


def fields(result):
    return {name: getattr(result, name) for name in result.__dataclass_fields__ if getattr(result, name) is not None}


def with_gradients(result, leaves, incoming):
    """Fields, and the gradients of leaves by their names."""
    gradients = torch.autograd.grad(result.logprob, list(leaves.values()), incoming)
    return {name: value.detach() for name, value in fields(result).items()} | dict(zip(leaves, gradients, strict=True))


def leaf(x):
    return x.detach().requires_grad_()


@pytest.fixture(scope="module")
def levels():
    return _levels()


def in_some_code(drawn, levels):
    """A tile and an instruction set for the ops inside."""
    stack = ExitStack()
    stack.enter_context(patch.object(native, "LEVEL", drawn.one(levels)))
    tile = drawn.one([None, (1, 1), (3, 7), (5, 64), (64, 5)])
    if tile is not None:
        stack.enter_context(patch.object(native, "tile_shape", lambda width: tile))
    return stack


N = st.sampled_from([0, 1, 2, 5, 6, 17])
V = st.sampled_from([1, 2, 5, 7, 8, 63, 64, 65, 130, 1023, 1025])
WIDTH = st.sampled_from([1, 2, 3, 8, 17])
IGNORE = st.sampled_from([-100, -(2**63), 2**63 - 1])


def defined(z):
    return ~(z.isnan() | (z == torch.inf)).any(dim=1)


@given(st.data(), N, V, WIDTH, WIDTH, IGNORE)
def test_linear_credit(levels, data, n, V, D, K, ignore):
    drawn = Drawn(data)
    options = drawn.head(n, V)
    columns, rows = options["vocab_size"], data.draw(st.sampled_from([V, max(1, V - 1), max(1, V // 2), V + 3]))
    hidden = drawn.floats(n, D)
    weight = drawn.floats(V, D, scale=2 / D**0.5, unread_from=columns)
    bias = drawn.one([None, drawn.floats(V, unread_from=columns)])
    ids = drawn.ids(n, columns, ignore)
    reward = [drawn.floats(n, K), drawn.floats(rows, K, unread_from=columns)] if drawn.one([True, False]) else []
    incoming = torch.randn(n, generator=drawn.generator)

    def run(backend="cpu"):
        leaves = {"hidden": leaf(hidden), "weight": leaf(weight)} | ({} if bias is None else {"bias": leaf(bias)})
        more = {"bias": leaves.get("bias"), "ignore_index": ignore}
        result = linear_credit(leaves["hidden"], leaves["weight"], ids, *reward, **options, **more, backend=backend)
        return with_gradients(result, leaves, incoming)

    with in_some_code(drawn, levels):
        got = same_for_every_paint(drawn, run)
    expected = run("reference")
    raw = hidden.float() @ weight[:columns].float().T
    whole = defined(raw if bias is None else raw + bias[:columns].float())
    assert all((value[ids == ignore] == 0).all() for name, value in got.items() if name not in ("hidden", "weight", "bias"))
    for name, value in expected.items():
        if name in ("weight", "bias") and not (whole | (ids == ignore)).all():
            continue  # every row is in them
        keep = whole if name not in ("weight", "bias") else slice(None)
        assert_agrees(name, got[name][keep], value[keep], ROUNDING[value.dtype])


@given(st.data(), N, V, WIDTH, IGNORE, st.sampled_from(["none", "given", "product"]))
def test_logits_credit(levels, data, n, V, K, ignore, way):
    drawn = Drawn(data)
    options = drawn.head(n, V)
    columns, rows = options["vocab_size"], data.draw(st.sampled_from([V, max(1, V - 1), max(1, V // 2), V + 3]))
    logits, ids = drawn.floats(n, V, scale=3.0), drawn.ids(n, columns, ignore)
    reward = {}
    if way == "given":
        reward = {"reward": drawn.floats(n, rows)}
    elif way == "product":
        reward = {"reward_grad": drawn.floats(n, K), "reward_embedding": drawn.floats(rows, K, unread_from=columns)}
    incoming = torch.randn(n, generator=drawn.generator)

    def run(backend="cpu"):
        x = leaf(logits)
        result = logits_credit(x, ids, **reward, **options, ignore_index=ignore, backend=backend)
        return with_gradients(result, {"logits": x}, incoming)

    with in_some_code(drawn, levels):
        got = same_for_every_paint(drawn, run)
    keep = defined(logits[:, :columns].float())
    for name, value in run("reference").items():
        assert_agrees(name, got[name][keep], value[keep], ROUNDING[value.dtype])


@given(st.data(), N, V, WIDTH, WIDTH)
def test_candidate_advantages(levels, data, n, V, D, K):
    drawn = Drawn(data)
    options = drawn.head(n, V)
    columns, rows = options["vocab_size"], data.draw(st.sampled_from([V, max(1, V - 1), max(1, V // 2), V + 3]))
    hidden, weight = drawn.floats(n, D), drawn.floats(V, D, scale=2 / D**0.5, unread_from=columns)
    reward = [drawn.floats(n, K), drawn.floats(rows, K, unread_from=columns)] if drawn.one([True, False]) else [None, None]
    k = drawn.one([1, 2, columns])
    if drawn.one([True, False]) or k > columns:
        options["candidate_ids"] = torch.randint(columns, (n, k), generator=drawn.generator)
    else:
        options["top_k"] = k

    def run(backend="cpu"):
        found = candidate_advantages(hidden, weight, *reward, **options, backend=backend)
        return {name: x.double() for name, x in fields(found).items()}

    with in_some_code(drawn, levels):
        got = same_for_every_paint(drawn, run)
    keep = defined(hidden.float() @ weight[:columns].float().T)
    expected = run("reference")
    assert ((got["token_ids"] >= 0) & (got["token_ids"] < columns)).all()
    assert_agrees("probability", got["probability"][keep], expected["probability"][keep], ROUNDING[torch.float32])
    if "top_k" in options:  # nearly equal ones may change places
        assert all(len(set(row)) == k for row in got["token_ids"].tolist())
    elif "advantage" in expected:
        assert_agrees("advantage", got["advantage"][keep], expected["advantage"][keep], ROUNDING[torch.float32])


@given(st.data(), st.lists(st.sampled_from([0, 1, 2, 3, 40]), max_size=5), st.sampled_from([1.0, 1.0001, 4.0, 1e6]))
def test_allocate_weights(data, lengths, ceiling):
    drawn = Drawn(data)
    n, dtype, tokens = sum(lengths), drawn.one([*DTYPES, torch.float64]), torch.tensor(lengths, dtype=torch.int64)
    credit, advantage = drawn.floats(n, dtype=dtype), drawn.floats(len(lengths))
    frozen = None
    if drawn.one([True, False]):
        x = place((n,), drawn.one(VECTOR), torch.bool)
        frozen = drawn.keep(x, torch.rand(x.small.shape, generator=drawn.generator) < 0.3, (n,))
        if drawn.placed[0].small.shape == (n,):
            drawn.placed[0].unread = frozen.clone()
    options = {"frozen": frozen, "ceiling": ceiling, "utility": drawn.one(["advantage", "sign"])}

    def run(backend="cpu"):
        return fields(allocate_weights(credit, advantage, tokens, **options, backend=backend))

    got, expected = same_for_every_paint(drawn, run), run("reference")
    keep = {"weight": advantage.isfinite().repeat_interleave(tokens), "temperature": advantage.isfinite()}
    for name, value in expected.items():
        torch.testing.assert_close(got[name][keep[name]], value[keep[name]], rtol=WEIGHT, atol=rounding(), equal_nan=True)
