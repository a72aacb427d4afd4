"""The policy reads a group's prompt once: hidden states, gradients and samples are those of whole rows, one at a time."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from test_rollout import make_model, tokenizer  # noqa: F401 - a fixture
from tolerances import FORWARD
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig, Qwen3Config

from datc_kernels.testing.rounding import rounding
from datc_train.micro_batches import micro_batches
from datc_train.policy import Policy, take_policy
from datc_train.prefix.exactness import _READS_ON, why_not_shared
from datc_train.rollout import TransformersSampler
from datc_train.types import Prompt, Rollout

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=5),
    "gemma2": Gemma2Config(**SIZES, sliding_window=5, layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
}
DTYPE = {"sdpa": torch.float64, "eager": torch.float32}  # transformers' eager softmax is float32 and overflows on float64's masks
# Norms and softmax are float32 in either: three layers over 32 and 48 numbers, forwards and backwards, and a sum over 90 tokens;
# hidden states and gradients of a size of up to some 10.
ALLOWED = rounding(length=2 * 3 * (6 * 32 + 48) + 90, condition=10)
CLOSE: dict[str, Any] = {"rtol": ALLOWED, "atol": ALLOWED}
# Lengths on both sides of the window, responses of one token, a prompt of two; groups of three.
LENGTHS = [(11, (4, 1, 9)), (2, (3, 7, 1)), (6, (5, 5, 2))]


def policy_of(family: str, attention: str = "sdpa") -> Policy:
    torch.manual_seed(0)
    attention = "eager" if family == "gemma2" else attention  # it knows no other
    model = AutoModelForCausalLM.from_config(CONFIGS[family], attn_implementation=attention, dtype=DTYPE[attention])
    model = get_peft_model(model.eval(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return take_policy(model.eval(), None, starts_at_base=True, reference=False)  # type: ignore[arg-type]


def batch(seed: int = 0, lengths: Sequence[tuple[int, Sequence[int]]] = LENGTHS) -> tuple[list[tuple[int, ...]], list[Tensor]]:
    chance = torch.Generator().manual_seed(seed)
    prompts, responses = [], []
    for length, sizes in lengths:
        prompt = tuple(torch.randint(1, 64, (length,), generator=chance).tolist())
        for size in sizes:
            prompts.append(prompt)
            responses.append(torch.randint(1, 64, (size,), generator=chance))
    return prompts, responses


def one_by_one(policy: Policy, prompts: Sequence[Sequence[int]], responses: Sequence[Tensor]) -> Tensor:
    """By the stock model, a row at a time, nothing cached and nothing padded."""
    hidden = []
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.cat([torch.tensor(prompt), response])[None]
        output = policy.backbone(input_ids=ids, use_cache=False).last_hidden_state[0]
        hidden.append(output[len(prompt) - 1 : -1])
    return torch.cat(hidden)


def gradients(policy: Policy, hidden: Tensor) -> list[Tensor]:
    weight = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1), dtype=hidden.dtype)
    policy.model.zero_grad()
    (hidden * weight).sum().backward()
    return [p.grad.clone() for p in policy.trainable if p.grad is not None]


@contextmanager
def tokens_read(policy: Policy) -> Iterator[list[int]]:
    """Padded tokens of every pass through the backbone."""
    seen: list[int] = []
    hook = policy.backbone.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    yield seen
    hook.remove()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", CONFIGS)
def test_numbers_are_those_of_whole_rows(family: str, attention: str) -> None:
    policy = policy_of(family, attention)
    prompts, responses = batch()
    expected = one_by_one(policy, prompts, responses)
    expected_gradients = gradients(policy, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        policy.hidden_states(prompts, responses)  # the first call tries the model
        with tokens_read(policy) as seen:
            found = policy.hidden_states(prompts, responses)
    assert seen == [3 * 10, 9 * 9]  # three prompts without their last tokens, nine rows from there on
    torch.testing.assert_close(found, expected, **CLOSE)
    for mine, theirs in zip(gradients(policy, found), expected_gradients, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)


@pytest.mark.parametrize("family", CONFIGS)
def test_rows_with_nothing_to_share_are_read_whole(family: str) -> None:
    policy = policy_of(family)
    for lengths in ([(5, (4,)), (7, (2,))], [(1, (4, 3)), (5, (2, 2))]):
        prompts, responses = batch(lengths=lengths)
        with tokens_read(policy) as seen:
            found = policy.hidden_states(prompts, responses)
        assert len(seen) == 1
        torch.testing.assert_close(found, one_by_one(policy, prompts, responses), **CLOSE)


@pytest.mark.parametrize("training", [True, False])
def test_checkpointed_activations_mean_whole_rows_in_either_mode(training: bool) -> None:
    policy = policy_of("llama")
    policy.model.gradient_checkpointing_enable()
    policy.model.train(training)
    prompts, responses = batch()
    with tokens_read(policy) as seen:
        found = policy.hidden_states(prompts, responses)
    assert len(seen) == 1
    torch.testing.assert_close(found, one_by_one(policy, prompts, responses), **CLOSE)


def test_a_model_that_reads_a_cache_wrongly_is_read_whole_and_says_so() -> None:
    """A backbone that forgets positions behind a cache, as one of somebody's own might."""
    policy = policy_of("llama")
    forward = policy.backbone.forward

    def forgetful(input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **named: Any) -> Any:
        behind = 0 if attention_mask is None else attention_mask.shape[1] - input_ids.shape[1]
        return forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=None if position_ids is None else position_ids - (3 if behind else 0),
            **named,
        )

    forgetful.__signature__ = __import__("inspect").signature(forward)  # type: ignore[attr-defined]
    policy.backbone.forward = forgetful
    prompts, responses = batch()
    with pytest.warns(RuntimeWarning, match="does not read on from a cache"):
        found = policy.hidden_states(prompts, responses)
    assert _READS_ON[policy.backbone] is False
    torch.testing.assert_close(found, one_by_one(policy, prompts, responses), **CLOSE)


def rollout_of(prompts: list[tuple[int, ...]], responses: list[Tensor], group_size: int) -> Rollout:
    lengths = torch.tensor([len(response) for response in responses])
    return Rollout(
        prompts=tuple(Prompt(messages=({"role": "user", "content": "a"},)) for _ in prompts[::group_size]),
        prompt_ids=tuple(prompts[::group_size]),
        group_size=group_size,
        response_ids=torch.cat(responses),
        lengths=lengths,
        sampler_logprob=torch.zeros(int(lengths.sum())),
        finished=torch.ones(len(responses), dtype=torch.bool),
    )


@given(
    st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(1, 80), min_size=3, max_size=3)), min_size=1, max_size=5),
    st.integers(1, 400),
)
@example([(10, [490, 20, 20]), (10, [400, 400, 400])], 1000)  # a group's short tail, and then a long row
def test_a_groups_rows_are_neighbours_and_the_budget_holds(lengths: list[tuple[int, list[int]]], budget: int) -> None:
    prompts, responses = batch(lengths=lengths)
    found = micro_batches(rollout_of(prompts, responses, 3), budget)
    order = [i for one in found for i in one.responses.tolist()]
    assert sorted(order) == list(range(len(responses)))
    owners = [i // 3 for i in order]
    assert sum(a != b for a, b in itertools.pairwise(owners)) == len(lengths) - 1
    for one in found:
        padded = len(one.lengths) * max(len(p) + len(r) for p, r in zip(one.prompt_ids, one.response_ids, strict=True))
        assert padded <= budget or len(one.lengths) == 1


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_length_are_read_whole(kind: str) -> None:
    policy = policy_of("llama")
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 12}
    policy.backbone.config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **factors}
    prompts, responses = batch()
    with pytest.warns(RuntimeWarning, match=f"depend on the row's length .{kind}"), tokens_read(policy) as seen:
        policy.hidden_states(prompts, responses)
    assert len(seen) == 1


@pytest.mark.parametrize("max_batch_size", [3, 5, 64])
def test_samples_are_those_of_prompts_read_for_every_response(tokenizer: Any, max_batch_size: int, monkeypatch: Any) -> None:  # noqa: F811
    model = make_model().double()
    prompts = [Prompt(messages=({"role": "user", "content": words},)) for words in ("a b c d e f g", "h", "c c a b")]
    sampler = TransformersSampler(model, tokenizer, group_size=4, max_new_tokens=9, max_batch_size=max_batch_size)
    shared = sampler.sample(prompts, seed=3)
    monkeypatch.setattr(TransformersSampler, "_read_prompts", lambda *_: {})
    alone = sampler.sample(prompts, seed=3)
    assert torch.equal(shared.response_ids, alone.response_ids)
    assert torch.equal(shared.lengths, alone.lengths)
    torch.testing.assert_close(shared.sampler_logprob, alone.sampler_logprob, rtol=FORWARD, atol=FORWARD)


def test_the_sampler_reads_each_prompt_once(tokenizer: Any) -> None:  # noqa: F811
    model = make_model()
    prompts = [Prompt(messages=({"role": "user", "content": words},)) for words in ("a b c d e f g", "h")]
    sampler = TransformersSampler(model, tokenizer, group_size=4, max_new_tokens=3)
    sampler.sample(prompts, seed=0)  # the first call tries the model
    longest = max(map(len, sampler.encode(prompts)))
    seen: list[tuple[int, ...]] = []
    hook = model.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    sampler.sample(prompts, seed=0)
    hook.remove()
    assert seen[:2] == [(2, longest - 1), (8, 1)]
    assert set(seen[2:]) <= {(8, 1)}


@pytest.mark.parametrize("noise", ["dropout", "autocast"])
def test_the_probe_is_not_fooled_by_noise(noise: str) -> None:
    """A model that is asked first in training mode with dropout, or under autocast, may share prompts in what follows."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, attention_dropout=0.5))
    backbone = model.model.train(noise == "dropout")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=noise == "autocast"):
        assert why_not_shared(backbone, list(range(1, 20)), torch.device("cpu")) is None
    assert backbone.training == (noise == "dropout")
    assert all(module.training == (noise == "dropout") for module in backbone.modules())


def test_a_few_ids_decide_for_themselves_alone() -> None:
    backbone = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).model.eval()
    assert why_not_shared(backbone, [1, 2, 3], torch.device("cpu")) is None
    assert backbone not in _READS_ON
    assert why_not_shared(backbone, list(range(1, 9)), torch.device("cpu")) is None
    assert _READS_ON[backbone] is True
