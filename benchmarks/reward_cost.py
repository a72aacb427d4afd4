"""Time of scoring a group with shared prefixes, against the plain score-and-backward of whole rows.

    python -m benchmarks.reward_cost [--preset six-layer] [--json FILE] [--rounds 3] [--threads 1]

Both run in every micro-batch size, in turn, round after round; each is judged by its best size, by the ratio of their medians.
Wall-clock seconds count; the process's own CPU seconds stand beside them, for machines that others use as well. Before any
time is taken, scores and gradients are held against the plain ones.

A bar (gradient: 0.80, score alone: 0.85) that is not met is printed as missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForSequenceClassification

from datc_train.bench.machine import machine
from datc_train.reward.classifier import take_apart
from datc_train.reward.micro_batches import SplitRow
from datc_train.reward.scorer import Scorer
from datc_train.reward.scoring import score_rows

BARS = {True: 0.80, False: 0.85}  # with gradient, without
Times = dict[tuple[str, int], list[tuple[float, float]]]  # (path, rows a micro-batch) -> wall and CPU seconds of each round


@dataclass(frozen=True)
class Preset:
    prompt: int  # tokens
    response: int  # tokens
    group: int  # responses
    layers: int
    real: bool  # the quickstart's reward model, else a random one of hidden size 512


PRESETS = {
    "six-layer": Preset(prompt=200, response=500, group=8, layers=6, real=False),
    "quickstart": Preset(prompt=100, response=128, group=8, layers=14, real=True),
    "small": Preset(prompt=80, response=200, group=4, layers=2, real=False),
}


def load(preset: Preset) -> nn.Module:
    if preset.real:
        from datc_train.quickstart import load_untrained_reward_model

        return load_untrained_reward_model(preset.layers)[0]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=preset.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_labels=1,
        pad_token_id=0,
    )
    return LlamaForSequenceClassification(config)


def plain(model: Any, ids: Tensor, rows: int, gradient: bool) -> tuple[Tensor, list[Tensor]]:
    """What anyone would write: the stock classifier on whole rows of equal length, `rows` at a time."""
    scores, gradients = [], []
    for batch in ids.split(rows):
        inputs = model.get_input_embeddings()(batch).detach().requires_grad_(gradient)
        with torch.set_grad_enabled(gradient):
            score = model(inputs_embeds=inputs, use_cache=False).logits.squeeze(-1)
        scores.append(score.detach())
        if gradient:
            gradients += torch.autograd.grad(score.sum(), inputs)[0].unbind()
    return torch.cat(scores), gradients


def shared(scorer: Scorer, split: list[SplitRow], rows: int, gradient: bool) -> tuple[Tensor, list[Tensor]]:
    gradients: dict[int, Tensor] = {}
    tokens = rows * (len(split[0].prefix) + len(split[0].rest))
    score, _ = score_rows(scorer, split, tokens, gradients.__setitem__ if gradient else None, print)
    return score, [gradients[i] for i in sorted(gradients)]


def check(expected: tuple[Tensor, list[Tensor]], got: tuple[Tensor, list[Tensor]], prompt: int) -> dict[str, float]:
    """Largest errors; SystemExit above 1e-5."""
    score = float(((got[0] - expected[0]).abs() / expected[0].abs().clamp(min=1)).max())
    pairs = zip(got[1], expected[1], strict=True)
    gradient = max(float((g - e[prompt:]).norm() / e.norm()) for g, e in pairs)
    if max(score, gradient) > 1e-5:
        raise SystemExit(f"score is wrong by {score:.1e} and gradient by {gradient:.1e}; no times are taken")
    return {"score": score, "gradient": gradient}


def measure(preset: Preset, rounds: int = 3, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    model = load(preset)
    scorer = take_apart(model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, scorer.vocab_size, (preset.group, preset.prompt + preset.response), generator=generator)
    ids[:, : preset.prompt] = ids[0, : preset.prompt]
    split = [SplitRow(tuple(row[: preset.prompt]), row[preset.prompt :]) for row in ids.tolist()]
    errors = check(plain(model, ids, preset.group, True), shared(scorer, split, preset.group, True), preset.prompt)

    sizes = [rows for rows in (1, 2, 4, 8) if rows <= preset.group]
    result: dict[str, Any] = {"preset": asdict(preset), "rounds": rounds, "errors": errors}
    for gradient in (True, False):
        times: Times = {(path, rows): [] for rows in sizes for path in ("whole", "shared")}
        for number in range(rounds):
            for (path, rows), seconds in times.items():
                wall, cpu = time.perf_counter(), time.process_time()
                if path == "whole":
                    plain(model, ids, rows, gradient)
                else:
                    shared(scorer, split, rows, gradient)
                seconds.append((time.perf_counter() - wall, time.process_time() - cpu))
            say(f"{'gradient' if gradient else 'score'}: round {number + 1} of {rounds}")
        result["gradient" if gradient else "score"] = _judge(times, BARS[gradient])
    result["backward_over_forward"] = {
        path: result["gradient"][path]["cpu_seconds"] / result["score"][path]["cpu_seconds"] - 1 for path in ("whole", "shared")
    }
    return result | {"load_average": os.getloadavg(), "machine": machine()}


def _judge(times: Times, bar: float) -> dict[str, Any]:
    medians = {key: tuple(statistics.median(column) for column in zip(*seconds, strict=True)) for key, seconds in times.items()}
    best = {path: min((rows for p, rows in medians if p == path), key=lambda rows: medians[path, rows]) for path, _ in medians}
    wall, cpu = ({path: medians[path, rows][kind] for path, rows in best.items()} for kind in (0, 1))
    each = [a[0] / b[0] for a, b in zip(times["shared", best["shared"]], times["whole", best["whole"]], strict=True)]
    return {
        "ratio": wall["shared"] / wall["whole"],
        "ratio_of_each_round": each,
        "cpu_ratio": cpu["shared"] / cpu["whole"],
        "bar": bar,
        "met": wall["shared"] / wall["whole"] <= bar,
        "seconds_by_rows": {path: {rows: t[0] for (p, rows), t in medians.items() if p == path} for path in best},
    } | {path: {"rows": best[path], "seconds": wall[path], "cpu_seconds": cpu[path]} for path in best}


def table(result: dict[str, Any]) -> str:
    lines = [f"{'seconds (medians)':<22}{'whole':>9}{'rows':>6}{'shared':>9}{'rows':>6}{'ratio':>8}{'CPU':>8}{'bar':>7}"]
    for kind, name in (("gradient", "score and gradient"), ("score", "score alone")):
        line = result[kind]
        whole, own = line["whole"], line["shared"]
        lines.append(
            f"{name:<22}{whole['seconds']:>9.2f}{whole['rows']:>6}{own['seconds']:>9.2f}{own['rows']:>6}"
            f"{line['ratio']:>8.3f}{line['cpu_ratio']:>8.3f}{line['bar']:>7.2f} {'met' if line['met'] else 'MISSED'}"
        )
    backward = result["backward_over_forward"]
    lines.append(f"backward over forward, CPU seconds: whole {backward['whole']:.2f}, shared {backward['shared']:.2f}")
    lines.append(f"errors: score {result['errors']['score']:.1e}, gradient {result['errors']['gradient']:.1e}")
    load = result["load_average"][0]
    lines.append(f"{result['machine']['processor']}, {result['machine']['threads']} threads, load average {load:.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", choices=PRESETS, default="six-layer")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    result = measure(PRESETS[arguments.preset], arguments.rounds, print)
    print(table(result))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
