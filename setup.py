"""Builds the C++ extension of csrc into `datc_kernels/_native`, where it can be built; everything else is in pyproject.toml.

An install never fails because of it: without PyTorch (pip builds in isolation), without a compiler, or where the code does not
compile, the reason goes into `missing.txt` there, which `datc_kernels.missing_backends()` reads. The library is
written against LibTorch's stable ABI: one build serves every PyTorch from 2.11 on and every Python.
"""

from __future__ import annotations

import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

NAME = "datc_kernels._native.datc_cpu"  # no Python module: PyTorch loads it
NOTE = "missing.txt"
FLAGS = ["-std=c++20", "-O3", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-g0"]
# Files whose code runs only where the processor has these; the rest must run everywhere.
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
WIDER = {"row_pass_avx2.cpp": ["-mavx2", "-mfma"], "row_pass_avx512.cpp": AVX512}
OLDEST_TORCH = "0x020b000000000000"  # 2.11.0


class BuildWherePossible(build_ext):
    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        note = target.parent / NOTE
        note.unlink(missing_ok=True)
        target.unlink(missing_ok=True)
        reason = self._try(ext, target)
        if reason is not None:
            note.write_text(reason + "\n", encoding="utf-8")
            self.warn(f"the CPU backend is not built: {reason}")

    def _try(self, ext: Extension, target: Path) -> str | None:
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

        def compile_one(source: str) -> list[str]:
            return self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                macros=[("TORCH_TARGET_VERSION", OLDEST_TORCH)],
                extra_postargs=[*FLAGS, f"-isystem{root / 'include'}", *(WIDER.get(Path(source).name, []) if x86 else [])],
                depends=ext.depends,
            )

        try:
            with ThreadPoolExecutor(2) as pool:
                objects = [name for names in pool.map(compile_one, ext.sources) for name in names]
            self.compiler.link_shared_object(
                objects, str(target), libraries=["torch_cpu"], library_dirs=[str(root / "lib")], target_lang="c++"
            )
        except (CompileError, LinkError) as error:
            return f"its C++ code did not compile here (GCC 12 or a Clang of its time, and PyTorch 2.11, are needed): {error}"
        return None

    def copy_extensions_to_source(self) -> None:
        folder = NAME.rpartition(".")[0]
        package, _, leaf = folder.rpartition(".")
        target = Path(self.get_finalized_command("build_py").get_package_dir(package), leaf)
        target.mkdir(exist_ok=True)
        super().copy_extensions_to_source()
        note = Path(self.build_lib, *folder.split("."), NOTE)
        (target / NOTE).unlink(missing_ok=True)
        if note.exists():
            self.copy_file(str(note), str(target / NOTE))


setup(
    ext_modules=[
        Extension(
            NAME,
            sources=sorted(str(path) for path in Path("csrc").glob("*.cpp")),
            depends=sorted(str(path) for path in Path("csrc").glob("*.h")),
            language="c++",
            optional=True,
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildWherePossible},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
