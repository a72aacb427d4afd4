"""The README's Python blocks run as they stand, its YAML is a config, its commands and links exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from datc_train.config import config_from

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


INTEGRATIONS = (ROOT / "datc_train" / "integrations" / "README.md").read_text(encoding="utf-8")
PROBE = (ROOT / "datc_train" / "probe" / "README.md").read_text(encoding="utf-8")
PAGES = {"README": README, "integrations": INTEGRATIONS, "probe": PROBE}


@pytest.mark.parametrize(
    ("page", "index"), [(page, i) for page, text in PAGES.items() for i in range(len(blocks("python", text)))]
)
def test_python_blocks_run(page: str, index: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", blocks("python", PAGES[page])[index]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_recipes_are_configs() -> None:
    assert blocks("yaml")
    for block in blocks("yaml"):
        config_from(yaml.safe_load(block))


@pytest.mark.parametrize("path", sorted((ROOT / "datc_train" / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_packaged_recipes_are_configs(path: Path) -> None:
    config_from(yaml.safe_load(path.read_text(encoding="utf-8")))
    assert path.stem in README


def test_commands_and_their_keys_exist() -> None:
    help_text = subprocess.run(
        [sys.executable, "-m", "datc_train", "train", "--help"], capture_output=True, text=True, check=True
    ).stdout
    makefile = (ROOT / "Makefile").read_text()
    commands = "\n".join(blocks("console"))
    assert "make train" in commands
    for target in re.findall(r"^make ([\w-]+)", commands, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for key in re.findall(r"^datc train .*", commands, re.MULTILINE):
        for option in re.findall(r"--(\w+)", key):
            assert option == "help" or f"--{option}" in help_text, option


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
