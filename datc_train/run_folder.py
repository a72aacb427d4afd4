"""The folder of a run: what it was asked, what it measured, what it learned."""

from __future__ import annotations

import json
import os
import time
from dataclasses import fields
from pathlib import Path
from typing import IO, Any

import yaml

from datc_train.checkpoint import checkpoints
from datc_train.config import Config
from datc_train.credit_point import EMBEDDING
from datc_train.disk import write_whole, written
from datc_train.sources import FILE as SOURCES
from datc_train.sources import Sources

# What may differ when a run goes on: where it ends, where it lies, who watches, how long a function may take, and what the engine
# is given.
ENGINE_KEYS = frozenset(field.name for field in fields(Config) if field.name.startswith("vllm_"))
FREE_KEYS = frozenset({"run_dir", "resume", "steps", "trackers", "report", "reward_timeout"}) | ENGINE_KEYS
LOGS = ("metrics.jsonl", "samples.jsonl", "eval.jsonl")
LOCK = ".lock"  # held by the process that writes the run; the system lets go of it when that ends, however it ends


def check_run_dir(config: Config) -> None:
    """Whether the run may have its folder: before models load, not after.

    Raises FileExistsError for a `run_dir` that exists, without `resume`; ValueError for one that `resume` cannot go on with:
    no run's folder, or a run of another config (every key that differs is named).
    """
    if config.run_dir is not None and not config.run_dir.strip():
        raise ValueError(f"run_dir: expected a folder's name or null, got {config.run_dir!r}")
    if config.run_dir is not None and Path(config.run_dir).is_file():
        raise FileExistsError(f"run_dir: expected a folder, got the file {config.run_dir}")
    if config.resume is None:
        if config.run_dir is not None and Path(config.run_dir).exists():
            raise FileExistsError(
                f"run_dir: {config.run_dir} exists; choose another folder, or go on with that run by --resume auto"
            )
        return
    if config.run_dir is None:
        raise ValueError("resume: expected run_dir with it, the folder of the run to go on with, got none")
    path = Path(config.run_dir)
    if not path.exists() or _is_fresh(path):
        return
    if not (path / "config.yaml").is_file():
        raise ValueError(f"resume: expected a run's folder with config.yaml, got {path}")
    if not checkpoints(path):  # it begins again, with whatever config
        return
    # A run of an older version knows nothing of newer keys, which it ran without: at their defaults, or as it was before them.
    saved = Config().to_dict() | EMBEDDING.arguments() | saved_config(path)
    now = _resolved(config, path)
    if config.schedule_steps is None:
        now["schedule_steps"] = saved.get("schedule_steps")
    different = [key for key in now if key not in FREE_KEYS and now[key] != saved.get(key)]
    if different:
        changes = "; ".join(f"{key}: {saved.get(key)!r} then, {now[key]!r} now" for key in different)
        raise ValueError(f"resume: only {', '.join(sorted(FREE_KEYS))} may differ from {path}, got {changes}")


def saved_config(run: Path) -> dict[str, Any]:
    """What `run/config.yaml` holds. Raises ValueError where that is not a run's config."""
    try:
        found = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{run / 'config.yaml'}: expected the keys of a run, got no YAML: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{run / 'config.yaml'}: expected the keys of a run, got {found!r:.60}")
    return found


class RunFolder:
    """Makes the folder, or takes that of the run to go on with; otherwise a run never writes into another's, nor two processes
    into one, until `close`.

    Raises as `check_run_dir`, and ValueError for a run that was made of other `sources`; BlockingIOError for a folder that
    another process writes; OSError where it cannot be written.
    """

    def __init__(self, config: Config, sources: Sources) -> None:
        check_run_dir(config)
        if config.run_dir is not None and checkpoints(Path(config.run_dir)):
            sources.check_same(Path(config.run_dir))
        try:
            if config.run_dir is None:
                self.path = _new_folder(Path("runs"), f"{time.strftime('%Y%m%d-%H%M%S')}-{config.method}")
            else:
                self.path = Path(config.run_dir)
                self.path.mkdir(parents=True, exist_ok=config.resume is not None)
            self._lock = _locked(self.path)
        except (FileExistsError, BlockingIOError):
            raise
        except OSError as error:
            raise OSError(
                f"run_dir: {config.run_dir or 'runs'} cannot be written: {error.strerror}; choose another folder"
            ) from error
        resolved = _resolved(config, self.path)
        begun = bool(checkpoints(self.path))
        if begun:
            resolved["schedule_steps"] = saved_config(self.path)["schedule_steps"]
        self.schedule_steps: int = resolved["schedule_steps"]
        try:
            with written(f"run_dir: {self.path}"):
                if not begun:
                    (self.path / "sigma0.json").unlink(missing_ok=True)
                write_whole(self.path / SOURCES, sources.to_json())
                write_whole(self.path / "config.yaml", yaml.safe_dump(resolved, sort_keys=False))
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Let other processes write here."""
        self._lock.close()

    def append(self, name: str, lines: list[dict[str, Any]]) -> None:
        """Append to a file of JSON lines; a NaN is a fault, not a value."""
        text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
        with written(self.path / name), (self.path / name).open("a", encoding="utf-8") as file:
            file.write(text)

    def lines(self, name: str) -> list[dict[str, Any]]:
        return read_lines(self.path / name)

    def rewind(self, step: int) -> None:
        """Take back everything written after `step`, a half-written last line included."""
        for name in LOGS:
            path = self.path / name
            if path.is_file():
                kept = [line for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if _step(line) <= step]
                with written(path):
                    write_whole(path, "".join(line + "\n" for line in kept))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A file of JSON lines; none where there is no such file. A last line that a kill or a full disk cut short is left out.

    Raises ValueError with file and line for another line that is not JSON.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    rows = text.split("\n")  # not splitlines: text may hold U+2028
    found = []
    for number, row in enumerate(rows, start=1):
        if not row:
            continue
        try:
            found.append(json.loads(row))
        except ValueError as error:
            if number == len(rows):
                break
            raise ValueError(f"{path}: line {number} is not JSON: {error}") from error
    return found


def _resolved(config: Config, path: Path) -> dict[str, Any]:
    values = config.to_dict()
    del values["resume"]
    # The schedule's length as well: going on for more steps must not stretch it.
    return values | {"run_dir": str(path), "schedule_steps": config.schedule_steps or config.steps}


def _is_fresh(path: Path) -> bool:
    """A folder that holds nothing, or only what a start leaves that was killed before it wrote its config."""
    return path.is_dir() and all(entry.name in ("config.yaml.tmp", SOURCES, f"{SOURCES}.tmp", LOCK) for entry in path.iterdir())


def _locked(path: Path) -> IO[str]:
    file = (path / LOCK).open("a+", encoding="utf-8")
    try:
        import fcntl
    except ImportError:  # not on Windows
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        who = file.read().strip()
        file.close()
        raise BlockingIOError(
            f"run_dir: {path} is being written by process {who or 'unknown'}; wait for it, or stop it"
        ) from error
    except OSError:  # a file system without locks
        return file
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _new_folder(parent: Path, name: str) -> Path:
    for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
        path = parent / (name + suffix)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"run_dir: a thousand runs called {parent / name} exist")
