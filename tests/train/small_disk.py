"""Runs on a disk of their own that fills up, or turns read-only, while they train; what became of each as a line of JSON.

    unshare --map-root-user --mount python small_disk.py FOLDER WHAT...

WHAT: KiB that are left when the first responses are scored, with "+report" for a run that ends with one; "ro": from there on the
run's folder is read-only; "sealed": all is from the start. The disk is a tmpfs in this process's own mount namespace: a read-only
mount binds root too, no right of root is needed, and nothing of it stays. The libraries' own errors come as they are: torch,
safetensors and tokenizers each raise another.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datc_train import train

CONFIG = {
    "policy": "tiny",
    "prompts": "quickstart",
    "device": "cpu",
    "method": "grpo",
    "steps": 2,
    "prompts_per_step": 2,
    "group_size": 2,
    "max_new_tokens": 8,
    "learning_rate": 1e-3,
    "save_every": 1,
    "lora": {"r": 4, "alpha": 8},
    "eval_prompts": "quickstart",
    "eval_limit": 1,
}


def length(completions: Any, **_: Any) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


def first(then: Callable[[], None]) -> Callable[..., list[float]]:
    """A reward that does something else as well, once."""
    waiting = [then]

    def reward(completions: Any, **_: Any) -> list[float]:
        while waiting:
            waiting.pop()()
        return length(completions)

    return reward


def fill(disk: Path, room: int) -> None:
    ballast = disk / "ballast"
    free = int(subprocess.check_output(["df", "--output=avail", "-k", str(disk)]).split()[-1])
    ballast.write_bytes(bytes(1024 * (free - room)))


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def seal(folder: Path) -> None:
    """Read-only for whoever comes by its path; a file that is open for writing keeps the disk itself from becoming so."""
    mount("--bind", str(folder), str(folder))
    mount("-o", "remount,bind,ro", str(folder))


def run(disk: Path, what: str) -> dict[str, Any]:
    mount("-t", "tmpfs", "-o", "size=112m", "tmpfs", str(disk))
    config = CONFIG | {"run_dir": str(disk / "r"), "report": what.endswith("+report")}
    if what == "sealed":
        seal(disk)
    room = what.removesuffix("+report")
    hurt = {"ro": lambda: seal(disk / "r"), "sealed": lambda: None}.get(what, lambda: fill(disk, int(room)))
    found: dict[str, Any] = {"what": what, "kind": None, "error": None}
    try:
        train(config, reward=first(hurt))
    except Exception as error:
        found |= {"kind": type(error).__name__, "error": str(error)}
    if what in ("ro", "sealed"):
        subprocess.run(["umount", str(disk / "r" if what == "ro" else disk)], check=True)
    found["left"] = sorted(path.name for path in disk.rglob("*.tmp"))
    (disk / "ballast").unlink(missing_ok=True)
    train(config | {"resume": "auto"}, reward=length)
    found |= {"left_at_the_end": sorted(path.name for path in disk.rglob("*.tmp")), "end": end(disk / "r")}
    subprocess.run(["umount", str(disk)], check=True)
    return found


def end(run: Path) -> dict[str, Any]:
    """Everything that a run leaves but for times, as text."""
    logs = {name: (run / name).read_text() for name in ("metrics.jsonl", "samples.jsonl", "eval.jsonl")}
    metrics = [json.loads(line) for line in logs.pop("metrics.jsonl").splitlines()]
    logs["metrics"] = json.dumps([{k: v for k, v in line.items() if "second" not in k} for line in metrics])
    weights = {path.parent.name: path.read_bytes().hex() for path in sorted(run.glob("checkpoints/*/adapter_model.safetensors"))}
    return logs | weights


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    whole = end(train(CONFIG | {"run_dir": str(folder / "whole"), "report": False}, reward=length))
    (folder / "disk").mkdir()
    for what in sys.argv[2:]:
        outcome = run(folder / "disk", what)
        print("OUTCOME", json.dumps(outcome | {"end": outcome["end"] == whole}), flush=True)
