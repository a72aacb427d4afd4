"""A policy's tokens spelled in the reward model's: the candidate table of a policy with a vocabulary of its own.

    E'_v = mean of E_s over the reward tokens s that spell token v                        [policy ids, K]
    <sum of the span's gradients, E'_v>   first-order change when every position of a span is given to E'_v

With one vocabulary, a token spells itself and E' is E.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from datc_train.disk import written

_TOKENS_AT_A_TIME = 8192
_FORMAT = 1  # of the files; another rule of spelling is another number


@dataclass(frozen=True)
class Spelling:
    """The reward ids of policy token v are `ids[start[v]:start[v + 1]]`; none where v stands for no bytes."""

    ids: NDArray[np.int64]  # [M]
    start: NDArray[np.int64]  # [policy ids + 1]


def spell(
    policy_bytes: Sequence[bytes | None], tokenizer: PreTrainedTokenizerBase, reward_bytes: Sequence[bytes | None]
) -> Spelling:
    """Every policy token in reward tokens of exactly its bytes.

    As the reward tokenizer reads its text, where that gives back the bytes; else (half a character, a blank that the
    tokenizer adds) the longest known piece at each byte. A token with a byte that no piece has is not spelled.
    """
    spelled: list[list[int]] = [[] for _ in policy_bytes]
    texts: dict[int, str] = {}
    for v, token in enumerate(policy_bytes):
        try:
            texts[v] = (token or b"").decode()
        except UnicodeDecodeError:
            continue
    places = [v for v, text in texts.items() if text]
    for at in range(0, len(places), _TOKENS_AT_A_TIME):
        chunk = places[at : at + _TOKENS_AT_A_TIME]
        rows = tokenizer([texts[v] for v in chunk], add_special_tokens=False)["input_ids"]
        for v, row in zip(chunk, rows, strict=True):
            spelled[v] = row if b"".join(reward_bytes[i] or b"" for i in row) == policy_bytes[v] else []
    pieces = {piece: i for i, piece in reversed(list(enumerate(reward_bytes))) if piece}
    longest = max(map(len, pieces), default=0)
    for v, token in enumerate(policy_bytes):
        if token and not spelled[v]:
            spelled[v] = _longest_pieces(token, pieces, longest)
    start = np.cumsum([0, *map(len, spelled)], dtype=np.int64)
    return Spelling(np.array([i for row in spelled for i in row], dtype=np.int64), start)


def _longest_pieces(token: bytes, pieces: dict[bytes, int], longest: int) -> list[int]:
    ids, at = [], 0
    while at < len(token):
        sizes = range(min(longest, len(token) - at), 0, -1)
        size = next((size for size in sizes if token[at : at + size] in pieces), 0)
        if not size:
            return []
        ids.append(pieces[token[at : at + size]])
        at += size
    return ids


def cached_spelling(
    policy_bytes: Sequence[bytes | None],
    tokenizer: PreTrainedTokenizerBase,
    reward_bytes: Sequence[bytes | None],
    folder: Path | None = None,
) -> Spelling:
    """`spell`, kept in a file named after both vocabularies under `$DATC_CACHE` (default `~/.cache/datc`)."""
    if folder is None:
        folder = Path(os.environ.get("DATC_CACHE") or "~/.cache/datc").expanduser() / "spellings"
    reward_side = tokenizer.backend_tokenizer.to_str()
    policy_side = json.dumps([None if token is None else token.hex() for token in policy_bytes])
    path = folder / f"{hashlib.sha256(f'{_FORMAT} {reward_side} {policy_side}'.encode()).hexdigest()[:32]}.npz"
    try:
        with np.load(path) as file:
            return Spelling(file["ids"], file["start"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        spelling = spell(policy_bytes, tokenizer, reward_bytes)  # no such file, or half of one
    unfinished = path.with_suffix(f".{os.getpid()}.npz")
    try:
        with written(path, "the environment variable DATC_CACHE names another folder for it"):
            folder.mkdir(parents=True, exist_ok=True)
            np.savez(unfinished, ids=spelling.ids, start=spelling.start)
            unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        raise
    return spelling


def spelled_table(table: Tensor, spelling: Spelling) -> Tensor:
    """[policy ids, K] mean row of `table [reward rows, K]` over each token's spelling, zero where it has none; same dtype.

    Means are taken in float32, some thousand tokens at a time. A spelling of one token is its row, bit for bit.
    """
    count = len(spelling.start) - 1
    out = table.new_zeros(count, table.shape[1])
    for low in range(0, count, _TOKENS_AT_A_TIME):
        start = spelling.start[low : low + _TOKENS_AT_A_TIME + 1]
        ids = torch.from_numpy(spelling.ids[start[0] : start[-1]]).to(table.device)
        sizes = torch.from_numpy(np.diff(start)).to(table.device)
        owner = torch.repeat_interleave(torch.arange(len(sizes), device=table.device), sizes)
        exact = torch.promote_types(table.dtype, torch.float32)
        sums = torch.zeros(len(sizes), table.shape[1], dtype=exact, device=table.device)
        sums.index_add_(0, owner, table[ids].to(exact))
        out[low : low + len(sizes)] = (sums / sizes.clamp(min=1)[:, None]).to(table.dtype)
    return out


def span_sums(gradient: Tensor, start: Tensor, width: Tensor) -> Tensor:
    """[n, K] sum of `gradient [L, K]` over each span of `width [n]` rows from `start [n]` on, in float32; same dtype."""
    start, width = start.to(gradient.device), width.to(gradient.device)
    if bool((width == 1).all()):
        return gradient[start]
    owner = torch.repeat_interleave(torch.arange(len(width), device=gradient.device), width)
    inside = torch.arange(len(owner), device=gradient.device) - (width.cumsum(0) - width)[owner]
    exact = torch.promote_types(gradient.dtype, torch.float32)
    sums = torch.zeros(len(width), gradient.shape[1], dtype=exact, device=gradient.device)
    return sums.index_add_(0, owner, gradient[start[owner] + inside].to(exact)).to(gradient.dtype)
