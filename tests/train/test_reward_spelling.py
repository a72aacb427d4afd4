"""A policy with a vocabulary of its own: spans of equal bytes, the table of its ids, and what the numbers then mean."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_reward_tiny import (
    CHATML,
    LLAMA_SPLIT,
    QWEN_SPECIALS,
    byte_level,
    chatml_tokenizer,
    finish,
    llama_tokenizer,
    sentencepiece_tokenizer,
    single_row,
    tiny_classifier,
)
from tolerances import FORWARD, NORM

from datc_train.reward import RewardModel
from datc_train.reward.mapped_rows import RowBuilder
from datc_train.reward.mapping import map_spans
from datc_train.reward.rows import RowTemplate
from datc_train.reward.spelling import Spelling, cached_spelling, span_sums, spell, spelled_table
from datc_train.reward.token_bytes import token_bytes
from datc_train.reward.vocabulary import PolicyVocabulary, policy_vocabulary
from datc_train.types import Messages

PROMPT: Messages = [{"role": "user", "content": "What is the capital of France? 🙂"}]
TEXT = "Hello there. The answer is 123 and 4567, naïve café 🙂\n\nThank you very much"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DATC_CACHE", str(tmp_path))
    return tmp_path


def other_tokenizer() -> Any:
    """Few merges, digits in threes, another order of special tokens."""
    return finish(byte_level(LLAMA_SPLIT, 300), QWEN_SPECIALS[::-1], bos=None, eos="<|im_end|>", template=CHATML, adds_bos=False)


def pair(**options: Any) -> RewardModel:
    tokenizer = chatml_tokenizer()
    with pytest.warns(RuntimeWarning, match=r"the policy has another vocabulary \(\d+ ids that differ: id \d+ is"):
        return RewardModel(tiny_classifier("llama", len(tokenizer)), tokenizer, policy_tokenizer=other_tokenizer(), **options)


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_token_has_the_sum_of_its_span() -> None:
    """The policy's larger pieces: mapped where they are whole reward tokens, with the gradients of the single row added up."""
    reward_tokenizer = other_tokenizer()
    policy = chatml_tokenizer()
    model = tiny_classifier("llama", len(reward_tokenizer))
    with pytest.warns(RuntimeWarning, match="another vocabulary"):
        reward = RewardModel(model, reward_tokenizer, policy_tokenizer=policy)
    ids = [*encode(policy, TEXT), policy.eos_token_id]
    scored = reward.score([PROMPT], [ids], 1)
    row = reward_tokenizer.apply_chat_template([*PROMPT, {"role": "assistant", "content": TEXT}], return_dict=False)
    score, gradient = single_row(model, row)
    assert scored.score.item() == pytest.approx(score, rel=FORWARD, abs=FORWARD)
    assert scored.reward_grad is not None
    # By hand: walk both token lists along the text and add up what lies inside.
    ours, theirs = token_bytes(policy), token_bytes(reward_tokenizer)
    at = len(row) - len(encode(reward_tokenizer, TEXT + "<|im_end|>\n"))
    mapped = 0
    for t, token in enumerate(ids[:-1]):
        want, spelled, start = ours[token] or b"", b"", at
        while len(spelled) < len(want):
            spelled += theirs[row[at]] or b""
            at += 1
        if spelled != want:  # digits: split at other places
            break
        assert scored.mapped[t]
        torch.testing.assert_close(
            scored.reward_grad[t], gradient[start:at].sum(0), rtol=NORM, atol=NORM * float(gradient.abs().max())
        )
        mapped += at - start > 1
    assert mapped > 3
    assert not scored.mapped[-1]
    assert scored.frozen[-1]


def test_policy_pieces_inside_a_reward_token_are_unmapped() -> None:
    reward = pair()
    ids = encode(reward.policy_tokenizer, "there are 4567 quick foxes")
    scored = reward.score([PROMPT], [ids, ids], 2)
    pieces = [reward.policy_tokenizer.decode([i]) for i in ids]
    mapped = scored.mapped[: len(ids)].tolist()
    assert any(mapped)
    assert not all(mapped)
    for piece, is_mapped in zip(pieces, mapped, strict=True):
        whole = piece.encode() in token_bytes(reward.tokenizer)
        assert whole or not is_mapped or len(encode(reward.tokenizer, piece)) > 1
    assert not scored.reward_grad[~scored.mapped].any()  # type: ignore[index]


def test_table_has_a_row_for_each_policy_id() -> None:
    reward = pair()
    table = reward.score([PROMPT], [[40]], 1).reward_embedding
    assert table is not None
    assert table.shape == (len(reward.policy_tokenizer), 32)
    embedding = reward.model.get_input_embeddings().weight
    ours = token_bytes(reward.policy_tokenizer)
    for v in (0, 70, 290, 299, reward.policy_tokenizer.eos_token_id):
        try:
            ids = encode(reward.tokenizer, (ours[v] or b"").decode())
        except UnicodeDecodeError:
            continue
        torch.testing.assert_close(table[v], embedding[ids].mean(0))


def test_equal_to_the_shared_case_when_tokenizers_agree() -> None:
    """Spans and spelling, forced on one vocabulary, give the positions and the table of the shared case, bit for bit."""
    tokenizer = chatml_tokenizer()
    bytes_of = token_bytes(tokenizer)
    shared = policy_vocabulary(tokenizer, tokenizer, bytes_of)
    assert shared.difference is None
    forced = PolicyVocabulary("forced", shared.bytes_of, shared.special_ids, {i: i for i in shared.special_ids})
    response = [*encode(tokenizer, TEXT), tokenizer.eos_token_id]
    a, b = (
        RowBuilder(RowTemplate(tokenizer), bytes_of, policy, "").build([PROMPT], [""], [response], 1, set())[0]
        for policy in (shared, forced)
    )
    assert np.array_equal(a.position, b.position)
    assert (a.position >= 0).sum() == len(response) - 1
    assert (b.width[b.position >= 0] == 1).all()
    embedding = torch.randn(len(tokenizer), 8)
    canonical = [v for v, token in enumerate(bytes_of) if token and encode(tokenizer, token.decode(errors="ignore")) == [v]]
    assert len(canonical) > 250
    assert torch.equal(spelled_table(embedding, spell(bytes_of, tokenizer, bytes_of))[canonical], embedding[canonical])
    copy = RewardModel(
        tiny_classifier("llama", len(tokenizer)),
        tokenizer,
        policy_tokenizer=tokenizer.__class__(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>"),
    )
    own = RewardModel(tiny_classifier("llama", len(tokenizer)), tokenizer)
    x, y = (reward.score([PROMPT], [response], 1) for reward in (copy, own))
    assert torch.equal(x.reward_grad, y.reward_grad)  # type: ignore[arg-type]
    assert torch.equal(x.reward_embedding, y.reward_embedding)  # type: ignore[arg-type]


def test_stop_and_closing_tokens_by_content() -> None:
    """The reward model's end of turn has another id in the policy's vocabulary; it is taken off all the same."""
    reward = pair()
    content = encode(reward.policy_tokenizer, "I am fine")
    end = reward.policy_tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end != reward.tokenizer.convert_tokens_to_ids("<|im_end|>")
    reward.policy_tokenizer.eos_token = "<|endoftext|>"
    scored = reward.score([PROMPT], [[*content, end], content], 2)
    assert scored.score[0] == scored.score[1]
    assert scored.frozen[len(content)]


@pytest.mark.parametrize("reward_side", [chatml_tokenizer, llama_tokenizer, sentencepiece_tokenizer])
def test_spelling_has_the_tokens_own_bytes(reward_side: Any) -> None:
    tokenizer = reward_side()
    reward_bytes, policy_bytes = token_bytes(tokenizer), token_bytes(other_tokenizer())
    spelling = spell(policy_bytes, tokenizer, reward_bytes)
    spelled = 0
    for v, token in enumerate(policy_bytes):
        ids = spelling.ids[spelling.start[v] : spelling.start[v + 1]]
        assert not len(ids) or b"".join(reward_bytes[i] or b"" for i in ids) == token
        spelled += len(ids) > 0
    assert spelled >= len(policy_bytes) - 3


def test_spelling_is_kept_on_disk(cache: Path) -> None:
    tokenizer = chatml_tokenizer()
    reward_bytes, policy_bytes = token_bytes(tokenizer), token_bytes(other_tokenizer())
    first = cached_spelling(policy_bytes, tokenizer, reward_bytes)
    (path,) = (cache / "spellings").iterdir()
    np.savez(path, ids=first.ids + 1, start=first.start)
    assert np.array_equal(cached_spelling(policy_bytes, tokenizer, reward_bytes).ids, first.ids + 1)  # it was read
    path.write_bytes(path.read_bytes()[:40])
    assert np.array_equal(cached_spelling(policy_bytes, tokenizer, reward_bytes).ids, first.ids)  # half a file is none
    cached_spelling(policy_bytes[:-1], tokenizer, reward_bytes)
    assert len(list((cache / "spellings").iterdir())) == 2


def test_means_and_sums() -> None:
    table = torch.tensor([[1.0, 2.0], [3.0, 4.0], [10.0, 20.0]])
    spelling = Spelling(np.array([0, 1, 2]), np.array([0, 2, 2, 3]))
    assert spelled_table(table, spelling).tolist() == [[2.0, 3.0], [0.0, 0.0], [10.0, 20.0]]
    assert spelled_table(table.bfloat16(), spelling).dtype == torch.bfloat16
    assert span_sums(table, torch.tensor([0, 2]), torch.tensor([2, 1])).tolist() == [[4.0, 6.0], [10.0, 20.0]]
    assert span_sums(table, torch.tensor([2, 0]), torch.tensor([1, 1])).tolist() == [[10.0, 20.0], [1.0, 2.0]]
    assert span_sums(table, torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.long)).shape == (0, 2)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.lists(st.integers(1, 4), min_size=1, max_size=12))
def test_spans_against_a_search(ours: list[int], theirs: list[int]) -> None:
    """Every start and end of a reward token; a token is mapped where both of its ends are among them."""
    length = min(sum(ours), sum(theirs))
    ends = [0, *np.cumsum(theirs).tolist()]
    spans = np.array(ends[:-1]), np.array(ends[1:])
    pieces, at = [], 0
    while at < length:
        size = min(ours[len(pieces) % len(ours)], length - at)
        pieces.append(b"x" * size)
        at += size
    position, width = map_spans(pieces, np.arange(length), spans)
    at = 0
    for t, piece in enumerate(pieces):
        inside = [i for i in range(len(theirs)) if ends[i] >= at and ends[i + 1] <= at + len(piece)]
        covered = sum(theirs[i] for i in inside) == len(piece)
        assert (position[t], width[t]) == ((inside[0], len(inside)) if covered else (-1, 0))
        at += len(piece)


def test_first_order_change_of_the_score() -> None:
    """<g, E'> is the derivative: giving every position of a span a step towards E'_v changes the score by it."""
    reward = pair()
    ids = encode(reward.policy_tokenizer, "I am fine, thank you")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scored = reward.score([PROMPT], [ids], 1)
    assert scored.reward_grad is not None
    assert scored.reward_embedding is not None
    t = int(torch.nonzero(scored.mapped)[0])
    (row,) = reward._rows.build([PROMPT], [""], [ids], 1, set())
    span = slice(int(row.position[t]), int(row.position[t] + row.width[t]))
    inputs = reward.model.get_input_embeddings()(torch.tensor([row.ids])).detach()
    direction = torch.zeros_like(inputs)
    direction[0, span] = scored.reward_embedding[60]
    step = 1e-2
    with torch.no_grad():
        high, low = (reward.model(inputs_embeds=inputs + sign * step * direction).logits.item() for sign in (1, -1))
    predicted = float(scored.reward_grad[t] @ scored.reward_embedding[60])
    assert (high - low) / (2 * step) == pytest.approx(predicted, rel=0.05, abs=0.01)
