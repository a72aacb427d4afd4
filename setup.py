"""Builds the C++ extension of csrc into `datc_kernels/_native`, where it can be built; everything else is in pyproject.toml.

    DATC_CUDA=1        the CUDA kernels of csrc/cuda too, by nvcc
    DATC_SANITIZE=1    the C++ extension with AddressSanitizer and UndefinedBehaviorSanitizer (`make test-sanitize`)

An install never fails because of it: without PyTorch (pip builds in isolation), without a compiler, or where the code does not
compile, the reason goes into `missing.txt` or `missing_cuda.txt` there, which `datc_kernels.missing_backends()` reads. The C++
library is written against LibTorch's stable ABI: one build serves every PyTorch from 2.11 on and every Python. The CUDA library
knows nothing of PyTorch.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, ExecError, LinkError

FOLDER = "datc_kernels._native"  # no Python modules: PyTorch and ctypes load them
CPU, CUDA = f"{FOLDER}.datc_cpu", f"{FOLDER}.datc_cuda"
NOTES = {CPU: "missing.txt", CUDA: "missing_cuda.txt"}
FLAGS = ["-std=c++20", "-O3", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-g0"]
# Python's own flags may say that integers wrap around, which hides an overflow.
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-wrapv"]
# Files whose code runs only where the processor has these; the rest must run everywhere.
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
WIDER = {"row_pass_avx2.cpp": ["-mavx2", "-mfma"], "row_pass_avx512.cpp": AVX512}
OLDEST_TORCH = "0x020b000000000000"  # 2.11.0
# What runs from compute capability 8.0 on, the last as code that a driver compiles for later ones.
CUDA_TARGETS = ["arch=compute_80,code=sm_80", "arch=compute_90a,code=sm_90a", "arch=compute_100,code=[sm_100,compute_100]"]
CUDA_FLAGS = ["-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden", *(f"-gencode={target}" for target in CUDA_TARGETS)]


class BuildWherePossible(build_ext):
    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        note = target.parent / NOTES[ext.name]
        note.unlink(missing_ok=True)
        target.unlink(missing_ok=True)
        reason = self._cuda(ext, target) if ext.name == CUDA else self._cpp(ext, target)
        if reason is not None:
            note.write_text(reason + "\n", encoding="utf-8")
            self.warn(f"the {ext.name.rpartition('_')[2]} backend is not built: {reason}")

    def _cpp(self, ext: Extension, target: Path) -> str | None:
        """Builds `target`, or says why not."""
        torch = find_spec("torch")
        if torch is None or torch.origin is None:
            return (
                "PyTorch was not there when the package was built (pip builds in isolation): install torch first, then "
                "`pip install --no-build-isolation` the package"
            )
        if sys.platform == "win32":
            return "its C++ code is built with GCC or Clang, not on Windows"
        root = Path(torch.origin).parent
        x86 = platform.machine() in ("x86_64", "AMD64")
        sanitizers = SANITIZERS if os.environ.get("DATC_SANITIZE") == "1" else []
        flags = [*FLAGS, "-O1", "-g1", *sanitizers] if sanitizers else FLAGS

        def compile_one(source: str) -> list[str]:
            return self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                macros=[("TORCH_TARGET_VERSION", OLDEST_TORCH)],
                extra_postargs=[*flags, f"-isystem{root / 'include'}", *(WIDER.get(Path(source).name, []) if x86 else [])],
                depends=ext.depends,
            )

        try:
            with ThreadPoolExecutor(2) as pool:
                objects = [name for names in pool.map(compile_one, ext.sources) for name in names]
            self.compiler.link_shared_object(
                objects,
                str(target),
                libraries=["torch_cpu"],
                library_dirs=[str(root / "lib")],
                extra_postargs=sanitizers,
                target_lang="c++",
            )
        except (CompileError, LinkError) as error:
            return f"its C++ code did not compile here (GCC 12 or a Clang of its time, and PyTorch 2.11, are needed): {error}"
        return None

    def _cuda(self, ext: Extension, target: Path) -> str | None:
        """Builds `target`, or says why not."""
        beside = os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
        nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=beside)
        if nvcc is None:
            return "there was no nvcc when the package was built (it is looked for in PATH and CUDA_HOME)"
        try:
            self.spawn([nvcc, *CUDA_FLAGS, "-shared", "-o", str(target), *ext.sources])
        except ExecError as error:
            return f"its CUDA code did not compile here (CUDA 13 is needed): {error}"
        return None

    def copy_extensions_to_source(self) -> None:
        package, _, leaf = FOLDER.rpartition(".")
        target = Path(self.get_finalized_command("build_py").get_package_dir(package), leaf)
        target.mkdir(exist_ok=True)
        super().copy_extensions_to_source()
        for ext in self.extensions:
            note = Path(self.build_lib, *FOLDER.split("."), NOTES[ext.name])
            library = target / Path(self.get_ext_filename(ext.name)).name
            (target / note.name).unlink(missing_ok=True)
            if note.exists():
                if _is_of(library, [*ext.sources, *ext.depends, "setup.py"]):  # another environment's build is not lost
                    self.warn(f"{library} stays: it was built from these sources")
                    continue
                library.unlink(missing_ok=True)  # what an older build left would be taken for this one
                self.copy_file(str(note), str(target / note.name))


def _is_of(library: Path, sources: list[str]) -> bool:
    """Whether the library is there and no source is newer."""
    return library.exists() and library.stat().st_mtime >= max(Path(source).stat().st_mtime for source in sources)


def extensions() -> list[Extension]:
    headers = sorted(str(path) for path in Path("csrc").rglob("*.h"))
    sources = {CPU: Path("csrc").glob("*.cpp")}
    if os.environ.get("DATC_CUDA") == "1":
        sources[CUDA] = Path("csrc/cuda").glob("*.cu")
    return [
        Extension(name, sorted(map(str, paths)), depends=headers, language="c++", optional=True, py_limited_api=True)
        for name, paths in sources.items()
    ]


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildWherePossible},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
