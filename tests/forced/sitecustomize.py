"""For processes that tests start: the instruction set that `--cpu-capability` chose.

Python imports this where `tests/conftest.py` has put its folder on the path; no part of the package knows of it.
"""

import os
import sys
from importlib.machinery import PathFinder

NAME, VARIABLE = "datc_kernels.native", "DATC_TESTS_LEVEL"


class Forced:
    """Sets `LEVEL` when the module has been loaded."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != NAME:
            return None
        spec = PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.LEVEL = int(os.environ[VARIABLE])

        spec.loader.exec_module = exec_module
        return spec


if VARIABLE in os.environ:
    sys.meta_path.insert(0, Forced)
