"""The quickstart's reward model: the lower half of SmolLM2-135M-Instruct with a low-rank change and a score head.

Only the change is shipped, `reward_model/model.safetensors`: for each adapted projection of a layer its LoRA factors
A [r, in] and B [out, r], the final norm and the score head. The rest comes from the policy's converted folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, DynamicCache, LlamaForSequenceClassification
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from datc_train.quickstart.smollm2 import GGUF_SHA256, policy_path, verify_sha256
from datc_train.quickstart.tiny import float32_head

FOLDER = Path(__file__).with_name("reward_model")


def load_reward_model(
    dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", folder: Path = FOLDER
) -> tuple[LlamaForSequenceClassification, Any]:
    """The frozen reward model in eval mode and its tokenizer (the policy's). The head stays in float32.

    The change is merged in float32 before the cast to `dtype`.

    Raises:
        RuntimeError: the weights are not those that config.json names, or belong to another base model.
    """
    config = json.loads((folder / "config.json").read_text())
    if config["base_sha256"] != GGUF_SHA256:
        raise RuntimeError(f"{folder} was trained on another base model: {config['base_sha256']}, have {GGUF_SHA256}")
    verify_sha256(folder / "model.safetensors", config["weights_sha256"])
    model = backbone(config["layers"])
    merge(model, load_file(folder / "model.safetensors"), config["lora_alpha"] / config["lora_rank"])
    return float32_head(model.to(device, dtype)).eval().requires_grad_(False), AutoTokenizer.from_pretrained(policy_path())


def load_untrained_reward_model(
    layers: int | None = None, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[LlamaForSequenceClassification, Any]:
    """The policy's first `layers` layers (None: all) under a random head, and its tokenizer: for measuring time."""
    model = backbone(layers or AutoConfig.from_pretrained(policy_path()).num_hidden_layers)
    model.score.weight.data.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(0))
    return float32_head(model.to(device, dtype)).eval().requires_grad_(False), AutoTokenizer.from_pretrained(policy_path())


def backbone(layers: int) -> LlamaForSequenceClassification:
    """The policy's embeddings, first `layers` layers and final norm in float32 under a score head of zeros."""
    config = AutoConfig.from_pretrained(policy_path(), num_hidden_layers=layers, num_labels=1, dtype="float32")
    with torch.device("meta"):
        model = LlamaForSequenceClassification(config)
    with safe_open(policy_path() / "model.safetensors", framework="pt") as file:
        state = {name: file.get_tensor(name) for name in model.state_dict() if name != "score.weight"}
    state["score.weight"] = torch.zeros(1, config.hidden_size)
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # its buffers are not in the state dict
    return model


@torch.no_grad()
def merge(model: LlamaForSequenceClassification, delta: dict[str, Tensor], scale: float) -> None:
    """Add scale * B A to every adapted projection, and take over the final norm and the head."""
    parameters = dict(model.named_parameters())
    for name, value in delta.items():
        if name.endswith(".lora_A"):
            module = name.removesuffix(".lora_A")
            parameters[f"{module}.weight"] += scale * delta[f"{module}.lora_B"].float() @ value.float()
        elif not name.endswith(".lora_B"):
            parameters[name].copy_(value)


def score_group(model: Any, tokenizer: Any, prompt: str, responses: list[str]) -> Tensor:  # [len(responses)]
    """Scores of several responses to one prompt; the prompt's keys and values are computed once.

    A row is the chat template of prompt and response, `<|im_end|>` and newline included, pooled at its last token.
    """
    question = [{"role": "user", "content": prompt}]
    prefix = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    rows = [
        tokenizer.apply_chat_template([*question, {"role": "assistant", "content": text}], return_dict=False)
        for text in responses
    ]
    if any(row[: len(prefix)] != prefix for row in rows):
        raise ValueError("responses: expected text that does not merge with the newline before it")
    device = model.device
    cache = DynamicCache(config=model.config)
    model.model(torch.tensor([prefix], device=device), None, None, cache, use_cache=True)
    cache.batch_repeat_interleave(len(rows))
    lengths = [len(row) - len(prefix) for row in rows]
    ids = torch.full((len(rows), max(lengths)), tokenizer.pad_token_id)
    for index, row in enumerate(rows):
        ids[index, : lengths[index]] = torch.tensor(row[len(prefix) :])
    ends = torch.tensor(lengths, device=device)
    columns = torch.arange(len(prefix) + ids.shape[1], device=device)
    mask = (columns < len(prefix) + ends[:, None]).long()
    hidden = model.model(ids.to(device), mask, None, cache, use_cache=True).last_hidden_state
    pooled = hidden[torch.arange(len(rows), device=device), ends - 1]
    return model.score(pooled).squeeze(-1).float()
