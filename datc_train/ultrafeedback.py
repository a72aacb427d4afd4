"""`datc data ultrafeedback`: the paper's splits of UltraFeedback as JSON lines.

    heldout.jsonl   256 prompts, for the reward of the policy on prompts that it never trained on
    rl.jsonl        2,000 prompts to train on
    sft.jsonl       2,500 prompts with their chosen answer, for supervised fine-tuning of a base model

From the column `prompt` of `HuggingFaceH4/ultrafeedback_binarized`, split train_prefs. A hash of the seed and a prompt's text
says for which file it is, if for any is a matter of room: each takes the lowest hashes of its own. So neither the order of
rows nor rows added later move a prompt from one file to another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datc_train.data import json_rows
from datc_train.tables import has_splits, is_table, table_rows

SOURCE, SPLIT = "HuggingFaceH4/ultrafeedback_binarized", "train_prefs"
SIZES = {"heldout": 256, "rl": 2000, "sft": 2500}
MAX_CHARACTERS = 8192  # about 2,048 tokens, the paper's bound of a prompt


def prepare(
    out: Path, *, source: str = SOURCE, split: str = SPLIT, seed: int = 0, sizes: dict[str, int] | None = None
) -> dict[str, int]:
    """Write the three files to `out`; returns how many candidates there were and the size of each.

    A prompt counts once, however often it comes, with the answer of the lowest hash; empty ones and those above
    `MAX_CHARACTERS` are left out. Hashes are dealt to the files in proportion to their sizes.

    Raises ValueError for a source with a row that lacks the prompt or the assistant's answer, for one with too few prompts and
    for a split of one without any; FileExistsError where a file is in the way. Nothing is written then.
    """
    sizes = SIZES if sizes is None else sizes
    paths = {name: out / f"{name}.jsonl" for name in sizes}
    for path in paths.values():
        if path.exists():
            raise FileExistsError(f"out: {path} exists; choose another folder")
    for path in (out, *out.parents):
        if path.exists() and not path.is_dir():
            raise FileExistsError(f"out: expected a folder, got {out}, where {path} is a file")
    candidates: dict[str, dict[str, Any]] = {}
    for row, where in _rows(source, split):
        kept = _kept(row, f"source: {where}")
        prompt = kept["prompt"]
        if prompt.strip() and len(prompt) <= MAX_CHARACTERS:
            candidates[prompt] = min(kept, candidates.get(prompt, kept), key=lambda one: _hash(seed, _line(one)))
    needed = sum(sizes.values())
    if len(candidates) < needed:
        raise ValueError(f"source: expected at least {needed} different prompts, got {len(candidates)} from {source}")
    parts = {name: "".join(lines) for name, lines in _dealt(candidates, seed, sizes, source).items()}
    out.mkdir(parents=True, exist_ok=True)
    for name, text in parts.items():
        paths[name].write_text(text, encoding="utf-8")
    return {"candidates": len(candidates)} | sizes


def _dealt(candidates: dict[str, dict[str, Any]], seed: int, sizes: dict[str, int], source: str) -> dict[str, list[str]]:
    """The lines of every file, by the prompts' hashes."""
    needed = sum(sizes.values())
    hashes = sorted((_hash(seed, prompt), prompt) for prompt in candidates)
    dealt, start = {}, 0
    for name, size in sizes.items():
        # Hashes are 256 bits: this file's are [start, start + size) / needed of them.
        own = [prompt for digest, prompt in hashes if start <= int.from_bytes(digest) * needed >> 256 < start + size]
        start += size
        if len(own) < size:
            raise ValueError(
                f"source: expected at least {size} different prompts whose hash is {name}'s, got {len(own)} of "
                f"{len(candidates)} from {source}; more rows or another seed"
            )
        left_out = () if name == "sft" else ("response",)
        kept = (candidates[prompt] for prompt in own[:size])
        dealt[name] = [_line({key: value for key, value in row.items() if key not in left_out}) for row in kept]
    return dealt


def _hash(seed: int, text: str) -> bytes:
    return hashlib.sha256(f"{seed}\0{text}".encode()).digest()


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _rows(source: str, split: str) -> Iterator[tuple[dict[str, Any], str]]:
    path = Path(source)
    if split not in (SPLIT, "train") and path.exists() and not has_splits(source):
        raise ValueError(f"split: expected {SPLIT!r} (the default) or 'train' of a source without splits, got {split!r}")
    return json_rows(path) if path.is_file() and not is_table(source) else table_rows(source, split, name="source")


def _kept(row: dict[str, Any], where: str) -> dict[str, Any]:
    """The parts of a row that are written. Raises ValueError for what is missing of them or not what it should be."""
    if not {"prompt", "chosen"} <= row.keys():
        raise ValueError(f"{where}: expected the columns prompt (text) and chosen (messages), got {', '.join(map(repr, row))}")
    chosen, prompt_id = row["chosen"], row.get("prompt_id")
    last = chosen[-1] if isinstance(chosen, list) and chosen else None
    if not isinstance(last, dict):
        raise ValueError(f"{where}, 'chosen': expected a list of messages, got {chosen!r:.80}")
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        raise ValueError(f"{where}, 'chosen': expected a last message with role assistant and text as content, got {last!r:.80}")
    if prompt_id is not None and not isinstance(prompt_id, str | int):
        raise ValueError(f"{where}, 'prompt_id': expected text, a whole number or nothing, got {prompt_id!r:.80}")
    for column, text in (("prompt", row["prompt"]), ("chosen", last["content"]), ("prompt_id", str(prompt_id))):
        if not isinstance(text, str):
            raise ValueError(f"{where}, {column!r}: expected text, got {'null' if text is None else repr(text)[:80]}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}, {column!r}: expected text, got half of a surrogate pair ({error})") from None
    return {"prompt": row["prompt"], "prompt_id": prompt_id, "response": last["content"]}
