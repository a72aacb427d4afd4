"""`datc data ultrafeedback`: the paper's splits of UltraFeedback as JSON lines.

    heldout.jsonl   256 prompts, for the reward of the policy on prompts that it never trained on
    rl.jsonl        2,000 prompts to train on
    sft.jsonl       2,500 prompts with their chosen answer, for supervised fine-tuning of a base model

From the column `prompt` of `HuggingFaceH4/ultrafeedback_binarized`, split train_prefs. Which prompt goes where follows from a
hash of the seed and its text, so neither the order of rows nor rows added later move a prompt from one split to another's use.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from datc_train.tables import table_rows

SOURCE, SPLIT = "HuggingFaceH4/ultrafeedback_binarized", "train_prefs"
SIZES = {"heldout": 256, "rl": 2000, "sft": 2500}
MAX_CHARACTERS = 8192  # about 2,048 tokens, the paper's bound of a prompt


def prepare(
    out: Path, *, source: str = SOURCE, split: str = SPLIT, seed: int = 0, sizes: dict[str, int] | None = None
) -> dict[str, int]:
    """Write the three files to `out`; returns how many candidates there were and the size of each.

    A prompt counts once, however often it comes; empty ones and those above `MAX_CHARACTERS` are left out.

    Raises ValueError for a source without the columns prompt and chosen or with too few prompts; FileExistsError where a file
    of that name is there already.
    """
    sizes = SIZES if sizes is None else sizes
    paths = {name: out / f"{name}.jsonl" for name in sizes}
    for path in paths.values():
        if path.exists():
            raise FileExistsError(f"out: {path} exists; choose another folder")
    candidates: dict[str, dict[str, Any]] = {}
    for row, where in table_rows(source, split):
        if not isinstance(row.get("prompt"), str) or not isinstance(row.get("chosen"), list):
            raise ValueError(
                f"{where}: expected the columns prompt (text) and chosen (messages), got {', '.join(map(repr, row))}"
            )
        prompt = row["prompt"]
        if prompt.strip() and len(prompt) <= MAX_CHARACTERS:
            candidates.setdefault(prompt, row)
    needed = sum(sizes.values())
    if len(candidates) < needed:
        raise ValueError(f"source: expected at least {needed} different prompts, got {len(candidates)} from {source}")
    order = sorted(candidates, key=lambda prompt: hashlib.sha256(f"{seed}\0{prompt}".encode()).digest())
    out.mkdir(parents=True, exist_ok=True)
    start = 0
    for name, size in sizes.items():
        rows = [_row(candidates[prompt], answer=name == "sft") for prompt in order[start : start + size]]
        start += size
        paths[name].write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return {"candidates": len(candidates)} | sizes


def _row(row: dict[str, Any], *, answer: bool) -> dict[str, Any]:
    kept = {"prompt": row["prompt"], "prompt_id": row.get("prompt_id")}
    return kept | {"response": row["chosen"][-1]["content"]} if answer else kept
