"""Sources that were read as something else in silence, or refused in words that name neither key, file nor row."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from datc_train import train
from datc_train.config import Config, config_from
from datc_train.data import find_eval_prompts, find_prompts, find_train_prompts, load_prompts
from datc_train.ultrafeedback import prepare

datasets = pytest.importorskip("datasets")
datasets.disable_progress_bars()

TINY = {"policy": "tiny", "reward": "tiny", "steps": 1, "prompts_per_step": 1, "group_size": 2, "max_new_tokens": 4}


def table(*prompts: str) -> Any:
    return datasets.Dataset.from_dict({"prompt": list(prompts)})


def texts(*args: Any, **options: Any) -> list[str]:
    return [prompt.messages[-1]["content"] for prompt in find_prompts(*args, **options)]


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["p[1]", "p*", "p?"])
def test_a_name_is_not_a_pattern(tmp_path: Path, name: str) -> None:
    table("other").to_parquet(tmp_path / "p1.parquet")
    table("own").to_parquet(tmp_path / f"{name}.parquet")
    assert texts(tmp_path / f"{name}.parquet") == ["own"]
    for folder, words in (("p1", "other"), (name, "own")):
        (tmp_path / folder).mkdir()
        for split in ("train", "test"):
            table(f"{words} {split}").to_parquet(tmp_path / folder / f"{split}.parquet")
    assert texts(tmp_path / name) == ["own train"]
    assert texts(tmp_path / name, split="test") == ["own test"]
    datasets.DatasetDict({"train": table("saved")}).save_to_disk(tmp_path / f"{name} saved")
    assert texts(tmp_path / f"{name} saved") == ["saved"]


def test_suffixes_and_folders_that_look_like_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table("upper").to_parquet(tmp_path / "x.PARQUET")
    assert texts(tmp_path / "x.PARQUET") == ["upper"]
    (tmp_path / "y.parquet").mkdir()
    table("part").to_parquet(tmp_path / "y.parquet" / "part-0.parquet")
    assert texts(tmp_path / "y.parquet") == ["part"]
    (tmp_path / "json").mkdir()  # the name of one of `datasets`' own readers
    table("here").to_parquet(tmp_path / "json" / "train.parquet")
    monkeypatch.chdir(tmp_path)
    assert texts("json") == ["here"]
    monkeypatch.chdir(tmp_path / "json")
    assert texts(".") == ["here"]


# ---------------------------------------------------------------- splits


def without_splits(tmp_path: Path) -> list[Any]:
    table("a").to_parquet(tmp_path / "p.parquet")
    table("a").save_to_disk(tmp_path / "plain")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    return [str(tmp_path / name) for name in ("p.parquet", "plain", "p.jsonl")]


def two_splits(tmp_path: Path) -> str:
    datasets.DatasetDict({"train": table("a", "b"), "test": table("c")}).save_to_disk(tmp_path / "dd")
    return str(tmp_path / "dd")


def test_a_split_of_what_has_none_is_refused(tmp_path: Path) -> None:
    for source in [*without_splits(tmp_path), "quickstart", ["a"]]:
        with pytest.raises(ValueError, match=r"^prompt_split: expected 'train' .* got 'test'"):
            find_prompts(source, split="test")
        assert find_prompts(source)


def test_no_split_is_not_every_split(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    table("a").to_parquet(tmp_path / "folder" / "train.parquet")
    with pytest.raises(ValueError, match=r"^prompts: expected .*: expected a split's name, got ''"):
        find_prompts(tmp_path / "folder", split="")


def evaluated(trained_on: Any = "quickstart", **keys: Any) -> list[str]:
    return [p.messages[-1]["content"] for p in find_eval_prompts(Config(prompts="quickstart", **keys), trained_on)]


def test_the_split_of_evaluation(tmp_path: Path) -> None:
    both = two_splits(tmp_path)
    assert evaluated() == []
    assert evaluated(both, eval_prompts=both, eval_split="test") == ["c"]
    assert evaluated(both, eval_prompts=both, eval_split="train", eval_limit=1) == ["a"]
    assert evaluated(eval_prompts=both) == ["a", "b"]
    assert evaluated(eval_prompts=both, prompt_split="test") == ["c"]
    for other in (both, both + "/", Path(both)):
        with pytest.raises(ValueError, match=r"^eval_split: expected a split's name where eval_prompts and prompts are both"):
            evaluated(other, eval_prompts=both)
    for source in without_splits(tmp_path):
        assert evaluated(source, eval_prompts=source, prompt_split="test") == ["a"]
        with pytest.raises(ValueError, match=r"^eval_split: expected null, as .* has no splits, got 'test'"):
            evaluated(eval_prompts=source, eval_split="test")
    with pytest.raises(ValueError, match="^eval_split: expected null without eval_prompts, got test"):
        config_from({"eval_split": "test"})


def test_what_cannot_be_evaluated_is_named_by_its_own_key(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "a"}\n')
    for source, words in (
        (str(path), r".*p\.jsonl, line 1: expected a column 'prompt'"),
        (two_splits(tmp_path), r"expected a Parquet file.* no split 'dev'"),
        (str(tmp_path / "none.parquet"), r"expected a Parquet file.* there is no file"),
    ):
        with pytest.raises(ValueError, match=f"^eval_prompts: {words}"):
            evaluated(eval_prompts=source, eval_split="dev" if source.endswith("dd") else None)
    with pytest.raises(FileNotFoundError, match=r"^eval_prompts: .*none\.jsonl: expected a file"):
        evaluated(eval_prompts=str(tmp_path / "none.jsonl"))


def test_what_cannot_be_sampled_is_named_by_its_own_key_and_index(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n' + json.dumps({"prompt": "word " * 200, "completions": 1}) + "\n")
    config = TINY | {"run_dir": str(tmp_path / "run"), "eval_prompts": str(path), "max_prompt_tokens": 100}
    with pytest.raises(ValueError, match=r"^eval_prompts: expected at most 100 tokens a prompt, got \d+ in prompt 1 "):
        train(config, prompts=["a", "b", "c"])
    with pytest.raises(ValueError, match=r"^eval_prompts: expected other columns .* got completions in prompt 1"):
        train(config | {"method": "grpo"}, prompts=["a", "b", "c"], reward=lambda prompts, **_: [0.0] * len(prompts))
    with pytest.raises(ValueError, match=r"^prompts: expected at most 100 tokens a prompt, got \d+ in prompt 2 "):
        train(config, prompts=["a", "b", "word " * 200])
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- what stands in them


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a", "id": ' + "1" * 5000 + "}", "4300 digits"),
        ('{"prompt": "a", "id": ' + "[" * 200_000 + "}", "recursion"),
        ('{"prompt": "first", "prompt": "second"}', "the key 'prompt' stands there twice"),
        ('{"prompt": [{"role": "user", "content": "a", "role": "user"}]}', "the key 'role' stands there twice"),
    ],
)
def test_lines_that_the_json_reader_cannot_take(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "good"}\n' + line + "\n")
    with pytest.raises(ValueError) as error:
        load_prompts(path)
    assert str(error.value).startswith(f"{path}, line 2: expected one JSON object, got ")
    assert words in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (['{"prompt": "a"}\n{"prompt":\n'], "(JSON parse error|Expected object or value)"),  # by version of datasets
        (['{"prompt": "a", "x": 1}\n', '{"prompt": "b", "y": "s"}\n'], "column names don't match"),
    ],
)
def test_the_reader_of_a_folder_says_why(tmp_path: Path, files: list[str], words: str) -> None:
    (tmp_path / "folder").mkdir()
    for index, text in enumerate(files):
        (tmp_path / "folder" / f"{index}.jsonl").write_text(text)
    with pytest.raises(ValueError, match=f"^prompts: expected a Parquet file.*{words}"):
        find_prompts(tmp_path / "folder")


def test_columns_of_one_name_are_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["prompt", "prompt"])
    parquet.write_table(twice, tmp_path / "p.parquet")
    with pytest.raises(ValueError, match=r"^prompts: expected a Parquet file.*Multiple matches for FieldRef.Name\(prompt\)"):
        find_prompts(tmp_path / "p.parquet")


@pytest.mark.parametrize("source", [3, 2.5, True, b"abc"])
def test_what_is_no_source_at_all(source: Any) -> None:
    for call in (find_prompts, lambda given: train(TINY, prompts=given)):
        with pytest.raises(ValueError, match=r"^prompts: expected a source's name, a path or a list of rows, got "):
            call(source)


# ---------------------------------------------------------------- UltraFeedback

SIZES = {"heldout": 8, "rl": 20, "sft": 12}


def rows(count: int, first: int = 0, answer: str = "Answer", **replaced: Any) -> list[dict[str, Any]]:
    made = []
    for i in range(first, first + count):
        chat = [{"role": "user", "content": f"Question {i}?"}, {"role": "assistant", "content": f"{answer} {i}."}]
        made.append({"prompt": f"Question {i}?", "prompt_id": f"id{i}", "chosen": chat} | replaced)
    return made


def dealt(tmp_path: Path, made: list[dict[str, Any]], **options: Any) -> dict[str, list[dict[str, Any]]]:
    tmp_path.mkdir(exist_ok=True)
    source = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in made))
    out = source.with_suffix("")
    prepare(out, source=str(source), **{"sizes": SIZES} | options)
    return {name: [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()] for name in SIZES}


def prompts_of(parts: dict[str, list[dict[str, Any]]]) -> dict[str, set[str]]:
    return {name: {row["prompt"] for row in part} for name, part in parts.items()}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rows_added_later_move_no_prompt_from_one_file_to_another(tmp_path: Path, seed: int) -> None:
    seen: dict[str, str] = {}
    for count in (150, 200, 400, 1000):
        for name, prompts in prompts_of(dealt(tmp_path, rows(count), seed=seed)).items():
            assert len(prompts) == SIZES[name]
            assert {seen.setdefault(prompt, name) for prompt in prompts} == {name}


def test_every_file_takes_the_lowest_hashes_of_its_own(tmp_path: Path) -> None:
    """By another road than the code: shares of the hash as floats."""
    made, total = rows(400), sum(SIZES.values())
    place = {row["prompt"]: int(hashlib.sha256(f"5\0{row['prompt']}".encode()).hexdigest()[:13], 16) / 16**13 for row in made}
    parts, start = dealt(tmp_path, made, seed=5), 0.0
    for name, size in SIZES.items():
        own = sorted((at, prompt) for prompt, at in place.items() if start <= at < start + size / total)
        assert [row["prompt"] for row in parts[name]] == [prompt for _, prompt in own[:size]]
        start += size / total


def test_the_answer_of_a_prompt_that_comes_twice_does_not_depend_on_order(tmp_path: Path) -> None:
    made = rows(150) + rows(150, answer="Other") + rows(150, prompt_id=None)
    once = dealt(tmp_path, made)
    answers = {row["response"].split()[0] for row in once["sft"]}
    assert answers == {"Answer", "Other"}  # neither is preferred
    for seed in range(3):
        random.Random(seed).shuffle(made)
        assert dealt(tmp_path, made) == once


def test_too_few_of_one_file_are_counted(tmp_path: Path) -> None:
    words = r"^source: expected at least \d+ different prompts whose hash is (heldout|rl|sft)'s, got \d+ of 40 from "
    with pytest.raises(ValueError, match=words):
        dealt(tmp_path, rows(40))
    with pytest.raises(ValueError, match=r"^source: expected at least 40 different prompts, got 39 from "):
        dealt(tmp_path, rows(39))
    assert not (tmp_path / "0").exists()


USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("replaced", "words"),
    [
        ({"chosen": []}, r"'chosen': expected a list of messages, got \[\]"),
        ({"chosen": None}, r"'chosen': expected a list of messages, got None"),
        ({"chosen": "x"}, r"'chosen': expected a list of messages, got 'x'"),
        ({"chosen": ["a", "b"]}, r"'chosen': expected a list of messages, got \['a', 'b'\]"),
        ({"chosen": [USER]}, r"'chosen': expected a last message with role assistant and text as content, got "),
        ({"chosen": [ANSWER, USER]}, r"'chosen': expected a last message with role assistant"),
        ({"chosen": [{"role": "assistant"}]}, r"'chosen': expected a last message with role assistant"),
        ({"chosen": [ANSWER | {"content": None}]}, r"'chosen': expected a last message with role assistant"),
        ({"chosen": [ANSWER | {"content": "\ud800"}]}, r"'chosen': expected text, got half of a surrogate pair"),
        ({"prompt": None}, r"'prompt': expected text, got null"),
        ({"prompt": 3}, r"'prompt': expected text, got 3"),
        ({"prompt": "\ud800"}, r"'prompt': expected text, got half of a surrogate pair"),
        ({"prompt_id": [1]}, r"'prompt_id': expected text, a whole number or nothing, got \[1\]"),
    ],
)
def test_a_bad_row_is_named_before_anything_is_written(tmp_path: Path, replaced: dict[str, Any], words: str) -> None:
    made = rows(150)
    made[7] |= replaced
    with pytest.raises(ValueError, match=rf"^source: .*0\.jsonl, line 8, {words}"):
        dealt(tmp_path, made)
    assert not (tmp_path / "0").exists()


def test_a_bad_row_of_parquet_is_named(tmp_path: Path) -> None:
    made = rows(150)
    made[7]["chosen"] = []
    datasets.Dataset.from_list(made).to_parquet(tmp_path / "p.parquet")
    with pytest.raises(ValueError, match=r"^source: .*p\.parquet, row 7, 'chosen': expected a list of messages"):
        prepare(tmp_path / "out", source=str(tmp_path / "p.parquet"), sizes=SIZES)


def test_sources_and_folders_that_cannot_be(tmp_path: Path) -> None:
    source = str(tmp_path / "p.parquet")
    datasets.Dataset.from_list(rows(150)).to_parquet(source)
    with pytest.raises(ValueError, match=r"^source: expected .* got '.*none\.jsonl'"):
        prepare(tmp_path / "out", source=str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match=r"^split: expected 'train_prefs' .* got 'nope'"):
        prepare(tmp_path / "out", source=source, split="nope", sizes=SIZES)
    for out in (Path(source), Path(source) / "below"):
        with pytest.raises(FileExistsError, match=r"^out: expected a folder, got .*p\.parquet is a file"):
            prepare(out, source=source, sizes=SIZES)
    assert prepare(tmp_path / "out", source=source, sizes=SIZES)["candidates"] == 150


def test_prompts_of_a_config_are_read_as_it_says(tmp_path: Path) -> None:
    """Training, the doctor and the benchmarks all read them so."""
    (tmp_path / "p.jsonl").write_text('{"question": "Why?"}\n')
    config = config_from({"prompts": str(tmp_path / "p.jsonl"), "prompt_column": "question", "system_prompt": "Be brief."})
    (prompt,) = find_train_prompts(config)
    assert [message["content"] for message in prompt.messages] == ["Be brief.", "Why?"]
    (other,) = find_train_prompts(config, [{"question": "How?"}])
    assert other.messages[-1]["content"] == "How?"
