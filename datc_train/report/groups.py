"""Runs that differ by their seed only are one group: one curve, with a band over its seeds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from datc_train.report.runs import Run

WINDOW = 25
# What says where, how long and how watched a run was, not what it did in a step.
_NOT_COMPARED = frozenset(
    "seed run_dir steps device reward_device save_every keep trackers resume samples_per_step candidates_per_token eval_prompts "
    "eval_split eval_limit eval_every schedule_steps reward_timeout".split()
)
_ORDER = ("grpo", "datc")


@dataclass(frozen=True)
class Group:
    label: str  # the method, and what sets it apart from another group of that method
    runs: tuple[Run, ...]
    index: int  # of its colour


@dataclass(frozen=True)
class Band:
    """A metric of a group over the steps that all of its runs have done; each [n]."""

    steps: np.ndarray
    mean: np.ndarray  # over runs, of their moving averages
    low: np.ndarray
    high: np.ndarray
    raw: np.ndarray | None  # the metric itself, where there is one run
    window: int


def group_runs(runs: list[Run]) -> list[Group]:
    """Groups in a fixed order (GRPO, DATC, others by name), labelled by method and by the settings that differ within it."""
    found: list[Group] = []
    methods = sorted({run.method for run in runs}, key=lambda m: (_ORDER.index(m) if m in _ORDER else len(_ORDER), m))
    for method in methods:
        same = [run for run in runs if run.method == method]
        keys = sorted({key for run in same for key in run.config} - _NOT_COMPARED - {"method"})
        varied = [key for key in keys if any(run.config.get(key) != same[0].config.get(key) for run in same)]
        alike: dict[str, list[Run]] = {}
        for run in same:
            alike.setdefault(repr([run.config.get(key) for key in varied]), []).append(run)
        for members in alike.values():
            members.sort(key=lambda run: (run.seed, run.name))
            settings = ", ".join(f"{key} {members[0].config.get(key)!s:.24}" for key in varied)
            found.append(Group(f"{method} ({settings})" if settings else method, tuple(members), len(found)))
    return found


def window_for(steps: int) -> int:
    """25 steps where there are that many, else half of them."""
    return WINDOW if steps >= WINDOW else max(1, steps // 2)


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` values up to each, of those that there are; NaN counts as not there."""
    known = ~np.isnan(values)
    total, count = (np.concatenate([[0.0], np.cumsum(x)]) for x in (np.where(known, values, 0.0), known))
    start = np.maximum(np.arange(len(values)) + 1 - window, 0)
    stop = np.arange(len(values)) + 1
    counts = count[stop] - count[start]
    return np.divide(total[stop] - total[start], counts, out=np.full(len(values), np.nan), where=counts > 0)


def band(group: Group, key: str) -> Band:
    runs = [run for run in group.runs if len(run.metrics)]
    if not runs:
        empty = np.zeros(0)
        return Band(np.zeros(0, dtype=np.int64), empty, empty, empty, empty, 1)
    steps = runs[0].steps
    for run in runs[1:]:
        steps = np.intersect1d(steps, run.steps)
    window = window_for(len(steps))
    values = np.stack([run.values(key)[np.isin(run.steps, steps)] for run in runs])
    smooth = np.stack([moving_average(row, window) for row in values])
    known = ~np.isnan(smooth).any(axis=0)
    steps, smooth = steps[known], smooth[:, known]
    raw = values[0, known] if len(runs) == 1 else None
    return Band(steps, smooth.mean(axis=0), smooth.min(axis=0), smooth.max(axis=0), raw, window)
