"""What holds for every Triton kernel and every launch of it, whatever it computes. K numbers: reports against other kernels."""

import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from types import ModuleType

import pytest
import torch

import datc_kernels
from datc_kernels import dispatch, linear_credit, missing_backends

if "triton" in missing_backends():
    pytest.skip("no Triton", allow_module_level=True)

import triton
import triton.language as tl

from benchmarks import launches

ROOT = Path(__file__).parents[2]
WRITTEN = {  # by kernel: the parameters that it stores through
    "linear_credit_kernel": ("partials", "z_y", "u_y"),
    "logits_credit_kernel": ("partials", "z_y", "u_y"),
    "merge_partials_kernel": ("merged",),
    "allocate_kernel": ("weight", "temperature"),
    "logit_gradient_kernel": ("out",),
}


def kernels_and_their_helpers():
    """Every function of the package that Triton compiles, by name."""
    found = {}
    for info in pkgutil.walk_packages(datc_kernels.__path__, "datc_kernels."):
        if "testing" in info.name or "triton" not in info.name:
            continue
        for name, value in vars(importlib.import_module(info.name)).items():
            if hasattr(value, "fn") and type(value).__module__.startswith("triton"):
                found[name] = value
    return found


def recorded(**options):
    made = launches.linear_credit((9, 0), torch.bfloat16, D=64, K=64, **options)
    made += launches.linear_credit((8, 0), torch.bfloat16, D=64, K=None, row_temperature=True, **options)
    made += launches.logits_credit((9, 0), torch.bfloat16, N=min(options.get("N", 64), 4096), V=4096, K=64)
    made += launches.logits_credit((9, 0), torch.bfloat16, V=4096)
    return made + launches.allocate_weights((9, 0))


def test_the_recorder_sees_every_kernel():
    top = {name for name in kernels_and_their_helpers() if name.endswith("_kernel")}
    assert {launch.kernel.__name__ for launch in recorded(N=256, V=4096)} == top == set(WRITTEN)


@pytest.mark.parametrize(("N", "V"), [(1_000_000, 4096), (256, 2_000_000)], ids=["many rows", "many columns"])
def test_k33_grids_have_one_axis(N, V):
    """K33: the second and third axis of a grid end at 65,535."""
    made = [launch for launch in recorded(N=N, V=V) if launch.kernel.__name__ != "allocate_kernel"]
    assert made
    for launch in made:
        assert len(launch.grid) == 1
        assert 0 < launch.grid[0] < 2**31


def test_k32_no_two_outputs_of_a_launch_are_the_same_memory():
    """K32: the interpreter copies every argument back; of two names for one memory the later one wins."""
    for launch in recorded(N=256, V=4096):
        outputs = [launch.values[name] for name in WRITTEN[launch.kernel.__name__]]
        for a, b in combinations(outputs, 2):
            assert a.data_ptr() + a.numel() * a.element_size() <= b.data_ptr() or b.data_ptr() + b.numel() * b.element_size() <= (
                a.data_ptr()
            ), launch.kernel.__name__


def test_k56_what_a_kernel_takes_from_its_module_is_constexpr():
    """K56: Triton freezes other globals at the first compilation, or refuses them."""
    kernels = kernels_and_their_helpers()
    assert len(kernels) > 15
    for name, kernel in kernels.items():
        for used, value in inspect.getclosurevars(inspect.unwrap(kernel.fn)).globals.items():
            fine = isinstance(value, tl.constexpr | ModuleType) or hasattr(value, "fn") or inspect.isbuiltin(value)
            assert fine or getattr(value, "__module__", "").startswith("triton"), (name, used)


def test_k55_numbers_reach_kernels_as_float32_or_integers():
    """K55: a Python float that became float64 made a kernel 27 times slower."""
    for launch in recorded(N=256, V=4096):
        for name, value in launch.values.items():
            assert not (isinstance(value, torch.Tensor) and value.dtype == torch.float64), (launch.kernel.__name__, name)


def test_k47_k49_k50_k51_products_as_the_compiler_gets_them():
    """K47: no product's operand is another product's result. K49: one product an accumulator and step of the loop. K50: no warp
    specialisation. K51: tensor descriptors are made on the host, so that no allocator of the device is asked for.
    """
    code = """
import re, torch
from benchmarks import launches
for capability in ((8, 0), (9, 0)):
    made = launches.linear_credit(capability, torch.bfloat16, D=5120, K=4096)
    made += launches.logits_credit(capability, torch.bfloat16, K=1024)
    for launch in made:
        text = launch.compile(capability).asm["ttir"]
        assert "warp_specialize" not in text and "make_tensor_desc" not in text, launch.kernel.__name__
        after_product, dots = {}, 0  # by value: whether a product lies on the way to it, within one pass through the code
        for line in text.splitlines():
            if not (found := re.match(r"\\s*(%[\\w#:]+) = (?:\\"?)([\\w.]+)(.*)", line)):
                continue
            name, op, rest = found.groups()
            uses = re.findall(r"%\\w+", rest.split(" loc(")[0])
            tainted = any(after_product.get(use, False) for use in uses)
            if op == "tt.dot":
                dots += 1
                assert not any(after_product.get(use, False) for use in uses[:3]), line
            after_product[name.split(":")[0]] = tainted or op == "tt.dot"
        print(launch.kernel.__name__, capability[0], dots)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    dots = [line.split() for line in done.stdout.splitlines()]
    assert {int(n) for name, _, n in dots if name == "linear_credit_kernel"} == {2}  # logits and rewards
    assert {int(n) for name, _, n in dots if name == "logits_credit_kernel"} == {1}
    assert {int(n) for name, _, n in dots if name == "merge_partials_kernel"} == {0}


def test_k61_other_makers_of_gpus_are_refused(monkeypatch):
    """K61: ROCm calls its devices cuda and counts its capabilities otherwise: the tiles and warps here are NVIDIA's."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.2")
    with pytest.raises(RuntimeError, match="^backend: 'triton' cannot run here: .*ROCm"):
        linear_credit(torch.randn(2, 8), torch.randn(16, 8), torch.tensor([1, 2]), backend="triton")
    assert not dispatch.row_kernel_runs(torch.device("cuda"), torch.float32)
