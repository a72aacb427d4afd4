"""A response's heat map as a picture, for where a page will not do: the tokens on a grid of characters."""

from __future__ import annotations

import unicodedata
import warnings

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from datc_train.report.heatmap import Panel, Token
from datc_train.report.theme import INK, MUTED, STYLE, to_png

_COLUMNS, _MOST_LINES = 92, 60
_CELL, _LINE = 0.078, 0.22  # inches
_UP, _DOWN = (230 / 255, 110 / 255, 10 / 255), (30 / 255, 110 / 255, 190 / 255)

Piece = tuple[int, int, str, Token]  # line, column, text


def layout(tokens: tuple[Token, ...]) -> list[Piece]:
    """Where every token stands, broken at line breaks and at the right edge; at most `_MOST_LINES` lines."""
    pieces: list[Piece] = []
    line = column = 0
    for token in tokens:
        text, start = "", column
        for character in token.text:
            width = _width(character)
            if character == "\n" or column + width > _COLUMNS:
                if text:
                    pieces.append((line, start, text, token))
                line, column, start, text = line + 1, 0, 0, ""
            if character != "\n":
                text += " " if character == "\t" else character
                column += width
        if text:
            pieces.append((line, start, text, token))
    return [piece for piece in pieces if piece[0] < _MOST_LINES]


def draw_tokens(panel: Panel) -> bytes:
    """PNG of a panel."""
    pieces = layout(panel.tokens)
    lines = 1 + max((piece[0] for piece in pieces), default=0)
    with rc_context(STYLE | {"figure.constrained_layout.use": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = Figure(figsize=(_COLUMNS * _CELL + 0.5, lines * _LINE + 0.7))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(-0.25 / _CELL, _COLUMNS + 0.25 / _CELL)
        axes.set_ylim(lines + 0.2 / _LINE, -0.5 / _LINE)
        axes.set_axis_off()
        axes.text(0, -0.25 / _LINE, _head(panel), color=MUTED, va="center")
        for piece in pieces:
            _draw(axes, piece)
        return to_png(figure)


def _draw(axes: Axes, piece: Piece) -> None:
    line, column, text, token = piece
    width = sum(map(_width, text))
    if token.shade:
        colour = _UP if token.shade > 0 else _DOWN
        axes.add_patch(
            Rectangle((column, line + 0.06), width, 0.88, facecolor=colour, alpha=0.62 * abs(token.shade), linewidth=0)
        )
    if token.frozen:
        axes.plot([column + 0.1, column + width - 0.1], [line + 0.93] * 2, color=MUTED, linestyle=":", linewidth=1)
    ink = MUTED if token.frozen else INK
    for character in text:
        if not character.isspace():
            axes.text(column, line + 0.5, character, family="DejaVu Sans Mono", fontsize=9.3, color=ink, va="center")
        column += _width(character)


def _head(panel: Panel) -> str:
    numbers = {"reward": panel.reward, "advantage": panel.advantage}
    known = [f"{name} {value:+.3g}" for name, value in numbers.items() if value is not None]
    return " · ".join([*([panel.label] if panel.label else []), f"step {panel.step}", *known, "weight > 1 orange, < 1 blue"])


def _width(character: str) -> int:
    return 2 if unicodedata.east_asian_width(character) in "WF" else 0 if unicodedata.combining(character) else 1
