"""First stage of building the reward model: responses of the policy to every prompt, at several temperatures."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from datc_train.quickstart.smollm2 import load_policy

MAX_NEW_TOKENS = 48
BATCH = 128
FOLDER = Path(__file__).with_name("pairs_prompts")
Job = tuple[str, str, float]  # split, prompt, temperature


@dataclass(frozen=True)
class Sample:
    """One response; `finished` where it ended by itself, before `MAX_NEW_TOKENS`."""

    split: str
    prompt: str
    temperature: float
    response: str
    finished: bool
    tokens: int


def split_prompts(split: str) -> list[str]:
    lines = (FOLDER / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"][0]["content"] for line in lines]


def all_jobs() -> list[Job]:
    """Every prompt at 0.3; of the training prompts every other one at 1.0 and the rest at 1.3, which is mostly garbage;
    the held-out ones twice at 1.0 and once at 1.3. Prompts of like length are neighbours, so that little is padding.
    """
    train, heldout = split_prompts("train"), split_prompts("heldout")
    blocks = [("train", train, 0.3), ("train", train[::2], 1.0), ("train", train[1::2], 1.3)]
    blocks += [("heldout", heldout, temperature) for temperature in (0.3, 1.0, 1.0, 1.3)]
    return [(split, prompt, temperature) for split, prompts, temperature in blocks for prompt in sorted(prompts, key=len)]


def load_or_sample(path: Path, seed: int) -> list[Sample]:
    """The samples in `path`; batches that are missing there are drawn and added, so an interrupted run goes on."""
    jobs = all_jobs()
    samples = [Sample(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    if len(samples) == len(jobs):
        return samples
    model, tokenizer = load_policy()
    while len(samples) < len(jobs):
        start = len(samples)
        temperature = jobs[start][2]
        batch = [job for job in jobs[start : start + BATCH] if job[2] == temperature]
        torch.manual_seed(seed + start)
        drawn = sample_batch(model, tokenizer, [prompt for _, prompt, _ in batch], temperature)
        new = [Sample(s, p, t, *result) for (s, p, t), result in zip(batch, drawn, strict=True)]
        with path.open("a") as file:
            file.writelines(json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in new)
        samples += new
        print(f"sampled {len(samples)} of {len(jobs)}", flush=True)
    return samples


@torch.inference_mode()
def sample_batch(model: Any, tokenizer: Any, prompts: list[str], temperature: float) -> list[tuple[str, bool, int]]:
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": p}], add_generation_prompt=True, tokenize=False)
        for p in prompts
    ]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    output = model.generate(**inputs, do_sample=True, temperature=temperature, top_k=0, top_p=1.0, max_new_tokens=MAX_NEW_TOKENS)
    results = []
    for row in output[:, inputs["input_ids"].shape[1] :].tolist():
        finished = tokenizer.eos_token_id in row
        ids = row[: row.index(tokenizer.eos_token_id)] if finished else row
        results.append((tokenizer.decode(ids), finished, len(ids)))
    return results
