"""The row that the reward model reads: its own chat template of prompt and response.

    BOS, once | prompt ...  header of the answer, and its start | the response's text | the template's closing
                             head                                  region                 tail

Head and tail are what the template writes around any answer. They are found by rendering the prompt with a marker that
no conversation holds; searching for the response in the row would find the prompt's quotation of it instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from datc_train.messages import answered, asked, started_answer
from datc_train.types import Messages

_MARKER = "\U000f0000answer\U000f0000"  # private-use characters: no template trims or rewrites them


@dataclass(frozen=True)
class Frame:
    """What the template writes before and after any answer to one prompt."""

    head: str
    tail: str


@dataclass(frozen=True)
class Region:
    """The part `text[start:end]` of a rendered row that came from the response."""

    text: str
    start: int
    end: int

    @property
    def content(self) -> str:
        return self.text[self.start : self.end]


@dataclass(frozen=True)
class Tokenized:
    """A row as the reward model reads it, with each id's character offsets in the rendered text."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    inserted: list[bool]  # True for ids that the tokenizer put in of its own (BOS): they stand for no text


class RowTemplate:
    """Renders and tokenizes rows with one tokenizer.

    Raises:
        ValueError: a tokenizer without a chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise ValueError("tokenizer: expected one with a chat template, got chat_template=None")
        self.tokenizer = tokenizer
        bos = tokenizer.bos_token
        empty = tokenizer("", add_special_tokens=True)["input_ids"]
        # Only where the tokenizer adds a BOS itself is the template's one too many. Where it does not, the template's is
        # the only one, or no BOS at all but an ordinary header (ChatML models name <|im_start|> their BOS).
        self._redundant_bos = bos if bos and empty[:1] == [tokenizer.bos_token_id] else ""
        self.special_ids = special_ids(tokenizer)

    def frame(self, prompt: Messages, name: str) -> Frame:
        """Head and tail of the rows of one prompt; `name` is what an error calls it. A started answer is part of the head."""
        _check_started(prompt, name)
        text = self._render(prompt, _MARKER)
        head, *tail = text.split(_MARKER)
        if len(tail) != 1:
            raise ValueError(
                f"tokenizer: expected a chat template that writes the answer once; for {name} it came {len(tail)} times"
            )
        return Frame(head, tail[0])

    def region(self, prompt: Messages, response: str, frame: Frame) -> Region:
        """Render the row and say where in it the response is, also where the template edits it (trims, moves thoughts).

        The prefix and suffix that the row shares with the frame are the template's; what is left is the response's.
        """
        text = self._render(prompt, response)
        start, end = len(frame.head), len(text) - len(frame.tail)
        if not (text.startswith(frame.head) and text.endswith(frame.tail) and start <= end):
            start = _shared(text, frame.head)
            end = len(text) - _shared(text[start:][::-1], frame.tail[::-1])
        return Region(text, start, end)

    def tokenize(self, texts: Sequence[str]) -> list[Tokenized]:
        """The ids of each row, never truncated."""
        if not texts:
            return []
        batch = self.tokenizer(
            list(texts),
            add_special_tokens=True,
            return_offsets_mapping=True,
            padding=False,
            truncation=False,
            verbose=False,
        )
        return [
            Tokenized(list(row.ids), list(row.offsets), [bool(flag) for flag in row.special_tokens_mask])
            for row in batch.encodings
        ]

    def closing_ids(self, frames: Iterable[Frame]) -> frozenset[int]:
        """Special tokens that the template writes after an answer (the end of the turn)."""
        tails = {frame.tail for frame in frames}
        ids = {i for tail in tails for i in self.tokenizer(tail, add_special_tokens=False)["input_ids"]}
        return frozenset(ids) & self.special_ids

    def _render(self, prompt: Messages, response: str) -> str:
        conversation = answered(prompt, response)
        try:
            text = self.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=False)
        except TemplateError as error:
            start = asked(prompt)[:60]
            raise ValueError(f"prompts: the reward model's chat template refuses an answer to {start!r}: {error}") from error
        return text.removeprefix(self._redundant_bos)


def _check_started(prompt: Messages, name: str) -> None:
    started = started_answer(prompt)
    if prompt[-1]["role"] != "assistant":
        return
    if len(prompt) == 1:
        raise ValueError(
            f"prompts: expected a message before the started answer (a last one of the assistant's), got none in {name}"
        )
    if not started and (started is None or prompt[-2]["role"] != "assistant"):
        raise ValueError(
            f"prompts: expected text in the started answer (a last message of the assistant's), got {started!r} in {name}; "
            "without that message the answer is a turn of its own"
        )


def _shared(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of all tokens that the tokenizer calls special: turns, stops, BOS, padding, reserved ones."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def without_stop(response: Sequence[int], stop_ids: frozenset[int]) -> list[int]:
    """The response without the stop tokens at its end."""
    length = len(response)
    while length and response[length - 1] in stop_ids:
        length -= 1
    return list(response[:length])
