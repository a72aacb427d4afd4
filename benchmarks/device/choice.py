"""Which of `triton` and `chunked` backend=None should take: one answer a shape class, for all N, as a row's bits must not
depend on N."""

from __future__ import annotations

import math
from typing import Any

from .report import Part


def run(part: Part, parts: dict[str, dict[str, Any]]) -> None:
    """From the rows of the timing parts that are there."""
    part.attempt("choice", lambda: part.rows.extend(table(parts)))
    if not part.rows:
        part.notes.append("no times of both backends: nothing to choose by")


def table(parts: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a shape and kind of call: triton's time over chunked's for every N, their geometric mean, and the faster one."""
    classes: dict[tuple[Any, ...], dict[int, float]] = {}
    for name, part in parts.items():
        if not name.startswith("times"):
            continue
        for row in part["rows"]:
            if row.get("over chunked") is not None:
                key = (row["shape"], row["V"], row["D"], row["K"] if row["what"] == "credit" else 0, row["what"])
                classes.setdefault(key, {})[row["N"]] = row["over chunked"]
    found = []
    for (shape, V, D, K, what), ratios in classes.items():
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        found.append(
            {"shape": shape, "what": what, "V": V, "D": D, "K": K, "width": D + K}
            | {f"N {N}": ratio for N, ratio in sorted(ratios.items())}
            | {
                "mean": round(mean, 3),
                "take": "triton" if mean < 1 else "chunked",
                "same for every N": len({ratio < 1 for ratio in ratios.values()}) == 1,
            }
        )
    return found
