"""What a source archive and a wheel hold, and that an install where something is missing succeeds and says why."""

import os
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distribution, version
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest

from datc_kernels import missing_backends, native, native_cuda

pytest.importorskip("setuptools")
ROOT = Path(__file__).parent.parent
SOURCES = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc").rglob("*") if p.is_file())


@pytest.fixture
def tree(tmp_path):
    """The project's files without what building leaves there; large ones are not needed."""
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for folder in ("csrc", "datc_kernels", "datc_train"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md", ".cpp", ".h", ".cu", ".yaml") or path.name == "py.typed":
                target = tmp_path / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
    return tmp_path


def setup(tree, *arguments, without_torch=False, **environment):
    options = []
    if without_torch:  # as in pip's isolated builds: setuptools and nothing else
        lonely = tree / "lonely"
        lonely.mkdir()
        metadata = Path(distribution("setuptools").locate_file("")) / f"setuptools-{version('setuptools')}.dist-info"
        for path in (*(Path(find_spec(name).origin).parent for name in ("setuptools", "_distutils_hack")), metadata):
            (lonely / path.name).symlink_to(path)
        environment["PYTHONPATH"] = str(lonely)
        options = ["-S"]
    command = [sys.executable, *options, "setup.py", "--quiet", *arguments]
    done = subprocess.run(command, cwd=tree, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_source_archive_can_be_built_from(tree):
    setup(tree, "sdist")
    (archive,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert len(SOURCES) > 20
    assert names >= {*SOURCES, "setup.py", "pyproject.toml", "LICENSE", "datc_kernels/native.py", "datc_kernels/py.typed"}
    assert not [name for name in names if name.startswith(("tests/", "datc_kernels/_native/"))]


def test_a_wheel_built_without_torch_says_what_is_missing(tree):
    """K63: pip's isolation is the usual way there; nvcc is not there either."""
    setup(tree, "bdist_wheel", without_torch=True, DATC_CUDA="1", PATH="/nowhere", CUDA_HOME="/nowhere")
    (wheel,) = (tree / "dist").glob("*.whl")
    assert "-cp311-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        notes = {name: file.read(f"datc_kernels/_native/{name}").decode() for name in ("missing.txt", "missing_cuda.txt")}
    assert names >= {"datc_kernels/py.typed", "datc_kernels/linear_credit/README.md", "datc_train/recipes/quickstart.yaml"}
    assert not [name for name in names if name.startswith(("csrc", "tests", "benchmarks")) or name.endswith(".so")]
    assert "install torch first" in notes["missing.txt"]
    assert "no nvcc" in notes["missing_cuda.txt"]


def test_without_a_compiler_the_build_succeeds_and_the_reason_arrives(tree):
    folder = tree / "datc_kernels" / "_native"
    folder.mkdir(exist_ok=True)
    (folder / "datc_cpu.abi3.so").write_text("of an earlier build")
    os.utime(folder / "datc_cpu.abi3.so", (0, 0))
    setup(tree, "build_ext", "--inplace", CXX="/nowhere/g++", CC="/nowhere/gcc")
    assert [path.name for path in folder.iterdir()] == ["missing.txt"]
    with patch.object(native, "__file__", str(folder.parent / "native.py")):
        reason = native._load()
    assert "/nowhere/g++" in reason
    with patch.object(native, "WHY_MISSING", reason), patch.object(native_cuda, "_FOLDER", folder):
        assert missing_backends()["cpu"] == reason
        assert "DATC_CUDA=1" in missing_backends()["cuda"]


@pytest.mark.parametrize("newer", [None, "csrc/fold.cpp", "csrc/row_pass_body.h", "setup.py"])
def test_a_second_environment_leaves_the_extension_that_is_there(tree, newer):
    """pip's isolation has no torch: an editable install from another environment would take the ops away from the first."""
    library = tree / "datc_kernels" / "_native" / "datc_cpu.abi3.so"
    library.parent.mkdir(exist_ok=True)
    library.write_text("built")
    if newer is not None:
        later = library.stat().st_mtime + 10
        os.utime(tree / newer, (later, later))
    setup(tree, "build_ext", "--inplace", without_torch=True)
    assert [path.name for path in library.parent.iterdir()] == (["missing.txt"] if newer else [library.name])
