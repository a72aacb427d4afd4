"""Rows to learn a lexicon's valence from: the policy's answers, with words put in place of others, and cut ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from datc_train.quickstart.utility import WORD, lexicon, utility, words

SHARES = (0.1, 0.1, 0.2, 0.5)  # of an answer's words that are replaced, one drawn a text


@dataclass(frozen=True)
class Vocabulary:
    """Words to put in place of others."""

    common: list[str]  # of the lexicon, those that are one token after a blank
    rare: list[str]  # of the lexicon, the others
    neutral: list[str]  # of the policy's answers, those that the lexicon does not have, as often as they occur

    @classmethod
    def of(cls, texts: Sequence[str], tokenizer: Any) -> Vocabulary:
        known = sorted(word for word in lexicon() if word.isascii())
        single = {word for word in known if len(tokenizer(f" {word}", add_special_tokens=False)["input_ids"]) == 1}
        neutral = [word for text in texts for word in words(text) if word not in lexicon()]
        return cls([w for w in known if w in single], [w for w in known if w not in single], neutral)

    def draw(self, rng: random.Random) -> str:
        match rng.random():
            case x if x < 0.5:
                return rng.choice(self.common)
            case x if x < 0.7:
                return rng.choice(self.rare)
            case _:
                return rng.choice(self.neutral)


def substitute(text: str, vocabulary: Vocabulary, rng: random.Random) -> str:
    """The text with a share of its words replaced, each by another or, now and then, all by the same one."""
    share = rng.choice(SHARES)
    same = vocabulary.draw(rng) if rng.random() < 0.1 else None

    def replace(match: Any) -> str:
        if rng.random() >= share:
            return match.group()
        word = same or vocabulary.draw(rng)
        return word.capitalize() if match.group()[0].isupper() else word

    return WORD.sub(replace, text)


def cut(text: str, rng: random.Random) -> str:
    """A beginning of the text, at least a character of it, that may end within a word."""
    return text[: rng.randint(1, len(text))] if text else text


@dataclass(frozen=True)
class Row:
    """A row as the reward model reads it, and the utility of the text so far from the answer's first token on."""

    ids: list[int]
    start: int  # of the first target; the last target is that of the row's last token
    targets: list[float]


def make_row(prompt: str, text: str, tokenizer: Any) -> Row:
    """The chat template of prompt and text, closed; the closing tokens have the whole text's utility."""
    question = [{"role": "user", "content": prompt}]
    head = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template([*question, {"role": "assistant", "content": text}], tokenize=False)
    if not whole.startswith(head + text):
        raise ValueError(f"text: expected one that the chat template leaves as it is, got {text!r:.80}")
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    ends = [end for _, end in encoded["offset_mapping"]]
    start = next(index for index, end in enumerate(ends) if end > len(head))
    targets = [utility(text[: end - len(head)]) for end in ends[start:]]
    return Row(encoded["input_ids"], start, targets)


def first_tokens(text: str, count: int, tokenizer: Any) -> str:
    """The text up to its `count`th token."""
    ends = [end for _, end in tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]]
    return text[: ends[count - 1]] if len(ends) > count else text


def collate(rows: Sequence[Row], pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [B, L], targets [B, L] and weights [B, L]: half on each row's last token, half spread over the answer before it."""
    shape = (len(rows), max(len(row.ids) for row in rows))
    ids, targets, weights = torch.full(shape, pad), torch.zeros(shape), torch.zeros(shape)
    for i, row in enumerate(rows):
        end = len(row.ids)
        ids[i, :end] = torch.tensor(row.ids)
        targets[i, row.start : end] = torch.tensor(row.targets)
        weights[i, row.start : end - 1] = 0.5 / (end - 1 - row.start)
        weights[i, end - 1] = 0.5
    return ids, targets, weights / len(rows)
