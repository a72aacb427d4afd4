"""The CUDA kernels without a GPU: their arithmetic, compiled for the host, behind the real backend; what nvcc says of them.

`cuda_on_host.cpp` exports the functions of the CUDA library and runs the code that a block's threads run, one after the other.
"""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import sanitized
import test_golden_vectors as golden
import test_large_strides as large
import torch

from datc_kernels import allocate_weights, dispatch, linear_credit, logits_credit, missing_backends, native_cuda
from datc_kernels.allocate_weights import cuda_backend
from datc_kernels.testing import inputs as cases
from datc_kernels.testing import truth
from datc_kernels.testing.budgets import BUDGETS, TEMPERATURE, WEIGHT, assert_within_budget, field_names
from datc_kernels.testing.inputs import CASES, Sizes, plain
from datc_kernels.testing.rounding import assert_rounded

ROOT = Path(__file__).parents[2]
NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    target = tmp_path_factory.mktemp("cuda") / "datc_cuda.so"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", *sanitized.FLAGS]
    command = [compiler, *flags, "-o", target, Path(__file__).with_name("cuda_on_host.cpp")]
    subprocess.run(command, check=True, env=sanitized.without_sanitizers())
    return native_cuda.open_library(target)


@pytest.fixture
def backend(library):
    """ "cuda", on CPU tensors."""
    with (
        patch.object(native_cuda, "_library", lambda: library),
        patch.object(dispatch, "_why_no_cuda", lambda: None),
        patch.object(dispatch, "_why_not_gpu", lambda device: None),
    ):
        yield "cuda"


def fields(result):
    return {name: getattr(result, name) for name in field_names(result)}


@pytest.mark.parametrize("given", ["reward_grad", "reward"])
@pytest.mark.parametrize("name", golden.CREDIT_FILES)
def test_golden_vectors(name, given, backend):
    golden.test_logits_credit(name, given, backend)


@pytest.mark.parametrize("utility", ["advantage", "sign"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_golden_allocation(utility, dtype, backend):
    golden.test_allocate_weights(utility, dtype, backend)


_MAKERS = (cases.ties, cases.masked, cases.everything, cases.reward_offset)
WIDE = {make.__name__: lambda make=make: make(3, Sizes(N=9, V=4200)) for make in _MAKERS}


@pytest.mark.parametrize("name", [*CASES, *WIDE])
def test_every_case_is_exact(name, backend):
    """Beside float64 of the same logits and rewards; in the wide ones a thread takes several tiles of columns."""
    case = (CASES | WIDE)[name]()
    logits, u = case.logits(), case.reward_grad @ case.reward_embedding.T
    got = logits_credit(logits, case.token_ids, reward=u, **case.logits_options, backend=backend)
    true = logits_credit(logits.double(), case.token_ids, reward=u.double(), **case.logits_options, backend="reference")
    assert_within_budget(got, true)


@pytest.mark.parametrize("V", [1, 2, 7, 255, 256, 257, 2047, 2048, 2049, 2305])
def test_odd_vocabularies(V, backend):
    case = plain(V, Sizes(N=5, V=V))
    logits, u = case.logits(), case.reward_grad @ case.reward_embedding.T
    for reward in (None, u, u[:, : max(1, V - 3)]):
        got = logits_credit(logits, case.token_ids, reward=reward, backend=backend)
        true = logits_credit(logits, case.token_ids, reward=reward, backend="reference")
        assert field_names(got) == field_names(true)
        for name, value in fields(true).items():
            assert_rounded(getattr(got, name), value, length=V, condition=4, name=name)  # differences of differences


@pytest.mark.parametrize("reward_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_every_dtype(dtype, reward_dtype, backend):
    """16-bit numbers arrive as what they are: subnormal, infinite and NaN too."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    z = (every.view(dtype) if dtype != torch.float32 else every.float())[:, None]
    u = (every.view(reward_dtype) if reward_dtype != torch.float32 else every.float())[:, None]
    got = logits_credit(z, torch.zeros(len(z), dtype=torch.int64), reward=u, backend=backend)
    x = z[:, 0].float()
    assert torch.equal(got.logsumexp.nan_to_num(123.0), x.where(x < INF, NAN).nan_to_num(123.0))
    finite = x.isfinite() & u[:, 0].isfinite()
    assert torch.equal(got.reward_mean[finite], u[:, 0].float()[finite])
    assert not got.reward_mean[x.isfinite() & ~u[:, 0].isfinite()].isfinite().any()


def test_layouts_and_what_lies_between(backend):
    """K34: strides in every direction; NaN around the columns and beyond the support changes no bit."""
    case = plain(1, Sizes(N=6, V=301))
    z, u = case.logits(), case.reward_grad @ case.reward_embedding.T
    ids, whole = case.token_ids % 290, {"reward": u[:, :280].contiguous()}
    expected = fields(logits_credit(z[:, :290].contiguous(), ids, **whole, backend=backend))

    def strided(x):
        return torch.full((2 * x.shape[0] + 1, 3 * x.shape[1] + 1), NAN)[1::2, 1::3].copy_(x)

    for change in (strided, lambda x: x.T.contiguous().T):
        z[:, 290:] = NAN
        got = logits_credit(change(z), ids, reward=change(u)[:, :280], vocab_size=290, backend=backend)
        assert all(torch.equal(value, expected[name]) for name, value in fields(got).items())


@pytest.mark.parametrize("name", ["logits", "reward"])
def test_k29_rows_far_apart(name, backend):
    """K29: offsets beyond 2^31 elements."""
    try:
        space = torch.empty(3 * large.STRIDE + 64, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("this machine does not reserve 4.8 GB")
    large.test_k29_logits_far_apart(name, backend, space)


def test_a_row_has_the_same_bits_in_any_batch(backend):
    """Also beside rows of NaN, and where the rewards are a product taken a row at a time."""
    case = plain(2, Sizes(N=20, V=2500))
    z, u = case.logits(), case.reward_grad @ case.reward_embedding.T
    whole = logits_credit(z, case.token_ids, reward=u, backend=backend)
    spoilt = z.clone()
    spoilt[1::2] = NAN
    beside = logits_credit(spoilt, case.token_ids, reward=u, backend=backend)
    for row in range(0, 20, 2):
        some = slice(row, row + 1)
        alone = logits_credit(z[some], case.token_ids[some], reward=u[some], backend=backend)
        for name, value in fields(whole).items():
            assert torch.equal(value[some], getattr(alone, name))
            assert torch.equal(value[some], getattr(beside, name)[some])
    with patch("datc_kernels.logits_credit.cuda_backend._REWARDS", 7 * 2500):
        got = logits_credit(z, *case.args[2:], temperature=torch.linspace(0.5, 2, 20), backend=backend)
    true = truth.linear_credit(*case.args, temperature=torch.linspace(0.5, 2, 20))
    assert_within_budget(got, true, {name: 5 * value for name, value in BUDGETS.items()})


def test_undefined_rows_and_masked_columns(backend):
    """A NaN or +inf among the logits: NaN. A masked column's reward does not count; ignored rows are exact zeros."""
    z, u = torch.randn(6, 300), torch.randn(6, 300)
    z[:, 7], u[:, 7] = -INF, NAN
    z[1, 299], z[2, 0], z[3, :200], u[3, :200] = NAN, INF, -INF, INF
    ids = torch.tensor([5, 5, 5, 250, -100, 7])
    z[4] = NAN
    got = fields(logits_credit(z, ids, reward=u, backend=backend))
    for name, value in got.items():
        assert value[1:3].isnan().all(), name
        assert value[[0, 3]].isfinite().all(), name
        assert (value[4] == 0).all() or name == "cosine", name
    assert got["logprob"][5] == -INF
    keep = torch.arange(300) != 7
    without = fields(logits_credit(z[:1, keep], ids[:1], reward=u[:1, keep], backend="reference"))
    for name, value in without.items():
        assert_rounded(got[name][:1], value, length=300, condition=4, name=name)


def test_the_gradient(backend):
    case = plain(4, Sizes(N=7, V=301))
    gradients = []
    for name in (backend, "reference"):
        z = case.logits().requires_grad_()
        logits_credit(z, case.token_ids, softcap=9.0, backend=name).logprob.sum().backward()
        gradients.append(z.grad)
    assert_rounded(*gradients, length=301)


def test_allocation_of_any_length_and_of_lengths_that_do_not_fit(backend):
    lengths = torch.tensor([0, 1, 255, 256, 257, 3, 1000])
    credit, A = torch.randn(int(lengths.sum())), torch.randn(7)
    frozen = torch.rand(len(credit)) < 0.2
    credit[frozen] = NAN
    got = allocate_weights(credit, A, lengths, frozen=frozen, backend=backend)
    weight, temperature = truth.allocate_weights(credit, A, lengths, frozen, 4.0, "advantage")
    torch.testing.assert_close(got.weight.double(), weight, rtol=0, atol=WEIGHT)
    torch.testing.assert_close(got.temperature.double(), temperature, rtol=TEMPERATURE, atol=0)
    # On a GPU nobody reads lengths back: what they say beyond the tokens is not touched.
    for wrong in ([4, 2**40, 3, 0], [-5, 9, -(2**50), 8], [0, 2, 3, 10**6]):
        weight, _ = cuda_backend.allocate(torch.randn(8), torch.ones(4), torch.tensor(wrong), None, 4.0, "sign")
        assert weight.shape == (8,)
        assert ((weight > 0) & (weight <= 4)).all()


def test_what_the_device_says_is_raised(backend):
    """And the device and its current stream are those of the tensors."""
    with (
        patch.object(torch.cuda, "current_stream", lambda device: Mock(cuda_stream=device.index)),
        pytest.raises(RuntimeError, match="^datc_allocate_weights: device 3, stream 3$"),
    ):
        native_cuda.launch("datc_allocate_weights", native_cuda.AllocateCall(), device=torch.device("cuda", 3))


def test_the_device_check_looks_at_it(backend, run_variant):
    """All that needs no GPU; a wrong weight is found."""
    pytest.importorskip("triton")
    from benchmarks.device import cuda_kernels, others
    from benchmarks.device.report import Part
    from benchmarks.device.setting import Setting

    setting = Setting(torch.device("cpu"), dry=True)
    with run_variant("triton"):
        part = Part("cuda kernels", 1e4, setting.device, judges_times=False)
        cuda_kernels.run(part, setting)
    assert part.errors == [], part.errors
    assert [check for check in part.checks if not check["ok"]] == []
    names = {check["name"] for check in part.checks}
    assert {"cuda, u given: beside NaN", "ceiling 1.5, sign, cuda", "float32, u product, options, cuda"} <= names
    allocate = cuda_backend.allocate
    with patch.object(cuda_backend, "allocate", lambda *x: [torch.where(y == 1, 1.0, 1.001 * y) for y in allocate(*x)]):
        part = Part("cuda kernels", 1e4, setting.device, judges_times=False)
        others.weights(part, setting, ("cuda",))
    failed = {check["name"] for check in part.checks if not check["ok"]}
    assert {"ceiling 4.0, advantage, frozen tokens, cuda", "ceiling 1.5, sign, cuda", "padded"} <= failed


def test_linear_credit_is_not_there(backend):
    with pytest.raises(RuntimeError, match="^backend: 'cuda' has no linear_credit"):
        linear_credit(*plain().args, backend=backend)


def test_without_a_gpu_or_the_library_the_reason_is_said():
    with patch.object(native_cuda, "_find", lambda: None):
        assert missing_backends()["cuda"] == native_cuda.why_not_built()
        with pytest.raises(RuntimeError, match="^backend: 'cuda' cannot run here: "):
            allocate_weights(torch.randn(3), torch.ones(1), backend="cuda")
    with patch.object(native_cuda, "why_not_built", lambda: None), patch.object(torch.cuda, "is_available", lambda: False):
        assert missing_backends()["cuda"] == "there is no CUDA device"


def test_the_structures_are_those_of_the_library():
    """A field of another size or place would shift every later one."""
    text = (ROOT / "csrc" / "cuda" / "api.h").read_text()
    for structure in (native_cuda.LogitsCall, native_cuda.AllocateCall):
        body = re.search(rf"struct {structure.__name__} {{(.*?)}};", text, re.S)[1]
        kinds = {"double": ctypes.c_double, "int64_t": ctypes.c_int64}
        declared = [
            (name.strip(" *"), ctypes.c_void_p if "*" in line else kinds[line.split()[0]])
            for line in (statement.strip() for statement in re.sub(r"//.*", "", body).split(";"))
            if line
            for name in re.sub(r"^(const )?\w+[ *]+", "", line).split(",")
        ]
        assert declared == [(name, kind) for name, kind, *_ in structure._fields_]


@pytest.mark.parametrize("arch", ["80", "90a", "100"])
@pytest.mark.parametrize("source", ["logits_credit", "allocate_weights"])
def test_nvcc_compiles_without_spills(source, arch, tmp_path):
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("there is no nvcc")
    command = [nvcc, "-std=c++17", "-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}", "-Xptxas=-v", "-cubin"]
    command += ["-o", str(tmp_path / "kernels.cubin"), str(ROOT / "csrc" / "cuda" / f"{source}.cu")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=sanitized.without_sanitizers())
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert len(spills) == {"logits_credit": 12, "allocate_weights": 1}[source]
    assert set(spills) == {("0", "0", "0")}
