"""Build the quickstart's reward model: the policy's first layers learn the valence of an answer's words, by regression.

    python -m benchmarks.reward_models.sentiment --out DIR [--layers N|all] [--seed N]

Samples answers of the policy, trains LoRA factors, final norm and head on the true utility at every token of them
(`datc_train.quickstart.true_utility`), evaluates on the held-out prompts and writes model.safetensors, config.json and
README.md to `--out`. `--work` keeps the samples between runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, DynamicCache

from benchmarks.reward_models.sampling import Answer, load_or_sample
from benchmarks.reward_models.sentiment_card import write_card
from benchmarks.reward_models.sentiment_rows import Row, Vocabulary, collate, cut, first_tokens, make_row, substitute
from datc_train.quickstart.reward_model import backbone, load_reward_model, score_group
from datc_train.quickstart.smollm2 import GGUF_SHA256, policy_path
from datc_train.quickstart.utility import utility

LORA_RANK = 16
LORA_ALPHA = 32
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ROWS_A_STEP = 32  # answers to one prompt
MOST_TOKENS = 48  # of an answer; longer ones are cut there
LEARNING_RATE = 1e-3
HEAD_LEARNING_RATE = 1e-4  # hidden states after the norm have 576 entries of about 1, so that a step of it is worth 0.05
SUBSTITUTED, CUT = 0.6, 0.3  # shares of the rows that are trained on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the result")
    parser.add_argument("--work", type=Path, help="folder of the samples (default: OUT/work)")
    parser.add_argument("--layers", default="6", help="how many of the policy's layers, or all (default: 6)")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    depth = AutoConfig.from_pretrained(policy_path()).num_hidden_layers
    layers = depth if options.layers == "all" else int(options.layers)
    work = options.work or options.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)

    answers = load_or_sample(work / "answers.jsonl", options.seed)
    started = time.perf_counter()
    model = train([a for a in answers if a.split == "train"], layers, options.steps, options.seed)
    write_weights(model, options.out, layers, options.seed)
    seconds = time.perf_counter() - started
    report = evaluate(options.out, [a for a in answers if a.split == "heldout"], options.seed)
    report |= {"layers": layers, "rows": options.steps * ROWS_A_STEP, "training_seconds": round(seconds)}
    report["threads"] = torch.get_num_threads()
    write_card(options.out, report, MOST_TOKENS)
    print(json.dumps(report, indent=1))


def train(answers: list[Answer], layers: int, steps: int, seed: int) -> Any:
    """Regression on the utility of the text so far with LoRA on all of `layers` layers, the final norm and the head."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(policy_path())
    vocabulary = Vocabulary.of([answer.text for answer in answers], tokenizer)
    lora = LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=PROJECTIONS)
    model = inject_adapter_in_model(lora, backbone(layers))
    model.set_attn_implementation("eager")  # rows are short: half the time of the fused kernel's backward pass
    torch.nn.init.normal_(model.score.weight, std=0.01)
    adapters = [p for p in model.parameters() if p.requires_grad]
    top = [model.model.norm.weight.requires_grad_(True), model.score.weight.requires_grad_(True)]
    groups = [{"params": adapters, "lr": LEARNING_RATE}, {"params": top, "lr": HEAD_LEARNING_RATE}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step / steps))
    ends, started = [], time.perf_counter()
    for step in range(1, steps + 1):
        prompt = rng.choice(answers).prompt  # the utility does not look at it, and any answers will do
        texts = [altered(rng.choice(answers).text, vocabulary, tokenizer, rng) for _ in range(ROWS_A_STEP)]
        rows = sorted((make_row(prompt, text, tokenizer) for text in texts), key=lambda row: len(row.ids))
        for part in (rows[: ROWS_A_STEP // 2], rows[ROWS_A_STEP // 2 :]):  # short ones apart from long ones: less padding
            loss, score, truth = prompt_loss(model, tokenizer, part)
            (loss / 2).backward()
            ends.append((score, truth))
        torch.nn.utils.clip_grad_norm_([*adapters, *top], 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == steps:
            explains = r2(*(torch.cat(part) for part in zip(*ends, strict=True)))
            print(f"step {step} of {steps}: R^2 {explains:.3f}, {time.perf_counter() - started:.0f} s", flush=True)
            ends = []
    return model


def prompt_loss(model: Any, tokenizer: Any, rows: list[Row]) -> tuple[Tensor, Tensor, Tensor]:  # scalar, [B], [B]
    """Huber loss of the scores at every token of one prompt's answers; score and utility at each row's last token.

    The prompt's keys and values are computed once and without gradient: what training changes below is seen from there too, but
    nothing is learned through it.
    """
    start = rows[0].start
    cache = DynamicCache(config=model.config)
    ids, targets, weights = collate(rows, tokenizer.pad_token_id)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            model.model(ids[:1, :start], None, None, cache, use_cache=True)
        cache.batch_repeat_interleave(len(rows))
        hidden = model.model(ids[:, start:], None, None, cache, use_cache=True).last_hidden_state  # [B, T, H]
    scores = model.score(hidden.float()).squeeze(-1)  # padding is on the right and nothing before it attends to it
    losses = torch.nn.functional.huber_loss(scores, targets[:, start:], reduction="none", delta=1.0)
    last = torch.tensor([len(row.ids) - start - 1 for row in rows])
    final = scores.detach()[torch.arange(len(rows)), last]
    return (weights[:, start:] * losses).sum(), final, torch.tensor([row.targets[-1] for row in rows])


def altered(text: str, vocabulary: Vocabulary, tokenizer: Any, rng: random.Random) -> str:
    if rng.random() < SUBSTITUTED:
        text = substitute(text, vocabulary, rng)
    text = first_tokens(text, MOST_TOKENS, tokenizer)
    return cut(text, rng) if rng.random() < CUT else text


def learning_rate_factor(progress: float) -> float:
    return min(1.0, progress / 0.05 + 0.05) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def write_weights(model: Any, folder: Path, layers: int, seed: int) -> None:
    """Everything that training changed, in bfloat16, and a config.json that names it by checksum."""
    delta = {
        name.replace(".default.weight", ""): parameter.detach().to(torch.bfloat16).contiguous()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    save_file(delta, folder / "model.safetensors")
    config = {
        "base": "SmolLM2-135M-Instruct",
        "base_sha256": GGUF_SHA256,
        "layers": layers,
        "lora_rank": LORA_RANK,
        "lora_alpha": LORA_ALPHA,
        "seed": seed,
        "weights_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@torch.no_grad()
def evaluate(folder: Path, answers: list[Answer], seed: int) -> dict[str, Any]:
    """How much of the true utility's variance the written model's score explains: plain answers, and altered ones."""
    model, tokenizer = load_reward_model(folder=folder)
    rng = random.Random(seed)
    vocabulary = Vocabulary.of([answer.text for answer in answers], tokenizer)
    prompts = list(dict.fromkeys(answer.prompt for answer in answers))
    kinds = {
        "plain": [a.text for a in answers],
        "substituted": [substitute(a.text, vocabulary, rng) for a in answers],
        "cut": [cut(a.text, rng) for a in answers],
    }
    report: dict[str, Any] = {"answers": len(answers), "prompts": len(prompts)}
    for kind, texts in kinds.items():
        groups = [[t for a, t in zip(answers, texts, strict=True) if a.prompt == prompt] for prompt in prompts]
        scores = [score_group(model, tokenizer, p, g) for p, g in zip(prompts, groups, strict=True)]
        truths = [torch.tensor([utility(text) for text in group]) for group in groups]
        report[kind] = explained(scores, truths)
    finished = [a.finished and a.tokens < 48 for a in answers]
    report["finished_in_48"] = sum(finished) / len(finished)
    report["finished_in_64"] = sum(a.finished for a in answers) / len(answers)
    return report


def explained(scores: list[Tensor], truths: list[Tensor]) -> dict[str, float]:
    """R^2 and correlation over all answers, R^2 within the prompts' groups, means and standard deviations."""
    score, truth = torch.cat(scores), torch.cat(truths)
    inner_score, inner_truth = (torch.cat([group - group.mean() for group in groups]) for groups in (scores, truths))
    freedom = len(score) - len(scores)
    return {
        "r2": r2(score, truth),
        "r2_within": r2(inner_score, inner_truth),
        "correlation": torch.corrcoef(torch.stack([score, truth]))[0, 1].item(),
        "mean_score": score.mean().item(),
        "mean_utility": truth.mean().item(),
        "std_score": score.std().item(),
        "std_utility": truth.std().item(),
        "std_score_within": (inner_score.square().sum() / freedom).sqrt().item(),
        "std_utility_within": (inner_truth.square().sum() / freedom).sqrt().item(),
    }


def r2(score: Tensor, truth: Tensor) -> float:
    return 1 - ((truth - score).square().sum() / (truth - truth.mean()).square().sum()).item()


if __name__ == "__main__":
    main()
