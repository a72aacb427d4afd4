"""The sampler that a config asks for."""

from __future__ import annotations

from typing import Any

from datc_train.config import Config
from datc_train.policy import Policy
from datc_train.rollout.sampler import Sampler
from datc_train.rollout.transformers_sampler import TransformersSampler
from datc_train.rollout.vllm_sampler import EngineSettings, VllmSampler


def make_sampler(config: Config, actor: Policy, base: str | None = None) -> Sampler:
    """Groups of `config.group_size`. `base`: where the policy's own model can be loaded from, None where nowhere (vLLM)."""
    options: dict[str, Any] = {
        "group_size": config.group_size,
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "max_batch_size": config.sample_batch_size,
        "max_prompt_tokens": config.max_prompt_tokens,
        "chat_template_kwargs": config.chat_template_kwargs,
    }
    if config.sampler == "transformers":
        return TransformersSampler(actor.model, actor.tokenizer, **options)
    settings = EngineSettings(
        memory=config.vllm_memory,
        max_model_len=config.vllm_max_model_len,
        devices=None if config.vllm_devices is None else tuple(config.vllm_devices),
        enforce_eager=config.vllm_enforce_eager,
        sleep=config.vllm_sleep,
        timeout=config.vllm_timeout,
    )
    return VllmSampler(actor.model, actor.tokenizer, base=base, settings=settings, **options)
