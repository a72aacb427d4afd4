"""Checkpoints: written whole or not at all, kept in a bounded number, and read back into a run that goes on.

checkpoints/<step, six digits>/    PEFT's or transformers' own files, the tokenizer's, and trainer_state.pt
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import load_peft_weights, set_peft_model_state_dict
from safetensors import SafetensorError
from torch import Tensor

from datc_train.disk import written

STATE = "trainer_state.pt"


def save_checkpoint(run: Path, step: int, model: Any, tokenizer: Any, optimizer: Any, schedule: Any) -> Path:
    """Everything that going on from `step` needs; the folder appears under its name only when it is on the disk.

    Raises OSError that names the last whole checkpoint where this one cannot be written.
    """
    final = _folder(run) / f"{step:06d}"
    temporary = final.with_name(final.name + ".tmp")
    whole = checkpoints(run)
    hint = f"{run} has none yet; --resume auto begins it again"
    if whole:
        hint = f"the last whole one is {whole[-1]}, from which --resume auto goes on"
    try:
        with written(f"the checkpoint of step {step}", hint):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            options = {"save_embedding_layers": False} if hasattr(model, "peft_config") else {}
            model.save_pretrained(temporary, **options)
            tokenizer.save_pretrained(temporary)
            state = {
                "step": step,
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "random": random_state(),
            }
            with (temporary / STATE).open("wb") as file:  # given a path, torch does not say why it cannot write
                torch.save(state, file)
            _sync(temporary)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(temporary, final)
            _sync_folder(final.parent)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def checkpoints(run: Path) -> list[Path]:
    """The run's whole checkpoints, oldest first."""
    folder = _folder(run)
    return sorted(p for p in folder.iterdir() if p.name.isdecimal()) if folder.is_dir() else []


def prune(run: Path, keep: int | None, also: Collection[int | None]) -> None:
    """Delete all but the newest `keep` checkpoints (None: none is deleted), those of the steps in `also`; leftovers too."""
    if not _folder(run).is_dir():
        return
    with written(_folder(run)):
        for leftover in _folder(run).glob("*.tmp"):
            shutil.rmtree(leftover)
        for path in checkpoints(run)[: -keep if keep else 0]:
            if int(path.name) not in also:
                doomed = path.with_name(path.name + ".tmp")  # a half-deleted folder must not look like a checkpoint
                os.replace(path, doomed)
                shutil.rmtree(doomed)


def restore(path: Path, model: Any, optimizer: Any, schedule: Any) -> None:
    """Put a checkpoint's weights, optimizer, schedule and random states in place, bit for bit.

    Raises ValueError for a checkpoint that cannot be read or does not fit the model.
    """
    adapter = hasattr(model, "peft_config")
    with readable(path):
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
        weights = load_peft_weights(str(path), device="cpu") if adapter else None
        saved = None if adapter else type(model).from_pretrained(path, dtype=model.dtype)
    try:
        if weights is not None:
            result = set_peft_model_state_dict(model, weights)
            if result.unexpected_keys:
                raise ValueError(f"unexpected {result.unexpected_keys[0]}")
        elif saved is not None:
            model.load_state_dict(saved.state_dict())
        optimizer.load_state_dict(state["optimizer"])
    except (ValueError, RuntimeError, KeyError) as error:
        raise ValueError(f"resume: {path} does not fit this policy: {error}") from error
    schedule.load_state_dict(state["schedule"])
    set_random_state(state["random"])


@contextmanager
def readable(checkpoint: Path) -> Iterator[None]:
    """ValueError that names the checkpoint, and those before it, where a file of it is damaged."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        others = [str(path) for path in checkpoints(checkpoint.parent.parent) if path != checkpoint]
        hint = f"without it the run goes on from {others[-1]}" if others else "the run has no other"
        raise ValueError(f"checkpoint: {checkpoint} cannot be read ({error}); {hint}") from error


def check_room(run: str | Path | None, parameters: Collection[Tensor], keep: int | None) -> None:
    """Raises OSError where the disk has no room for the checkpoints that will be kept: weights and two moments each."""
    one = 3 * sum(p.numel() * p.element_size() for p in parameters) + 16 * 2**20
    run = Path("runs" if run is None else run)
    there = next((folder for folder in (run, *run.absolute().parents) if folder.is_dir()), Path("/"))
    needed, free = one * ((keep or 1) + 2), shutil.disk_usage(there).free
    if free < needed:
        raise OSError(f"run_dir: expected {needed / 2**30:.2f} GiB of free disk for checkpoints in {run}, got {free / 2**30:.2f}")


def random_state() -> dict[str, Any]:
    """Python's, NumPy's and torch's global generators. Sampling and data use none of them; reward functions may."""
    name, words, *rest = np.random.get_state()  # noqa: NPY002 - the global generator is what is meant
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(words, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    name, words, *rest = state["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _folder(run: Path) -> Path:
    return run / "checkpoints"


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
