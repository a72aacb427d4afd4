"""What `datc probe` found, as a section of a run's report and as a page of its own. Reads its JSON; nothing here loads torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from datc_train.disk import write_whole, written
from datc_train.report.figures import Plot
from datc_train.report.page import environment, template_text
from datc_train.report.theme import GRID, MUTED, SERIES, STYLE, page_css, to_png, to_svg

_KINDS = (("free", False), ("frozen", True))
_COLUMNS = ("all_pearson", "all_spearman", "within_pearson", "within_spearman", "advantage_pearson", "advantage_spearman")


@dataclass(frozen=True)
class Exhibit:
    """A section's content."""

    label: str  # of which run, where there are several
    subtitle: str
    tables: list[tuple[str, list[list[str]]]]  # kind of position, and a row of cells a point
    verdict: str
    config_lines: str
    plot: Plot


def exhibit(found: dict[str, Any], name: str = "probe", label: str = "") -> Exhibit:
    """name: of the figure."""
    settings, replacements = found["settings"], found["replacements"]
    free = sum(not one["frozen"] for one in replacements)
    each = len(replacements[0]["alternatives"])
    return Exhibit(
        label=label,
        subtitle=f"{settings['policy'] or 'the policy'} against the reward model {settings['reward'] or 'given'}: "
        f"{found['responses']} responses, {free} free and {len(replacements) - free} frozen positions, {each} alternatives each",
        tables=[
            (kind, [_row(point, point[kind]) for point in found["points"]])
            for kind, _ in _KINDS
            if found["points"][0][kind] is not None
        ],
        verdict=found["reason"],
        config_lines="\n".join(f"{key}: {value}" for key, value in found["recommended"].items()),
        plot=scatter(found, name),
    )


def write_page(found: dict[str, Any], page: Path) -> None:
    """A self-contained page that shows the probe alone."""
    html = (
        environment()
        .get_template("probe.html.jinja")
        .render(
            title="Where to take the reward's gradient",
            palette=page_css(),
            css=template_text("report.css"),
            probes=[exhibit(found)],
            settings=json.dumps(found["settings"], indent=1),
        )
    )
    with written(page, "once it can be, the same command makes it"):
        write_whole(page, html.encode("utf-8", errors="replace"), sync=False)


def scatter(found: dict[str, Any], name: str) -> Plot:
    """Forecast against truth, a panel a point."""
    title = "Forecast and truth"
    points = [point["name"] for point in found["points"]]
    columns = 3
    with rc_context(STYLE):
        figure = Figure(figsize=(9.3, 3.1 * -(-len(points) // columns)))
        grid = figure.subplots(-(-len(points) // columns), columns, sharey=True, squeeze=False).flatten()
        for axes, point in zip(grid, points, strict=False):
            _panel(axes, found["replacements"], point)
        for axes in grid[len(points) :]:
            axes.set_axis_off()
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=3)
        svg = to_svg(figure, name, title)
        png = to_png(figure)
    caption = (
        "Each dot is a replacement of one token: across, what the gradient forecasts, ⟨g, E_v − E_y⟩; up, what the score of the "
        "response does when v stands there. On the line the forecast is exact; scales across differ from panel to panel."
    )
    return Plot(name, title, caption, svg, png)


def _panel(axes: Axes, replacements: list[dict[str, Any]], point: str) -> None:
    low = high = 0.0
    for index, (kind, frozen) in enumerate(_KINDS):
        some = [one for one in replacements if one["frozen"] == frozen]
        guess = np.array([value for one in some for value in one["forecast"][point]])
        truth = np.array([value for one in some for value in one["change"]])
        if len(some):
            axes.plot(guess, truth, "o" if index == 0 else "^", color=SERIES[index], markersize=2.6, alpha=0.55, label=kind)
            low, high = min(low, truth.min()), max(high, truth.max())
    axes.axhline(0, color=GRID, linewidth=0.8, zorder=0)
    limits = axes.get_xlim()
    axes.plot([low, high], [low, high], color=MUTED, linewidth=0.9, linestyle=(0, (4, 2)), label="exact", scalex=False)
    axes.set_xlim(limits)
    axes.set_title(point, loc="left", fontsize=10)
    axes.set_xlabel("forecast")
    if axes.get_subplotspec() is not None and axes.get_subplotspec().is_first_col():  # type: ignore[union-attr]
        axes.set_ylabel("change of the score")


def _row(point: dict[str, Any], quality: dict[str, Any]) -> list[str]:
    return [point["name"], *(_cell(quality[key]) for key in _COLUMNS), f"{point['cost']:.2f}"]


def _cell(estimate: dict[str, float | None]) -> str:
    value, low, high = (estimate[key] for key in ("value", "low", "high"))
    if value is None:
        return "–"
    text = f"{value:.2f}" if low is None or high is None else f"{value:.2f} ({low:.2f} to {high:.2f})"
    return text.replace("-", "−")
