"""Run folders made up for tests of the report, and a report's page taken apart."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

HOSTILE = "</script><img src=http://example.invalid/x.png onerror=alert(1)><!--"
PHASES = ("sample", "score", "reference", "credit", "weights", "candidates", "update")
CURVES = {"reward", "length", "kl", "entropy", "ess_ratio"}


def metrics(step: int, offset: float = 0.0) -> dict[str, Any]:
    line = {"step": step, "reward_mean": offset + 0.1 * step, "length_mean": 20.0 + step, "kl": 0.01 * step, "entropy": 2.0}
    return line | {"ess_ratio": 0.8, "seconds_step": 7.0} | {f"seconds_{phase}": 1.0 for phase in PHASES}


def sample(step: int, prompt: str = "Why?", advantage: float = 1.0, tokens: list[str] | None = None) -> dict[str, Any]:
    tokens = [" Be", "cause", "\n", HOSTILE, "\ufffd\x00\ud800", "."] if tokens is None else tokens
    n = len(tokens)
    return {
        "step": step,
        "prompt": [{"role": "user", "content": prompt}],
        "response": "".join(tokens),
        "token_ids": list(range(50000, 50000 + n)),
        "tokens": tokens,
        "advantage": advantage,
        "reward": 0.25,
        "credit": [0.001 * (i - 1) for i in range(n)],
        "weight": ([4.0, 0.25, 1.0, 1.5, 1.0, 1.0] * n)[:n],
        "probability": [0.125] * n,
        "frozen": ([False, False, True, False, False, True] * n)[:n],
        "candidates": [[t, HOSTILE, " so"] for t in tokens],
        "candidate_ids": [[50000 + i, 7, 8] for i in range(n)],
        "candidate_probability": [[0.5, 0.25, 1e-7]] * n,
        "candidate_advantage": [[0.75, -0.0125, 0.0]] * n,
    }


def make_run(
    path: Path,
    steps: int = 30,
    method: str = "datc",
    seed: int = 0,
    samples: list[dict[str, Any]] | None = None,
    evaluated: bool = True,
    **config: Any,
) -> Path:
    path.mkdir(parents=True)
    settings = {"policy": "tiny", "reward": "tiny", "method": method, "seed": seed, "steps": 30, "ceiling": 4.0} | config
    (path / "config.yaml").write_text(yaml.safe_dump(settings))
    if samples is None:
        samples = [sample(s, f"prompt {s}", a) for s in range(1, steps + 1) for a in (1.0, -1.5, 0.25)]
    logs = {"metrics": [metrics(s, seed) for s in range(1, steps + 1)], "samples": samples}
    logs |= {"eval": [{"step": s, "reward_mean": 0.5 + s} for s in (0, steps)]} if evaluated else {}
    for name, lines in logs.items():
        if lines:
            (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


class Page(HTMLParser):
    """Elements, data scripts and text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.data: list[dict[str, Any]] = []
        self.text: list[str] = []
        self.kind = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.kind = f"{tag} {dict(attrs).get('type')}"

    def handle_endtag(self, tag: str) -> None:
        self.kind = ""

    def handle_data(self, data: str) -> None:
        if self.kind == "script application/json":
            self.data.append(json.loads(data))
        elif not self.kind.startswith(("script", "style")):
            self.text.append(data)

    def tagged(self, tag: str, name: str = "") -> list[dict[str, str | None]]:
        return [a for t, a in self.elements if t == tag and name in (a.get("class") or "").split() + [""]]
