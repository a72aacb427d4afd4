"""Who may import whom: kernels know nothing of training, and importing them needs neither Triton nor a model library."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from datc_kernels.dispatch import choose

ROOT = Path(__file__).parent.parent
KERNELS = sorted((ROOT / "datc_kernels").rglob("*.py"))
HEAVY = {"transformers", "peft", "trl", "triton"}


def imported(path, *, module_level_only=False):
    """Top-level names of the absolute imports in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside_functions = {
        id(node) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(f)
    }
    names = set()
    for node in ast.walk(tree):
        if module_level_only and id(node) in inside_functions:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


def test_kernels_never_import_training():
    assert len(KERNELS) > 20
    for path in KERNELS:
        assert "datc_train" not in imported(path), path


def test_k59_kernels_import_no_heavy_library_at_module_level():
    """K59: a module may import Triton only where it runs it (and `*_backend.py` files hold nothing but such code)."""
    for path in KERNELS:
        if not path.name.startswith("triton_"):
            assert not imported(path, module_level_only=True) & HEAVY, path


def test_files_stay_readable():
    for path in [*KERNELS, *sorted((ROOT / "tests" / "kernels").rglob("*.py"))]:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, path


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_k59_importing_and_using_the_kernels_needs_no_triton():
    """K59: with Triton and the model libraries made impossible to import, the ops import and run."""
    code = f"""
import sys
for name in {sorted(HEAVY)!r}:
    sys.modules[name] = None  # importing it raises ImportError
import torch, datc_kernels
case = torch.randn(4, 8), torch.randn(20, 8), torch.arange(4), torch.randn(4, 6), torch.randn(20, 6)
out = datc_kernels.linear_credit(*case)
print(out.credit.shape[0], "datc_train" in sys.modules)
"""
    assert run(code) == "4 False"


def test_k63_no_environment_variable_chooses_the_backend():
    """K63: the code reads no variable of the environment, and setting likely ones does not change the choice."""
    for path in KERNELS:
        text = path.read_text(encoding="utf-8")
        assert "os.environ" not in text, path
        assert "getenv" not in text, path
    code = "import torch; from datc_kernels.dispatch import choose; print(choose(None, torch.device('cpu')))"
    variables = ("DATC_BACKEND", "DATC_KERNELS_BACKEND", "DATC_IMPL", "KERNELS_BACKEND")
    assert run(code, **dict.fromkeys(variables, "reference")) == choose(None, torch.device("cpu"))


# A stage imports types and what is to its left: none of them knows the loop that calls it.
STAGES, RIGHT_OF_THEM = ("rollout", "reward", "credit"), ("loop", "update", "losses", "cli", "metrics", "evaluate", "run_folder")


@pytest.mark.parametrize("stage", STAGES)
def test_stages_of_training_do_not_reach_to_their_right(stage):
    right = {*RIGHT_OF_THEM, *STAGES[STAGES.index(stage) + 1 :]}
    for path in sorted((ROOT / "datc_train" / stage).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = set()
            if isinstance(node, ast.ImportFrom):
                names = {*(node.module or "").split("."), *(alias.name for alias in node.names if not node.module)}
                outside = node.level >= 2 or (node.module or "").startswith("datc_train")
                names = names if outside else set()
            elif isinstance(node, ast.Import):
                names = {part for alias in node.names if alias.name.startswith("datc_train") for part in alias.name.split(".")}
            assert not names & right, f"{path} imports {names & right}"
