"""A long run of the tiny pair, watched from outside: memory, descriptors, threads and time of a step must stay flat.

    python -m benchmarks.soak [--steps 500] [--json FILE]

`datc train --config tiny` runs as a user runs it, with checkpoints, evaluations and its report, in a process of its own. After
every line of metrics.jsonl that process is looked at. First comes what the run left: every step and evaluation once, every
number finite, the checkpoints, the report. Then the figures. Steps are taken in blocks of ten, one checkpoint and one evaluation
each. Of a block count the median memory, descriptors and threads, which a leak raises and a passing use does not, and the mean
time; that is processor time of one thread, for others may use the machine. Through the blocks of the second half a straight line
is fitted:

    growth = slope (steps fitted)      flat:  growth <= bound

Memory may grow by what a run keeps of every step, its line of metrics, for the summary at the end. Linux only. Exit status 1
where something is not flat, or the run is not whole.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil

from datc_train.bench.machine import machine
from datc_train.checkpoint import checkpoints
from datc_train.evaluate import best_step
from datc_train.run_folder import read_lines

BLOCK = 10
KEEP = 3
MIB = 2**20
# Growth over the steps fitted. A line of metrics is 2 KiB, the heap's own wear three times that; a rollout with its reward's
# gradients is 30. Others' use of the caches alone moves the processor time of a step by a third.
KIB_A_STEP, SHARE_OF_STEP = 16.0, 0.5


@dataclass(frozen=True)
class Look:
    """The process after a step."""

    step: int
    memory: float  # resident, MiB
    descriptors: int
    threads: int
    processor: float  # seconds that it was given since its start, children included
    seconds: float  # on the clock


@dataclass(frozen=True)
class Trend:
    """A straight line through the blocks of the second half; `growth`, its `error` and its `bound` in the level's unit."""

    name: str
    unit: str
    level: float  # mean of the fitted blocks
    slope: float  # a step
    growth: float
    error: float  # standard error of `growth`
    bound: float

    @property
    def flat(self) -> bool:
        return self.growth <= self.bound


def command(run: Path, steps: int) -> list[str]:
    options = {
        "steps": steps,
        "run_dir": run,
        "device": "cpu",
        "save_every": BLOCK,
        "keep": KEEP,
        "eval_prompts": "quickstart",
        "eval_limit": 2,
        "eval_every": BLOCK,
    }
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    return [sys.executable, "-m", "datc_train", "train", "--config", "tiny", *words]


def watch(words: Sequence[str], metrics: Path, log: Path) -> tuple[int, list[Look]]:
    """Run a command that writes a line of `metrics` a step; its exit status, and a look at it after every line."""
    looks: list[Look] = []
    lines = size = 0
    began = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("wb") as out, subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment) as process:
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            time.sleep(0.005)
            if (metrics.stat().st_size if metrics.is_file() else 0) == size:
                continue
            with metrics.open("rb") as file:
                file.seek(size)
                new = file.read()
            lines, size = lines + new.count(b"\n"), size + len(new)
            if b"\n" in new:
                with suppress(psutil.NoSuchProcess):
                    looks.append(_look(watched, lines, time.monotonic() - began))
    return process.returncode, looks


def _look(process: psutil.Process, step: int, seconds: float) -> Look:
    with process.oneshot():
        cpu = process.cpu_times()
        return Look(
            step=step,
            memory=process.memory_info().rss / MIB,
            descriptors=process.num_fds(),
            threads=process.num_threads(),
            processor=cpu.user + cpu.system + cpu.children_user + cpu.children_system,
            seconds=seconds,
        )


def trends(looks: Sequence[Look]) -> list[Trend]:
    """The four lines through the blocks of the second half, BLOCK steps each. Raises ValueError for fewer than 4 blocks there."""
    steps = np.array([look.step for look in looks])
    of = {name: np.array([getattr(look, name) for look in looks], dtype=float) for name in ("memory", "descriptors", "threads")}
    processor = np.array([look.processor for look in looks])
    first, last = int(steps[-1]) // (2 * BLOCK) * BLOCK, int(steps[-1]) // BLOCK * BLOCK
    edges = np.arange(first, last + 1, BLOCK)
    if len(edges) < 5:
        raise ValueError(f"steps: expected at least {8 * BLOCK}, got {steps[-1]}")
    blocks = [(steps > low) & (steps <= low + BLOCK) for low in edges[:-1]]
    if not all(block.any() for block in blocks):
        raise ValueError(f"looks: expected one in every {BLOCK} steps, got none in some; is the machine this busy?")
    series = {name: np.array([np.median(values[block]) for block in blocks]) for name, values in of.items()}
    series["step"] = np.diff(np.interp(edges, steps, processor)) / BLOCK
    middle = (edges[:-1] + edges[1:]) / 2
    return [_trend(name, middle, values, last - first) for name, values in series.items()]


def _trend(name: str, steps: np.ndarray, values: np.ndarray, span: int) -> Trend:
    (slope, _), covariance = np.polyfit(steps - steps.mean(), values, 1, cov=True)
    level = float(values.mean())
    bound, unit = {"memory": (KIB_A_STEP / 1024 * span, "MiB"), "step": (SHARE_OF_STEP * level, "s")}.get(name, (0.5, ""))
    return Trend(name, unit, level, float(slope), float(slope) * span, math.sqrt(covariance[0, 0]) * span, bound)


def missing(run: Path, steps: int) -> list[str]:
    """What a run of so many steps should have left and has not."""
    metrics, evaluations = read_lines(run / "metrics.jsonl"), read_lines(run / "eval.jsonl")
    samples = read_lines(run / "samples.jsonl")
    every = list(range(1, steps + 1))
    newest = range(max(steps - (KEEP - 1) * BLOCK, BLOCK), steps + 1, BLOCK)
    kept = {f"{step:06d}" for step in {*newest, best_step(evaluations) or steps}}
    numbers = ("reward_mean", "kl", "entropy", "grad_norm", "update_norm", "ess_ratio", "predicted_gain", "seconds_step")
    report = run / "report.html"
    holds = {
        "a line of metrics a step": [line["step"] for line in metrics] == every,
        f"numbers in {', '.join(numbers)}": all(isinstance(line[key], float) for line in metrics for key in numbers),
        "four samples a step": [line["step"] for line in samples] == [step for step in every for _ in range(4)],
        "an evaluation every ten steps": [line["step"] for line in evaluations] == list(range(0, steps + 1, BLOCK)),
        f"the checkpoints {', '.join(sorted(kept))}": {path.name for path in checkpoints(run)} == kept,
        "a report of all steps": report.is_file() and f"{steps} of {steps}" in report.read_text(encoding="utf-8"),
        "no half files": not list(run.rglob("*.tmp")),
    }
    return [what for what, there in holds.items() if not there]


def table(found: Sequence[Trend]) -> str:
    lines = [f"{'':12}{'level':>12}{'slope a step':>16}{'growth':>12}{'error':>10}{'bound':>10}"]
    for one in found:
        verdict = "flat" if one.flat else "NOT FLAT"
        numbers = f"{one.level:12.4g}{one.slope:16.2e}{one.growth:12.3g}{one.error:10.2g}{one.bound:10.3g}"
        lines.append(f"{one.name:12}{numbers}  {one.unit:4}{verdict}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=500, help=f"a multiple of {BLOCK}, at least {8 * BLOCK}")
    parser.add_argument("--json", type=Path, help="write figures and looks here")
    options = parser.parse_args(argv)
    if options.steps % BLOCK or options.steps < 8 * BLOCK:
        parser.error(f"--steps: expected a multiple of {BLOCK}, at least {8 * BLOCK}, got {options.steps}")
    with tempfile.TemporaryDirectory() as folder:
        run, log = Path(folder) / "run", Path(folder) / "log"
        status, looks = watch(command(run, options.steps), run / "metrics.jsonl", log)
        if status:
            print(f"the run ended with status {status}: {log.read_text(errors='replace')[-2000:]}", file=sys.stderr)
            return 1
        wrong = missing(run, options.steps)
    for what in wrong:
        print(f"the run lacks {what}", file=sys.stderr)
    found = trends(looks)
    after = "second half of " + f"{options.steps} steps, {looks[-1].seconds:.0f} s on the clock"
    print(f"{after}\n{table(found)}")
    if options.json is not None:
        result = {"machine": machine(), "trends": [asdict(t) for t in found], "looks": [asdict(look) for look in looks]}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(bool(wrong) or not all(one.flat for one in found))


if __name__ == "__main__":
    sys.exit(main())
