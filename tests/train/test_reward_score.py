"""Scores and gradients against the stock model's own single rows: exact, whatever the batch and the caller's mode."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reward_tiny import FAMILIES, chatml_tokenizer, llama_tokenizer, qwen3_tokenizer, single_row, tiny_classifier
from tolerances import FORWARD, GRADIENT
from torch import Tensor

from datc_train.reward import RewardModel
from datc_train.reward.micro_batches import micro_batches
from datc_train.reward.pooling import last_attended, pooled_score
from datc_train.types import Messages, ScoredRollout

PROMPTS: list[Messages] = [
    [{"role": "user", "content": "How are you today?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France? 🙂"}],
]
TEXTS = ["I am fine, thank you very much.", "Fine", "", "Paris. The answer is 123", "The quick brown fox\n\njumps", "no"]


def responses(tokenizer: Any) -> list[list[int]]:
    """Three to a prompt: closed by EOS, cut off, empty."""
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    return [row + [tokenizer.eos_token_id] * (i % 2) for i, row in enumerate(ids)]


def reward_model(family: str = "llama", **options: Any) -> RewardModel:
    tokenizer = {"llama": llama_tokenizer, "qwen3": qwen3_tokenizer}.get(family, chatml_tokenizer)()
    changes = options.pop("changes", {})
    return RewardModel(tiny_classifier(family, len(tokenizer) + 5, **changes), tokenizer, **options)


def rendered_row(reward: RewardModel, prompt: Messages, response: list[int]) -> list[int]:
    """The row by transformers alone: template to ids, for text that decodes without loss."""
    text = reward.tokenizer.decode(response, skip_special_tokens=True)
    chat = [*prompt, {"role": "assistant", "content": text}]
    return reward.tokenizer.apply_chat_template(chat, return_dict=False)


def same(a: ScoredRollout, b: ScoredRollout, tolerance: float = GRADIENT) -> None:
    torch.testing.assert_close(a.score, b.score, atol=tolerance, rtol=tolerance)
    assert a.reward_grad is not None
    assert b.reward_grad is not None
    assert (a.reward_grad - b.reward_grad).norm() <= tolerance * b.reward_grad.norm()
    assert torch.equal(a.mapped, b.mapped)
    assert torch.equal(a.frozen, b.frozen)


@pytest.mark.parametrize("family", FAMILIES)
def test_score_and_gradient_are_the_stock_models_single_rows(family: str) -> None:
    """T15, T16, T25: batched and padded, yet each row is the unpadded forward of the model that the library ships."""
    reward = reward_model(family)
    rows = responses(reward.tokenizer)
    scored = reward.score(PROMPTS, rows, 3)
    assert scored.score.dtype == torch.float32
    assert scored.reward_grad is not None
    at = 0
    for index, response in enumerate(rows):
        row = rendered_row(reward, PROMPTS[index // 3], response)
        score, gradient = single_row(reward.model, row)
        assert scored.score[index].item() == pytest.approx(score, rel=FORWARD, abs=FORWARD)
        got = scored.reward_grad[at : at + len(response)]
        mapped = scored.mapped[at : at + len(response)]
        # The response's ids are contiguous in these rows: their place is where all mapped ids agree.
        content = [token for token, kept in zip(response, mapped.tolist(), strict=True) if kept]
        starts = [s for s in range(len(row) - len(content) + 1) if row[s : s + len(content)] == content]
        expected = gradient[starts[-1] : starts[-1] + len(content)]
        assert (got[mapped] - expected).norm() <= GRADIENT * gradient.norm()
        assert torch.equal(got[~mapped], torch.zeros_like(got[~mapped]))
        at += len(response)
    assert scored.mapped.sum() > 20
    assert at == len(scored.mapped) == len(scored.reward_grad)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_gradient_against_finite_differences(family: str) -> None:
    """R(E + h v) - R(E - h v) over 2 h is <g, v>, v supported on the response's tokens."""
    reward = reward_model(family)
    response = reward.tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
    scored = reward.score(PROMPTS[:1], [response], 1)
    assert scored.reward_grad is not None
    row = rendered_row(reward, PROMPTS[0], response)
    start = next(s for s in range(len(row)) if row[s : s + len(response)] == response)
    embedded = reward.model.get_input_embeddings()(torch.tensor([row]))
    step = 1e-2 * embedded.abs().mean()
    for seed in range(4):
        v = torch.zeros_like(embedded)
        v[0, start : start + len(response)] = torch.randn(
            len(response), embedded.shape[-1], generator=torch.Generator().manual_seed(seed)
        )
        with torch.no_grad():
            high, low = (reward.model(inputs_embeds=embedded + sign * step * v).logits.item() for sign in (1, -1))
        predicted = (scored.reward_grad * v[0, start : start + len(response)]).sum().item()
        scale = scored.reward_grad.norm().item() * math.sqrt(embedded.shape[-1])
        assert (high - low) / (2 * step.item()) == pytest.approx(predicted, abs=0.03 * scale)


def test_t61_micro_batches_bound_the_pass_and_change_nothing() -> None:
    """T61: no pass holds more than the budget, and the budget shows in no number."""
    reward = reward_model()
    rows = responses(reward.tokenizer)
    whole = reward.score(PROMPTS, rows, 3)
    longest = max(len(rendered_row(reward, PROMPTS[i // 3], row)) for i, row in enumerate(rows))
    shapes: list[torch.Size] = []
    reward.model.model.layers[0].register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
    for budget in (1, longest, 2 * longest, 3 * longest + 1):
        shapes.clear()
        reward.max_tokens_per_batch = budget
        same(reward.score(PROMPTS, rows, 3), whole)
        assert all(shape[0] * shape[1] <= max(budget, longest) for shape in shapes)
        assert sum(shape[0] for shape in shapes) == len(rows) + len(PROMPTS)


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 120))
def test_micro_batches_cover_every_row_once(lengths: list[int], budget: int) -> None:
    batches = list(micro_batches(lengths, budget))
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= budget


@settings(max_examples=5, deadline=None)
@given(st.permutations(range(4)), st.integers(40, 400))
def test_t25_order_and_company_do_not_matter(order: list[int], budget: int) -> None:
    """T25: the same response scores the same in any place and any batch."""
    reward = reward_model("qwen3", max_tokens_per_batch=budget)
    rows = [responses(reward.tokenizer)[i] for i in (0, 1, 3, 4)]
    alone = [reward.score(PROMPTS[:1], [row], 1) for row in rows]
    together = reward.score(PROMPTS[:1], [rows[i] for i in order], 4)
    assert together.reward_grad is not None
    parts = together.reward_grad.split([len(rows[i]) for i in order])
    for place, i in enumerate(order):
        assert together.score[place].item() == pytest.approx(alone[i].score.item(), rel=FORWARD, abs=FORWARD)
        assert alone[i].reward_grad is not None
        assert (parts[place] - alone[i].reward_grad).norm() <= GRADIENT * alone[i].reward_grad.norm()


def test_callers_mode_does_not_matter() -> None:
    """no_grad, inference mode and autocast around the call; nothing in the result is an inference tensor."""
    reward = reward_model()
    rows = responses(reward.tokenizer)
    plain = reward.score(PROMPTS, rows, 3)
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with mode:
            scored = reward.score(PROMPTS, rows, 3)
        assert torch.equal(scored.score, plain.score)
        assert torch.equal(scored.reward_grad, plain.reward_grad)
        for tensor in (scored.score, scored.reward_grad, scored.mapped, scored.frozen, scored.reward_embedding):
            assert not tensor.is_inference()
            assert not tensor.requires_grad


def test_model_is_frozen_and_left_alone() -> None:
    """Evaluation mode is restored where someone took it away, and no parameter gets a gradient."""
    reward = reward_model(changes={"attention_dropout": 0.5})
    before = {name: value.clone() for name, value in reward.model.state_dict().items()}
    rows = responses(reward.tokenizer)
    expected = reward.score(PROMPTS, rows, 3)
    reward.model.train()
    again = reward.score(PROMPTS, rows, 3)
    assert torch.equal(again.score, expected.score)
    assert not any(parameter.requires_grad for parameter in reward.model.parameters())
    assert all(parameter.grad is None for parameter in reward.model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in reward.model.state_dict().items())


def test_without_gradient() -> None:
    """The same scores and masks, no gradient and no table."""
    reward = reward_model("qwen3")
    rows = responses(reward.tokenizer)
    full, bare = reward.score(PROMPTS, rows, 3), reward.score(PROMPTS, rows, 3, gradient=False)
    torch.testing.assert_close(bare.score, full.score, atol=FORWARD, rtol=FORWARD)
    assert bare.reward_grad is None
    assert bare.reward_embedding is None
    assert torch.equal(bare.mapped, full.mapped)
    assert torch.equal(bare.frozen, full.frozen)


def test_reward_embedding_is_what_the_module_returns() -> None:
    """A plain table is the weight itself, not a copy; a scaled one (Gemma) carries its scale."""
    plain, scaled = reward_model(), reward_model("gemma3")
    rows = responses(plain.tokenizer)[:1]
    table = plain.score(PROMPTS[:1], rows, 1).reward_embedding
    assert table is not None
    assert table.data_ptr() == plain.model.get_input_embeddings().weight.data_ptr()
    assert not table.requires_grad
    module = scaled.model.get_input_embeddings()
    table = scaled.score(PROMPTS[:1], [[5, 6]], 1).reward_embedding
    assert table is not None
    assert torch.equal(table, module(torch.arange(module.weight.shape[0])))
    torch.testing.assert_close(table, module.weight * math.sqrt(32))
    assert scaled.score(PROMPTS[:1], [[5, 6]], 1).reward_embedding is table


def test_empty_rollouts_and_responses() -> None:
    """No prompt, no token, a stop token alone: scores where there are responses, nothing mapped."""
    reward = reward_model()
    none = reward.score([], [], 2)
    assert none.score.shape == (0,)
    assert none.reward_grad is not None
    assert none.reward_grad.shape == (0, 32)
    assert none.mapped.dtype == none.frozen.dtype == torch.bool
    empty = reward.score(PROMPTS[:1], [[], []], 2)
    stopped = reward.score(PROMPTS[:1], [[reward.tokenizer.eos_token_id], []], 2)
    assert torch.equal(empty.score, stopped.score)
    assert empty.mapped.shape == (0,)
    assert stopped.mapped.tolist() == [False]
    assert stopped.frozen.tolist() == [True]
    score, _ = single_row(reward.model, rendered_row(reward, PROMPTS[0], []))
    assert empty.score.tolist() == pytest.approx([score, score], rel=FORWARD, abs=FORWARD)


def test_t13_t18_stop_tokens() -> None:
    """T13, T18: the row is closed after a cut response too, no id is added to N, and a sampled EOS keeps its place in N."""
    reward = reward_model()
    cut = reward.tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
    closed = [*cut, reward.tokenizer.eos_token_id]
    scored = reward.score(PROMPTS[:1], [cut, closed], 2)
    assert scored.score[0] == scored.score[1]
    assert len(scored.mapped) == len(cut) + len(closed)
    assert scored.frozen[-1]
    assert not scored.mapped[-1]
    assert scored.mapped[: len(cut)].all()


def test_stop_ids_beside_eos() -> None:
    """A stop that is neither EOS nor the template's closing is part of the answer unless it is named."""
    reward = reward_model()
    stop = reward.tokenizer.convert_tokens_to_ids("<|end_of_text|>")
    content = reward.tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
    named = reward.score(PROMPTS[:1], [[*content, stop], content], 2, stop_ids=[stop])
    assert named.score[0] == named.score[1]
    unnamed = reward.score(PROMPTS[:1], [[*content, stop], content], 2)
    assert unnamed.score[0] != unnamed.score[1]
    word = content[-1]
    assert reward.score(PROMPTS[:1], [content], 1, stop_ids=[word]).frozen.tolist()[-1] is True


def test_t17_t28_padding_is_not_looked_for_in_ids() -> None:
    """T17, T28: without a pad token, and with pad = EOS inside the response, the rows are the single ones."""
    reward = reward_model()
    assert reward.tokenizer.pad_token_id is None
    assert reward.model.config.pad_token_id is None
    eos = reward.tokenizer.eos_token_id
    words = reward.tokenizer("fine fine", add_special_tokens=False)["input_ids"]
    inside = [words[0], eos, *words]
    scored = reward.score(PROMPTS[:1], [inside, [words[0]]], 2)
    reward.model.config.pad_token_id = eos
    assert torch.equal(reward.score(PROMPTS[:1], [inside, [words[0]]], 2).score, scored.score)
    alone = reward.score(PROMPTS[:1], [inside], 1)
    assert scored.score[0].item() == pytest.approx(alone.score.item(), rel=FORWARD, abs=FORWARD)
    assert scored.mapped[: len(inside)].all()
    assert scored.frozen.tolist() == [False, True, *[False] * (len(words) + 1)]


def test_t15_pooling_on_either_side() -> None:
    """T15: the last attended position, wherever the padding is."""
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]])
    assert last_attended(mask).tolist() == [1, 3, 3, 1, 2]
    head = torch.nn.Linear(3, 1)
    hidden = torch.randn(5, 4, 3)
    expected = torch.stack([head(hidden[i, p])[0] for i, p in enumerate([1, 3, 3, 1, 2])])
    torch.testing.assert_close(pooled_score(head, hidden, mask), expected)


def test_t27_head_in_float32() -> None:
    """T27: bfloat16 hidden states that the head's bfloat16 product would tie keep different scores."""
    head = torch.nn.Linear(2, 1, bias=False).to(torch.bfloat16)
    head.weight.data = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    hidden = torch.tensor([[[256.0, 0.5]], [[256.0, 0.25]]], dtype=torch.bfloat16)
    mask = torch.ones(2, 1, dtype=torch.long)
    assert head(hidden[0, 0]) == head(hidden[1, 0])
    assert pooled_score(head, hidden, mask).tolist() == [256.5, 256.25]
    assert head.weight.dtype == torch.bfloat16


def test_low_precision_model() -> None:
    """Gradient and table in the model's dtype, scores in float32."""
    tokenizer = chatml_tokenizer()
    reward = RewardModel(tiny_classifier("llama", len(tokenizer), dtype=torch.bfloat16), tokenizer)
    scored = reward.score(PROMPTS, responses(tokenizer), 3)
    assert scored.score.dtype == torch.float32
    assert scored.reward_grad is not None
    assert scored.reward_grad.dtype == torch.bfloat16
    assert scored.reward_embedding is not None
    assert scored.reward_embedding.dtype == torch.bfloat16
    exact = RewardModel(tiny_classifier("llama", len(tokenizer)), tokenizer).score(PROMPTS, responses(tokenizer), 3)
    assert exact.reward_grad is not None
    error: Tensor = (scored.reward_grad.float() - exact.reward_grad).norm() / exact.reward_grad.norm()
    assert error < 0.1
