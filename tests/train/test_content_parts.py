"""Message content that is a list of parts: text is read as if it had been written in one piece, everything else is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_reward_tiny import chatml_tokenizer, llama_tokenizer, qwen3_tokenizer, tiny_classifier, trl_template
from test_train import TINY

from datc_train import train
from datc_train.data import find_prompts, load_prompts
from datc_train.messages import with_text
from datc_train.reward import RewardModel
from datc_train.rollout import encode_prompts
from datc_train.types import Prompt

WORDS = ["Name a\n", " quiet", "", " hobby. 🙂"]
WHOLE = "".join(WORDS)


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def conversation(of_parts: bool) -> list[dict[str, Any]]:
    system, first, answer = "Be\nbrief.", "Hello", "Hi there"
    content = parts if of_parts else "".join
    return [
        {"role": "system", "content": parts("Be", "\nbrief.") if of_parts else system},
        {"role": "user", "content": parts(first) if of_parts else first},
        {"role": "assistant", "content": parts("Hi ", "there") if of_parts else answer},
        {"role": "user", "content": content(*WORDS) if of_parts else content(WORDS)},
    ]


@pytest.mark.parametrize("form", ["file", "list of rows", "list of messages", "Prompts", "parquet"])
def test_wherever_prompts_come_from(tmp_path: Path, form: str) -> None:
    row = {"prompt": conversation(True), "id": 7}
    source: Any
    match form:
        case "file":
            source = tmp_path / "p.jsonl"
            source.write_text(json.dumps(row) + "\n")
        case "parquet":  # its readers fill in keys that other parts have
            datasets = pytest.importorskip("datasets")
            source = tmp_path / "p.parquet"
            with_nulls = [{"role": m["role"], "content": [p | {"image": None} for p in m["content"]]} for m in conversation(True)]
            datasets.Dataset.from_list([{"prompt": with_nulls, "id": 7}]).to_parquet(source)
        case "list of rows":
            source = [row]
        case "Prompts":
            source = [Prompt(conversation(True), {"id": 7})]
        case _:
            source = [conversation(True)]
    assert find_prompts(source) == [Prompt(conversation(False), {} if form == "list of messages" else {"id": 7})]


def test_what_was_text_stays_the_same_object() -> None:
    message = {"role": "user", "content": "a"}
    assert with_text(message) is message
    prompt = Prompt([message])
    assert load_prompts([prompt])[0] is prompt
    given = conversation(True)
    find_prompts([given])
    assert given == conversation(True)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3_5_think", "glm4moe", "lfm2_2_5", "muse_glimmer"])
def test_templates_that_take_parts_write_the_same_row(name: str) -> None:
    tokenizer = qwen3_tokenizer()
    tokenizer.chat_template = trl_template(name)
    expected = tokenizer.apply_chat_template(conversation(True), add_generation_prompt=True, return_dict=False)
    assert encode_prompts(tokenizer, load_prompts([conversation(True)])) == (tuple(expected),)
    assert encode_prompts(tokenizer, load_prompts([conversation(False)])) == (tuple(expected),)


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_1", "phi3", "lfm2"])
def test_templates_that_know_text_alone_write_the_words(name: str) -> None:
    """Given the parts they write Python's list, drop the words or break."""
    tokenizer = qwen3_tokenizer()
    tokenizer.chat_template = trl_template(name)
    (row,) = encode_prompts(tokenizer, load_prompts([conversation(True)]))
    text = tokenizer.decode(row)
    assert WHOLE in text
    assert "Be\nbrief." in text
    assert "'text'" not in text


@pytest.mark.parametrize("tokenizer", [chatml_tokenizer, llama_tokenizer, qwen3_tokenizer])
def test_the_reward_model_reads_the_same(tokenizer: Any) -> None:
    tokenizer = tokenizer()
    reward = RewardModel(tiny_classifier("llama", len(tokenizer)), tokenizer)
    ids = tokenizer("I am fine", add_special_tokens=False)["input_ids"]
    text, of_parts = conversation(False), conversation(True)
    expected, got = (reward.score([prompt], [ids, ids[:2]], 2) for prompt in (text, of_parts))
    assert torch.equal(got.score, expected.score)
    assert torch.equal(got.reward_grad, expected.reward_grad)
    assert torch.equal(reward.token_rewards([of_parts], [ids], 1), reward.token_rewards([text], [ids], 1))
    assert reward.check_prompts([of_parts]) == reward.check_prompts([text])
    completion = [{"role": "assistant", "content": "I am fine"}]
    completion_parts = [{"role": "assistant", "content": parts("I am", " fine")}]
    expected_call = reward([text], [completion], [ids])
    for prompt, answer in ((of_parts, completion), (of_parts, completion_parts), (text, completion_parts)):
        assert reward([prompt], [answer], [ids]) == expected_call


def test_a_run_is_the_same_run(tmp_path: Path) -> None:
    made = []
    for form in (True, False):
        path = tmp_path / f"{form}.jsonl"
        path.write_text((json.dumps({"prompt": conversation(form)}) + "\n") * 2)
        options = {"prompts": str(path), "eval_prompts": str(path), "run_dir": str(tmp_path / f"r{form}"), "steps": 1}
        run = train(TINY | options | {"report": True})
        made.append([json.loads(line) for name in ("samples", "eval") for line in (run / f"{name}.jsonl").open()])
        assert "quiet" in (run / "report.html").read_text()
    assert made[0] == made[1]
    assert made[0][0]["prompt"] == conversation(False)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([*parts("What is"), {"type": "image", "image": "x.png"}], "expected parts of text alone, got 'image' as part 1"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "expected parts of text alone, got 'image_url' as part 0"),
        ([{"type": "audio", "audio": "x"}], "expected parts of text alone, got 'audio' as part 0"),
        ([{"type": "video", "text": "x"}], "expected parts of text alone, got 'video' as part 0"),
        ([{"type": 3}], "expected parts of text alone, got 3 as part 0"),
        ([{"text": "a"}], "expected parts with a type, {'type': 'text', 'text': ...}, got an object with 'text' as part 0"),
        (["a"], "expected parts with a type, {'type': 'text', 'text': ...}, got 'a' as part 0"),
        ([{"type": "text"}], "expected text in part 0, got null"),
        ([{"type": "text", "text": ["a"]}], "expected text in part 0, got a list of 1"),
        ([], "expected content that is text or a list of parts with text, got a list of 0"),
        ({"type": "text", "text": "a"}, "expected content that is text or a list of parts with text, got an object with 'type'"),
        (3, "expected content that is text or a list of parts with text, got 3"),
    ],
)
def test_what_is_not_text_is_named(content: Any, words: str) -> None:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    with pytest.raises(ValueError) as error:
        load_prompts([{"prompt": "good"}, {"prompt": prompt}])
    assert str(error.value).startswith(f"prompts[1], 'prompt', message 1: {words}")
    tokenizer = chatml_tokenizer()
    reward = RewardModel(tiny_classifier("llama", len(tokenizer)), tokenizer)
    good = [{"role": "user", "content": "a"}]
    for call in (
        lambda: reward.score([good, prompt], [[5], [5]], 1),
        lambda: reward.token_rewards([good, prompt], [[5], [5]], 1),
        lambda: reward.check_prompts([good, prompt]),
        lambda: reward([good, prompt], ["", ""], [[5], [5]]),
    ):
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value).startswith(f"prompts: {words}")
        assert str(error.value).endswith(" in prompt 1")
    with pytest.raises(ValueError) as error:
        reward([good], [[{"role": "assistant", "content": content}]], [[5]])
    assert str(error.value).startswith(f"completions: {words}")


@pytest.mark.parametrize("texts", [("", " "), ("",), ("\n", "\t")])
def test_parts_without_words(texts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected a last message with words in it"):
        load_prompts([[{"role": "user", "content": parts(*texts)}]])


def test_half_of_a_surrogate_pair_in_a_part() -> None:
    with pytest.raises(ValueError, match=r"message 0: expected text, got half of a surrogate pair"):
        load_prompts([[{"role": "user", "content": parts("a", "\ud83d")}]])
    assert load_prompts([[{"role": "user", "content": parts("a", "\U0001f642")}]])


def test_a_message_without_content_beside_tool_calls_is_left_to_the_template() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": []}
    assert with_text(message) is message


def test_in_trl_policy_and_reward_model_read_the_words(tmp_path: Path) -> None:
    """TRL hands parts to the template as they are; the tiny policy's knows text alone."""
    pytest.importorskip("trl")
    from datasets import Dataset
    from test_trl import make

    from datc_train.integrations.trl import DATCTrainer

    rows = {}
    for form in (True, False):
        trainer = make(DATCTrainer, tmp_path / str(form), max_steps=1)
        trainer.train_dataset = Dataset.from_list(
            [{"prompt": [{"role": "user", "content": parts(*WORDS) if form else WHOLE}]}] * 4
        )
        kept: list[Any] = []
        real = trainer._tokenize_prompts
        trainer._tokenize_prompts = lambda prompts, real=real, kept=kept: kept.append(real(prompts)) or kept[-1]
        trainer.train()
        rows[form] = kept[0][0], trainer.state.log_history[0]["reward"]
    assert rows[True] == rows[False]
    assert WHOLE in trainer.processing_class.decode(rows[True][0][0])
