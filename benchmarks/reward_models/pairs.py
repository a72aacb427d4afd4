"""Build a reward model of general quality from nothing but SmolLM2, 412 prompts and 130 hand-written answers.

    python -m benchmarks.reward_models.pairs --out DIR [--seed N]

Samples responses, makes preference pairs, trains by Bradley-Terry, fixes the scale, evaluates on the held-out prompts
and writes model.safetensors, config.json and README.md to `--out`. `--work` keeps samples and pairs between runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.reward_models.pairs_card import write_card
from benchmarks.reward_models.pairs_made import Pair, make_pairs, whole_sentences
from benchmarks.reward_models.pairs_sampling import Sample, load_or_sample
from datc_train.quickstart.reward_model import backbone, load_reward_model, score_group
from datc_train.quickstart.smollm2 import GGUF_SHA256, policy_path

LAYERS = 14  # of the policy's 30
FROZEN_LAYERS = 5  # the lowest ones keep the policy's weights
LORA_RANK = 8
LORA_ALPHA = 16
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EPOCHS = 2
PROMPTS_A_STEP = 2
LEARNING_RATE = 5e-4
TARGET_SPREAD = 1.3  # standard deviation of the score among temperature-1 samples of one prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the result")
    parser.add_argument("--work", type=Path, help="folder of samples and pairs (default: OUT/work)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    work = options.work or options.out / "work"
    work.mkdir(parents=True, exist_ok=True)

    started = time.perf_counter()
    samples = load_or_sample(work / "samples.jsonl", options.seed)
    epochs = [make_pairs(samples, "train", options.seed + epoch) for epoch in range(EPOCHS)]
    heldout = make_pairs(samples, "heldout", options.seed)
    train = [pair for epoch in epochs for pair in epoch]
    save_pairs(work / "pairs.jsonl", [*train, *heldout])
    print(f"{len(train)} pairs to train on, {len(heldout)} held out, {time.perf_counter() - started:.0f} s", flush=True)

    model, tokenizer = train_reward_model(epochs, options.seed)
    fix_scale(model, tokenizer, [s for s in samples if s.split == "heldout" and s.temperature == 1.0])
    write_weights(model, options.out, options.seed)
    print(f"trained, {time.perf_counter() - started:.0f} s", flush=True)

    model, tokenizer = load_reward_model(folder=options.out)
    report = evaluate(model, tokenizer, heldout, [s for s in samples if s.split == "heldout"])
    write_card(options.out, report, pairs=len(train), prompts=len({pair.prompt for pair in train}))
    print(json.dumps(report, indent=1), f"\n{time.perf_counter() - started:.0f} s")


def save_pairs(path: Path, pairs: list[Pair]) -> None:
    path.write_text("".join(json.dumps(asdict(pair), ensure_ascii=False) + "\n" for pair in pairs))


def by_prompt(pairs: list[Pair]) -> dict[str, list[Pair]]:
    groups: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[pair.prompt].append(pair)
    return groups


def margins(model: Any, tokenizer: Any, pairs: list[Pair]) -> Tensor:  # [len(pairs)]
    """score(chosen) - score(rejected) of one prompt's pairs; a text that occurs in several pairs is scored once."""
    texts = sorted({text for pair in pairs for text in (pair.chosen, pair.rejected)}, key=lambda text: (len(text), text))
    half = len(texts) // 2  # short rows apart from long ones: less padding
    parts = [part for part in (texts[:half], texts[half:]) if part]
    scores = torch.cat([score_group(model, tokenizer, pairs[0].prompt, part) for part in parts])
    better = torch.tensor([texts.index(pair.chosen) for pair in pairs])
    worse = torch.tensor([texts.index(pair.rejected) for pair in pairs])
    return scores[better] - scores[worse]


def train_reward_model(epochs: list[list[Pair]], seed: int) -> tuple[Any, Any]:
    """Minimise -log sigmoid(margin) over the pairs with LoRA on the upper layers, the final norm and the head."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(policy_path())
    lora = LoraConfig(
        r=LORA_RANK,
        lora_alpha=LORA_ALPHA,
        target_modules=PROJECTIONS,
        layers_to_transform=list(range(FROZEN_LAYERS, LAYERS)),
    )
    model = inject_adapter_in_model(lora, backbone(LAYERS))
    for parameter in (model.model.norm.weight, model.score.weight):
        parameter.requires_grad_(True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01)

    batches = [batch for pairs in epochs for batch in shuffled_batches(pairs, rng)]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step / len(batches)))
    for step, groups in enumerate(batches, 1):
        total = sum(map(len, groups))
        losses, right = 0.0, 0
        for group in groups:
            margin = margins(model, tokenizer, group)
            loss = torch.nn.functional.softplus(-margin).sum() / total
            loss.backward()
            losses += loss.item()
            right += int((margin > 0).sum())
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == len(batches):
            print(f"step {step} of {len(batches)}: loss {losses:.3f}, right {right / total:.2f}", flush=True)
    return model, tokenizer


def shuffled_batches(pairs: list[Pair], rng: random.Random) -> list[list[list[Pair]]]:
    """Batches of `PROMPTS_A_STEP` groups, a group being one prompt's pairs."""
    groups = list(by_prompt(pairs).values())
    rng.shuffle(groups)
    return [groups[start : start + PROMPTS_A_STEP] for start in range(0, len(groups), PROMPTS_A_STEP)]


def learning_rate_factor(progress: float) -> float:
    return min(1.0, progress / 0.05 + 0.05) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


@torch.no_grad()
def sample_scores(model: Any, tokenizer: Any, samples: list[Sample]) -> dict[str, Tensor]:
    """Scores of the samples, prompt by prompt, in the order given."""
    groups: dict[str, list[str]] = defaultdict(list)
    for sample in samples:
        groups[sample.prompt].append(sample.response)
    return {prompt: score_group(model, tokenizer, prompt, texts) for prompt, texts in groups.items()}


def spread(scores: dict[str, Tensor]) -> float:
    """Pooled standard deviation within the groups."""
    deviations = torch.cat([group - group.mean() for group in scores.values()])
    return (deviations.square().sum() / (len(deviations) - len(scores))).sqrt().item()


@torch.no_grad()
def fix_scale(model: Any, tokenizer: Any, samples: list[Sample]) -> None:
    model.score.weight *= TARGET_SPREAD / spread(sample_scores(model, tokenizer, samples))


def write_weights(model: Any, folder: Path, seed: int) -> None:
    """Everything that training changed, and a config.json that names it by checksum."""
    delta = {
        name.replace(".default.weight", ""): parameter.detach().float().contiguous()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    save_file(delta, folder / "model.safetensors")
    config = {
        "base": "SmolLM2-135M-Instruct",
        "base_sha256": GGUF_SHA256,
        "layers": LAYERS,
        "lora_rank": LORA_RANK,
        "lora_alpha": LORA_ALPHA,
        "seed": seed,
        "weights_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@torch.no_grad()
def evaluate(model: Any, tokenizer: Any, pairs: list[Pair], samples: list[Sample]) -> dict[str, Any]:
    """Accuracy by kind on the held-out pairs, and how the score moves with length on plain samples."""
    right: dict[str, list[float]] = defaultdict(list)
    for group in by_prompt(pairs).values():
        for pair, margin in zip(group, margins(model, tokenizer, group).tolist(), strict=True):
            right[pair.kind].append(float(margin > 0))
    plain = [s for s in samples if s.temperature == 1.0]
    whole = [s for s in plain if whole_sentences(s.response)]
    trimmed = [Sample(**{**asdict(s), "response": whole_sentences(s.response)}) for s in whole]
    scores = sample_scores(model, tokenizer, plain)
    finished = {p: [s.finished for s in plain if s.prompt == p] for p in scores}
    every = torch.cat(list(scores.values()))
    ended = torch.tensor([flag for flags in finished.values() for flag in flags])
    return {
        "pairs": sum(map(len, right.values())),
        "accuracy": mean([value for values in right.values() for value in values]),
        "by_kind": {kind: {"accuracy": mean(values), "pairs": len(values)} for kind, values in sorted(right.items())},
        "length_correlation_as_sampled": length_correlation(model, tokenizer, plain),
        "length_correlation_whole_sentences": length_correlation(model, tokenizer, trimmed),
        "spread": spread(scores),
        "mean_finished": every[ended].mean().item(),
        "mean_cut": every[~ended].mean().item(),
    }


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def length_correlation(model: Any, tokenizer: Any, samples: list[Sample]) -> float:
    """Pearson correlation of score and number of tokens over all samples."""
    scores = sample_scores(model, tokenizer, samples)
    lengths = [len(tokenizer(s.response).input_ids) for prompt in scores for s in samples if s.prompt == prompt]
    pair = torch.stack([torch.cat(list(scores.values())), torch.tensor(lengths, dtype=torch.float32)])
    return torch.corrcoef(pair)[0, 1].item()


if __name__ == "__main__":
    main()
