"""Prompts from Parquet files, folders and Hugging Face dataset names, through `datasets` (pip install 'datc[data]')."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def is_table(source: str | os.PathLike[str]) -> bool:
    """Whether `datasets` reads it: a Parquet file, a folder, or a name like owner/name that is no file here."""
    path = Path(source)
    if path.suffix == ".parquet" or path.is_dir():
        return True
    name = os.fspath(source)
    return not path.exists() and not path.suffix and name.count("/") == 1 and not name.startswith((".", "/", "~"))


def table_rows(source: str | os.PathLike[str], split: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The rows of one split in their stored order, each with the words that say where it stands.

    Raises ValueError, beginning with `prompts`, where the source cannot be read or has no such split.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"prompts: reading {source} needs the package datasets: pip install datasets") from error
    path = Path(source)
    try:
        if path.suffix == ".parquet":
            if not path.is_file():
                raise FileNotFoundError(f"there is no file {path}")
            loaded: Any = datasets.load_dataset("parquet", data_files=str(path), split="train")
        elif path.is_dir() and ((path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()):
            loaded = datasets.load_from_disk(str(path))
            if isinstance(loaded, datasets.DatasetDict):
                if split not in loaded:
                    raise ValueError(f"no split {split!r}; it has {', '.join(loaded)}")
                loaded = loaded[split]
        else:
            loaded = datasets.load_dataset(os.fspath(source), split=split)
    except Exception as error:  # datasets raises whatever its readers do
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"prompts: expected a Parquet file, a folder or a dataset's name, got {str(source)!r}: {reason}"
        ) from error
    for index, row in enumerate(loaded):
        yield row, f"{source}, row {index}"
