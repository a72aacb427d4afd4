"""For which models a shared prefix gives the numbers of whole rows."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from datc_train.modes import evaluating
from datc_train.prefix.past import backbone_hidden, cache_argument, read_prefixes, rest_rows

# Layers that keep past keys and values as they are. What compresses, quantises or sums up its past is not taken apart.
_PLAIN = (DynamicLayer, DynamicSlidingWindowLayer)
_READS_ON: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
_PROBED, _ENOUGH = 24, 8  # tokens
# Relative difference of hidden states. Rounding stays well below; keys and values that a token should not have seen, or
# should have and did not, change them by about their own size.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}


def why_not_shared(backbone: nn.Module, ids: Sequence[int], device: torch.device) -> str | None:
    """What about the model, as it is set up now, makes a shared prefix inexact; None where nothing does.

    Its parts are looked at every time, for a model may start to checkpoint its activations; how it reads on from a cache is
    tried once a model, on the first of these ids (of the longest row, best), without dropout and autocast, whose noise would
    look like a difference. Fewer than eight ids decide for themselves alone.
    """
    reason = _by_its_parts(backbone)
    if reason is None and len(ids) > 1:
        reads_on = _READS_ON.get(backbone)
        if reads_on is None:
            reads_on = _reads_on(backbone, ids, device)
            if len(ids) >= _ENOUGH:
                _READS_ON[backbone] = reads_on
        if not reads_on:
            reason = "it does not read on from a cache as it reads a whole row"
    return reason


def _by_its_parts(backbone: nn.Module) -> str | None:
    config: Any = backbone.config
    text_config = config.get_text_config(decoder=True)
    parameters = inspect.signature(backbone.forward).parameters
    if cache_argument(backbone) not in parameters:
        return f"{type(backbone).__name__} takes no cache"
    if not getattr(text_config, "is_causal", True) or getattr(text_config, "use_bidirectional_attention", None):
        return "its attention is bidirectional"
    for module in backbone.modules():
        if getattr(module, "is_causal", True) is False:
            return f"the attention of {type(module).__name__} is bidirectional"
        if module.training and getattr(module, "gradient_checkpointing", False):
            return f"{type(module).__name__} checkpoints its activations in training mode, which drops the cache"
    kinds = set(getattr(text_config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds or getattr(text_config, "attention_chunk_size", None):
        return f"its layers are of kinds that are not known here ({', '.join(sorted(kinds)) or 'chunked attention'})"
    by_length = sorted({"dynamic", "longrope"} & set(_rope_types(text_config)))
    if by_length:  # keys in the cache would keep the frequencies of a shorter row
        return f"its rotary frequencies depend on the row's length ({', '.join(by_length)})"
    layers = DynamicCache(config=config).layers
    strange = next((layer for layer in layers if type(layer) not in _PLAIN), None)
    if strange is not None or not layers:
        return f"its cache is of a kind that is not known here ({type(strange).__name__ if layers else 'no layers'})"
    return None


def _rope_types(text_config: Any) -> Iterator[str]:
    """Of all layers; some models keep a setting for every kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        settings = getattr(text_config, name, None)
        for one in (settings, *settings.values()) if isinstance(settings, dict) else ():
            if isinstance(one, dict):
                yield str(one.get("rope_type", one.get("type")))


def _reads_on(backbone: nn.Module, ids: Sequence[int], device: torch.device) -> bool:
    """Whether the model reads the second half of a row after the first as it reads both at once: tried on these ids."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False), evaluating(backbone):
        return _same_after_a_cut(backbone, list(ids[:_PROBED]), device)


def _same_after_a_cut(backbone: nn.Module, ids: list[int], device: torch.device) -> bool:
    cut = len(ids) // 2
    whole = rest_rows([ids], None, device)
    at_once = backbone_hidden(backbone, None, whole)[:, cut:]
    past = read_prefixes(backbone, [ids[:cut]], device)
    rest = rest_rows([ids[cut:]], past, device)
    after = backbone_hidden(backbone, None, rest, past.cache)
    if any(layer.get_seq_length() != len(ids) for layer in past.cache.layers):
        return False
    difference, size = (after - at_once).float().norm().item(), at_once.float().norm().item()
    return not difference > _TOLERANCE.get(after.dtype, 0.15) * size
