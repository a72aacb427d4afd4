"""GRPO against DATC on the quickstart pair: same seeds, prompts and random numbers, one report.

    python -m benchmarks.compare [--seeds 0 1 2] [--methods grpo datc] [--out FOLDER] [--config quickstart] [--key value ...]

Any credit methods can stand side by side. Where grpo and datc do, a third run, `datc_rescaled`, is DATC with its learning rate
multiplied by (mean norm of GRPO's parameter changes) / (mean norm of DATC's): whatever is then left between the two is not the
size of the steps; `--no-rescaled` leaves it out. All methods of a seed come before the next seed, and `compare.json` is written
after every run. Every run can be stopped and goes on when the same command is given again. Ends with a table, `compare.json` and
`report.html` in --out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from datc_train import train
from datc_train.bench.machine import machine
from datc_train.cli import config_of
from datc_train.config import Config
from datc_train.credit import METHODS
from datc_train.report import write_report
from datc_train.run_folder import read_lines
from datc_train.summary import reward_change


def go(config: Config, folder: Path) -> Path:
    print(f"\n{folder}: {config.method}, seed {config.seed}, learning rate {config.learning_rate:g}", flush=True)
    return train(replace(config, run_dir=str(folder), resume="auto"))


def numbers(run: Path) -> dict[str, Any]:
    metrics, evaluations = read_lines(run / "metrics.jsonl"), read_lines(run / "eval.jsonl")
    first, last, error = reward_change(metrics) or (None, None, None)
    return {
        "run": run.name,
        "reward_first_quarter": first,
        "reward_last_quarter": last,
        "standard_error": error,
        "held_out": [line["reward_mean"] for line in evaluations],
        "held_out_finished": [line["finished"] for line in evaluations],
        "held_out_length": [line["length_mean"] for line in evaluations],
        "length_last": metrics[-1]["length_mean"],
        "kl_last": metrics[-1]["kl"],
        "update_norm": statistics.mean(line["update_norm"] for line in metrics),
        "learning_rate": metrics[0]["learning_rate"],
        "seconds": sum(line["seconds_step"] for line in metrics),
    }


def save(rows: list[dict[str, Any]], path: Path) -> None:
    path.write_text(json.dumps({"runs": rows, "machine": machine()}, indent=1) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'run':<18}{'reward: first':>14}{'last quarter':>14}{'+-':>7}{'held out':>18}{'KL':>7}{'|change|':>10}{'seconds':>9}"
    ]
    for row in rows:
        held = " -> ".join(f"{value:+.2f}" for value in (row["held_out"][:1] + row["held_out"][-1:]))
        kl = "-" if row["kl_last"] is None else f"{row['kl_last']:.2f}"
        lines.append(
            f"{row['run']:<18}{_number(row['reward_first_quarter'], '+14.3f')}{_number(row['reward_last_quarter'], '+14.3f')}"
            f"{_number(row['standard_error'], '7.3f')}"
            f"{held:>18}{kl:>7}{row['update_norm']:>10.4f}{row['seconds']:>9.0f}"
        )
    return "\n".join(lines)


def _number(value: float | None, form: str) -> str:
    """`-` where undefined: runs of a few steps have no quarters."""
    return f"{'-':>{form.lstrip('+').split('.')[0]}}" if value is None else f"{value:>{form}}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=["grpo", "datc"])
    parser.add_argument("--rescaled", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, default=Path("runs/compare"))
    parser.add_argument("--config", default="quickstart")
    options, rest = parser.parse_known_args(arguments)
    config = config_of(["--config", options.config, *rest])
    runs: dict[str, list[Path]] = {method: [] for method in options.methods}

    def rows() -> list[dict[str, Any]]:
        return [numbers(run) for group in runs.values() for run in group]

    def train_one(name: str, one: Config) -> None:
        runs.setdefault(name, []).append(go(one, options.out / f"{name}-{one.seed}"))
        save(rows(), options.out / "compare.json")

    for seed in options.seeds:
        for method in options.methods:
            train_one(method, replace(config, method=method, seed=seed))
    if options.rescaled and {"grpo", "datc"} <= set(options.methods):
        norm = {m: statistics.mean(numbers(run)["update_norm"] for run in runs[m]) for m in ("grpo", "datc")}
        rescaled = config.learning_rate * norm["grpo"] / norm["datc"]
        for seed in options.seeds:
            train_one("datc_rescaled", replace(config, method="datc", seed=seed, learning_rate=rescaled))
    page = write_report([run for group in runs.values() for run in group], options.out / "report.html")
    print("\n" + table(rows()) + f"\nReport: {page}")


if __name__ == "__main__":
    main()
