"""Prompts: what is read, what is refused in which words, and how steps share them out."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datc_train.data import load_prompts, prompt_batch
from datc_train.types import Prompt

USER = {"role": "user", "content": "Hello"}


def write(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_text_messages_and_columns(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    path = write(tmp_path, {"prompt": "Grüße\u2028zwei", "id": 7}, "", {"prompt": [system, USER], "answer": None})
    assert load_prompts(path) == [
        Prompt([{"role": "user", "content": "Grüße\u2028zwei"}], {"id": 7}),
        Prompt([system, USER], {"answer": None}),
    ]
    assert load_prompts(str(path)) == load_prompts(path)


def test_line_separator_inside_a_string_is_not_a_line_end(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "one\u2028two"}')
    assert load_prompts(path)[0].messages[0]["content"] == "one\u2028two"


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"q": "a"}\r\n{"q": "b"}\r\n')
    assert [prompt.messages[0]["content"] for prompt in load_prompts(path, "q")] == ["a", "b"]


def test_lists() -> None:
    given_prompt = Prompt([USER], {"x": 1})
    prompts = load_prompts(["Hi", given_prompt, [USER], {"prompt": "Hi", "x": 2}])
    assert prompts[1] is given_prompt
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["Hi", "Hello", "Hello", "Hi"]
    assert prompts[3].columns == {"x": 2}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a"', "line 2: expected one JSON object, got"),
        ('["a"]', "line 2: expected a JSON object, got a list of 1"),
        ('{"prompt": "half a pair \\ud83d"}', "line 2, 'prompt': expected text, got half of a surrogate pair"),
        ({"question": "a"}, "line 2: expected a column 'prompt', got 'question'"),
        ({"prompt": None}, "line 2, 'prompt': expected text or a list of messages, got null"),
        ({"prompt": []}, "line 2, 'prompt': expected text or a list of messages, got a list of 0"),
        ({"prompt": " "}, "line 2, 'prompt': expected a last message with words in it"),
        ({"prompt": ["a"]}, "message 0: expected an object with role and content, got 'a'"),
        (
            {"prompt": [{"role": "user"}]},
            "message 0: expected an object with role and content, got an object with 'role'",
        ),
        ({"prompt": [{"role": "human", "content": "a"}]}, "message 0: expected a role among system, user, assistant"),
        (
            {"prompt": [{"role": "user", "content": ["a"]}]},
            "message 0: expected parts with a type, {'type': 'text', 'text': ...}, got 'a' as part 0",
        ),
        (
            {"prompt": [USER, {"role": "assistant", "content": ""}]},
            "expected a last message with words in it, got ''",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, line: object, words: str) -> None:
    path = write(tmp_path, {"prompt": "good"}, line)
    with pytest.raises(ValueError) as error:
        load_prompts(path)
    assert str(path) in str(error.value)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_wrong_in_a_list_is_named_with_its_index() -> None:
    with pytest.raises(ValueError, match=r"^prompts\[1\]: expected a column 'prompt', got none"):
        load_prompts([{"prompt": "a"}, {}])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.jsonl: expected a file of JSON lines"):
        load_prompts(tmp_path / "missing.jsonl")
    with pytest.raises(FileNotFoundError):
        load_prompts(tmp_path)
    with pytest.raises(ValueError, match=r"prompts\.jsonl: expected at least one prompt, got none"):
        load_prompts(write(tmp_path, "", "  "))
    with pytest.raises(ValueError, match=r"^prompts: expected at least one prompt"):
        load_prompts([])
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(ValueError, match=r"latin\.jsonl: expected UTF-8"):
        load_prompts(tmp_path / "latin.jsonl")


# ---------------------------------------------------------------- steps


def names(batch: list[Prompt]) -> list[str]:
    return [prompt.messages[0]["content"] for prompt in batch]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 5))
def test_epochs_are_complete_and_steps_without_repeats(count: int, per_step: int, seed: int) -> None:
    per_step = min(per_step, count)
    prompts = load_prompts([f"p{i}" for i in range(count)])
    steps = [names(prompt_batch(prompts, step, per_step, seed)) for step in range(1, 4 * count // per_step + 2)]
    assert all(len(set(step)) == per_step for step in steps)
    stream = [name for step in steps for name in step]
    for start in range(0, len(stream) - count + 1, count):
        assert len(set(stream[start : start + count])) == count


def test_t34_a_step_depends_on_seed_and_step_alone() -> None:
    """T32, T34: resuming in the middle of an epoch needs neither state nor random numbers from outside."""
    prompts = load_prompts([f"p{i}" for i in range(21)])
    run = [names(prompt_batch(prompts, step, 8, 1)) for step in range(1, 20)]
    random.seed(5)
    state = random.getstate()
    assert [names(prompt_batch(prompts, step, 8, 1)) for step in reversed(range(1, 20))] == run[::-1]
    assert random.getstate() == state
    assert run != [names(prompt_batch(prompts, step, 8, 2)) for step in range(1, 20)]
    assert run[0] != run[3]


def test_every_prompt_comes_equally_often() -> None:
    prompts = load_prompts([f"p{i}" for i in range(20)])
    counts = Counter(name for step in range(1, 51) for name in names(prompt_batch(prompts, step, 8, 0)))
    assert set(counts.values()) == {20}


def test_steps_that_cannot_be() -> None:
    prompts = load_prompts(["a", "b"])
    with pytest.raises(ValueError, match=r"^prompts_per_step: expected 1 to 2, the number of prompts, got 3"):
        prompt_batch(prompts, 1, 3, 0)
    with pytest.raises(ValueError, match=r"^prompts_per_step"):
        prompt_batch(prompts, 1, 0, 0)
    with pytest.raises(ValueError, match=r"^step"):
        prompt_batch(prompts, 0, 1, 0)


def test_columns_instead_of_rows_are_refused() -> None:
    """A dict of columns iterates over its keys: one prompt, "prompt", would be trained on in silence."""
    with pytest.raises(ValueError, match=r"^prompts: expected a list of rows, got columns \(prompt\)"):
        load_prompts({"prompt": ["a", "b"]})  # type: ignore[arg-type]
