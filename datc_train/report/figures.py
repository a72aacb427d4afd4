"""The figures of a report: what each shows, drawn once, kept as SVG for the page and as PNG beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import MaxNLocator

from datc_train.report.groups import Band, Group, band
from datc_train.report.runs import Run
from datc_train.report.theme import CARD, DASHES, SERIES, STYLE, to_png, to_svg

_WIDTH = 6.2  # inches


@dataclass(frozen=True)
class Plot:
    name: str  # figures/<name>.png
    title: str
    caption: str
    svg: str
    png: bytes


@dataclass(frozen=True)
class _Metric:
    name: str
    key: str
    title: str
    unit: str
    meaning: str


CURVES = (
    _Metric("reward", "reward_mean", "Reward", "raw score", "Mean raw score of the reward model over a step's responses."),
    _Metric("length", "length_mean", "Response length", "tokens", "Mean number of tokens of a response."),
    _Metric(
        "kl", "kl", "KL to the start", "nats a token", "Mean k3 estimate over tokens, to the policy that training started from."
    ),
    _Metric("entropy", "entropy", "Entropy", "nats a token", "Mean entropy of the policy at the sampled positions."),
    _Metric(
        "ess_ratio",
        "ess_ratio",
        "Effective sample size of the weights",
        "share of the tokens",
        "(sum w)² / (T sum w²), mean over responses: 1 where every token counts alike.",
    ),
)


def draw_figures(groups: list[Group]) -> tuple[list[Plot], list[str]]:
    """Figures, and a line for each that there is nothing to draw of."""
    plots, missing = [], []
    for metric in [*CURVES, *_reward_parts(groups)]:
        bands = [band(group, metric.key) for group in groups]
        if any(len(b.steps) for b in bands):
            plots.append(_curve(metric, groups, bands))
        else:
            missing.append(f"{metric.title}: not measured" + (" (beta is 0)" if metric.key == "kl" else "") + ".")
    runs = [run for group in groups for run in group.runs if run.metrics]
    timed = any(run.phases for run in runs)
    if len(runs) == 1 and timed:
        plots += [_phases(runs[0]), _phases_total(runs[0])]
    elif len(runs) > 1:
        plots += [_phases_compared(groups), _time_compared(groups)] if timed else []
        plots.append(_methods(groups))
    return plots, missing


def _reward_parts(groups: list[Group]) -> list[_Metric]:
    """A curve for each of several rewards."""
    lines = [run.metrics[-1] for group in groups for run in group.runs if run.metrics]
    keys = dict.fromkeys(key for line in lines for key in line if key.startswith("reward_") and key.endswith("_mean"))
    names = [key.removeprefix("reward_").removesuffix("_mean") for key in keys if key.count("_") > 1]
    return [
        _Metric(
            f"reward_{name}",
            f"reward_{name}_mean",
            f"Reward: {name}",
            "raw score",
            f"Mean score of {name}, without its weight, over the responses that it scored.",
        )
        for name in names
        if name != "shaped"
    ]


def _plot(name: str, title: str, caption: str, draw: Callable[[Axes], None], height: float = 3.1) -> Plot:
    with rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH, height))
        axes = figure.subplots()
        draw(axes)
        svg = to_svg(figure, name, title)
        _title(figure, title)
    return Plot(name, title, caption, svg, to_png(figure))


def _title(figure: Figure, title: str) -> None:
    """For the picture; on the page the title is a heading."""
    if figure.legends:
        figure.legends[0].set_title(title, prop=FontProperties(weight="bold", size=11))
    else:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")


def _not_too_close(axes: Axes) -> None:
    """A thousandth of the values' size is the least that the axis spans: rounding is not to look like an event."""
    low, high = axes.get_ylim()
    least = 1e-3 * max(abs(low), abs(high))
    if high - low < least:
        axes.set_ylim((low + high - least) / 2, (low + high + least) / 2)
    axes.ticklabel_format(axis="y", useOffset=False)


def _whole_steps(axes: Axes) -> None:
    low, high = axes.get_xlim()
    if high - low < 1:  # one step
        axes.set_xlim(round(low) - 1, round(high) + 1)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def _legend(axes: Axes) -> None:
    """Above the axes, in as many columns as the width takes."""
    handles, labels = axes.get_legend_handles_labels()
    longest = max(map(len, labels), default=0)
    columns = max(1, min(len(labels), int(_WIDTH / (0.7 + 0.08 * longest))))
    assert isinstance(axes.figure, Figure)
    axes.figure.legend(
        handles, labels, loc="outside upper left", alignment="left", ncols=columns, handlelength=2.2, columnspacing=1.4
    )


def _line(axes: Axes, b: Band, group: Group) -> None:
    colour, dash = SERIES[group.index % len(SERIES)], DASHES[group.index % len(DASHES)]
    one = len(b.steps) == 1
    if b.raw is not None and not one:
        axes.plot(b.steps, b.raw, color=colour, alpha=0.4, linewidth=0.9)
    if len(group.runs) > 1:
        axes.fill_between(b.steps, b.low, b.high, color=colour, alpha=0.2, linewidth=0)
    axes.plot(b.steps, b.mean, color=colour, linestyle=dash, linewidth=2, marker="o" if one else None, label=group.label)


def _curve(metric: _Metric, groups: list[Group], bands: list[Band]) -> Plot:
    evaluated = metric.key == "reward_mean" and any(run.evaluations for group in groups for run in group.runs)

    def draw(axes: Axes) -> None:
        for group, b in zip(groups, bands, strict=True):
            if len(b.steps):
                _line(axes, b, group)
            if evaluated:
                _evaluations(axes, group)
        axes.set_ylabel(metric.unit)
        _not_too_close(axes)
        axes.margins(x=0.02)
        _whole_steps(axes)
        if len(groups) > 1 or evaluated:
            _legend(axes)

    return _plot(metric.name, metric.title, _curve_caption(metric, groups, bands, evaluated), draw)


def _curve_caption(metric: _Metric, groups: list[Group], bands: list[Band], evaluated: bool) -> str:
    windows = sorted({b.window for b in bands if b.window > 1})
    parts = [metric.meaning]
    if windows:
        parts.append(f"Thick: moving average over the last {' or '.join(map(str, windows))} steps; thin: each step.")
    several = max(len(group.runs) for group in groups) > 1
    if several and windows:
        parts[-1] = parts[-1].replace("; thin: each step", "; thin, where a group is one run: each step")
        parts.append(
            "Line: mean over a group's runs; band: from the lowest to the highest of their moving averages, over the steps that "
            "all of them have done."
        )
    if evaluated:
        parts.append("Diamonds: held-out prompts" + (", mean over a group's runs." if several else "."))
    return " ".join(parts)


def _evaluations(axes: Axes, group: Group) -> None:
    runs = [run for run in group.runs if run.evaluations]
    if not runs:
        return
    by_run = [{line["step"]: line.get("reward_mean") for line in run.evaluations} for run in runs]
    steps = [s for s in sorted(by_run[0]) if all(isinstance(at.get(s), (int, float)) for at in by_run)]
    mean = [np.mean([at[s] for at in by_run]) for s in steps]
    axes.plot(
        steps,
        mean,
        marker="D",
        markersize=6,
        linestyle=":",
        linewidth=0.9,
        color=SERIES[group.index % len(SERIES)],
        markeredgecolor=CARD,
        label=f"{group.label}, held out",
        zorder=4,
    )


def _seconds(run: Run) -> tuple[list[str], np.ndarray]:
    """Phases and their seconds [phases, n]; a phase that did not run took none."""
    return run.phases, np.stack([np.nan_to_num(run.values(f"seconds_{name}")) for name in run.phases])


def _phase_colour(index: int) -> str:
    return SERIES[index % len(SERIES)]


def _stack(axes: Axes, x: np.ndarray, phases: list[str], y: np.ndarray) -> None:
    colours = [_phase_colour(i) for i in range(len(phases))]
    axes.stackplot(x, y, labels=phases, colors=colours, edgecolor=CARD, linewidth=0.4)
    axes.set_xlim(x[0], x[-1])
    axes.set_ylim(bottom=0)
    axes.set_ylabel("seconds")
    axes.grid(axis="x", visible=False)
    _whole_steps(axes)
    _legend(axes)


def _phases(run: Run) -> Plot:
    phases, seconds = _seconds(run)

    def draw(axes: Axes) -> None:
        steps = run.steps
        edges = np.stack([steps - 0.5, steps + 0.5], axis=1).ravel()
        _stack(axes, edges, phases, np.repeat(seconds, 2, axis=1))

    return _plot("phase_seconds", "Seconds of a step, by phase", _PHASES_CAPTION, draw)


def _phases_total(run: Run) -> Plot:
    phases, seconds = _seconds(run)
    shares = seconds.sum(axis=1) / max(seconds.sum(), 1e-12)
    caption = "Phase times added up over the steps. Shares: " + ", ".join(
        f"{name} {share:.1%}" for name, share in zip(phases, shares, strict=True)
    )

    def draw(axes: Axes) -> None:
        total = np.concatenate([np.zeros((len(phases), 1)), seconds.cumsum(axis=1)], axis=1)
        _stack(axes, np.concatenate([[run.steps[0] - 1], run.steps]), phases, total)

    return _plot("phase_seconds_total", "Seconds since the start, by phase", caption + ".", draw)


_PHASES_CAPTION = (
    "sample: responses; score: reward model, its gradient with it where the method needs one; reference: log-probabilities "
    "of the starting policy; credit: log-probabilities and credit from hidden states; weights: the sharing-out; candidates: "
    "the alternatives shown below; update: the policy's own forward and backward pass and the optimizer."
)


def _phases_compared(groups: list[Group]) -> Plot:
    with_steps = [group for group in groups if any(run.metrics for run in group.runs)]
    names = list(dict.fromkeys(name for group in with_steps for run in group.runs for name in run.phases))

    def median(group: Group, phase: str) -> float:
        return float(np.median(np.concatenate([np.nan_to_num(run.values(f"seconds_{phase}")) for run in group.runs])))

    def draw(axes: Axes) -> None:
        left = np.zeros(len(with_steps))
        labels = [group.label for group in with_steps]
        for i, name in enumerate(names):
            width = np.array([median(group, name) for group in with_steps])
            axes.barh(labels, width, left=left, height=0.6, color=_phase_colour(i), edgecolor=CARD, linewidth=0.6, label=name)
            left += width
        axes.invert_yaxis()
        axes.set_xlabel("seconds")
        axes.grid(axis="y", visible=False)
        _legend(axes)

    caption = "Median over steps and runs of each phase. " + _PHASES_CAPTION
    return _plot("phase_seconds", "Seconds of a step, by phase", caption, draw, height=1.5 + 0.45 * len(with_steps))


def _time_compared(groups: list[Group]) -> Plot:
    def draw(axes: Axes) -> None:
        for group in groups:
            colour, dash = SERIES[group.index % len(SERIES)], DASHES[group.index % len(DASHES)]
            for i, run in enumerate(run for run in group.runs if run.metrics):
                x = np.concatenate([[run.steps[0] - 1], run.steps])
                y = np.concatenate([[0.0], np.nan_to_num(run.values("seconds_step")).cumsum()])
                axes.plot(x, y, color=colour, linestyle=dash, linewidth=1.6, label=group.label if i == 0 else None)
        axes.set_ylabel("seconds")
        axes.set_ylim(bottom=0)
        _whole_steps(axes)
        _legend(axes)

    caption = "All phases of a step, added up over the steps; a line a run."
    return _plot("phase_seconds_total", "Seconds since the start", caption, draw)


def last_quarter(run: Run) -> float:
    """Mean reward of the last quarter of the steps (at least one step); NaN where there is none."""
    values = run.values("reward_mean")
    values = values[~np.isnan(values)]
    return float(np.mean(values[-max(1, len(values) // 4) :])) if len(values) else float("nan")


def _methods(groups: list[Group]) -> Plot:
    def draw(axes: Axes) -> None:
        for row, group in enumerate(groups):
            colour = SERIES[group.index % len(SERIES)]
            values = [last_quarter(run) for run in group.runs if run.metrics]
            if not values:
                continue
            axes.plot(values, [row] * len(values), "o", color=colour, markersize=7, alpha=0.55, markeredgecolor=CARD)
            axes.plot([np.mean(values)], [row], "|", color=colour, markersize=22, markeredgewidth=3)
            last = [run.evaluations[-1].get("reward_mean") for run in group.runs if run.evaluations]
            held_out = [float(x) for x in last if isinstance(x, (int, float))]
            axes.plot(held_out, [row + 0.22] * len(held_out), "D", color=colour, markersize=5, alpha=0.7, markeredgecolor=CARD)
        axes.set_yticks(range(len(groups)), [group.label for group in groups])
        axes.set_ylim(len(groups) - 0.5, -0.5)
        axes.set_xlabel("raw score")
        axes.grid(axis="y", visible=False)

    caption = (
        "Mean reward of the last quarter of each run's steps: a dot a run, the bar their mean. Diamonds: each run's last "
        "evaluation on held-out prompts."
    )
    return _plot("methods", "Where the runs ended", caption, draw, height=1.3 + 0.5 * len(groups))
