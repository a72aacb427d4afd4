"""The folder of a run: what it was asked, what it measured, what it learned."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from datc_train.config import Config


def check_free(config: Config) -> None:
    """Raises FileExistsError for a `run_dir` that exists: before models load, not after."""
    if config.run_dir is not None and Path(config.run_dir).exists():
        raise FileExistsError(f"run_dir: {config.run_dir} exists; choose another folder, a run never overwrites one")


class RunFolder:
    """Creates the folder; a run never writes into another's. Raises as `check_free`, OSError where it cannot be written."""

    def __init__(self, config: Config) -> None:
        if config.run_dir is not None:
            check_free(config)
            self.path = Path(config.run_dir)
            self.path.mkdir(parents=True)
        else:
            self.path = _new_folder(Path("runs"), f"{time.strftime('%Y%m%d-%H%M%S')}-{config.method}")
        # The schedule's length as well: going on for more steps must not stretch it.
        resolved = config.to_dict() | {"run_dir": str(self.path), "schedule_steps": config.schedule_steps or config.steps}
        (self.path / "config.yaml").write_text(yaml.safe_dump(resolved, sort_keys=False), encoding="utf-8")

    def append(self, name: str, lines: list[dict[str, Any]]) -> None:
        """Append to a file of JSON lines, flushed; a NaN is a fault, not a value."""
        with (self.path / name).open("a", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")

    def save_checkpoint(self, step: int, model: Any, tokenizer: Any, state: dict[str, Any]) -> Path:
        """checkpoints/<step>/: PEFT's or transformers' own files, `trainer_state.pt` beside them; whole or not there."""
        final = self.path / "checkpoints" / f"{step:06d}"
        temporary = final.with_name(final.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        options = {"save_embedding_layers": False} if hasattr(model, "peft_config") else {}
        model.save_pretrained(temporary, **options)
        tokenizer.save_pretrained(temporary)
        torch.save(state, temporary / "trainer_state.pt")
        os.replace(temporary, final)
        return final


def _new_folder(parent: Path, name: str) -> Path:
    for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
        path = parent / (name + suffix)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"run_dir: a thousand runs called {parent / name} exist")
