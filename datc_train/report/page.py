"""What every page is made with: templates, the style sheet, and numbers as they are read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from datc_train.report.heatmap import visible


def environment() -> Environment:
    made = Environment(loader=PackageLoader("datc_train.report"), autoescape=True)
    made.filters["signed"] = signed
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    made.filters["visible"] = visible
    return made


def template_text(name: str) -> Any:
    """Our own style sheet and script, as they are."""
    from markupsafe import Markup

    return Markup((Path(__file__).parent / "templates" / name).read_text(encoding="utf-8"))


def number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def signed(value: Any) -> str:
    found = number(value)
    return "–" if math.isnan(found) else f"{found:+.3f}".replace("-", "−")
