"""Colours of the figures, and a matplotlib figure as inline SVG that follows the page's light or dark scheme.

Figures are drawn in the light palette. In the SVG every colour of it becomes a CSS variable of the same name, whose dark value
`page_css` holds; a PNG keeps the light one. The series are Okabe and Ito's colours (told apart by the colour-blind), dash
patterns say the same a second time.
"""

from __future__ import annotations

import io
import re
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

# name -> (light, dark)
PALETTE: dict[str, tuple[str, str]] = {
    "card": ("#fefefd", "#1d1e20"),
    "ink": ("#1c1c1a", "#ececea"),
    "muted": ("#62615d", "#a9a8a3"),
    "grid": ("#e5e3df", "#383a3d"),
    "series-1": ("#0072b2", "#5aaeea"),
    "series-2": ("#d55e00", "#f58a42"),
    "series-3": ("#009e73", "#35c79c"),
    "series-4": ("#b85c94", "#e19cc4"),
    "series-5": ("#e69f00", "#f0bd4e"),
    "series-6": ("#56b4e9", "#9bd6f7"),
    "series-7": ("#8a8782", "#bdbab4"),
}
CARD, INK, MUTED, GRID = (PALETTE[name][0] for name in ("card", "ink", "muted", "grid"))
SERIES = [light for name, (light, _) in PALETTE.items() if name.startswith("series")]
DASHES: list[Any] = ["-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (9, 2))]

STYLE: Any = {  # matplotlib types the keys of its settings one by one
    "svg.fonttype": "none",
    "text.parse_math": False,  # labels hold file names and settings, where $ is only a dollar
    "font.family": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "figure.facecolor": "none",
    "figure.constrained_layout.use": True,
}


def page_css() -> str:
    """The palette as CSS variables, light and dark."""

    def block(side: int) -> str:
        return " ".join(f"--{name}: {colours[side]};" for name, colours in PALETTE.items())

    return f":root {{ {block(0)} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {block(1)} }} }}"


def to_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(buffer, format="png", dpi=160, facecolor=CARD)
    return buffer.getvalue()


def to_svg(figure: Figure, name: str, title: str) -> str:
    """Markup of the figure; ids begin with `name`, so that several fit on one page."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context(STYLE | {"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # would apply to the whole page
    svg = re.sub(r"font-family: [^;\"]*;", "", svg)
    used = set(re.findall(r"""(?:url\(|href=")#([^)"]+)""", svg))
    svg = re.sub(r' id="([^"]*)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r"""(url\(|href=")#""", rf"\1#{name}-", svg)
    for variable, (light, _) in PALETTE.items():
        svg = svg.replace(light, f"var(--{variable})")
    return re.sub(r'<svg .*?(viewBox="[^"]*").*?>', rf'<svg {_XLINK} \1 role="img" aria-label="{title}">', svg, count=1)


_XLINK = 'xmlns:xlink="http://www.w3.org/1999/xlink"'
