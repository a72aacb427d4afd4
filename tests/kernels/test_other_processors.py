"""The C++ ops for a processor that is not here: the portable code compiles for 64-bit ARM. It is not run."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import sanitized
import torch

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "csrc").glob("*.cpp"))
INCLUDE = Path(torch.__file__).parent / "include"


@pytest.fixture(scope="module")
def compiler():
    found = shutil.which("aarch64-linux-gnu-g++")
    if found is None:
        pytest.skip("there is no compiler for ARM here (Debian: g++-aarch64-linux-gnu)")
    return found


def compile_for_arm(compiler, source, target):
    setup = (ROOT / "setup.py").read_text()
    flags = re.findall(r'"(-[^"]+)"', re.search(r"^FLAGS = \[(.*)\]$", setup, re.M)[1])
    oldest = re.search(r'^OLDEST_TORCH = "(\w+)"', setup, re.M)[1]
    command = [compiler, *flags, "-O1", "-Wall", "-Wextra", f"-DTORCH_TARGET_VERSION={oldest}", f"-isystem{INCLUDE}"]
    command += ["-c", str(source), "-o", str(target)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=sanitized.without_sanitizers())


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_it_compiles_for_arm(source, compiler, tmp_path):
    done = compile_for_arm(compiler, source, tmp_path / "part.o")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "warning" not in done.stderr, done.stderr[-3000:]
    assert (tmp_path / "part.o").read_bytes()[18:20] == b"\xb7\x00"  # ELF's number for AArch64


def test_an_intrinsic_of_x86_is_found(compiler, tmp_path):
    """What the test above is for."""
    source = tmp_path / "wrong.cpp"
    source.write_text("#include <immintrin.h>\n")
    assert compile_for_arm(compiler, source, tmp_path / "part.o").returncode != 0
