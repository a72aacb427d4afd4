"""What a probe finds: frozen, and as JSON.

Legend: P positions, k alternatives at each.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datc_train.credit_point import CreditPoint


@dataclass(frozen=True)
class Estimate:
    """A number and its bootstrap 95 % interval over responses; all None where it is undefined (nothing varies)."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Quality:
    """Correlations of forecast and truth at one kind of position.

    all_*        over all replacements
    within_*     over the alternatives of a position, mean over positions
    advantage_*  of A_y, over positions
    """

    all_pearson: Estimate
    all_spearman: Estimate
    within_pearson: Estimate
    within_spearman: Estimate
    advantage_pearson: Estimate
    advantage_spearman: Estimate


@dataclass(frozen=True)
class PointResult:
    point: CreditPoint
    name: str
    free: Quality
    frozen: Quality | None  # None where there are too few such positions
    cost: float  # seconds over those of scoring the same responses without gradient, median over batches


@dataclass(frozen=True)
class Replacement:
    """One position: what was drawn in place of its token, what that does to the score, and each point's forecast of it."""

    response: int
    position: int  # in the response
    frozen: bool
    token: int
    token_probability: float
    alternatives: tuple[int, ...]  # [k] distinct, none of them `token`
    probability: tuple[float, ...]  # [k] the policy's
    text: tuple[str, ...]  # [1 + k] of the token and the alternatives
    change: tuple[float, ...]  # [k] R(with v at the position) - R(the response)
    forecast: dict[str, tuple[float, ...]]  # by the point's name: [k] <g, E_v - E_y>


@dataclass(frozen=True)
class Probe:
    """Which credit point forecasts the score of replacements best, for one policy, reward model and set of prompts."""

    points: tuple[PointResult, ...]  # the cheapest first
    recommended: CreditPoint
    reason: str  # in words
    responses: int
    replacements: tuple[Replacement, ...]  # [P], free positions and frozen ones, response by response
    settings: dict[str, Any]  # the config and the probe's own
    machine: dict[str, Any]

    @property
    def free(self) -> int:
        """Free positions."""
        return sum(not one.frozen for one in self.replacements)

    @property
    def config(self) -> dict[str, Any]:
        """The recommendation as keys of a recipe; what is the default of the point is left out."""
        keys = self.recommended.arguments()
        return keys if self.recommended.moves else {"credit_point": self.recommended.kind}

    @property
    def config_lines(self) -> str:
        return "\n".join(f"{key}: {value}" for key, value in self.config.items())

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        found["points"] = [
            point.point.arguments() | {key: value for key, value in line.items() if key != "point"}
            for point, line in zip(self.points, found["points"], strict=True)
        ]
        return found | {"recommended": self.config}

    def save(self, path: Path) -> None:
        """Write the JSON, and beside it a page of the same name that shows it. Raises as `check_out`."""
        from datc_train.report.probe import write_page  # brings matplotlib

        check_out(path)
        found = self.to_dict()
        path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        write_page(found, path.with_suffix(".html"))


def check_out(path: Path) -> None:
    """Makes the folder of what `Probe.save` is to write. Raises ValueError for a name without .json, OSError where it cannot."""
    if path.suffix != ".json" or path.is_dir():
        raise ValueError(f"json: expected a file that ends in .json, got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
