"""A training policy, for a while, as a sampler wants it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from datc_train.modes import evaluating


@contextmanager
def sampling_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, gradient checkpointing off, cache on, no gradient, and a blank `generation_config`; all of it is
    as it was afterwards, module by module, whatever happens inside.

    The blank config is there because `generate` fills every knob that its caller left at None from the model's own:
    suppressed tokens, bad words, a minimum length and the like cannot be passed as "none" in any other way.
    """
    modules = list(model.modules())
    saved: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        saved.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    try:
        for module in modules:
            own = vars(module)  # a wrapper (PEFT's) also answers for the attributes of what it wraps
            if own.get("gradient_checkpointing") is True:
                replace(module, "gradient_checkpointing", False)
            if own.get("generation_config") is not None:
                replace(module, "generation_config", GenerationConfig())
            config = own.get("config")
            if getattr(config, "use_cache", None) is False:
                replace(config, "use_cache", True)
        with torch.no_grad(), evaluating(model):
            yield
    finally:
        for owner, name, value in reversed(saved):
            setattr(owner, name, value)
