"""The policy's weights on disk, a folder a version, for an engine that reads them from there.

engine/base/              the model under an adapter, where it comes from no folder of its own
engine/versions/<step>/   adapters, or whole models; the newest ones

All of it can be made anew from a checkpoint: it goes when the sampler closes, and when a run goes on that was killed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from datc_train.disk import written


class Versions:
    """Folders that appear under their names only when they are whole, and never twice under the same one."""

    def __init__(self, root: Path, *, keep: int = 2) -> None:
        self.root = root
        self.keep = keep
        self.clear()
        with written(f"sampler: the engine's folder {root}"):
            (root / "versions").mkdir(parents=True)

    def write(self, version: int, save: Callable[[Path], None]) -> Path:
        """The folder that `save` filled, `versions/<version>`; older ones than the newest `keep` go.

        Raises OSError that names the version where it cannot be written, FileExistsError for one that was written before.
        """
        folder = self.root / "versions" / f"{version:06d}"
        if folder.exists():
            raise FileExistsError(f"version: expected one that was not written yet, got {folder}")
        self._fill(folder, save)
        whole = sorted(path for path in folder.parent.iterdir() if path.name.isdecimal())
        for path in whole[: -self.keep]:
            shutil.rmtree(path)
        return folder

    def base(self, save: Callable[[Path], None]) -> Path:
        """The folder `base`, filled by `save` the first time."""
        folder = self.root / "base"
        if not folder.exists():
            self._fill(folder, save)
        return folder

    def clear(self) -> None:
        for name in ("base", "base.tmp", "versions"):
            shutil.rmtree(self.root / name, ignore_errors=True)

    def _fill(self, folder: Path, save: Callable[[Path], None]) -> None:
        temporary = folder.with_name(folder.name + ".tmp")
        try:
            with written(f"sampler: the engine's weights in {folder}"):
                shutil.rmtree(temporary, ignore_errors=True)
                save(temporary)
                os.replace(temporary, folder)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def save_base(model: Any, folder: Path) -> None:
    """The model under the adapter of `model`, untouched by it: nothing is merged."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    state: dict[str, Tensor] = {
        name.replace(".base_layer.", "."): value
        for name, value in base.state_dict().items()
        if not any(part.startswith("lora_") for part in name.split("."))
    }
    base.save_pretrained(folder, state_dict=state)


def save_whole(model: Any, folder: Path, *, untied: bool = False) -> None:
    """Every weight. `untied`: with a head of its own where embedding and head are one, and a config that says so."""
    if not (untied and model.config.get_text_config().tie_word_embeddings):
        model.save_pretrained(folder)
        return
    head = model.get_output_embeddings().weight
    state = {name: value.clone() if value.data_ptr() == head.data_ptr() else value for name, value in model.state_dict().items()}
    configs = {id(config): config for config in (model.config, model.config.get_text_config())}.values()
    try:
        for config in configs:
            config.tie_word_embeddings = False
        model.save_pretrained(folder, state_dict=state)
    finally:
        for config in configs:
            config.tie_word_embeddings = True


def save_adapter(model: Any, folder: Path) -> None:
    """The active adapter in PEFT's own files, at the top of `folder`."""
    name = model.active_adapter
    model.save_pretrained(folder, save_embedding_layers=False, selected_adapters=[name])
    if name != "default":  # PEFT puts it one folder down
        for path in (folder / name).iterdir():
            os.replace(path, folder / path.name)


def check_adapter(model: Any) -> None:
    """Raises ValueError for an adapter that vLLM would not serve as it is."""
    adapters = model.active_adapters
    if len(adapters) != 1:
        raise ValueError(f"sampler: vllm serves one active adapter, got {', '.join(adapters)}")
    settings = model.peft_config[adapters[0]]
    kind = str(getattr(settings.peft_type, "value", settings.peft_type))
    wrong = {
        "peft_type": kind if kind != "LORA" else None,
        "use_dora": getattr(settings, "use_dora", False),
        "bias": settings.bias if getattr(settings, "bias", "none") != "none" else None,
        "modules_to_save": getattr(settings, "modules_to_save", None),
        "rank_pattern": getattr(settings, "rank_pattern", None),
        "alpha_pattern": getattr(settings, "alpha_pattern", None),
        "target_parameters": getattr(settings, "target_parameters", None),
    }
    for name, value in wrong.items():
        if value:
            raise ValueError(f"sampler: vllm serves plain LoRA of one rank, got an adapter with {name}={value}")
