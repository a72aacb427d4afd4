"""What is refused, in words that say what was expected; loading; and the model as another trainer's reward function."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, TaskType, get_peft_model
from test_reward_tiny import chatml_tokenizer, llama_tokenizer, tiny_classifier
from tolerances import FORWARD, GRADIENT, NORM
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from datc_train.reward import RewardModel
from datc_train.types import Messages

PROMPT: Messages = [{"role": "user", "content": "How are you today?"}]


@pytest.fixture
def reward() -> RewardModel:
    tokenizer = chatml_tokenizer()
    return RewardModel(tiny_classifier("llama", len(tokenizer) + 2), tokenizer)


@pytest.mark.parametrize(
    ("prompts", "responses", "group_size", "message"),
    [
        ([PROMPT], [[5]], 2, r"responses: expected 1 prompts x group_size 2 = 2 responses, got 1"),
        ([PROMPT], [[5]], 0, r"group_size: expected an int of at least 1, got 0"),
        ([PROMPT], [[5]], True, r"group_size: .*got True"),
        ([PROMPT], [torch.tensor([5])], 1, r"responses: expected lists of int .*got Tensor at 0"),
        ([PROMPT], [[5.0]], 1, r"responses: expected lists of int"),
        ([PROMPT], [[True]], 1, r"responses: expected lists of int"),
        ([PROMPT], ["text"], 1, r"responses: expected lists of int .*got str"),
        ([PROMPT, PROMPT], [[5], [-1]], 1, r"responses: .*vocabulary.*got -1 in response 0 of prompt 1 \('How are you"),
        ([PROMPT], [[5], [100_000]], 2, r"responses: .*vocabulary.*got 100000 in response 1 of prompt 0"),
        ([[]], [[5]], 1, r"prompts: expected lists of .*at 0"),
        (["hi"], [[5]], 1, r"prompts: expected lists of"),
        ([[{"role": "user"}]], [[5]], 1, r"prompts: expected lists of"),
        ([[{"role": "assistant", "content": "x"}]], [[5]], 1, r"prompts: .*assistant"),
    ],
)
def test_arguments(reward: RewardModel, prompts: Any, responses: Any, group_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reward.score(prompts, responses, group_size)


def test_rows_longer_than_the_context_stop_before_anything_runs() -> None:
    """Nothing is cut in silence: the prompt is named and the model not called."""
    tokenizer = chatml_tokenizer()
    reward = RewardModel(tiny_classifier("llama", len(tokenizer), max_position_embeddings=64), tokenizer)
    reward.model.model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    long = [{"role": "user", "content": "A long story"}]
    with pytest.raises(ValueError, match=r"at most 64 tokens.*got \d+ for response 1 of prompt 1 \('A long story'\)"):
        reward.score([PROMPT, long], [[40], [40], [40], [40, 41] * 40], 2)


def test_tokenizer_with_ids_that_the_embedding_lacks() -> None:
    tokenizer = chatml_tokenizer()
    reward = RewardModel(tiny_classifier("llama", len(tokenizer) - 1), tokenizer)
    with pytest.raises(ValueError, match=r"tokenizer: expected ids below"):
        reward.score([PROMPT], [[5]], 1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_score_that_is_not_finite_names_the_prompt(value: float) -> None:
    """One bad token's embedding: the prompt whose row holds it is named; its neighbours' scores stay finite."""
    tokenizer = chatml_tokenizer()
    reward = RewardModel(tiny_classifier("llama", len(tokenizer)), tokenizer)
    bad = tokenizer(" Paris", add_special_tokens=False)["input_ids"][0]
    good = [i for i in range(40, 60) if i != bad][:2]
    reward.model.get_input_embeddings().weight.data[bad] = value
    other = [{"role": "user", "content": "hi"}]
    for gradient in (True, False):
        with pytest.raises(ValueError, match=r"model: expected a finite score.*response 1 of prompt 1 \('hi'\)"):
            reward.score([PROMPT, other], [good, good, good, [*good, bad]], 2, gradient=gradient)


def test_gradient_that_is_not_finite_names_the_prompt(reward: RewardModel) -> None:
    class Overflow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradient: torch.Tensor) -> torch.Tensor:
            return gradient[0] * math.inf

    reward.model.model.norm.register_forward_hook(lambda module, inputs, output: Overflow.apply(output))
    with pytest.raises(ValueError, match=r"gradient that is not finite for response 0 of prompt 0"):
        reward.score([PROMPT], [[40, 41]], 1)


def absent(model: Any) -> None:
    model.get_input_embeddings = lambda: None


def quantised(model: Any) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    model.get_input_embeddings = lambda: module


def flattened(model: Any) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(16))
    model.get_input_embeddings = lambda: module


def headless(model: Any) -> None:
    del model.score


def in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        module = nn.Embedding(4, 4)
    model.get_input_embeddings = lambda: module


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (absent, r"model: expected an input embedding with a weight, got NoneType"),
        (quantised, r"model: .*torch.int8"),
        (flattened, r"model: expected a floating-point \[rows, hidden\].*\[16\]"),
        (headless, r"model: expected a sequence classifier"),
        (in_inference_mode, r"model: .*inference_mode"),
    ],
)
def test_models_that_cannot_be_read(spoil: Callable[[Any], None], message: str) -> None:
    tokenizer = chatml_tokenizer()
    model = tiny_classifier("llama", len(tokenizer))
    spoil(model)
    with pytest.raises(ValueError, match=message):
        RewardModel(model, tokenizer)


def test_t25_one_label_only() -> None:
    """T25: two scores a row are not a reward."""
    tokenizer = chatml_tokenizer()
    with pytest.raises(ValueError, match=r"model: .*num_labels=1, got LlamaForSequenceClassification with num_labels=2"):
        RewardModel(tiny_classifier("llama", len(tokenizer), num_labels=2), tokenizer)


def test_budget_must_hold_a_token() -> None:
    tokenizer = chatml_tokenizer()
    with pytest.raises(ValueError, match=r"max_tokens_per_batch: expected at least 1, got 0"):
        RewardModel(tiny_classifier("llama", len(tokenizer)), tokenizer, max_tokens_per_batch=0)


def test_from_pretrained(tmp_path: Path) -> None:
    tokenizer = llama_tokenizer()
    model = tiny_classifier("llama", len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    response = tokenizer("I am fine", add_special_tokens=False)["input_ids"]
    expected = RewardModel(model, tokenizer).score([PROMPT], [response], 1)
    loaded = RewardModel.from_pretrained(tmp_path, policy_tokenizer=tokenizer, max_tokens_per_batch=100)
    assert loaded.max_tokens_per_batch == 100
    got = loaded.score([PROMPT], [response], 1)
    assert torch.equal(got.score, expected.score)
    assert torch.equal(got.reward_grad, expected.reward_grad)
    assert got.mapped.all()
    low = RewardModel.from_pretrained(tmp_path, dtype=torch.bfloat16, device="cpu").score([PROMPT], [response], 1)
    assert low.reward_grad is not None
    assert low.reward_grad.dtype == torch.bfloat16


def test_from_pretrained_refuses_what_is_no_reward_model(tmp_path: Path) -> None:
    """A language model's checkpoint has no score head; a classifier of two labels is none either."""
    tokenizer = llama_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_labels=1,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    with pytest.raises(ValueError, match=r"path: expected a trained reward model.*without score.weight \(1 newly"):
        RewardModel.from_pretrained(tmp_path / "lm")
    tiny_classifier("llama", len(tokenizer), num_labels=3).save_pretrained(tmp_path / "three")
    tokenizer.save_pretrained(tmp_path / "three")
    with pytest.raises(ValueError, match=r"path: .*num_labels=1, got num_labels=3"):
        RewardModel.from_pretrained(tmp_path / "three")


def test_adapter_on_top() -> None:
    """A PEFT reward model (LoRA, its own score head) is read through: the merged model's scores and gradients."""
    tokenizer = chatml_tokenizer()
    torch.manual_seed(0)
    peft_model = get_peft_model(
        tiny_classifier("llama", len(tokenizer)),
        LoraConfig(task_type=TaskType.SEQ_CLS, r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    )
    peft_model.base_model.model.score.modules_to_save["default"].weight.data.normal_()
    response = tokenizer("I am fine", add_special_tokens=False)["input_ids"]
    through = RewardModel(peft_model, tokenizer).score([PROMPT], [response], 1)
    assert not any(parameter.requires_grad for parameter in peft_model.parameters())
    merged = RewardModel(peft_model.merge_and_unload(), tokenizer).score([PROMPT], [response], 1)
    torch.testing.assert_close(through.score, merged.score, rtol=FORWARD, atol=FORWARD)
    torch.testing.assert_close(through.reward_grad, merged.reward_grad, rtol=NORM, atol=GRADIENT)


# ---------------------------------------------------------------- as a reward function


def test_reward_function(reward: RewardModel) -> None:
    """Strings or messages, columns ignored: the raw scores of the ids, in order, also under no_grad."""
    tokenizer = reward.tokenizer
    texts = ["I am fine", "Hello there", ""]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    expected = reward.score([PROMPT], ids, 3, gradient=False).score.tolist()
    with torch.no_grad():
        plain = reward(["How are you today?"] * 3, texts, ids, answer=["x"] * 3)
    chat = reward(prompts=[PROMPT] * 3, completions=[[{"role": "assistant", "content": t}] for t in texts], completion_ids=ids)
    assert plain == chat == pytest.approx(expected, rel=FORWARD, abs=FORWARD)
    assert all(type(score) is float for score in plain)
    assert reward.__name__ == "reward_model"
    assert not isinstance(reward, nn.Module)
    assert reward([], [], []) == []


def test_t24_reward_function_notices_another_tokenizer(reward: RewardModel) -> None:
    """T24: ids of a policy with another vocabulary spell none of the completions."""
    texts = ["I am fine", "Hello there"]
    own = [reward.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    foreign = [[(token + 7) % 400 for token in row] for row in own]
    with pytest.raises(ValueError, match=r"completion_ids: .*another tokenizer"):
        reward([PROMPT] * 2, texts, foreign)
    assert len(reward([PROMPT] * 2, ["cleaned up by a trainer", texts[1]], own)) == 2


def test_t24_any_ids_of_the_right_tokenizer_pass(reward: RewardModel) -> None:
    """T24: what the library's own decoding makes of random ids, special tokens and half characters, raises no alarm."""
    chance = random.Random(0)
    tokenizer = reward.tokenizer
    for _ in range(50):
        ids = [[chance.randrange(len(tokenizer)) for _ in range(60)] + [tokenizer.eos_token_id]]
        ids[0][::9] = [tokenizer.convert_tokens_to_ids("<|im_start|>")] * len(ids[0][::9])
        assert len(reward([PROMPT], tokenizer.batch_decode(ids, skip_special_tokens=True), ids)) == 1


def test_reward_function_arguments(reward: RewardModel) -> None:
    with pytest.raises(ValueError, match=r"prompts: expected as many as completions and completion_ids, got 1, 2 and 1"):
        reward([PROMPT], ["a", "b"], [[5]])
    with pytest.raises(ValueError, match=r"completions: expected one assistant message each, got 2 at 0"):
        reward([PROMPT], [[{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]], [[5]])
