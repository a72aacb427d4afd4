"""Prompts from Parquet, folders and datasets; UltraFeedback's splits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from datc_train.cli import main
from datc_train.data import find_prompts, load_prompts
from datc_train.tables import is_table
from datc_train.types import Prompt
from datc_train.ultrafeedback import prepare

datasets = pytest.importorskip("datasets")


def rows(count: int) -> list[dict]:
    """Rows of UltraFeedback's schema, every fifth prompt twice."""
    made = []
    for i in range(count):
        prompt = f"Question {i - i % 5 // 4}?"
        chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": f"Answer {i}."}]
        made.append(
            {
                "prompt": prompt,
                "prompt_id": f"id{i}",
                "chosen": chat,
                "rejected": chat,
                "messages": chat,
                "score_chosen": 8.0,
                "score_rejected": 3.0,
            }
        )
    return made


def write(tmp_path: Path, table: list[dict]) -> Path:
    path = tmp_path / "train.parquet"
    datasets.Dataset.from_list(table).to_parquet(path)
    return path


def test_parquet_text_and_messages(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = write(tmp_path, [{"q": chat, "id": 1}, {"q": chat, "id": 2}])
    assert find_prompts(path, "q") == [Prompt(chat, {"id": 1}), Prompt(chat, {"id": 2})]
    assert [p.messages[0]["content"] for p in find_prompts(str(write(tmp_path, rows(3))))] == [f"Question {i}?" for i in range(3)]


def test_folders(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(tmp_path / "two")
    (tmp_path / "three").mkdir()
    data.to_parquet(tmp_path / "three" / "train.parquet")
    for name in ("one", "two", "three"):
        assert [p.messages[0]["content"] for p in find_prompts(tmp_path / name)] == ["a", "b"]
    assert [p.messages[0]["content"] for p in find_prompts(tmp_path / "two", split="test")] == ["b"]
    with pytest.raises(ValueError, match=r"^prompts: expected .*no split 'dev'; it has train, test"):
        find_prompts(tmp_path / "two", split="dev")


def test_a_system_prompt_goes_where_there_is_none() -> None:
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "b"}]
    found = find_prompts(["a", own], system_prompt="Be brief.")
    assert found[0].messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
    assert found[1].messages == own


@pytest.mark.parametrize(
    ("source", "table"),
    [("a.jsonl", False), ("org/name", True), ("./org/name", False), ("a.parquet", True), ("name", False), ("a/b/c", False)],
)
def test_what_is_a_table(source: str, table: bool) -> None:
    assert is_table(source) == table


def test_what_cannot_be_read_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for source in ("nobody/nothing-at-all", str(tmp_path / "none.parquet")):
        with pytest.raises(ValueError, match="^prompts: expected a Parquet file, a folder or a dataset's name"):
            find_prompts(source)
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match="^prompts: expected a Parquet file"):
        find_prompts(tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match=r"train.parquet, row 0: expected a column 'question'"):
        find_prompts(write(tmp_path, rows(2)), "question")


def test_ultrafeedback_is_dealt_out_once_and_for_all(tmp_path: Path) -> None:
    sizes = {"heldout": 4, "rl": 10, "sft": 6}
    table = rows(40)
    done = prepare(tmp_path / "a", source=str(write(tmp_path, table)), split="train", sizes=sizes)
    assert done == {"candidates": 32} | sizes
    prepare(tmp_path / "b", source=str(write(tmp_path, table[::-1])), split="train", sizes=sizes)
    parts = {}
    for name, size in sizes.items():
        one, other = ([json.loads(line) for line in (tmp_path / x / f"{name}.jsonl").read_text().splitlines()] for x in "ab")
        assert [row["prompt"] for row in one] == [row["prompt"] for row in other]
        parts[name] = {row["prompt"] for row in one}
        assert len(parts[name]) == size
    assert not parts["rl"] & parts["heldout"]
    assert not parts["rl"] & parts["sft"]
    assert all(row["response"].startswith("Answer") for row in map(json.loads, (tmp_path / "a" / "sft.jsonl").open()))
    assert len(load_prompts(tmp_path / "a" / "rl.jsonl")) == 10


def test_ultrafeedback_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(source: Path, says: str) -> None:
        with pytest.raises(SystemExit) as stop:
            main(["data", "ultrafeedback", "--out", str(tmp_path / "out"), "--source", str(source), "--split", "train"])
        assert stop.value.code == 2
        assert says in capsys.readouterr().err

    fails(write(tmp_path, rows(10)), "expected at least 4756 different prompts, got 8")
    fails(write(tmp_path, [{"prompt": "a"}]), "expected the columns prompt (text) and chosen (messages)")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rl.jsonl").touch()
    fails(write(tmp_path, rows(10)), "rl.jsonl exists")
