"""The folder's README: its code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_reward_tiny import chatml_tokenizer, tiny_classifier

import datc_train.reward


def test_code_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(datc_train.reward.__file__).parent / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert blocks
    tokenizer = chatml_tokenizer()
    tiny_classifier("llama", len(tokenizer)).save_pretrained(tmp_path / "my-reward-model")
    tokenizer.save_pretrained(tmp_path / "my-reward-model")
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
