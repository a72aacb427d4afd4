"""A local source is read as it is now: `datasets` keeps copies by path, time and size, and would hand out the old rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from datc_train.cli import main
from datc_train.data import find_prompts
from datc_train.tables import table_rows

datasets = pytest.importorskip("datasets")


def parquet(path: Path, *prompts: str) -> Path:
    datasets.Dataset.from_dict({"prompt": list(prompts)}).to_parquet(path)
    return path


def json_lines(path: Path, *prompts: str) -> Path:
    path.write_text("".join(f'{{"prompt": "{prompt}"}}\n' for prompt in prompts))
    return path


def texts(source: Path) -> list[str]:
    return [prompt.messages[-1]["content"] for prompt in find_prompts(source)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    path.mkdir()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", path)
    return path


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("p.parquet", parquet),
        ("folder/train.parquet", parquet),
        ("folder/train.jsonl", json_lines),
        ("fold[e]r/train.parquet", parquet),
        ("p.jsonl", json_lines),
    ],
)
def test_other_rows_at_the_same_time_and_of_the_same_size(
    tmp_path: Path, cache: Path, name: str, write: Callable[..., Path]
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    source = path if path.parent == tmp_path else path.parent
    write(path, "one", "two")
    then = path.stat()
    assert texts(source) == ["one", "two"]
    write(path, "six", "ten")
    os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))
    now = path.stat()
    assert (now.st_size, now.st_mtime_ns) == (then.st_size, then.st_mtime_ns)
    assert texts(source) == ["six", "ten"]
    assert not list(cache.rglob("*.arrow"))  # no copy is left behind either


def test_a_saved_dataset_that_is_saved_again(tmp_path: Path, cache: Path) -> None:
    for prompts in (["one", "two"], ["six", "ten"]):
        datasets.Dataset.from_dict({"prompt": prompts}).save_to_disk(tmp_path / "saved")
        assert texts(tmp_path / "saved") == prompts


def test_a_broken_file_that_is_mended_and_one_that_breaks(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "p.parquet"
    good = parquet(path, "one", "two").read_bytes()
    then = path.stat()
    assert texts(path) == ["one", "two"]
    for content, readable in ((bytes(len(good)), False), (good, True)):
        path.write_bytes(content)
        os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))
        if readable:
            assert texts(path) == ["one", "two"]
        else:
            with pytest.raises(ValueError, match="^prompts: expected a Parquet file"):
                texts(path)


def test_what_is_read_in_part_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary copy goes when its rows are no longer wanted, an error among them."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    path = parquet(tmp_path / "p.parquet", "one", "two")
    rows = table_rows(path, "train")
    assert next(rows)[0] == {"prompt": "one"}
    assert list((tmp_path / "tmp").iterdir())
    rows.close()
    assert not list((tmp_path / "tmp").iterdir())
    path.write_bytes(b"no parquet")
    with pytest.raises(ValueError, match="^prompts: expected a Parquet file"):
        next(table_rows(path, "train"))
    assert not list((tmp_path / "tmp").iterdir())


@pytest.fixture
def with_bars() -> Iterator[None]:
    quiet = datasets.are_progress_bars_disabled()
    datasets.enable_progress_bars()
    yield
    if quiet:
        datasets.disable_progress_bars()


@pytest.mark.usefixtures("with_bars")
@pytest.mark.parametrize("kind", ["parquet", "folder", "good"])
def test_the_command_line_says_one_thing(tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str) -> None:
    """`datasets` logs the error that it raises, under a bar of its progress; both are as they were afterwards."""
    source = tmp_path / "p.parquet"
    match kind:
        case "good":
            parquet(source, "one")
        case "parquet":
            source.write_bytes(b"no parquet")
        case _:
            source = tmp_path / "folder"
            source.mkdir()
            (source / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt":\n')
    capfd.readouterr()
    level = datasets.logging.get_verbosity()
    with pytest.raises(SystemExit) as stop:
        main(["train", "--config", "tiny", "--prompts", str(source), "--run_dir", str(tmp_path / "r"), "--prompts_per_step", "9"])
    assert stop.value.code == 2
    said = capfd.readouterr().err.splitlines()
    says = "prompts_per_step: expected 1 to 1" if kind == "good" else "prompts: expected a Parquet file, a folder"
    assert len(said) == 1
    assert said[0].startswith(f"datc: {says}")
    assert datasets.logging.get_verbosity() == level
    assert not datasets.are_progress_bars_disabled()
