"""From run folders to one page: load, group, draw, fill in the template, write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml

from datc_train.disk import write_whole, written
from datc_train.report.figures import draw_figures
from datc_train.report.groups import Group, group_runs
from datc_train.report.heatmap import choose_exhibits
from datc_train.report.page import environment, number, signed, template_text
from datc_train.report.probe import exhibit
from datc_train.report.runs import Run, read_run
from datc_train.report.theme import page_css
from datc_train.report.token_plot import draw_tokens
from datc_train.summary import reward_change

_SIGNS = {"up": "▲ made likelier,", "down": "▼ made less likely,", "none": "not trained on,"}


def write_report(runs: str | Path | Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write `report.html`, and its figures as PNG files into the folder `figures` beside it (`name_figures` of another
    page, `name.html`); returns the page's path.

    The page is self-contained: it asks for nothing, from disk or network. A run that still goes on, or lacks evaluations or
    samples, is shown as far as it is; what `datc probe` wrote into its folder as probe.json has a section. Runs that differ by
    their seed only are one group, with a band over seeds.

    Args:
        runs: a run's folder, or several.
        out: the page, or an existing folder for it. None: in the run's folder; for several runs in the current one.

    Raises:
        ValueError: "run: ..." for a folder that is none of a run, or with broken lines; "out: ..." for no name of a page.
        OSError: the page cannot be written.
    """
    paths = [Path(runs)] if isinstance(runs, str | Path) else [Path(run) for run in runs]
    if not paths:
        raise ValueError("run: expected at least one run's folder, got none")
    loaded = [read_run(path) for path in {path.resolve(): path for path in paths}.values()]
    page = _page_path(loaded, out)
    groups = group_runs(loaded)
    plots, missing = draw_figures(groups)
    exhibits = choose_exhibits(groups)
    pictures = {plot.name: plot.png for plot in plots}
    probes = [
        exhibit(run.probe, f"probe_{i}" if len(loaded) > 1 else "probe", run.name if len(loaded) > 1 else "")
        for i, run in enumerate(loaded, start=1)
        if run.probe is not None
    ]
    pictures |= {probe.plot.name: probe.plot.png for probe in probes}
    panels = [panel for exhibit in exhibits for panel in exhibit.panels]
    pictures |= {f"tokens_{i}": draw_tokens(panel) for i, panel in enumerate(panels, start=1)}
    figures = page.parent / ("figures" if page.stem == "report" else f"{page.stem}_figures")
    html = (
        environment()
        .get_template("report.html.jinja")
        .render(
            title=_title(loaded),
            subtitle=_subtitle(loaded, groups),
            several=len(loaded) > 1,
            palette=page_css(),
            css=template_text("report.css"),
            script=template_text("report.js"),
            rows=[_row(run, group) for group in groups for run in group.runs],
            notes=_group_notes(groups) + [note for run in loaded for note in _notes(run, len(loaded) > 1)] + missing,
            plots=plots,
            probes=probes,
            exhibits=exhibits,
            signs=_SIGNS,
            scale=_scale(loaded),
            configs=[(run.name, yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)) for run in loaded],
        )
    )
    with written(page, "once it can be, datc report makes it"):
        figures.mkdir(parents=True, exist_ok=True)
        for name, png in pictures.items():
            write_whole(figures / f"{name}.png", png, sync=False)
        write_whole(page, html.encode("utf-8", errors="replace"), sync=False)  # someone may be looking at the last one
    return page


def _page_path(runs: list[Run], out: str | Path | None) -> Path:
    if out is None:
        return runs[0].path / "report.html" if len(runs) == 1 else Path("report.html")
    page = Path(out)
    if page.is_dir():
        return page / "report.html"
    if page.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"out: expected a file that ends in .html, or a folder that exists, got {out}")
    return page


def _title(runs: list[Run]) -> str:
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs"


def _subtitle(runs: list[Run], groups: list[Group]) -> str:
    models = sorted({f"{run.config.get('policy')} against {_rewards(run)}" for run in runs})
    return ", ".join(group.label for group in groups) + "; " + ", ".join(models)


def _rewards(run: Run) -> str:
    reward, weights = run.config.get("reward"), run.config.get("reward_weights")
    if not isinstance(reward, list):
        return f"the reward model {reward}"
    weights = weights if isinstance(weights, list) else [1] * len(reward)
    return "the rewards " + " + ".join(f"{weight:g} x {name}" for weight, name in zip(weights, reward, strict=True))


def _row(run: Run, group: Group) -> dict[str, str]:
    rewards = [line for line in run.metrics if not math.isnan(number(line.get("reward_mean")))]
    change = reward_change(rewards)
    first, last = (rewards[0]["reward_mean"], rewards[-1]["reward_mean"]) if rewards else (None, None)
    if change is not None:
        first, last = change[:2]
    held_out = [signed(line.get("reward_mean")) for line in run.evaluations]
    seconds = run.values("seconds_step")
    return {
        "name": run.name,
        "group": group.label,
        "seed": str(run.config.get("seed", "–")),
        "steps": f"{len(run.metrics)} of {run.config.get('steps', '?')}",
        "first": signed(first),
        "last": signed(last),
        "change": "–" if change is None else f"{signed(change[1] - change[0])} ± {change[2]:.2g}",
        "held_out": " → ".join(dict.fromkeys([held_out[0], held_out[-1]])) if held_out else "–",
        "seconds": f"{np.nanmedian(seconds):.3g}" if np.isfinite(seconds).any() else "–",
    }


def _group_notes(groups: list[Group]) -> list[str]:
    if all(len(group.runs) == 1 for group in groups):
        return []
    counts = ", ".join(f"{group.label}: {len(group.runs)}" for group in groups)
    return [f"Runs of a group differ by their seed only; {counts}."]


def _notes(run: Run, several: bool) -> list[str]:
    of = f"{run.name}: " if several else ""
    steps = run.config.get("steps")
    notes = []
    if not run.metrics:
        notes.append(f"{of}No step is done yet.")
    elif isinstance(steps, int) and len(run.metrics) < steps:
        notes.append(f"{of}{len(run.metrics)} of {steps} steps are done: the run is still going, or was stopped.")
    return notes


def _scale(runs: list[Run]) -> list[tuple[str, float]]:
    """(weight, shade) of the legend's keys. Every response is shaded by its own run's ceiling."""
    ceilings = {number(run.config.get("ceiling")) for run in runs}
    ceiling = ceilings.pop() if len(ceilings) == 1 else math.nan
    if not ceiling > 1:
        return [("1 / ceiling", -1.0), ("1", 0.0), ("ceiling", 1.0)]
    return [(f"{ceiling**shade:.3g}", shade) for shade in (-1.0, -0.5, 0.0, 0.5, 1.0)]
