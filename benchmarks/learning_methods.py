"""What each credit method learns on the quickstart pair, each at its best of three learning rates.

    python -m benchmarks.learning_methods --out FOLDER [--arms A ...] [--seeds 0 1 2 3 4] [--workers 2]

An arm is a method and the point at which its gradient is taken. Every arm runs at each rate with the tuning seeds; the rate of
the highest held-out reward is then run with the other seeds, so that no arm is judged by the runs that chose its rate. A run is
one process on one thread: `datc train` on `--config`, ending with an evaluation on held-out prompts. Runs that are done are kept
in FOLDER/runs.jsonl, one line each, and the same command goes on with what is missing; `--report-only` runs nothing.

    gain        held-out reward after training - before it
    ratio       mean gain / mean gain of grpo, over the same seeds
    interval    95 %, Student's t over the paired differences of the seeds

The table and FOLDER/learning_methods.json have every arm that was run, with every seed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datc_train.bench.machine import machine
from datc_train.run_folder import read_lines

ARMS: dict[str, dict[str, Any]] = {
    "grpo": {"method": "grpo"},
    "datc_integrated": {"method": "datc", "credit_point": "integrated"},
    "datc_tangent": {"method": "datc", "credit_point": "tangent"},
    "datc_embedding": {"method": "datc", "credit_point": "embedding"},
    "datc_integrated_4": {"method": "datc", "credit_point": "integrated", "credit_passes": 4},
    "datc_shuffled": {"method": "datc_shuffled", "credit_point": "integrated"},
    "datc_random": {"method": "datc_random"},
    "datc_no_angle": {"method": "datc_no_angle", "credit_point": "integrated"},
    "red": {"method": "red"},
    "p2t": {"method": "p2t"},
    "oar_g": {"method": "oar_g"},
}
RATES = (2.5e-4, 5e-4, 1e-3)
TUNING_SEEDS = (100, 101)
UTILITY = "reward_true_utility_mean"  # of eval.jsonl, where the recipe scores it beside the reward


@dataclass(frozen=True)
class Run:
    """One training run of the study."""

    arm: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.rate:g}-{self.seed}"


def arguments(run: Run, config: str, folder: Path, more: Sequence[str]) -> list[str]:
    """The command line of a run."""
    keys = {**ARMS[run.arm], "learning_rate": run.rate, "seed": run.seed, "run_dir": str(folder), "resume": "auto"}
    keys |= {"report": "false", "samples_per_step": 0, "candidates_per_token": 0, "save_every": "null"}
    return ["train", "--config", config, *(word for key, value in keys.items() for word in (f"--{key}", str(value))), *more]


def line_of(run: Run, folder: Path) -> dict[str, Any]:
    metrics, evaluations = read_lines(folder / "metrics.jsonl"), read_lines(folder / "eval.jsonl")
    before, after = evaluations[0], evaluations[-1]
    return {
        "arm": run.arm,
        "rate": run.rate,
        "seed": run.seed,
        "steps": metrics[-1]["step"],
        "reward_before": before["reward_mean"],
        "reward_after": after["reward_mean"],
        "utility_before": before.get(UTILITY),
        "utility_after": after.get(UTILITY),
        "finished_after": after["finished"],
        "length_after": after["length_mean"],
        "reward_last_quarter": statistics.mean(line["reward_mean"] for line in metrics[-max(1, len(metrics) // 4) :]),
        "rewards": [line["reward_mean"] for line in metrics],
        "kl_last": metrics[-1]["kl"],
        "update_norm": statistics.mean(line["update_norm"] for line in metrics),
        "seconds": sum(line["seconds_step"] for line in metrics),
    }


def run_all(runs: Iterable[Run], out: Path, config: str, workers: int, more: Sequence[str]) -> None:
    """Those that have no line yet, `workers` at a time; each appends its line when it is done."""
    done = {(line["arm"], line["rate"], line["seed"]) for line in read_lines(out / "runs.jsonl")}
    left = [run for run in runs if (run.arm, run.rate, run.seed) not in done]
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}

    def go(run: Run) -> None:
        folder = out / run.name
        command = [sys.executable, "-m", "datc_train", *arguments(run, config, folder, more)]
        with (out / f"{run.name}.log").open("w") as log:
            status = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False).returncode
        if status:
            raise SystemExit(f"{run.name} ended with {status}; see {out / run.name}.log")
        with (out / "runs.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line_of(run, folder)) + "\n")
        print(f"{run.name} is done", flush=True)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(go, left))


def gain(line: dict[str, Any], kind: str = "reward") -> float:
    return float(line[f"{kind}_after"] - line[f"{kind}_before"])


def best_rate(lines: Sequence[dict[str, Any]], arm: str, tuning: Sequence[int]) -> float | None:
    """The rate of the highest mean held-out reward over the tuning seeds, of those rates that all of them ran at."""
    by_rate: dict[float, dict[int, float]] = {}
    for line in lines:
        if line["arm"] == arm and line["seed"] in tuning:
            by_rate.setdefault(line["rate"], {})[line["seed"]] = line["reward_after"]
    whole = {rate: statistics.mean(found.values()) for rate, found in by_rate.items() if set(found) == set(tuning)}
    return max(whole, key=lambda rate: whole[rate]) if whole else None


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % for the mean by Student's t; None for fewer than two values."""
    from scipy.stats import t

    if len(values) < 2:
        return None
    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values) - half, statistics.mean(values) + half


def summary(lines: Sequence[dict[str, Any]], seeds: Sequence[int], tuning: Sequence[int]) -> dict[str, Any]:
    """Every arm that has a run with one of `seeds`, at its rate; differences to grpo over the seeds that both have."""
    arms: dict[str, Any] = {}
    chosen: dict[str, dict[int, dict[str, Any]]] = {}
    for arm in ARMS:
        rate = best_rate(lines, arm, tuning)
        own = {line["seed"]: line for line in lines if line["arm"] == arm and line["rate"] == rate and line["seed"] in seeds}
        if own:
            chosen[arm] = own
    for arm, own in chosen.items():
        found: dict[str, Any] = {"rate": next(iter(own.values()))["rate"], "seeds": sorted(own)}
        for kind in ("reward", "utility"):
            if any(line[f"{kind}_after"] is None for line in own.values()):
                continue
            gains = {seed: gain(line, kind) for seed, line in own.items()}
            found[f"{kind}_after"] = statistics.mean(line[f"{kind}_after"] for line in own.values())
            found[f"{kind}_gains"] = [gains[seed] for seed in sorted(gains)]
            shared = sorted(set(own) & set(chosen.get("grpo", {})))
            if shared and arm != "grpo":
                of_grpo = [gain(chosen["grpo"][seed], kind) for seed in shared]
                found[f"{kind}_ratio"] = statistics.mean(gains[seed] for seed in shared) / statistics.mean(of_grpo)
                found[f"{kind}_difference"] = interval([gains[s] - g for s, g in zip(shared, of_grpo, strict=True)])
        found["finished_after"] = statistics.mean(line["finished_after"] for line in own.values())
        found["seconds"] = statistics.mean(line["seconds"] for line in own.values())
        arms[arm] = found
    return {"arms": arms, "runs": list(lines), "tuning_seeds": list(tuning), "machine": machine()}


def table(result: dict[str, Any]) -> str:
    head = "| arm | rate | seeds | held out, after | gain / GRPO's | difference to GRPO, 95 % | true utility, after | finished |"
    rows = [head, "|---|---|---|---|---|---|---|---|"]
    for arm, found in result["arms"].items():
        between, utility = found.get("reward_difference"), found.get("utility_after")
        cells = [
            arm,
            f"{found['rate']:g}",
            str(len(found["seeds"])),
            f"{found['reward_after']:.3f}",
            f"{found.get('reward_ratio', 1.0):.2f}",
            "-" if between is None else f"{between[0]:+.3f} to {between[1]:+.3f}",
            "-" if utility is None else f"{utility:.3f}",
            f"{100 * found['finished_after']:.0f} %",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def draw(result: dict[str, Any], path: Path) -> None:
    """Gains of every arm, a point a seed, the mean as a bar."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    arms = sorted(result["arms"], key=lambda arm: statistics.mean(result["arms"][arm]["reward_gains"]))
    figure, axes = pyplot.subplots(figsize=(7, 0.4 * len(arms) + 1.2), layout="constrained")
    for place, arm in enumerate(arms):
        gains = result["arms"][arm]["reward_gains"]
        axes.barh(place, statistics.mean(gains), color="#9ecae1")
        axes.plot(gains, [place] * len(gains), "o", color="#08519c", markersize=4)
    axes.set_yticks(range(len(arms)), arms)
    axes.set_xlabel("gain of held-out reward; a point a seed, the bar their mean")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--tuning-seeds", type=int, nargs="+", default=list(TUNING_SEEDS))
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--report-only", action="store_true")
    options, more = parser.parse_known_args(words)
    if set(options.seeds) & set(options.tuning_seeds):
        parser.error(
            f"--seeds: expected others than --tuning-seeds, got {sorted(set(options.seeds) & set(options.tuning_seeds))}"
        )
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    if not options.report_only:
        tuning = [Run(arm, rate, seed) for seed in options.tuning_seeds for rate in options.rates for arm in options.arms]
        run_all(tuning, out, options.config, options.workers, more)
        lines = read_lines(out / "runs.jsonl")
        rates = {arm: best_rate(lines, arm, options.tuning_seeds) for arm in options.arms}
        judged = [Run(arm, rate, seed) for seed in options.seeds for arm, rate in rates.items() if rate is not None]
        run_all(judged, out, options.config, options.workers, more)
    result = summary(read_lines(out / "runs.jsonl"), options.seeds, options.tuning_seeds)
    (out / "learning_methods.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))
    if result["arms"]:
        draw(result, out / "learning_methods.png")


if __name__ == "__main__":
    main()
