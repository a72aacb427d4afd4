"""What a newcomer runs says nothing that they cannot act on: each in a process of its own, where nothing is silenced yet."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SMALL = "'steps': 1, 'group_size': 2, 'prompts_per_step': 1, 'max_new_tokens': 4, 'report': False"
EXPORT = "from pathlib import Path; from datc_train.export import export; export(Path(str(run)))"


def readme_examples() -> list[str]:
    """The README's blocks that train."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return [block for block in blocks if "from datc_train import train" in block]


def lines(code: str, folder: Path) -> list[str]:
    """What it writes to standard error."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    "code",
    [
        *(
            pytest.param(block + EXPORT, id=f"the README's example {i} and its export")
            for i, block in enumerate(readme_examples())
        ),
        pytest.param(
            f"from datc_train import train\nrun = train({{'policy': 'tiny', 'reward': 'tiny', 'prompts': 'quickstart', "
            f"'gradient_checkpointing': True, {SMALL}}})\n",
            id="gradient checkpointing",
        ),
    ],
)
def test_training_in_python(tmp_path: Path, code: str) -> None:
    said = lines(code, tmp_path)
    assert not [line for line in said if "Warning" in line], said


def test_the_page_has_examples_that_train() -> None:
    assert readme_examples()


def test_the_command_line(tmp_path: Path) -> None:
    words = ["train", "--config", "tiny", "--steps", "1", "--run_dir", "r", "--gradient_checkpointing", "true"]
    assert not lines(f"from datc_train.cli import main; main({words}); main(['export', 'r']); main(['doctor'])", tmp_path)
