"""The overhead as a picture: two bars by phase, and where the paper's figure lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Okabe and Ito's colours: told apart by every kind of colour vision.
COLOURS = {
    "sample": "#999999",
    "score": "#56B4E9",
    "reference": "#CC79A7",
    "update": "#0072B2",
    "credit": "#D55E00",
    "weights": "#F0E442",
}


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 2.4), layout="constrained")
    axes = figure.subplots()
    base = result["methods"]["grpo"]["step"]
    for row, method in enumerate(("datc", "grpo")):
        left = 0.0
        for phase, colour in COLOURS.items():
            width = result["methods"][method][phase] / base
            axes.barh(row, width, left=left, color=colour, label=phase if row == 0 else None)
            left += width
        axes.text(left + 0.005, row, f"{result['methods'][method]['step'] / base:.3f}", va="center")
    low, high = result["paper"]
    axes.axvspan(low, high, color="#000000", alpha=0.18, lw=0, label="paper: 1.057 to 1.091")
    axes.set_yticks([0, 1], ["DATC", "GRPO"])
    axes.set_xlim(0, 1.12 * max(high, result["overhead"]))
    axes.set_xlabel("seconds of a step over GRPO's")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(ncols=4, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.35), frameon=False)
    figure.savefig(path, dpi=150)
