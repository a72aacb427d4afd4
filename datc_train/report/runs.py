"""A run's folder as the report reads it. Whatever is not there yet is empty; nothing here loads torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

Line = dict[str, Any]
PROBE = "probe.json"  # in a run's folder, where `datc probe` was asked to write it there


@dataclass(frozen=True)
class SampleRef:
    """Where a line of samples.jsonl lies, and what it is chosen by; the lines themselves may be far too many to keep."""

    path: Path
    offset: int
    step: int
    prompt: str  # its messages as JSON: equal prompts are equal strings
    advantage: float

    def read(self) -> Line:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            line: Line = json.loads(_decode(file.readline()))
            return line


@dataclass(frozen=True)
class Run:
    path: Path
    config: dict[str, Any]
    metrics: tuple[Line, ...]  # by rising step
    evaluations: tuple[Line, ...]  # by rising step
    samples: tuple[SampleRef, ...]
    probe: Line | None = None  # what `datc probe` wrote into the folder

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def method(self) -> str:
        return str(self.config.get("method", "unknown"))

    @property
    def seed(self) -> int:
        seed = self.config.get("seed", 0)
        return seed if isinstance(seed, int) else 0

    @property
    def steps(self) -> np.ndarray:
        """[n] steps done."""
        return np.array([line["step"] for line in self.metrics], dtype=np.int64)

    def values(self, key: str) -> np.ndarray:
        """[n] float64 of a metric, NaN where it is undefined."""
        return np.array([_number(line.get(key)) for line in self.metrics], dtype=np.float64)

    @property
    def phases(self) -> list[str]:
        """Names of the timed phases, in the order of a step."""
        known = ("sample", "score", "reference", "credit", "weights", "candidates", "update")
        names = {key.removeprefix("seconds_") for line in self.metrics for key in line if key.startswith("seconds_")} - {"step"}
        return [name for name in known if name in names] + sorted(names - set(known))


def read_run(path: Path) -> Run:
    """Raises ValueError that begins with "run: " for what is no run's folder, or holds a line that is no JSON object."""
    if not path.is_dir():
        raise ValueError(f"run: expected a run's folder, got {path}, which is {'a file' if path.exists() else 'not there'}")
    config_file = path / "config.yaml"
    if not config_file.is_file():
        raise ValueError(f"run: expected a run's folder with config.yaml, got {path}")
    try:
        config = yaml.safe_load(config_file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"run: expected YAML in {config_file}: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"run: expected keys and values in {config_file}, got {config!r:.60}")
    samples = path / "samples.jsonl"
    return Run(
        path=path,
        config=config,
        metrics=_by_step(path / "metrics.jsonl"),
        evaluations=_by_step(path / "eval.jsonl"),
        samples=tuple(
            SampleRef(samples, offset, line["step"], json.dumps(line.get("prompt")), _number(line.get("advantage")))
            for offset, line in _lines(samples)
        ),
        probe=read_probe(path / PROBE),
    )


def read_probe(path: Path) -> Line | None:
    """None where the file is not there; ValueError that begins with "run: " for what is none of a probe."""
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        _ = found["points"][0]["free"]["advantage_pearson"]["value"], found["replacements"][0]["forecast"], found["reason"]
    except (UnicodeDecodeError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"run: expected what `datc probe --json` writes in {path}: {type(error).__name__}: {error}") from None
    return dict(found)


def _by_step(path: Path) -> tuple[Line, ...]:
    """Sorted by step; of lines of one step the last counts."""
    latest = {line["step"]: line for _, line in _lines(path)}
    return tuple(latest[step] for step in sorted(latest))


def _lines(path: Path) -> Iterator[tuple[int, Line]]:
    """(offset, line). A last line without its newline is one that is being written right now: skipped."""
    if not path.is_file():
        return
    offset = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.endswith(b"\n") and raw.strip():
                yield offset, _object(raw, f"{path}, line {number}")
            offset += len(raw)


def _object(raw: bytes, where: str) -> Line:
    try:
        line = json.loads(_decode(raw))
    except ValueError:
        line = None
    step = line.get("step") if isinstance(line, dict) else None
    if not isinstance(line, dict) or not isinstance(step, int) or isinstance(step, bool):
        raise ValueError(f"run: expected a JSON object with a step in {where}, got {_decode(raw)!r:.60}")
    return line


def _decode(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else float("nan")
