"""Prompts from Parquet files, folders and Hugging Face dataset names, through `datasets` (pip install 'datc[data]')."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
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
    path = Path(source)
    try:
        if _is_parquet(path):
            if not path.is_file():
                raise FileNotFoundError(f"there is no file {path}")
            loaded: Any = datasets.load_dataset("parquet", data_files=glob.escape(str(path)), split="train")
        elif path.is_dir() and ((path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()):
            loaded = datasets.load_from_disk(str(path))
            if isinstance(loaded, datasets.DatasetDict):
                if split not in loaded:
                    raise ValueError(f"no split {split!r}; it has {', '.join(loaded)}")
                loaded = loaded[split]
        elif not split:  # to `datasets` that is all of them
            raise ValueError("expected a split's name, got ''")
        else:
            loaded = datasets.load_dataset(
                str(path.resolve()) if path.is_dir() else os.fspath(source), data_files=_escaped_files(path), split=split
            )
    except Exception as error:  # datasets raises whatever its readers do
        said = f"{error}: {error.__cause__}" if isinstance(error, datasets.exceptions.DatasetGenerationError) else str(error)
        reason = " ".join(said.split())[:300]
        raise ValueError(
            f"{name}: expected a Parquet file, a folder or a dataset's name, got {str(source)!r}: {reason}"
        ) from error
    for index, row in enumerate(loaded):
        yield row, f"{source}, row {index}"


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
