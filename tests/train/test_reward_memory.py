"""When memory runs out, and when a row is longer than the reward model's context: nothing is cut, nothing is silent."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from test_reward_prefix import PROMPTS, Passes, reward_model, sampled
from test_reward_tiny import chatml_tokenizer, tiny_classifier
from tolerances import FORWARD, GRADIENT, MEAN

from datc_train.advantages import group_advantages
from datc_train.reward import RewardModel
from datc_train.reward.memory import pass_memory
from datc_train.reward.shared_prefix import read_prefixes, read_rests

SHORT = [{"role": "user", "content": "How are you today?"}]
OTHER = [{"role": "user", "content": "A story"}]


def memory_of(reward: RewardModel, tokens: int, error: type[RuntimeError] = torch.OutOfMemoryError) -> None:
    """Makes a pass of more tokens (rows x what it attends over) fail as an allocator would."""

    def refuse(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        size = kwargs["attention_mask"].numel()
        if size > tokens:
            raise error(f"[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate {size}")

    reward.model.model.register_forward_pre_hook(refuse, with_kwargs=True)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("tokens", [250, 700])
def test_out_of_memory_halves_the_budget_and_goes_on(error: type[RuntimeError], tokens: int) -> None:
    reward, expected_of = reward_model(), reward_model()
    responses = sampled(reward, 4)
    expected = expected_of.score(PROMPTS, responses, 4)
    memory_of(reward, tokens, error)
    with pytest.warns(RuntimeWarning, match=r"out of memory in a pass of \d+ tokens; going on with at most \d+"):
        scored = reward.score(PROMPTS, responses, 4)
    assert reward.max_tokens_per_batch < 2 * tokens
    torch.testing.assert_close(scored.score, expected.score, rtol=FORWARD, atol=FORWARD)
    assert expected.reward_grad is not None
    assert (scored.reward_grad - expected.reward_grad).norm() <= GRADIENT * expected.reward_grad.norm()
    passes = Passes(reward)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reward.score(PROMPTS, responses, 4)  # the smaller budget stays
    assert passes.seen


def test_rows_that_were_done_are_not_read_again() -> None:
    """Memory that runs out half-way (another process took it) costs the pass that failed, no more."""
    reward = reward_model(max_tokens_per_batch=200)
    responses = [[300 + i] for i in range(12)]
    reward.score([SHORT] * 3, responses, 4)
    read: list[int] = []
    failures = [3]

    def fail_once(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        rows = kwargs["inputs_embeds"]
        if rows.requires_grad:
            failures[0] -= 1
            if failures[0] == 0:
                raise torch.OutOfMemoryError("CUDA out of memory")
            read.append(rows.shape[0])

    reward.model.model.register_forward_pre_hook(fail_once, with_kwargs=True)
    with pytest.warns(RuntimeWarning, match="out of memory"):
        reward.score([SHORT] * 3, responses, 4)
    assert sum(read) == len(responses)


def test_memory_that_does_not_hold_one_row_is_an_error() -> None:
    reward = reward_model()
    memory_of(reward, 30)
    with pytest.warns(RuntimeWarning), pytest.raises(torch.OutOfMemoryError, match="can't allocate memory"):
        reward.score(PROMPTS, sampled(reward, 4), 4)


def test_other_errors_are_not_taken_for_memory() -> None:
    reward = reward_model()
    memory_of(reward, 0, ValueError)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="allocate"):
        reward.score(PROMPTS, sampled(reward, 4), 4)


# ---------------------------------------------------------------- rows beyond the context


def limited(on_overflow: str = "neutral") -> RewardModel:
    tokenizer = chatml_tokenizer()
    model = tiny_classifier("llama", len(tokenizer), max_position_embeddings=64)
    return RewardModel(model, tokenizer, on_overflow=on_overflow)  # type: ignore[arg-type]


def test_overflow_is_neutral() -> None:
    """Its group's mean, no gradient, no weight; the other rows as if it had never been there."""
    reward = limited()
    long = [40, 41] * 40
    responses = [[40], long, [42], [43, 44], long, [45]]
    with pytest.warns(RuntimeWarning, match=r"at most 64 tokens.*response 1 of prompt 0.*mean score of their group") as caught:
        scored = reward.score([SHORT, OTHER], responses, 3)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reward.score([SHORT, OTHER], responses, 3)  # said once
    short = reward.score([SHORT, OTHER], [[40], [42], [43, 44], [45]], 2)
    torch.testing.assert_close(scored.score[[0, 2, 3, 5]], short.score)
    torch.testing.assert_close(scored.score[[1, 4]], short.score.view(2, 2).mean(1))
    advantage = group_advantages(scored.score, 3)
    assert advantage[[1, 4]].abs().max() < MEAN
    assert advantage.abs().max() > 0.5
    lengths = [len(response) for response in responses]
    for index in (1, 4):
        part = slice(sum(lengths[:index]), sum(lengths[: index + 1]))
        assert not scored.mapped[part].any()
        assert scored.frozen[part].all()
        assert scored.reward_grad is not None
        assert not scored.reward_grad[part].any()
    assert scored.mapped.sum() == short.mapped.sum()


def test_a_group_of_overflows_and_a_call_of_nothing_else() -> None:
    reward = limited()
    long = [40, 41] * 40
    with pytest.warns(RuntimeWarning):
        scored = reward.score([SHORT, OTHER], [long, long, [40], [41]], 2)
    assert scored.score[:2].tolist() == [0.0, 0.0]
    assert group_advantages(scored.score, 2)[:2].tolist() == [0.0, 0.0]
    none = reward.score([SHORT], [long, long], 2)
    assert none.score.tolist() == [0.0, 0.0]
    assert not none.mapped.any()
    assert reward.score([SHORT], [long, [40]], 2, gradient=False).score.diff().item() == 0.0


def test_on_overflow_has_two_values() -> None:
    assert limited("error").on_overflow == "error"
    with pytest.raises(ValueError, match=r"on_overflow: expected 'error' or 'neutral', got 'cut'"):
        limited("cut")


# ---------------------------------------------------------------- what a pass costs


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("shape", [(1, 300, 100), (4, 40, 120), (3, 30, 40)])
def test_memory_of_a_pass_is_predicted(family: str, shape: tuple[int, int, int]) -> None:
    """From passes of some hundred tokens, within a tenth (sliding layers keep no more than their window of the past)."""
    reward = reward_model(family, changes={"sliding_window": 400} if family == "gemma3" else {})
    rows, prefix, rest = shape
    predicted = pass_memory(reward._scorer).bytes(rows, prefix, rest)
    past = read_prefixes(reward._scorer, [tuple(range(prefix))])
    storages: dict[int, tuple[torch.Tensor, int]] = {}
    own = {p.untyped_storage().data_ptr() for p in reward.model.parameters()}

    def see(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = (tensor, tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        read_rests(reward._scorer, [list(range(rest))] * rows, past, [0] * rows, True)
    actual = sum(size for pointer, (_, size) in storages.items() if pointer not in own)
    assert predicted == pytest.approx(actual, rel=0.1)
