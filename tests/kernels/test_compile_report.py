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
