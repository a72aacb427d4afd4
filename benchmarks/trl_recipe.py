"""TRL's trainers on a recipe of this package: the models, prompts and settings that `datc train` would take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from datc_train.config import Config
from datc_train.models import load_causal, load_reward, resolve_device
from datc_train.types import Prompt


def make_trainer(
    kind: type[GRPOTrainer], config: Config, prompts: Sequence[Prompt], folder: Path, extra: dict[str, Any], **options: Any
) -> GRPOTrainer:
    """`kind` with an adapter, a RewardModel and one optimizer step a rollout.

    Args:
        folder: TRL's output_dir.
        extra: further arguments of the trainer, such as `datc`.
        options: further arguments of GRPOConfig; what stands there wins.
    """
    device = resolve_device(config.device)
    model, tokenizer = load_causal(config.policy, getattr(torch, config.dtype), device)
    if config.lora is None:
        raise ValueError("lora: expected an adapter's settings, got null")
    settings: dict[str, Any] = {
        "per_device_train_batch_size": config.prompts_per_step * config.group_size,
        "num_generations": config.group_size,
        "max_completion_length": config.max_new_tokens,
        "temperature": config.temperature,
        "max_steps": config.steps,
        "learning_rate": config.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.max_grad_norm,
        "beta": config.beta,
        "loss_type": "grpo",
        "gradient_checkpointing": config.gradient_checkpointing,
        "use_cpu": device.type == "cpu",
        "bf16": config.dtype == "bfloat16",
        "seed": config.seed,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
    }
    trainer = kind(
        model=model,
        reward_funcs=[load_reward(config, device, tokenizer)],
        args=GRPOConfig(output_dir=str(folder), **settings | options),
        train_dataset=Dataset.from_list([{"prompt": prompt.messages} for prompt in prompts]),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=config.lora.r, lora_alpha=config.lora.alpha, lora_dropout=0.0, target_modules=config.lora.target_modules
        ),
        **extra,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
