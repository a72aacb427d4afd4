"""The probe on a terminal."""

from __future__ import annotations

from datc_train.probe.types import Estimate, Probe, Quality

_COLUMNS = (("all", "all"), ("within", "within"), ("A_y", "advantage"))


def table(found: Probe) -> str:
    """Points, correlations with intervals, costs, and what to write into the recipe."""
    frozen, each = len(found.replacements) - found.free, len(found.replacements[0].alternatives)
    lines = [
        f"{found.responses} responses; {found.free} free and {frozen} frozen positions, {each} alternatives at each.",
        "Correlation of <g, E_v - E_y> with the change of the score: over all replacements, within a position, of A_y.",
        "In brackets 95 % intervals over responses; rank: Spearman's; cost: seconds over scoring without gradient.",
    ]
    for kind in ("free", "frozen"):
        if getattr(found.points[0], kind) is None:
            lines += ["", f"{kind} positions: too few"]
            continue
        heads = "".join(f"{title:>23}{'rank':>6}" for title, _ in _COLUMNS)
        lines += ["", f"{kind + ' positions':<20}{heads}{'cost':>6}"]
        for point in found.points:
            quality: Quality = getattr(point, kind)
            cells = "".join(
                f"{_cell(getattr(quality, f'{key}_pearson')):>23}{_number(getattr(quality, f'{key}_spearman').value):>6}"
                for _, key in _COLUMNS
            )
            lines.append(f"{point.name:<20}{cells}{point.cost:>6.2f}")
    return "\n".join([*lines, "", found.reason, found.config_lines])


def _cell(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return _number(estimate.value)
    return f"{_number(estimate.value)} ({estimate.low:.2f} to {estimate.high:.2f})"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
