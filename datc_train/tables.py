"""Prompts from Parquet files, folders and Hugging Face dataset names, through `datasets` (pip install 'datc[data]')."""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


def is_table(source: str | os.PathLike[str]) -> bool:
    """Whether `datasets` reads it: a Parquet file, a folder, or a name like owner/name that is no file here."""
    path = Path(source)
    if _is_parquet(path) or path.is_dir():
        return True
    name = os.fspath(source)
    return not path.exists() and not path.suffix and name.count("/") == 1 and not name.startswith((".", "/", "~"))


def has_splits(source: str | os.PathLike[str]) -> bool:
    """Whether it is a folder or a dataset's name; not a folder that a plain `datasets.Dataset` was saved to."""
    path = Path(source)
    return is_table(source) and not _is_parquet(path) and not (path / "dataset_info.json").is_file()


def table_rows(source: str | os.PathLike[str], split: str, *, name: str = "prompts") -> Iterator[tuple[dict[str, Any], str]]:
    """The rows of one split in their stored order, each with the words that say where it stands.

    Raises ValueError, beginning with `name`, where the source cannot be read or has no such split.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{name}: reading {source} needs the package datasets: pip install datasets") from error
    with TemporaryDirectory(prefix="datc-") as cache:
        try:
            with _one_voice(bars=not Path(source).exists()):
                loaded = _load(source, split, cache)
        except Exception as error:  # datasets raises whatever its readers do
            said = f"{error}: {error.__cause__}" if isinstance(error, datasets.exceptions.DatasetGenerationError) else str(error)
            reason = " ".join(said.split())[:300]
            raise ValueError(
                f"{name}: expected a Parquet file, a folder or a dataset's name, got {str(source)!r}: {reason}"
            ) from error
        for index, row in enumerate(loaded):
            yield row, f"{source}, row {index}"


@contextmanager
def _one_voice(*, bars: bool) -> Iterator[None]:
    """Without what `datasets` logs of an error that it raises too, and without its progress `bars`, which a download has."""
    import datasets

    level, quiet = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(logging.CRITICAL)
    if not bars and not quiet:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if not bars and not quiet:
            datasets.enable_progress_bars()


def _load(source: str | os.PathLike[str], split: str, cache: str) -> Any:
    """Rows of `datasets`. It keeps a copy of what is here under path, time and size, and would take it for a file that has been
    written since within both: local sources are read into `cache`, which is new."""
    import datasets

    path = Path(source)
    if _is_parquet(path):
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        return datasets.load_dataset("parquet", data_files=glob.escape(str(path)), split="train", cache_dir=cache)
    if path.is_dir() and ((path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()):
        loaded = datasets.load_from_disk(str(path))
        if not isinstance(loaded, datasets.DatasetDict):
            return loaded
        if split not in loaded:
            raise ValueError(f"no split {split!r}; it has {', '.join(loaded)}")
        return loaded[split]
    if not split:  # to `datasets` that is all of them
        raise ValueError("expected a split's name, got ''")
    if path.is_dir():
        return datasets.load_dataset(str(path.resolve()), data_files=_escaped_files(path), split=split, cache_dir=cache)
    return datasets.load_dataset(os.fspath(source), split=split)


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet" and not path.is_dir()


def _escaped_files(folder: Path) -> dict[str, list[str]] | None:
    """The files of each split of a folder whose path `datasets` would take for a pattern; None: it finds them itself."""
    from datasets.data_files import get_data_patterns

    base = str(folder.resolve())
    if not folder.is_dir() or not glob.has_magic(base):
        return None
    base = glob.escape(base)
    return {str(split): [f"{base}/{file}" for file in files] for split, files in get_data_patterns(base).items()}
