"""What a run has found so far, in one JSON file that is written after every part and that a later run goes on with.

    {"schema": 1, "machine": {...}, "dry": false, "ok": true, "failures": [...],
     "parts": {NAME: {"status", "seconds", "budget_s", "checks", "rows", "skipped", "errors", "notes"}}}

A part's status is "done" (it ran to its end), "cut" (its seconds ran out; `skipped` says what it left out) or "error" (it broke
off). A check is {"name", "value", "bar", "ok"}; its value is at most, or at least, the bar, and None where a call failed.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SCHEMA = 1


class DeviceLostError(RuntimeError):
    """The GPU takes no more work in this process."""


@dataclass
class Part:
    """One part's findings, and the seconds it may take."""

    name: str
    budget_s: float
    device: torch.device
    judges_times: bool = True  # a bar on a time counts
    status: str = "error"
    seconds: float = 0.0
    checks: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)  # of the part's table
    skipped: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self.started)

    def check(self, name: str, value: float | None, bar: float, *, at_least: bool = False) -> bool:
        """Records a figure beside its bar; NaN and None do not meet any."""
        ok = value is not None and (value >= bar if at_least else value <= bar)
        number = None if value is None or value != value else float(value)
        self.checks.append({"name": name, "value": number, "bar": bar, "at_least": at_least, "ok": ok})
        return ok

    def bar(self, name: str, value: float, bar: float, *, at_least: bool = False) -> None:
        """A check on a time; only noted where times mean nothing."""
        if self.judges_times:
            self.check(name, value, bar, at_least=at_least)
        else:
            self.notes.append(f"{name}: {value:.3g}, bar {bar:g}, not judged")

    def holds(self, name: str, truth: bool) -> None:
        self.check(name, float(truth), 1.0, at_least=True)

    def attempt(self, name: str, call: Callable[[], None]) -> bool:
        """Runs the call unless the part's time is over; what it raises is one failed check. Whether it ran through."""
        if self.left_s <= 0:
            self.skipped.append(name)
            return False
        try:
            call()
        except Exception as error:
            self.errors.append(f"{name}: {''.join(traceback.format_exception(error, limit=-4))}")
            self.check(name, None, 0.0)
            self.require_device()
            return False
        return True

    def require_device(self) -> None:
        """DeviceLostError where an earlier failure has left the GPU unusable for this process."""
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.empty_cache()
            torch.zeros(1, device=self.device).item()
        except Exception as error:
            raise DeviceLostError(str(error).split("\n")[0]) from error

    def finish(self, status: str | None = None) -> None:
        self.status = status or ("cut" if self.skipped else "done")
        self.seconds = round(time.monotonic() - self.started, 2)

    def as_json(self) -> dict[str, Any]:
        hidden = ("name", "device", "judges_times", "started")
        plain = {key: value for key, value in self.__dict__.items() if key not in hidden}
        return json.loads(json.dumps(plain, default=str))


@dataclass
class Report:
    """All parts so far; `path` is where they are kept."""

    path: Path
    machine: dict[str, Any]
    dry: bool
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def resume(cls, path: Path, machine: dict[str, Any], dry: bool) -> Report:
        """The file's report; ValueError where it is of another machine or another version of the libraries."""
        report = cls(path, machine, dry)
        if not path.exists():
            return report
        content = json.loads(path.read_text(encoding="utf-8"))
        same = ("gpu", "processor", "torch", "triton")
        before = {key: content["machine"].get(key) for key in same}
        if content["schema"] != SCHEMA or content["dry"] != dry or before != {key: machine.get(key) for key in same}:
            raise ValueError(f"{path} is of another run: {before}")
        report.parts = content["parts"]
        return report

    def failures(self) -> list[str]:
        """Failed checks and parts that broke off."""
        found = []
        for name, part in self.parts.items():
            found += [f"{name}: {_describe(check)}" for check in part["checks"] if not check["ok"]]
            if part["status"] == "error":
                found.append(f"{name}: broke off: {(part['errors'] or ['no reason'])[-1].strip().splitlines()[-1]}")
        return found

    def add(self, part: Part) -> None:
        self.parts[part.name] = part.as_json()
        self.save()

    def save(self) -> None:
        failures = self.failures()
        content = {
            "schema": SCHEMA,
            "machine": self.machine,
            "dry": self.dry,
            "ok": not failures,
            "failures": failures,
            "parts": self.parts,
        }
        whole = self.path.with_name(self.path.name + ".new")
        whole.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(whole, self.path)


def _describe(check: dict[str, Any]) -> str:
    if check["value"] is None:
        return f"{check['name']}: failed or not a number"
    return f"{check['name']}: {check['value']:.3g}, bar {'>=' if check['at_least'] else '<='} {check['bar']:g}"


def print_rows(rows: list[dict[str, Any]]) -> None:
    """An aligned table; the columns are all keys in the order of their first row."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_text(row.get(column)) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for row in [columns, *cells]:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _text(value: object) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
