"""Pretrained models whose weights are all there and all used: what transformers only reports is an error here.

A causal language model read from a classifier's folder, or a classifier from a language model's, is partly random or partly
left out, and nothing later would show it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")

_SHOWN = 5


def causal_model(name: str | os.PathLike[str], dtype: str | torch.dtype, *, outline: bool = False) -> Any:
    """The causal language model of a folder or a hub name, on the CPU.

    `outline`: on torch's meta device. The checkpoint's names and shapes are read, its numbers are not; nothing is downloaded.

    Raises ValueError for an adapter without its base, for weights that are missing, not used or of another shape, and OSError
    for what holds no model or no weights. What transformers itself says may be missing (a tied head) or left over (a buffer
    that older versions saved) is neither.
    """
    return _load(AutoModelForCausalLM, name, "a causal language model", dtype=dtype, outline=outline)


def classifier(name: str | os.PathLike[str], dtype: str | torch.dtype, *, outline: bool = False) -> Any:
    """The sequence classifier with one label of a folder or a hub name, as `causal_model`.

    A language model's `lm_head` beside its own head is left unread: no score depends on it. Other weights that are not used
    say that the reward is made of more than the classifier's head. Raises as `causal_model`, and ValueError for another
    number of labels.
    """
    _refuse_adapter(name)
    config = classifier_config(name)
    kind = AutoModelForSequenceClassification
    return _load(kind, name, "a trained reward model", unread={"lm_head"}, config=config, dtype=dtype, outline=outline)


def classifier_config(name: str | os.PathLike[str]) -> Any:
    """The config of a classifier with one label; ValueError for another number of them."""
    config = AutoConfig.from_pretrained(name)
    if config.num_labels != 1:
        raise ValueError(
            f"expected a reward model with num_labels=1, got num_labels={config.num_labels} in {name} "
            f"(architectures {config.architectures})"
        )
    return config


def has_weights_here(name: str | os.PathLike[str]) -> bool:
    """Whether an outline can be read: it is a folder, or a hub name whose weights have been downloaded, every shard."""
    if Path(name).is_dir():
        return True
    try:
        found = next((at for file in WEIGHT_FILES if isinstance(at := try_to_load_from_cache(os.fspath(name), file), str)), None)
    except ValueError:  # no name of the hub's: what it is instead is said when it is loaded
        return False
    if found is None or not found.endswith(".index.json"):
        return found is not None
    shards = json.loads(Path(found).read_text(encoding="utf-8"))["weight_map"].values()
    return all(Path(found).with_name(shard).is_file() for shard in shards)


def _load(
    kind: Any, name: str | os.PathLike[str], words: str, *, unread: Collection[str] = (), outline: bool, **options: Any
) -> Any:
    _refuse_adapter(name)
    if outline:
        options |= {"device_map": "meta", "local_files_only": not Path(name).is_dir()}
    with _without_report():
        model, found = kind.from_pretrained(name, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    if getattr(model, "_hf_peft_config_loaded", False):  # of a hub's name
        raise ValueError(_ADAPTER.format(name=name))
    shapes = sorted(f"{key} {list(came)} for {list(needed)}" for key, came, needed in found["mismatched_keys"])
    faults = []
    if random := sorted({*found["missing_keys"]} - {key for key, *_ in found["mismatched_keys"]}):
        faults.append(f"without {_some(random)} ({len(random)} newly initialised)")
    if unused := sorted(key for key in found["unexpected_keys"] if key.split(".")[0] not in unread):
        faults.append(f"with {_some(unused)} ({len(unused)} not used by {type(model).__name__})")
    if shapes:
        faults.append(f"with other shapes: {_some(shapes)}")
    if faults:
        made = ", ".join(model.config.architectures or []) or "of no architecture"
        raise ValueError(f"expected {words}, got a checkpoint {', '.join(faults)} in {name} (its config says {made})")
    return model


_ADAPTER = (
    "expected a whole model, got the adapter {name}: merge it into its base first (datc export RUN, or PEFT's "
    "merge_and_unload), or load both in Python and hand them on there"
)


def _refuse_adapter(name: str | os.PathLike[str]) -> None:
    """Its base would come from wherever it was trained, with a report of the adapter's weights alone."""
    if (Path(name) / "adapter_config.json").is_file():
        raise ValueError(_ADAPTER.format(name=name))


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


@contextmanager
def _without_report() -> Iterator[None]:
    """Without transformers' table of missing and unused weights, whose content the error here has; other words pass."""

    def passes(record: logging.LogRecord) -> bool:
        words = record.getMessage()
        return "LOAD REPORT" not in words or "CONVERSION" in words

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)
