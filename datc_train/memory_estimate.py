"""How much memory a run takes, from its config and the models' shapes alone: an estimate within about a third.

stays        policy, gradient, AdamW's two moments, and the reference where it is a copy; the reward model
of a rollout what credit needs of every token: the reward's gradient [N, K], hidden states [N, D]
passes       the larger of the sampling cache and the activations of an update
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from datc_train.config import Config
from datc_train.credit import METHODS

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    training: int  # policy, gradient, moments, reference
    reward: int  # the reward models, and their embedding tables where they are joined or cross to another device
    rollout: int
    cache: int
    activations: int

    @property
    def total(self) -> int:
        return self.training + self.reward + self.rollout + max(self.cache, self.activations)


def training_bytes(config: Config, parameters: int, trainable: int) -> int:
    """What training holds of a policy of so many parameters, and with LoRA of an adapter of `trainable` ones beside them.

    With LoRA the base is frozen and its own reference; adapter, gradient and two moments are float32. Full fine-tuning has
    weights, gradient and two moments in the policy's dtype, and with beta > 0 the weights that it started from.
    """
    size = SIZES[config.dtype]
    if config.lora is None:
        return parameters * size * (4 + (config.beta > 0))
    return parameters * size + trainable * 4 * 4


def estimate(config: Config, policy: Any, reward: Any, trainable: int) -> Memory:
    """policy, reward: models of transformers, on the meta device if need be; of several reward models a list."""
    size, method = SIZES[config.dtype], METHODS[config.method]
    rewards = reward if isinstance(reward, list) else [reward]
    p = sum(x.numel() for x in policy.parameters())
    r = sum(x.numel() for one in rewards for x in one.parameters())
    settings = policy.config.get_text_config()
    layers, hidden = settings.num_hidden_layers, settings.hidden_size
    head = getattr(settings, "head_dim", None) or hidden // settings.num_attention_heads
    kv_width = getattr(settings, "num_key_value_heads", settings.num_attention_heads) * head
    responses = config.prompts_per_step * config.group_size
    rows = min(config.sample_batch_size, responses)
    width = getattr(settings, "intermediate_size", 4 * hidden)
    tokens = config.micro_batch_tokens
    layer = tokens * (6 * hidden + 4 * width) * size
    tables = [one.get_input_embeddings().weight for one in rewards]
    width_of_all = sum(table.shape[1] for table in tables)
    of_token = width_of_all * method.needs_reward_gradient
    table = min((len(table) for table in tables), default=0) * width_of_all
    copies = (len(tables) > 1) + (config.reward_device is not None)  # side by side, and on the policy's device
    of_token += hidden * (method.needs_base_hidden + (method.needs_hidden and method.needs_rollout))
    return Memory(
        training=training_bytes(config, p, trainable),
        reward=r * size + (copies * table * size if method.needs_reward_gradient else 0),
        rollout=responses * config.max_new_tokens * of_token * size,
        cache=2 * layers * kv_width * size * rows * (config.max_new_tokens + 256),
        activations=tokens * hidden * layers * size + 2 * layer if config.gradient_checkpointing else layers * layer,
    )
