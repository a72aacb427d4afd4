"""Reward curves of TRL's GRPOTrainer and of DATCTrainer, on the quickstart pair.

    python -m benchmarks.trl_curves [--steps 60] [--out FOLDER] [--json FILE] [--plot FILE] [--methods trl datc_trl]
        [--config quickstart] [--key value ...]

    trl       TRL's GRPOTrainer with the RewardModel as reward function
    datc_trl  DATCTrainer, method datc

Same prompts, seed and settings. TRL saves its checkpoints under --out; the same command goes on from the last one, and a run that
is complete is not run again, so that the two can be trained at different times; other settings need another --out. One run of
each is an example, not a comparison: the spread between seeds is that of `benchmarks/compare.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import trl
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOTrainer

from benchmarks.trl_recipe import make_trainer
from datc_train.bench.machine import machine
from datc_train.cli import config_of
from datc_train.config import Config
from datc_train.data import find_train_prompts
from datc_train.integrations.trl import DATCTrainer
from datc_train.summary import reward_change

METHODS: dict[str, tuple[type[GRPOTrainer], dict[str, Any]]] = {
    "trl": (GRPOTrainer, {}),
    "datc_trl": (DATCTrainer, {"datc": {"method": "datc"}}),
}
KEPT = ("reward", "kl", "completions/mean_length", "completions/clipped_ratio", "grad_norm", "step_time", "datc/ess")
SAVE_EVERY = 5
LAST = 10  # steps whose mean is drawn


def train(method: str, config: Config, folder: Path) -> list[dict[str, float]]:
    """The lines of TRL's log, one a step, from as far as the run has come in `folder` to its end."""
    finished, saved = folder / f"{method}.json", folder / method
    last = get_last_checkpoint(str(saved)) if saved.is_dir() else None
    if finished.is_file():
        history: list[dict[str, float]] = json.loads(finished.read_text())
    elif last is not None:  # a checkpoint of the last step is not trained on: TRL would take one step more
        history = json.loads((Path(last) / "trainer_state.json").read_text())["log_history"]
    else:
        history = []
    if len(lines := _kept(history)) >= config.steps:
        return lines[: config.steps]
    kind, extra = METHODS[method]
    prompts = find_train_prompts(config)
    options = {"save_strategy": "steps", "save_steps": SAVE_EVERY, "save_total_limit": 1, "save_only_model": False}
    trainer = make_trainer(kind, config, prompts, saved, extra, **options)
    trainer.train(resume_from_checkpoint=last)
    lines = _kept(trainer.state.log_history)
    finished.write_text(json.dumps(lines))
    return lines


def _kept(history: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{key: line[key] for key in KEPT if key in line} for line in history if "reward" in line]


def check_settings(config: Config, folder: Path) -> None:
    """Raises ValueError where the folder holds runs of other settings than these, but for their length."""
    settings, file = config.to_dict() | {"steps": None}, folder / "settings.json"
    before = json.loads(file.read_text()) if file.is_file() else settings
    changed = [key for key, value in settings.items() if before.get(key) != value]
    if changed:
        raise ValueError(f"{changed[0]}: expected {before.get(changed[0])!r} as in {file}, got {settings[changed[0]]!r}")
    file.write_text(json.dumps(settings))


def change(lines: list[dict[str, float]]) -> dict[str, float]:
    """Of the first to the last quarter of the steps."""
    found = reward_change([{"reward_mean": line["reward"]} for line in lines])
    assert found is not None
    first, last, error = found
    return {
        "first": first,
        "last": last,
        "standard_error": error,
        "step_seconds": statistics.median(line["step_time"] for line in lines),
        "minutes": sum(line["step_time"] for line in lines) / 60,
    }


def plot(curves: dict[str, list[dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    reward, length = figure.subplots(1, 2)
    last = min(LAST, *map(len, curves.values()))
    for (method, lines), colour in zip(curves.items(), ("#999999", "#0072B2"), strict=False):
        for axes, key in ((reward, "reward"), (length, "completions/mean_length")):
            values = np.array([line[key] for line in lines])
            axes.plot(np.arange(1, len(values) + 1), values, color=colour, alpha=0.25, lw=1)
            smooth = np.convolve(values, np.ones(last) / last, "valid")
            axes.plot(np.arange(len(smooth)) + last, smooth, color=colour, label=METHODS[method][0].__name__)
            axes.set_ylabel({"reward": "reward"}.get(key, "tokens of a response"))
            axes.set_xlabel(f"step (heavy: mean of the last {last})")
    reward.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("runs/trl_curves"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--config", default="quickstart")
    options, rest = parser.parse_known_args(arguments)
    config = config_of(["--config", options.config, "--steps", str(options.steps), *rest])
    if options.steps < 8:
        parser.error(f"--steps: expected at least 8, quarters of two, got {options.steps}")
    options.out.mkdir(parents=True, exist_ok=True)
    check_settings(config, options.out)
    curves = {method: train(method, config, options.out) for method in options.methods}
    for method, lines in curves.items():
        row = change(lines)
        print(
            f"{method:<10}reward {row['first']:+.2f} -> {row['last']:+.2f} (SE {row['standard_error']:.2f}), {len(lines)} steps, "
            f"{row['step_seconds']:.1f} s a step, {row['minutes']:.0f} min"
        )
    if options.json:
        summary = {method: change(lines) for method, lines in curves.items()}
        versions = {"trl": trl.__version__, "torch": torch.__version__}
        document = {"change": summary, "curves": curves, "settings": config.to_dict(), "machine": machine() | versions}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    if options.plot:
        plot(curves, options.plot)


if __name__ == "__main__":
    main()
