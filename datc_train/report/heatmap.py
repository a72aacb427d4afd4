"""Which responses a report shows token by token, and what it says of each token."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from datc_train.messages import asked, started_answer
from datc_train.report.groups import Group
from datc_train.report.runs import Run, SampleRef

_PICKED_STEPS = 3


@dataclass(frozen=True)
class Token:
    text: str  # as the page shows it
    shade: float  # log w / log ceiling in [-1, 1]; 0 for weight 1
    frozen: bool


@dataclass(frozen=True)
class Panel:
    """One response."""

    label: str  # of its group where there are several
    run: str
    step: int
    reward: float | None
    advantage: float | None
    tokens: tuple[Token, ...]
    details: dict[str, Any]  # what hovering shows, for the page's script

    @property
    def sign(self) -> str:
        """Whether training makes this response more or less likely."""
        if self.advantage is None or self.advantage == 0:
            return "none"
        return "up" if self.advantage > 0 else "down"


@dataclass(frozen=True)
class Exhibit:
    """Responses to one prompt, side by side."""

    prompt: str
    panels: tuple[Panel, ...]
    started: str | None = None  # what the responses go on from, where the prompt has begun the answer


def choose_exhibits(groups: list[Group]) -> list[Exhibit]:
    """Of the first, a middle and the last step that is kept: of one group the responses of highest and lowest advantage, of
    several groups, wherever all of them kept the same prompt in the same step, each one's response of highest advantage."""
    shown = [(group, run) for group in groups if (run := next((r for r in group.runs if r.samples), None)) is not None]
    if len(shown) > 1:
        keys = [{(ref.step, ref.prompt) for ref in run.samples} for _, run in shown]
        common = set.intersection(*keys)
        if common:
            return [_compare(shown, step, min(p for s, p in common if s == step)) for step in _spread({s for s, _ in common})]
    exhibits = []
    for group, run in shown:
        for step in _spread({ref.step for ref in run.samples}):
            exhibits += _extremes(run, step, group.label if len(shown) > 1 else "")
    return exhibits


def _spread(steps: set[int]) -> list[int]:
    """First, middle, last of them."""
    ordered = sorted(steps)
    places = {round(i * (len(ordered) - 1) / (_PICKED_STEPS - 1)) for i in range(_PICKED_STEPS)}
    return [ordered[i] for i in sorted(places)]


def _compare(shown: list[tuple[Group, Run]], step: int, prompt: str) -> Exhibit:
    panels = []
    for group, run in shown:
        best = _best([ref for ref in run.samples if (ref.step, ref.prompt) == (step, prompt)])
        panels.append(make_panel(best.read(), run, group.label))
    return _exhibit(prompt, panels)


def _extremes(run: Run, step: int, label: str) -> list[Exhibit]:
    """The responses of highest and of lowest advantage, under their prompts."""
    refs = [ref for ref in run.samples if ref.step == step]
    best, worst = _best(refs), _best(refs, sign=-1)
    picked = [best] if best == worst else [best, worst]
    panels = {ref: make_panel(ref.read(), run, label) for ref in picked}
    prompts = dict.fromkeys(ref.prompt for ref in picked)
    return [_exhibit(p, [panels[ref] for ref in picked if ref.prompt == p]) for p in prompts]


def _best(refs: list[SampleRef], sign: int = 1) -> SampleRef:
    return max(refs, key=lambda ref: -math.inf if math.isnan(ref.advantage) else sign * ref.advantage)


def _exhibit(prompt: str, panels: list[Panel]) -> Exhibit:
    messages = json.loads(prompt)
    try:
        started = started_answer(messages)
        return Exhibit(asked(messages), tuple(panels), None if started is None else str(started))
    except (TypeError, LookupError, AttributeError):  # not chat messages
        return Exhibit("" if messages is None else str(messages), tuple(panels))


def make_panel(line: dict[str, Any], run: Run, label: str) -> Panel:
    """A panel of one line of samples.jsonl. A column that is missing or shorter than the tokens is shown as not known."""
    texts = [str(text) for text in line.get("tokens") or []]
    n = len(texts)

    def column(key: str) -> list[Any]:
        values = line.get(key)
        return [*values, *[None] * n][:n] if isinstance(values, list) else [None] * n

    weight, frozen = column("weight"), [bool(x) for x in column("frozen")]
    ceiling = _number(run.config.get("ceiling")) or 4.0
    tokens = tuple(Token(visible(t), _shade(_number(w), ceiling), f) for t, w, f in zip(texts, weight, frozen, strict=True))
    ids, p, advantage = (column(f"candidate_{key}") for key in ("ids", "probability", "advantage"))
    sampled = column("token_ids")
    alternatives = [
        [
            [visible(str(text)).rstrip("\n"), _number_at(p[i], j), _number_at(advantage[i], j), _at(ids[i], j) == sampled[i]]
            for j, text in enumerate(found or [])
        ]
        for i, found in enumerate(column("candidates"))
    ]
    return Panel(
        label=label,
        run=run.name,
        step=line["step"],
        reward=_number(line.get("reward")),
        advantage=_number(line.get("advantage")),
        tokens=tokens,
        details={
            "advantage": _round(_number(line.get("advantage"))),
            "token": [visible(t).rstrip("\n") for t in texts],
            "weight": [_round(_number(x)) for x in weight],
            "credit": [_round(_number(x)) for x in column("credit")],
            "probability": [_round(_number(x)) for x in column("probability")],
            "frozen": frozen,
            "alternatives": alternatives,
        },
    )


def _shade(weight: float | None, ceiling: float) -> float:
    if weight is None or not weight > 0 or not ceiling > 1:
        return 0.0
    return max(-1.0, min(1.0, math.log(weight) / math.log(ceiling)))


def visible(text: str) -> str:
    """Line breaks and tabs with a sign before them, other control characters and lone surrogates as signs only."""
    out = []
    for character in text:
        code = ord(character)
        if character in "\n\r":
            out.append("↵\n" if character == "\n" else "␍")
        elif character == "\t":
            out.append("⇥\t")
        elif code < 0x20:
            out.append(chr(0x2400 + code))
        elif 0x7F <= code < 0xA0 or 0xD800 <= code < 0xE000 or code in _INVISIBLE:
            out.append(f"⟨{code:04X}⟩")
        else:
            out.append(character)
    return "".join(out)


# Marks that turn the direction of the text around them, and breaks that HTML does not show as such.
_INVISIBLE = frozenset([0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029, 0xFEFF])


def _at(values: Any, i: int) -> Any:
    return values[i] if isinstance(values, list) and i < len(values) else None


def _number_at(values: Any, i: int) -> float | None:
    return _round(_number(_at(values, i)))


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _round(value: float | None) -> float | None:
    """Four significant digits are what a tooltip shows."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")
