"""A sequence classifier taken apart: checked, frozen, and its embedding as a table."""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from datc_train.reward.scorer import Scorer

_ROWS_AT_A_TIME = 16_384


def take_apart(model: nn.Module, *, outline: bool = False) -> Scorer:
    """Embedding, backbone and score head of a `...ForSequenceClassification` with one label.

    Adapters on top (PEFT) are looked through. The model is put in evaluation mode and its parameters are frozen. An `outline`
    may lie on torch's meta device.

    Raises:
        ValueError: num_labels is not 1; no `score` head or backbone; an embedding that is absent, quantised, sharded,
            flattened or not in memory.
    """
    inner: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    name = type(inner).__name__
    labels = getattr(inner.config, "num_labels", None)
    if labels != 1:
        raise ValueError(f"model: expected a reward model with num_labels=1, got {name} with num_labels={labels}")
    head, backbone = getattr(inner, "score", None), getattr(inner, inner.base_model_prefix or "model", None)
    if not isinstance(head, nn.Module) or not isinstance(backbone, nn.Module):
        raise ValueError(f"model: expected a sequence classifier with a backbone and a head `score`, got {name}")
    embedding = inner.get_input_embeddings()
    weight = getattr(embedding, "weight", None)
    if not isinstance(weight, Tensor):
        raise ValueError(f"model: expected an input embedding with a weight, got {type(embedding).__name__} in {name}")
    if isinstance(weight, DTensor):
        raise ValueError("model: expected a whole input embedding, got a sharded one (DTensor): gather it first")
    if not weight.is_floating_point() or weight.ndim != 2 or not weight.numel() or (weight.is_meta and not outline):
        raise ValueError(
            "model: expected a floating-point [rows, hidden] input embedding in memory, got "
            f"{weight.dtype} {list(weight.shape)} on {weight.device}; a quantised embedding has no gradient to read"
        )
    if weight.is_inference():
        raise ValueError("model: expected one made outside torch.inference_mode(), whose tensors can carry a gradient")
    model.requires_grad_(False)
    model.eval()
    return Scorer(embedding, backbone, head, weight.shape[0], weight.device)


def embedding_table(embedding: nn.Module) -> Tensor:
    """[rows, K] what the module returns for every id, detached.

    A plain `nn.Embedding` returns its weight's rows: the weight itself, no copy. Any other (scaled, adapted, hooked) is
    asked.
    """
    weight: Tensor = embedding.weight  # type: ignore[assignment]
    plain = type(embedding) is nn.Embedding and embedding.max_norm is None
    if plain and not embedding._forward_hooks and "forward" not in vars(embedding):
        return weight.detach()
    ids = torch.arange(weight.shape[0], device=weight.device)
    with torch.no_grad():
        return torch.cat([embedding(chunk) for chunk in ids.split(_ROWS_AT_A_TIME)])
