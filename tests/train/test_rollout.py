"""The sampler against the model itself: its frequencies, its log-probabilities, its lengths, and what it leaves behind."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tolerances import FORWARD
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from datc_kernels.testing.rounding import rounding
from datc_train.config import RESERVED_TEMPLATE_KWARGS
from datc_train.rollout import TransformersSampler, check_sampler, encode_prompts, stop_token_ids, support_size
from datc_train.types import Prompt, Rollout

WORDS = ["<s>", "</s>", "<|end|>", "<unk>", "user", "assistant", "system", "think", *"abcdefgh"]
BOS, EOS, END = 0, 1, 2
TEMPLATE = (
    "<s> {% for m in messages %}{{ m.role }} {{ m.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% if enable_thinking is defined and enable_thinking %}think {% endif %}{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Words; like Llama's it adds a BOS of its own when it is asked for special tokens; pad is EOS."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<|end|>"],
    )
    made.chat_template = TEMPLATE
    return made


def make_model(seed: int = 0, columns: int = 24, dropout: float = 0.0, spread: float = 0.3) -> LlamaForCausalLM:
    """Two random layers over a vocabulary padded beyond the tokenizer's 16 words."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=columns,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=dropout,
        initializer_range=spread,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config).eval()


def with_adapter(model: LlamaForCausalLM, dropout: float = 0.0) -> Any:
    policy = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=dropout))
    torch.manual_seed(7)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return policy


def user(*texts: str) -> list[Prompt]:
    return [Prompt([{"role": "user", "content": text}]) for text in texts]


def sampler(model: Any, tokenizer: Any, **options: Any) -> TransformersSampler:
    return TransformersSampler(model, tokenizer, **{"group_size": 3, "max_new_tokens": 8, **options})


def split(rollout: Rollout) -> list[list[int]]:
    return [row.tolist() for row in rollout.response_ids.split(rollout.lengths.tolist())]


@torch.no_grad()
def teacher_forced(model: Any, rollout: Rollout, temperature: float, vocab_size: int) -> Tensor:
    """[N]: each row whole and alone, no padding and no cache."""
    result = []
    for row, response in enumerate(split(rollout)):
        prompt = list(rollout.prompt_ids[row // rollout.group_size])
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1, :vocab_size]
        logprob = torch.log_softmax(logits.double() / temperature, -1)
        result.append(logprob.gather(1, torch.tensor(response)[:, None])[:, 0])
    return torch.cat(result).float()


HOSTILE = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 2,
    "top_p": 0.5,
    "min_p": 0.3,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "repetition_penalty": 5.0,
    "no_repeat_ngram_size": 1,
    "encoder_repetition_penalty": 2.0,
    "suppress_tokens": [8, 9, 10],
    "begin_suppress_tokens": [1, 2, 11],
    "bad_words_ids": [[12], [13, 14]],
    "sequence_bias": [[[15], 9.0]],
    "min_new_tokens": 6,
    "min_length": 30,
    "max_length": 3,
    "max_time": 1e-9,
    "stop_strings": ["a"],
    "forced_bos_token_id": 15,
    "forced_eos_token_id": 1,
    "exponential_decay_length_penalty": (1, 5.0),
    "guidance_scale": 3.0,
    "renormalize_logits": True,
    "num_beams": 2,
    "num_return_sequences": 2,
    "length_penalty": 3.0,
    "use_cache": False,
    "cache_implementation": "static",
    "prefill_chunk_size": 1,
    "eos_token_id": [1, 5],
    "pad_token_id": 3,
    "output_scores": True,
    "return_dict_in_generate": True,
}


# ---------------------------------------------------------------- the distribution


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("adapter", [False, True])
def test_logprob_is_the_teacher_forced_one(tokenizer: Any, temperature: float, adapter: bool) -> None:
    """T48, T49: mixed prompt lengths, several stop ids, pad = EOS, a non-zero adapter, temperature on both sides."""
    model: Any = make_model()
    model = with_adapter(model) if adapter else model
    rollout = sampler(
        model, tokenizer, group_size=5, max_new_tokens=12, temperature=temperature, stop_ids=[EOS, END, 4], max_batch_size=7
    ).sample(user("a", "a b c d e f", "h g"), seed=3)
    expected = teacher_forced(model, rollout, temperature, len(WORDS))
    torch.testing.assert_close(rollout.sampler_logprob, expected, rtol=0, atol=FORWARD)
    assert rollout.sampler_logprob.dtype == torch.float32
    assert check_sampler(rollout.sampler_logprob, expected, dtype=torch.float32) < FORWARD
    assert len(set(rollout.lengths.tolist())) > 3
    assert set(rollout.finished.tolist()) == {True, False}


def test_bfloat16_policy_passes_its_check(tokenizer: Any) -> None:
    """The cached, padded and the whole forward round differently in bfloat16; by less than the check allows."""
    model = with_adapter(make_model()).bfloat16()
    rollout = sampler(model, tokenizer, group_size=8).sample(user("a", "b c d e"), seed=0)
    assert rollout.sampler_logprob.dtype == torch.float32
    check_sampler(rollout.sampler_logprob, teacher_forced(model, rollout, 1.0, len(WORDS)), dtype=torch.bfloat16)


def test_frequencies_are_the_softmax(tokenizer: Any) -> None:
    """First tokens of 4,000 responses: total variation and chi-square as independent draws from the softmax have them."""
    model, count = make_model(spread=0.15), 4000
    made = sampler(model, tokenizer, group_size=count, max_new_tokens=2, temperature=0.8, max_batch_size=count)
    rollout = made.sample(user("a b"), seed=0)
    with torch.no_grad():
        logits = model(torch.tensor([list(rollout.prompt_ids[0])])).logits[0, -1, : len(WORDS)]
    p = torch.softmax(logits.double() / 0.8, -1)
    first = torch.tensor([row[0] for row in split(rollout)])
    observed = torch.bincount(first, minlength=len(WORDS)).double()
    chi_square = ((observed - count * p).square() / (count * p)).sum()
    assert count * p.min() > 5
    assert chi_square < 37.7  # the 0.999 quantile at 15 degrees of freedom
    second = torch.tensor([row[1] for row in split(rollout) if len(row) == 2 and row[0] == int(p.argmax())])
    with torch.no_grad():
        logits = model(torch.tensor([[*rollout.prompt_ids[0], int(p.argmax())]])).logits[0, -1, : len(WORDS)]
    p = torch.softmax(logits.double() / 0.8, -1)
    observed = torch.bincount(second, minlength=len(WORDS)).double()
    assert 0.5 * (observed / len(second) - p).abs().sum() < 2.5 * (len(WORDS) / (2 * np.pi * len(second))) ** 0.5


@pytest.mark.parametrize("adapter", [False, True])
def test_generation_config_changes_nothing(tokenizer: Any, adapter: bool) -> None:
    """Every knob that a generation_config can hold is set against us; the samples stay the same, and so does the config."""
    results = []
    for hostile in ({}, HOSTILE):
        model: Any = make_model()
        model.generation_config = GenerationConfig(**hostile)
        kept = model.generation_config
        policy = with_adapter(model) if adapter else model
        results.append(sampler(policy, tokenizer, stop_ids=[EOS, END]).sample(user("a", "b c d"), seed=1))
        assert policy.generation_config is kept
    assert split(results[0]) == split(results[1])
    assert torch.equal(results[0].sampler_logprob, results[1].sampler_logprob)


def test_t42_padded_vocabulary_is_never_sampled(tokenizer: Any) -> None:
    """T42: columns beyond the tokenizer's ids cannot be drawn, even where the model prefers them."""
    model = make_model()
    model.lm_head.weight.data[len(WORDS) :] = 10 * model.lm_head.weight.data[4]
    made = sampler(model, tokenizer, group_size=64, stop_ids=[EOS])
    assert made.vocab_size == support_size(model, tokenizer) == len(WORDS) < model.config.vocab_size
    rollout = made.sample(user("a"), seed=0)
    assert int(rollout.response_ids.max()) < len(WORDS)
    torch.testing.assert_close(rollout.sampler_logprob, teacher_forced(model, rollout, 1.0, len(WORDS)), rtol=0, atol=FORWARD)
    all_columns = sampler(model, tokenizer, group_size=64, stop_ids=[EOS], vocab_size=model.config.vocab_size)
    assert int(all_columns.sample(user("a"), seed=0).response_ids.max()) >= len(WORDS)


# ---------------------------------------------------------------- lengths and stops


def certain(ids: Sequence[int]) -> Any:
    """A model that says `ids` one after the other, whatever it hears, and then the last one for ever."""
    model = make_model()
    said = width = 0

    def forward(module: Any, arguments: Any, keywords: Any, output: Any) -> Any:
        nonlocal said, width
        behind = (getattr(output, "cache", None) or output.past_key_values).get_seq_length()
        said, width = said + 1 if behind == width + 1 else 0, behind
        output.logits = torch.full_like(output.logits, -50.0)
        output.logits[..., ids[min(said, len(ids) - 1)]] = 50.0
        return output

    model.register_forward_hook(forward, with_kwargs=True)
    return model


@pytest.mark.parametrize(
    ("says", "response", "finished"),
    [
        ([8, 9, EOS], [8, 9, EOS], True),  # T17, T18: EOS is pad, and it is part of the response
        ([8, EOS, END], [8, EOS], True),
        ([8, END, EOS], [8, END], True),
        ([EOS], [EOS], True),
        ([8, 9, 10, 11], [8, 9, 10, 11], False),  # T13: cut, and nothing is appended
        ([8, 9, 10, EOS], [8, 9, 10, EOS], True),  # a stop at the very last place
        ([BOS, 3, 8, 9], [BOS, 3, 8, 9], False),  # other special tokens are tokens
    ],
)
def test_t13_t17_t18_lengths_come_from_the_stops(tokenizer: Any, says: list[int], response: list[int], finished: bool) -> None:
    made = sampler(certain(says), tokenizer, group_size=2, max_new_tokens=4, stop_ids=[EOS, END])
    rollout = made.sample(user("a", "b c"), seed=0)
    assert split(rollout) == [response] * 4
    assert rollout.lengths.tolist() == [len(response)] * 4
    assert rollout.finished.tolist() == [finished] * 4
    assert rollout.sampler_logprob.shape == rollout.response_ids.shape


def test_no_stop_ids_at_all(tokenizer: Any) -> None:
    """An empty set that was asked for: EOS is a token as any other."""
    rollout = sampler(certain([EOS]), tokenizer, max_new_tokens=3, stop_ids=[]).sample(user("a"), seed=0)
    assert split(rollout) == [[EOS] * 3] * 3
    assert not rollout.finished.any()


def test_rows_that_stopped_do_not_disturb_the_others(tokenizer: Any) -> None:
    rollout = sampler(make_model(), tokenizer, group_size=16, max_new_tokens=24).sample(user("a", "b"), seed=2)
    assert rollout.lengths.min() < 6 < rollout.lengths.max()
    for response, finished in zip(split(rollout), rollout.finished.tolist(), strict=True):
        stops = [i for i, token in enumerate(response) if token in (EOS, END)]
        assert stops == ([len(response) - 1] if finished else [])
        assert finished or len(response) == 24


def test_stop_ids_are_all_found(tokenizer: Any) -> None:
    model = make_model()
    assert stop_token_ids(model, tokenizer) == (EOS, END)
    model.generation_config.eos_token_id = [EOS, 5]
    assert stop_token_ids(with_adapter(model), tokenizer) == (EOS, END, 5)
    tokenizer.chat_template = TEMPLATE.replace("<|end|>", "h")  # no special token: not taken for a stop
    assert stop_token_ids(model, tokenizer) == (EOS, 5)
    tokenizer.chat_template = "{{ raise_exception('only system messages') }}"
    assert stop_token_ids(model, tokenizer) == (EOS, 5)
    tokenizer.chat_template = None
    assert stop_token_ids(model, tokenizer) == (EOS, 5)


# ---------------------------------------------------------------- prompts


def test_t19_t23_prompts_are_tokenised_once_with_one_bos(tokenizer: Any) -> None:
    system = Prompt([{"role": "system", "content": "a b"}, {"role": "user", "content": "c"}])
    assert encode_prompts(tokenizer, [system]) == ((BOS, 6, 8, 9, END, 4, 10, END, 5),)
    assert tokenizer("a")["input_ids"] == [BOS, 8]


def test_chat_template_kwargs_reach_the_template(tokenizer: Any) -> None:
    made = sampler(make_model(), tokenizer, chat_template_kwargs={"enable_thinking": True})
    assert made.sample(user("a"), seed=0).prompt_ids == ((BOS, 4, 8, END, 5, 7),)


def test_long_prompt_is_refused_by_name(tokenizer: Any) -> None:
    made = sampler(make_model(), tokenizer, max_prompt_tokens=6)
    with pytest.raises(ValueError, match=r"expected at most 6 tokens a prompt, got 7 in prompt 1 \('b c d'\)"):
        made.sample(user("a", "b c d"), seed=0)
    assert made.sample(user("a"), seed=0).group_size == 3


def test_prompts_that_make_no_row(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"^prompts: expected at least one, got none"):  # T7
        sampler(make_model(), tokenizer).sample([], seed=0)
    tokenizer.chat_template = "{{ '' }}"
    with pytest.raises(ValueError, match=r"^prompts: the chat template makes no token of prompt 0"):
        encode_prompts(tokenizer, user("a"))
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"^tokenizer: expected one with a chat template"):
        encode_prompts(tokenizer, user("a"))


# ---------------------------------------------------------------- randomness


def test_samples_depend_on_seed_and_prompt_alone(tokenizer: Any) -> None:
    """Neither the batch size, nor the order, nor the company changes a group."""
    prompts = user("a", "a b c d e", "c c", "h g f")
    model = make_model()

    def groups(order: Sequence[int], batch: int, seed: int = 5) -> dict[int, list[list[int]]]:
        made = sampler(model, tokenizer, max_batch_size=batch)
        rows = split(made.sample([prompts[i] for i in order], seed=seed))
        return {i: rows[3 * k : 3 * k + 3] for k, i in enumerate(order)}

    everything = groups([0, 1, 2, 3], 64)
    for order, batch in (([3, 1, 0, 2], 64), ([0, 1, 2, 3], 1), ([2, 0], 4)):
        assert groups(order, batch) == {i: everything[i] for i in order}
    assert groups([0, 1, 2, 3], 64, seed=6) != everything


def test_rows_come_back_in_the_prompts_order(tokenizer: Any) -> None:
    prompts = user("a b c d e", "a", "b c")
    model = make_model()
    rollout = sampler(model, tokenizer, max_batch_size=2).sample(prompts, seed=0)
    assert rollout.prompts == tuple(prompts)
    assert [len(ids) for ids in rollout.prompt_ids] == [9, 5, 6]
    assert int(rollout.lengths.sum()) == len(rollout.response_ids)
    torch.testing.assert_close(rollout.sampler_logprob, teacher_forced(model, rollout, 1.0, 16), rtol=0, atol=FORWARD)


def test_responses_of_a_group_differ_and_so_do_equal_prompts(tokenizer: Any) -> None:
    rows = split(sampler(make_model(spread=0.1), tokenizer).sample(user("a", "a"), seed=0))
    assert len(set(map(tuple, rows))) == 6


def test_global_random_state_is_left_alone(tokenizer: Any) -> None:
    made = sampler(make_model(), tokenizer)
    first = split(made.sample(user("a"), seed=1))
    torch.manual_seed(123)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    assert split(made.sample(user("a"), seed=1)) == first
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()  # noqa: NPY002


# ---------------------------------------------------------------- what it leaves behind


def state_of(model: Any) -> list[Any]:
    return [
        (module.training, vars(module).get("gradient_checkpointing"), id(vars(module).get("generation_config")))
        for module in model.modules()
    ] + [model.config.use_cache, [p.requires_grad for p in model.parameters()]]


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_t40_t41_the_policy_is_as_it_was(tokenizer: Any, adapter: bool, fails: bool) -> None:
    """T40, T41: sampled with cache, without checkpointing or dropout; every flag as it was, also after an error."""
    model: Any = make_model(dropout=0.5)
    policy = with_adapter(model, dropout=0.5) if adapter else model
    reference = split(sampler(policy.eval(), tokenizer).sample(user("a", "b c"), seed=0))

    policy.train()
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    model.model.layers[1].eval()  # a mixture that train() would not bring back
    before = state_of(policy)
    seen: list[tuple[bool, bool]] = []

    def spy(module: Any, arguments: Any, keywords: Any, output: Any) -> None:
        checkpointing = any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
        seen.append((any(m.training for m in model.modules()), checkpointing))
        if fails and len(seen) == 2:
            raise KeyboardInterrupt

    handle = model.register_forward_hook(spy, with_kwargs=True)
    if fails:
        with pytest.raises(KeyboardInterrupt):
            sampler(policy, tokenizer).sample(user("a", "b c"), seed=0)
    else:
        assert split(sampler(policy, tokenizer).sample(user("a", "b c"), seed=0)) == reference
    handle.remove()
    assert state_of(policy) == before
    assert not any(training or checkpointing for training, checkpointing in seen)


def test_one_token_a_step_goes_through_the_model(tokenizer: Any) -> None:
    """T40: the cache is used, whatever config.use_cache says."""
    model = make_model()
    model.config.use_cache = False
    widths: list[int] = []
    model.model.register_forward_hook(lambda m, a, k, out: widths.append(out[0].shape[1]), with_kwargs=True)
    made = sampler(model, tokenizer, stop_ids=[], max_new_tokens=4)
    made.sample(user("a b c d e f"), seed=0)  # tries how the model takes a cache
    widths.clear()
    made.sample(user("a b c d e f"), seed=0)
    assert widths == [9, 1, 1, 1, 1]  # the prompt, without its last token, for all of its responses


def test_result_can_be_trained_on(tokenizer: Any) -> None:
    """No inference-mode tensors: what comes back may be saved for a backward pass."""
    rollout = sampler(make_model(), tokenizer).sample(user("a"), seed=0)
    factor = torch.ones(len(rollout.response_ids), requires_grad=True)
    (factor * rollout.sampler_logprob).sum().backward()
    assert not rollout.response_ids.is_inference()


# ---------------------------------------------------------------- errors


def test_t6_logits_that_are_not_finite_name_the_prompt(tokenizer: Any) -> None:
    """T6: nothing is sampled from NaN."""
    model = make_model()
    model.model.embed_tokens.weight.data[WORDS.index("h")] = float("nan")
    with pytest.raises(RuntimeError, match="logits are not finite at response token 0 of prompt 1 \\('h'\\)"):
        sampler(model, tokenizer).sample(user("a", "h"), seed=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 1}, r"^group_size: expected at least 2, got 1"),  # T44
        ({"max_new_tokens": 0}, r"^max_new_tokens"),
        ({"max_batch_size": 0}, r"^max_batch_size"),
        ({"temperature": 0.0}, r"^temperature: expected a positive number, got 0.0"),
        ({"temperature": -1.0}, r"^temperature"),
        ({"temperature": float("nan")}, r"^temperature"),
        ({"vocab_size": 25}, r"^vocab_size: expected 1 to 24"),
        ({"vocab_size": 0}, r"^vocab_size"),
        ({"stop_ids": [16]}, r"^stop_ids: expected ids below vocab_size 16"),
        ({"stop_ids": [-1]}, r"^stop_ids"),
    ],
)
def test_what_cannot_be_is_named(tokenizer: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampler(make_model(), tokenizer, **options)


def test_a_template_that_refuses_a_prompt_is_named(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% if messages[0].content == 'b' %}{{ raise_exception('no b') }}{% endif %}{{ messages[0].content }}"
    )
    with pytest.raises(ValueError, match=r"^prompts: the policy's chat template refuses prompt 1 \('b'\): no b"):
        sampler(make_model(), tokenizer, stop_ids=[0]).sample(user("a", "b"), seed=0)


@pytest.mark.parametrize("key", sorted(RESERVED_TEMPLATE_KWARGS))
def test_template_kwargs_that_are_the_samplers_own(tokenizer: Any, key: str) -> None:
    with pytest.raises(ValueError, match=f"^chat_template_kwargs: expected keys of the template, got {key}"):
        sampler(make_model(), tokenizer, chat_template_kwargs={key: True}).sample(user("a"), seed=0)


def test_a_response_that_would_leave_the_context_is_refused(tokenizer: Any) -> None:
    model = make_model()
    room = model.config.max_position_embeddings - len(sampler(model, tokenizer).encode(user("a b c"))[0])
    sampler(model, tokenizer, max_new_tokens=room).encode(user("a b c", "a"))
    with pytest.raises(ValueError, match=rf"^max_new_tokens: expected at most {room} beside .*that is prompt 1 \('a b c'\)"):
        sampler(model, tokenizer, max_new_tokens=room + 1).encode(user("a", "a b c"))


def test_a_policy_that_cannot_stop(tokenizer: Any) -> None:
    model = make_model()
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ValueError, match=r"^stop_ids: the tokenizer"):
        sampler(model, tokenizer)


def test_negative_seed(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"^seed"):
        sampler(make_model(), tokenizer).sample(user("a"), seed=-1)


# ---------------------------------------------------------------- the first-use check


def test_check_sampler_measures_and_refuses() -> None:
    training = torch.tensor([-1.0, -2.0, -3.0])
    near = 3.0  # the numbers whose difference it is
    found = check_sampler(training + 5e-4, training, dtype=torch.float32)
    assert found == pytest.approx(5e-4, rel=rounding(condition=near / 5e-4))
    found = check_sampler(training - 0.04, training, dtype=torch.bfloat16)
    assert found == pytest.approx(0.04, rel=rounding(condition=near / 0.04))
    for dtype, gap in ((torch.float32, 2e-3), (torch.bfloat16, 0.06), (torch.float16, 0.06)):
        with pytest.raises(RuntimeError, match="temperature"):
            check_sampler(training + gap, training, dtype=dtype)


def test_t5_unknown_logprob_is_left_out() -> None:
    """T5: NaN from an engine means "not known"; it is not 0, and it hides nothing."""
    nan = float("nan")
    training = torch.tensor([-1.0, -2.0, -3.0])
    assert check_sampler(torch.tensor([-1.0, nan, -3.0]), training, dtype=torch.float32) == 0.0
    with pytest.raises(RuntimeError, match=r"mean difference 0\.5"):
        check_sampler(torch.tensor([-1.0, nan, -2.0]), training, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="gave no log-probabilities"):
        check_sampler(torch.tensor([nan, nan, nan]), training, dtype=torch.float32)


def test_check_sampler_arguments() -> None:
    with pytest.raises(RuntimeError, match="not finite"):
        check_sampler(torch.zeros(2), torch.tensor([0.0, float("nan")]), dtype=torch.float32)
    with pytest.raises(RuntimeError, match="mean difference inf"):
        check_sampler(torch.tensor([0.0, -float("inf")]), torch.zeros(2), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"^sampler_logprob"):
        check_sampler(torch.zeros(2), torch.zeros(3), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"^dtype"):
        check_sampler(torch.zeros(2), torch.zeros(2), dtype=torch.int64)


def test_t48_t55_check_finds_a_sampler_that_is_not_the_policy(tokenizer: Any) -> None:
    """T48: another temperature. T55: weights that the sampler does not have. Dropout in the training pass."""
    policy = with_adapter(make_model())
    rollout = sampler(policy, tokenizer, group_size=8).sample(user("a", "b c"), seed=0)
    assert check_sampler(rollout.sampler_logprob, teacher_forced(policy, rollout, 1.0, 16), dtype=torch.float32) < FORWARD
    with pytest.raises(RuntimeError):
        check_sampler(rollout.sampler_logprob, teacher_forced(policy, rollout, 0.9, 16), dtype=torch.float32)
    with policy.disable_adapter():
        base = teacher_forced(policy, rollout, 1.0, 16)
    with pytest.raises(RuntimeError, match="adapter"):
        check_sampler(rollout.sampler_logprob, base, dtype=torch.float32)
