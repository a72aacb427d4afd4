"""The small tokenizers and classifiers that the reward tests stand on, and that they are what those tests take them for."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_SPECIALS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
QWEN_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPLIT = LLAMA_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
CORPUS = [
    "Hello there, how are you today? I am fine.\n\nThank you very much. The answer is 123 and 4567.\n",
    "user assistant system think <think>\n\n</think>\n\nThe quick brown fox jumps over the lazy dog.\n",
    "Grüße aus München: naïve café 🙂🙂 👍 はい. What is the capital of France? Paris.\n\n\n1 22 333 4444",
] * 3

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3"]


def trl_template(name: str) -> str:
    """A chat template as the `trl` package carries it."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl, whose folder holds the chat templates, is not installed")
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def finish(
    inner: Tokenizer, specials: list[str], *, bos: str | None, eos: str, template: str, adds_bos: bool
) -> PreTrainedTokenizerFast:
    """Special tokens, BOS and chat template on top of a bare tokenizer."""
    inner.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in specials])
    if adds_bos:
        assert bos is not None
        inner.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, inner.token_to_id(bos))])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=bos, eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def byte_level(split: str, size: int = 420) -> Tokenizer:
    """Byte-level BPE trained on a few lines: all 256 bytes and some words."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(CORPUS, trainer)
    return inner


def built_once(make: Callable[[], PreTrainedTokenizerFast]) -> Callable[[], PreTrainedTokenizerFast]:
    """A copy at each call: a test may set a pad token on its own."""
    made = cache(make)
    return wraps(make)(lambda: copy.deepcopy(made()))


@built_once
def chatml_tokenizer() -> PreTrainedTokenizerFast:
    """No BOS of its own; like SmolLM2's it calls `<|im_start|>` its BOS all the same; no pad token."""
    return finish(byte_level(QWEN_SPLIT), QWEN_SPECIALS, bos="<|im_start|>", eos="<|im_end|>", template=CHATML, adds_bos=False)


@built_once
def qwen3_tokenizer() -> PreTrainedTokenizerFast:
    """Small vocabulary under Qwen3's template; pad is EOS."""
    tokenizer = finish(
        byte_level(QWEN_SPLIT),
        QWEN_SPECIALS,
        bos=None,
        eos="<|im_end|>",
        template=trl_template("qwen3"),
        adds_bos=False,
    )
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@built_once
def llama_tokenizer() -> PreTrainedTokenizerFast:
    """Small vocabulary under Llama 3.1's template: tokenizer and template each bring a BOS."""
    return finish(
        byte_level(LLAMA_SPLIT),
        LLAMA_SPECIALS,
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        template=trl_template("llama3_1"),
        adds_bos=True,
    )


@built_once
def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """SentencePiece-like: ▁ for blanks, one put in front of each text, bytes as <0xXX>."""
    words = ["▁Hello", "▁there", "▁fine", "▁I", "▁am", "▁", "H", "e", "l", "o", "user", "assistant", ".", "\n", "1"]
    vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    inner = Tokenizer(
        models.Unigram([(word, -1.0 - 0.1 * (len(word) == 1)) for word in vocabulary], unk_id=0, byte_fallback=True)
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return finish(inner, ["<s>", "</s>"], bos="<s>", eos="</s>", template="{{ bos_token }}" + CHATML, adds_bos=True)


def tiny_classifier(
    family: str, vocab_size: int, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """A random two-layer sequence classifier whose scores spread (weights far larger than at a usual start)."""
    names = {
        "llama": ("LlamaConfig", "LlamaForSequenceClassification"),
        "qwen2": ("Qwen2Config", "Qwen2ForSequenceClassification"),
        "qwen3": ("Qwen3Config", "Qwen3ForSequenceClassification"),
        "mistral": ("MistralConfig", "MistralForSequenceClassification"),
        "gemma2": ("Gemma2Config", "Gemma2ForSequenceClassification"),
        "gemma3": ("Gemma3TextConfig", "Gemma3TextForSequenceClassification"),
    }
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "num_labels": 1,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": 0.25,
    }
    if family in ("mistral", "gemma2", "gemma3"):
        settings["sliding_window"] = 16
    settings |= changes
    config_name, class_name = names[family]
    torch.manual_seed(seed)
    model = getattr(transformers, class_name)(getattr(transformers, config_name)(**settings))
    return model.to(dtype).eval()


def single_row(model: PreTrainedModel, ids: list[int]) -> tuple[float, Tensor]:
    """Score of one unpadded row by the stock model's own forward, and the gradient at its embedding's output, [L, K]."""
    kept: list[Tensor] = []

    def keep(module: torch.nn.Module, args: Any, output: Tensor) -> Tensor:
        kept.append(output.detach().requires_grad_())
        return kept[0]

    handle = model.get_input_embeddings().register_forward_hook(keep)
    try:
        with torch.enable_grad():
            score = model(input_ids=torch.tensor([ids])).logits[0, 0]
            (gradient,) = torch.autograd.grad(score, kept[0])
    finally:
        handle.remove()
    return score.item(), gradient[0]


def test_small_tokenizers_spell_what_they_read() -> None:
    for tokenizer in (chatml_tokenizer(), llama_tokenizer(), qwen3_tokenizer()):
        text = "Hello 123 🙂 ünï\n\n"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert len(ids) < len(text.encode())


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_classifiers_tell_rows_apart(family: str) -> None:
    model = tiny_classifier(family, 64)
    scores = [single_row(model, [1 + i, 5, 9, 2])[0] for i in range(4)]
    assert max(scores) - min(scores) > 1e-2
