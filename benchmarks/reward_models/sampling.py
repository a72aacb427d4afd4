"""Answers of the quickstart's policy at temperature 1, kept in a file of JSON lines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from datc_train.quickstart import heldout_prompts, load_policy, train_prompts

MAX_NEW_TOKENS = 64
BATCH = 64
HELDOUT_A_PROMPT, TRAIN_A_PROMPT = 8, 4  # answers


@dataclass(frozen=True)
class Answer:
    """One answer; `finished` where it ended by itself within `MAX_NEW_TOKENS`, `tokens` without the stop token."""

    split: str  # "train" or "heldout"
    prompt: str
    text: str
    finished: bool
    tokens: int


def load_or_sample(path: Path, seed: int) -> list[Answer]:
    """Answers to every prompt of the quickstart; what `path` has of them is read, the rest drawn and added."""
    jobs = [
        (split, prompt)
        for split, rows, count in (("heldout", heldout_prompts(), HELDOUT_A_PROMPT), ("train", train_prompts(), TRAIN_A_PROMPT))
        for _ in range(count)
        for prompt in sorted((row["prompt"][0]["content"] for row in rows), key=len)  # little padding
    ]
    answers = [Answer(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    if [(answer.split, answer.prompt) for answer in answers] != jobs[: len(answers)]:
        raise ValueError(f"path: expected a beginning of the answers that this build draws, got others: {path}")
    if len(answers) == len(jobs):
        return answers
    model, tokenizer = load_policy(dtype=torch.bfloat16)
    while len(answers) < len(jobs):
        batch = jobs[len(answers) : len(answers) + BATCH]
        torch.manual_seed(seed + len(answers))
        drawn = sample(model, tokenizer, [prompt for _, prompt in batch])
        new = [Answer(split, prompt, *result) for (split, prompt), result in zip(batch, drawn, strict=True)]
        with path.open("a") as file:
            file.writelines(json.dumps(asdict(answer), ensure_ascii=False) + "\n" for answer in new)
        answers += new
        print(f"sampled {len(answers)} of {len(jobs)}", flush=True)
    return answers


@torch.inference_mode()
def sample(model: Any, tokenizer: Any, prompts: list[str]) -> list[tuple[str, bool, int]]:
    """Text, whether it ended by itself, and its number of tokens, for one answer to each of `prompts`."""
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False)
        for prompt in prompts
    ]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    output = model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_NEW_TOKENS)
    results = []
    for row in output[:, inputs["input_ids"].shape[1] :].tolist():
        finished = tokenizer.eos_token_id in row
        ids = row[: row.index(tokenizer.eos_token_id)] if finished else row
        results.append((tokenizer.decode(ids), finished, len(ids)))
    return results
