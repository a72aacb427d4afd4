"""That the sanitizers of `make test-sanitize` see what they are there for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sanitized import SANITIZED

from datc_kernels import native

CODE = """
import torch, datc_kernels
z, ids, numbers = torch.randn(40, 9), torch.zeros(40, dtype=torch.int64), torch.zeros(40)
saved = torch.zeros(5, 40 - MISSING)
torch.ops.datc_cpu.logits_credit_backward(numbers, numbers, saved, z, ids, None, 1.0, 1.0, None, 9, -100, 64, LEVEL)
print("ran")
"""


@pytest.mark.skipif(not SANITIZED, reason="only under `make test-sanitize`")
@pytest.mark.parametrize("level", [0, 1])
def test_a_read_beyond_an_input_ends_the_process(level):
    assert "sanitize" in Path(native.__file__).parts

    def run(missing):
        code = CODE.replace("MISSING", str(missing)).replace("LEVEL", str(level))
        # Names for the addresses in PyTorch's library would take minutes.
        environment = os.environ | {"ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":symbolize=0"}
        return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=environment, check=False)

    assert run(0).stdout == "ran\n"
    done = run(8)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
