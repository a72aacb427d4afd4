"""For which models a shared prefix gives the numbers of whole rows."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from datc_train.reward.scorer import Scorer, cache_argument
from datc_train.reward.shared_prefix import read_prefixes

# Layers that keep past keys and values as they are. What compresses, quantises or sums up its past is not taken apart.
_PLAIN = (DynamicLayer, DynamicSlidingWindowLayer)
_PROBED = 24  # tokens
# Relative difference of hidden states. Rounding stays well below; keys and values that a token should not have seen, or
# should have and did not, change them by about their own size.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}


def why_not_shared(scorer: Scorer) -> str | None:
    """What about the model, as it is set up now, makes a shared prefix inexact; None where nothing does."""
    config: Any = scorer.backbone.config
    text_config = config.get_text_config(decoder=True)
    parameters = inspect.signature(scorer.backbone.forward).parameters
    if cache_argument(scorer.backbone) not in parameters:
        return f"{type(scorer.backbone).__name__} takes no cache"
    if not getattr(text_config, "is_causal", True) or getattr(text_config, "use_bidirectional_attention", None):
        return "its attention is bidirectional"
    for module in scorer.backbone.modules():
        if getattr(module, "is_causal", True) is False:
            return f"the attention of {type(module).__name__} is bidirectional"
        if module.training and getattr(module, "gradient_checkpointing", False):
            return f"{type(module).__name__} checkpoints its activations in training mode, which drops the cache"
    kinds = set(getattr(text_config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds or getattr(text_config, "attention_chunk_size", None):
        return f"its layers are of kinds that are not known here ({', '.join(sorted(kinds)) or 'chunked attention'})"
    layers = DynamicCache(config=config).layers
    strange = next((layer for layer in layers if type(layer) not in _PLAIN), None)
    if strange is not None or not layers:
        return f"its cache is of a kind that is not known here ({type(strange).__name__ if layers else 'no layers'})"
    return None


@torch.no_grad()
def reads_on_from_a_cache(scorer: Scorer, ids: Sequence[int]) -> bool:
    """Whether the model reads the second half of a row after the first as it reads both at once: tried on these ids."""
    ids = list(ids[:_PROBED])
    cut = len(ids) // 2
    if not cut:
        return True
    inputs = scorer.embedding(torch.tensor([ids], device=scorer.device))
    positions = torch.arange(len(ids), device=scorer.device)[None]
    mask = torch.ones_like(positions)
    at_once = scorer.hidden(inputs, mask, positions)[:, cut:].float()
    past = read_prefixes(scorer, [tuple(ids[:cut])])
    after = scorer.hidden(inputs[:, cut:], mask, positions[:, cut:], past.cache).float()
    if any(layer.get_seq_length() != len(ids) for layer in past.cache.layers):
        return False
    difference, size = (after - at_once).norm().item(), at_once.norm().item()
    return not difference > _TOLERANCE.get(inputs.dtype, 0.15) * size
