"""Random two-layer Llamas over one small tokenizer: offline, built in milliseconds, for tests and smoke runs."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2, as in SmolLM2
VOCAB_SIZE = 512  # 3 special tokens, 256 bytes, 253 merges

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

MERGE_TEXT = """
A short note on a small garden. In the morning we water the plants, because the sun is still low and the ground keeps
the water for longer. Tomatoes want warmth, beans want something to climb, and lettuce is happiest in the shade of the
other two. If you have only one hour in the week, spend it on weeding; everything else can wait until the weekend.
My neighbour asked me how to start. I told her to begin with three pots on the balcony: one with mint, one with basil,
and one with whatever she likes to eat. She would learn when the soil is dry, which leaves turn yellow and why, and what
the birds do when nobody is looking. The rest comes with time, with questions, and with a few mistakes that are not
worth worrying about. Please write to us when your first harvest is on the table, and thank you for reading.
You can help the user with this: what should they do first, how much does it cost, and where could they find more?
"""


def load_tiny_policy(
    seed: int = 0, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[LlamaForCausalLM, Any]:
    """A random policy: 2 layers, hidden 64, 2 heads of 32, tied head. In eval mode; the global RNG is untouched."""
    tokenizer = tiny_tokenizer()
    return _random_model(LlamaForCausalLM, _config(64, 2, tokenizer), seed).to(device, dtype), tokenizer


def load_tiny_reward_model(
    seed: int = 1, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[LlamaForSequenceClassification, Any]:
    """A random reward model: 2 layers, hidden 96, 3 heads of 32, one float32 score; frozen, in eval mode."""
    tokenizer = tiny_tokenizer()
    model = _random_model(LlamaForSequenceClassification, _config(96, 3, tokenizer, num_labels=1), seed)
    return float32_head(model.to(device, dtype)).requires_grad_(False), tokenizer


def float32_head(model: LlamaForSequenceClassification) -> LlamaForSequenceClassification:
    """Keep the score head in float32 under a backbone of any dtype; what comes in is cast on the way."""
    model.score.float()
    model.score.register_forward_pre_hook(_to_float32)
    return model


def _to_float32(module: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(arg.float() for arg in args)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a ChatML template; EOS `<|im_end|>` (2), pad `<|endoftext|>` (0), left padding."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_tokenizer_json()),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


@cache
def _tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([MERGE_TEXT], trainer)
    return tokenizer.to_str()


def _config(hidden: int, heads: int, tokenizer: Any, **extra: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=2048,
        initializer_range=0.05,  # wide enough that the logits are not flat
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **extra,
    )


def _random_model(kind: Any, config: LlamaConfig, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(config).eval()
