"""The compiler's view of the shipped kernels: no spill in a product's loop, tensor cores, shared memory, 16-byte loads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from datc_kernels import missing_backends

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif("triton" in missing_backends(), reason="no Triton")


def run(*arguments):
    """In a process of its own: a process that interprets kernels cannot compile them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.compile_report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)


@pytest.mark.parametrize("arch", [80, 90])
def test_the_main_configurations(arch, tmp_path):
    done = run("--quick", "--arch", arch, "--json", tmp_path / "report.json")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    products = [k for k in report["kernels"] if k["kernel"].startswith("linear_credit")]
    assert products
    for kernel in products:
        assert kernel["arch"] == arch
        assert kernel["spills_in_product_loops"] == 0
        assert kernel["matrix"].keys() == {"HGMMA" if arch == 90 else "HMMA"}
        assert kernel["registers"] <= 255
        assert 10 < kernel["epilogue_per_element"] < (40 if arch == 90 else 60)
    assert {(e["D"], e["K"]) for e in report["estimates"]} == {(5120, 4096), (1024, 1024)}


def test_k15_float32_products_never_use_tf32():
    """K15: Triton's default rounds float32 operands to 10 bits of mantissa."""
    code = """
import torch
from benchmarks import launches
for capability in ((8, 0), (9, 0)):
    made = launches.linear_credit(capability, torch.float32, N=64, V=1024, D=64, K=64)
    made += launches.logits_credit(capability, torch.float32, V=1024, K=64)
    for launch in made:
        print(launch.kernel.__name__, capability, "tf32" in launch.compile(capability).asm["ptx"])
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert sum("linear_credit_kernel" in line for line in lines) >= 2
    assert not [line for line in lines if line.endswith("True")]


@pytest.mark.slow
def test_every_configuration_on_every_architecture():
    done = run()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_process_that_interprets_is_told_so():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "benchmarks.compile_report", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 2
    assert "unset TRITON_INTERPRET" in done.stderr
