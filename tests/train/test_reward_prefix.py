"""The prompt is read once per group, and every number is that of whole rows."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_reward_tiny import FAMILIES, chatml_tokenizer, llama_tokenizer, qwen3_tokenizer, single_row, tiny_classifier
from tolerances import FORWARD, GRADIENT, NORM
from torch import Tensor

from datc_train.reward import RewardModel
from datc_train.reward.micro_batches import SplitRow, prefix_batches
from datc_train.reward.shared_prefix import whole
from datc_train.types import Messages, ScoredRollout

# Of 1, 12 and some 60 words: shorter than the classifiers' window of 16 tokens in part, and mostly far longer.
PROMPTS: list[Messages] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "user", "content": "How are you today? " * 3}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France? 🙂 " * 8}],
]


def reward_model(family: str = "llama", **options: Any) -> RewardModel:
    tokenizer = {"llama": llama_tokenizer, "qwen3": qwen3_tokenizer}.get(family, chatml_tokenizer)()
    changes = options.pop("changes", {})
    return RewardModel(tiny_classifier(family, len(tokenizer) + 5, **changes), tokenizer, **options)


def sampled(reward: RewardModel, group_size: int, seed: int = 0) -> list[list[int]]:
    """Random words, cut short and closed: lengths 0, 1 and up to 40, in every group another mixture."""
    chance = random.Random(seed)
    words = [i for i in range(300, len(reward.tokenizer)) if i not in reward.tokenizer.all_special_ids]
    lengths = [chance.choice([0, 1, 2, 7, 25, 40]) for _ in range(len(PROMPTS) * group_size)]
    closing = [[], [reward.tokenizer.eos_token_id]]
    return [[chance.choice(words) for _ in range(length)] + chance.choice(closing) for length in lengths]


def single_rows(reward: RewardModel, responses: list[list[int]], group_size: int) -> list[tuple[float, Tensor, Tensor]]:
    """By the stock model, one unpadded row at a time: score, gradient at every response token (0 where unmapped), row norm."""
    names = ["" for _ in PROMPTS]
    rows = reward._rows.build(PROMPTS, names, responses, group_size, {reward.tokenizer.eos_token_id})
    result = []
    for row in rows:
        score, gradient = single_row(reward.model, row.ids)
        position = torch.from_numpy(row.position)
        at_tokens = gradient[position.clamp(min=0)] * (position >= 0)[:, None]
        result.append((score, at_tokens, gradient.norm()))
    return result


def assert_equal_to_single_rows(reward: RewardModel, scored: ScoredRollout, responses: list[list[int]], size: int) -> None:
    assert scored.reward_grad is not None
    parts = scored.reward_grad.split([len(response) for response in responses])
    for index, (score, gradient, norm) in enumerate(single_rows(reward, responses, size)):
        assert scored.score[index].item() == pytest.approx(score, rel=FORWARD, abs=FORWARD)
        assert (parts[index] - gradient).norm() <= GRADIENT * norm


class Passes:
    """What the backbone was called with: rows, new tokens, whether a graph was made."""

    def __init__(self, reward: RewardModel) -> None:
        self.seen: list[tuple[int, int, bool]] = []
        reward.model.model.layers[0].register_forward_pre_hook(self._see)

    def _see(self, module: Any, args: tuple[Tensor, ...]) -> None:
        self.seen.append((args[0].shape[0], args[0].shape[1], torch.is_grad_enabled()))


@pytest.mark.parametrize("group_size", [1, 2, 3, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_whole_rows(family: str, group_size: int) -> None:
    """Unequal prefixes, a window shorter and longer than they are, lengths 0, 1 and many, several groups a pass."""
    reward = reward_model(family)
    responses = sampled(reward, group_size, seed=group_size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scored = reward.score(PROMPTS, responses, group_size)
    assert_equal_to_single_rows(reward, scored, responses, group_size)
    for budget in (1, 150, 600):
        reward.max_tokens_per_batch = budget
        again = reward.score(PROMPTS, responses, group_size)
        torch.testing.assert_close(again.score, scored.score, rtol=FORWARD, atol=FORWARD)
        assert scored.reward_grad is not None
        assert (again.reward_grad - scored.reward_grad).norm() <= GRADIENT * scored.reward_grad.norm()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attn_implementation": "eager"}),
        ("gemma2", {"attn_implementation": "eager"}),
        ("mistral", {"sliding_window": 3}),
        ("mistral", {"sliding_window": None}),
        ("gemma3", {"sliding_window": 2}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
        ("llama", {"num_hidden_layers": 1}),
        ("llama", {"num_key_value_heads": 1}),
    ],
)
def test_equal_to_whole_rows_in_other_shapes(family: str, changes: dict[str, Any]) -> None:
    reward = reward_model(family, changes=changes)
    responses = sampled(reward, 3)
    assert_equal_to_single_rows(reward, reward.score(PROMPTS, responses, 3), responses, 3)


def test_prompts_are_read_once_and_without_gradient() -> None:
    """With prefixes of like length in one pass; response and closing tokens alone make a graph."""
    reward = reward_model()
    prompts = [PROMPTS[1]] * 2 + [[{"role": "user", "content": "What is the answer? " * 3}]]
    responses = [[*reward.tokenizer("fine" + " fine" * i, add_special_tokens=False)["input_ids"]] for i in range(12)]
    longest = max(map(len, responses))
    reward.score(prompts, responses, 4)
    passes = Passes(reward)
    reward.score(prompts, responses, 4)
    (prefix_rows, prefix_width, prefix_graph), (rows, width, graph) = passes.seen
    assert (prefix_rows, rows) == (2, 12)  # the first two groups have one prompt: it is read once for both
    assert prefix_width > 20
    assert longest < width <= longest + 3
    assert (prefix_graph, graph) == (False, True)
    passes.seen.clear()
    reward.score(prompts, responses, 4, gradient=False)
    assert [rows for rows, _, _ in passes.seen] == [2, 12]
    assert not any(graph for _, _, graph in passes.seen)


def test_a_large_group_shares_its_prefix_across_passes() -> None:
    reward = reward_model()
    responses = [[300 + i] * 9 for i in range(8)]
    expected = reward.score(PROMPTS[2:], responses, 8)
    passes = Passes(reward)
    reward.max_tokens_per_batch = 500
    scored = reward.score(PROMPTS[2:], responses, 8)
    assert passes.seen[0][0] == 1
    assert len(passes.seen) > 3
    torch.testing.assert_close(scored.score, expected.score, rtol=FORWARD, atol=FORWARD)
    torch.testing.assert_close(scored.reward_grad, expected.reward_grad, rtol=NORM, atol=GRADIENT)


def test_equal_responses_keep_a_token_to_pool() -> None:
    """A group whose rows are the same row: what they share is everything, what is read with gradient is not nothing."""
    reward = reward_model()
    responses = [[], [], [], [305, 306], [305, 306], [305, 306], [307], [307], [307]]
    assert_equal_to_single_rows(reward, reward.score(PROMPTS, responses, 3), responses, 3)


def test_reward_function_calls_share_prompts() -> None:
    """Trainers repeat the prompt for each completion of its group."""
    reward = reward_model()
    responses = sampled(reward, 4)
    texts = [reward.tokenizer.decode(ids, skip_special_tokens=True) for ids in responses]
    expected = reward.score(PROMPTS, responses, 4, gradient=False).score.tolist()
    passes = Passes(reward)
    scores = reward([prompt for prompt in PROMPTS for _ in range(4)], texts, responses)
    assert scores == pytest.approx(expected, rel=FORWARD, abs=FORWARD)
    assert sum(rows for rows, _, _ in passes.seen) == len(PROMPTS) + len(responses)


# ---------------------------------------------------------------- where it would not be exact


def bidirectional(reward: RewardModel) -> None:
    reward.model.config.is_causal = False


def bidirectional_modules(reward: RewardModel) -> None:
    for layer in reward.model.model.layers:
        layer.self_attn.is_causal = False
    reward.model.config.is_causal = False


def checkpointing(reward: RewardModel) -> None:
    reward.model.gradient_checkpointing_enable()
    reward.model.model.train()
    reward.model.training = False  # the root says evaluation, its parts do not


def unknown_cache(reward: RewardModel) -> None:
    reward.model.config.layer_types = ["linear_attention", "full_attention"]
    reward.model.config.use_cache = False  # of the stock forward: Llama has no use for such layers


def chunked(reward: RewardModel) -> None:
    reward.model.config.attention_chunk_size = 512


def forgetful(reward: RewardModel) -> None:
    """Takes a cache and does nothing with it."""
    forward = reward.model.model.forward

    def without(input_ids: Any = None, cache: Any = None, **kwargs: Any) -> Any:
        embeds = kwargs.pop("inputs_embeds", None)
        embeds = reward.model.get_input_embeddings()(input_ids) if embeds is None else embeds
        mask = kwargs.pop("attention_mask", None)
        mask = None if mask is None else mask[:, -embeds.shape[1] :]
        return forward(inputs_embeds=embeds, attention_mask=mask, **kwargs | {"use_cache": False})

    reward.model.model.forward = without


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (bidirectional, "bidirectional"),
        (bidirectional_modules, "bidirectional"),
        (checkpointing, "checkpoints its activations"),
        (unknown_cache, r"not known here \(linear_attention\)"),
        (chunked, r"not known here \(chunked attention\)"),
        (forgetful, "does not read on from a cache"),
    ],
)
def test_inexact_models_are_read_whole_with_a_word_once(spoil: Any, message: str) -> None:
    reward = reward_model()
    spoil(reward)
    passes = Passes(reward)
    responses = sampled(reward, 3)
    with pytest.warns(RuntimeWarning, match=f"reward model: rows are read whole.*{message}"):
        scored = reward.score(PROMPTS, responses, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        reward.score(PROMPTS, responses, 3)
    assert passes.seen[-1][0] == len(responses)
    assert_equal_to_single_rows(reward, scored, responses, 3)


def test_checkpointing_in_evaluation_mode_shares() -> None:
    """Training mode is taken away, and with it what would drop the cache."""
    reward = reward_model()
    responses = sampled(reward, 2)
    expected = reward.score(PROMPTS, responses, 2)
    reward.model.gradient_checkpointing_enable()
    reward.model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(reward.score(PROMPTS, responses, 2).score, expected.score)


# ---------------------------------------------------------------- plans


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=12), st.integers(1, 30)), max_size=25),
    st.integers(1, 150),
    st.sets(st.integers(0, 24)),
)
def test_plans_hold_every_row_once_within_the_budget(sizes: list[tuple[list[int], int]], budget: int, done: set[int]) -> None:
    rows = [SplitRow(tuple(prefix), [7] * length) for prefix, length in sizes]
    pending = set(range(len(rows))) - done
    batches = list(prefix_batches(rows, pending, budget))
    assert sorted(row for batch in batches for part in batch.micro_batches for row in part) == sorted(pending)
    prefixes = [prefix for batch in batches for prefix in batch.prefixes]
    assert len(prefixes) == len(set(prefixes))
    for batch in batches:
        width = max(map(len, batch.prefixes))
        assert len(batch.prefixes) == 1 or len(batch.prefixes) * width <= budget
        assert all(2 * len(prefix) >= width for prefix in batch.prefixes)
        for part in batch.micro_batches:
            assert {rows[row].prefix for row in part} <= set(batch.prefixes)
            assert len(part) == 1 or len(part) * (width + max(len(rows[row].rest) for row in part)) <= budget


def test_whole_rows_have_nothing_before_them() -> None:
    reward = reward_model()
    rows = reward._rows.build(PROMPTS, ["", "", ""], [[300]] * 3, 1, set())
    assert [row.rest for row in whole(rows)] == [row.ids for row in rows]
    assert not any(row.prefix for row in whole(rows))


# ---------------------------------------------------------------- the last layer


@pytest.mark.parametrize("family", FAMILIES)
def test_last_layer_is_worked_out_at_the_pooled_position_only(family: str) -> None:
    """One position a row through its output projection and MLP, and nothing of it left behind afterwards."""
    reward = reward_model(family)
    reward.score(PROMPTS[:1], [[300]], 1)  # the first call tries the model out
    shapes: list[tuple[str, torch.Size]] = []
    for name, layer in (("first", reward.model.model.layers[0]), ("last", reward.model.model.layers[-1])):
        layer.mlp.down_proj.register_forward_hook(lambda m, i, output, name=name: shapes.append((name, output.shape)))
    responses = sampled(reward, 2)
    reward.score(PROMPTS, responses, 2)
    assert {shape[1] for name, shape in shapes if name == "last"} == {1}
    assert all(shape[1] > 1 for name, shape in shapes if name == "first")
    shapes.clear()
    reward.model(input_ids=torch.tensor([[5, 6, 7]]))
    assert [shape[1] for _, shape in shapes] == [3, 3]


def test_other_backbones_are_left_as_they_are() -> None:
    """A layer of somebody's own, under a name of a known family, keeps all of its positions."""
    reward = reward_model()

    class Own(type(reward.model.model.layers[-1])):  # type: ignore[misc]
        pass

    reward.model.model.layers[-1].__class__ = Own
    shapes: list[torch.Size] = []
    reward.model.model.layers[-1].mlp.register_forward_hook(lambda m, i, output: shapes.append(output.shape))
    responses = sampled(reward, 2)
    scored = reward.score(PROMPTS, responses, 2)
    assert all(shape[1] > 1 for shape in shapes)
    assert_equal_to_single_rows(reward, scored, responses, 2)
