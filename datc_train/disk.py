"""Writes that the disk may refuse: files whole or not at all, and one error for what every library raises in its own way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GO_ON = "once it can be, --resume auto goes on with the run"


@contextmanager
def written(what: str | Path, go_on: str = GO_ON) -> Iterator[None]:
    """OSError "<what> could not be written (<why>); <go_on>" where a write within is refused: no room, read-only, no right.

    safetensors and tokenizers raise classes of their own for it, with the system's error in their text.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and "(os error " not in str(error):
            raise
        why = getattr(error, "strerror", None) or str(error)
        raise OSError(f"{what} could not be written ({why}); {go_on}") from error


def write_whole(path: Path, content: str | bytes, *, sync: bool = True) -> None:
    """Under its name only when it is whole, with `sync` only when it is on the disk; nothing is left where it is refused."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
