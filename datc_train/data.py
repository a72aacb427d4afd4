"""Prompts: read from JSON lines, and dealt out to steps."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datc_train.config import Config
from datc_train.messages import kind_of, started_answer, with_text
from datc_train.tables import has_splits, is_table, table_rows
from datc_train.types import Messages, Prompt

ROLES = ("system", "user", "assistant", "tool")
PACKAGED = ("quickstart", "quickstart-long")

Row = str | Prompt | Messages | dict[str, Any]


def find_prompts(
    source: str | os.PathLike[str] | Sequence[Row],
    column: str = "prompt",
    *,
    held_out: bool = False,
    split: str = "train",
    system_prompt: str | None = None,
) -> list[Prompt]:
    """`load_prompts`, where a source may also be what comes with the package ("quickstart", "quickstart-long"), a Parquet
    file, a folder, or a Hugging Face dataset's name; `split` is which part of the last two. `system_prompt` goes in front of
    prompts that have none.

    Raises as `load_prompts`; ValueError, beginning with `prompts`, for a source that `datasets` cannot read, and, beginning
    with `prompt_split`, for a split of a source without any.
    """
    prompts = _find(source, column, held_out, split)
    if split != "train" and not _has_splits(source):
        raise ValueError(f"prompt_split: expected 'train' (the default) of a source without splits, got {split!r}")
    if system_prompt is None:
        return prompts
    system = {"role": "system", "content": system_prompt}
    return [p if p.messages[0]["role"] == "system" else Prompt([system, *p.messages], p.columns) for p in prompts]


def find_train_prompts(config: Config, source: str | os.PathLike[str] | Sequence[Row] | None = None) -> list[Prompt]:
    """`find_prompts` of what the config names, or of the `source` given instead, read as the config says."""
    given = config.prompts if source is None else source
    return find_prompts(given, config.prompt_column, split=config.prompt_split, system_prompt=config.system_prompt)


def find_eval_prompts(config: Config, trained_on: str | os.PathLike[str] | Sequence[Row]) -> list[Prompt]:
    """The first `eval_limit` of `eval_prompts`, none where that is null. `trained_on`: the source of the prompts to train on.

    Raises as `find_prompts`, beginning with `eval_prompts`; ValueError, beginning with `eval_split`, for a split of a source
    without any, and for none where a source with splits is `trained_on` too.
    """
    source, split = config.eval_prompts, config.eval_split
    if source is None:
        return []
    splits = _has_splits(source)
    if split is None and splits and isinstance(trained_on, str | os.PathLike) and _same(source, trained_on):
        raise ValueError(f"eval_split: expected a split's name where eval_prompts and prompts are both {source}, got null")
    part = (config.prompt_split if split is None else split) if splits else "train"
    with of_eval_prompts():
        found = find_prompts(source, config.prompt_column, held_out=True, split=part, system_prompt=config.system_prompt)
    if split is not None and not splits:
        raise ValueError(f"eval_split: expected null, as {source} has no splits, got {split!r}")
    return found[: config.eval_limit]


@contextmanager
def of_eval_prompts() -> Iterator[None]:
    """Errors about prompts begin with the key `eval_prompts`."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(f"eval_prompts: {str(error).removeprefix('prompts: ')}") from error


def _has_splits(source: Any) -> bool:
    return isinstance(source, str | os.PathLike) and source not in PACKAGED and has_splits(source)


def _same(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _find(source: str | os.PathLike[str] | Sequence[Row], column: str, held_out: bool, split: str) -> list[Prompt]:
    if isinstance(source, str) and source in PACKAGED:
        from datc_train import quickstart

        if source == "quickstart-long":
            return load_prompts(quickstart.long_prompts())
        return load_prompts(quickstart.heldout_prompts() if held_out else quickstart.train_prompts())
    if isinstance(source, str | os.PathLike) and is_table(source):
        prompts = [_prompt(row, column, where) for row, where in table_rows(source, split)]
        if not prompts:
            raise ValueError(f"prompts: expected at least one, got none from {source}")
        return prompts
    return load_prompts(source, column)


def load_prompts(source: str | os.PathLike[str] | Sequence[Row], column: str = "prompt") -> list[Prompt]:
    """Prompts from a file of JSON lines (a path), or from a list.

    A line, like a dict of the list, is an object whose `column` is the prompt: text, which becomes one user message, or
    a list of {"role", "content"}; what else it has is kept in `Prompt.columns`. A list may also hold the text or the
    messages themselves, and Prompts. A last message of the assistant's is a started answer, from which the policy goes on.
    Content is text, or parts {"type": "text", "text"} that are put one after another
    (`messages.with_text`). Blank lines are skipped.

    Raises FileNotFoundError for a file that is not there, and ValueError with file and line (or the list's index), what
    was expected and what came, for everything that is not a prompt.
    """
    prompts = [_prompt(row, column, where) for row, where in _rows(source)]
    if not prompts:
        name = os.fspath(source) if isinstance(source, str | os.PathLike) else "prompts"
        raise ValueError(f"{name}: expected at least one prompt, got none")
    return prompts


def prompt_batch(prompts: Sequence[Prompt], step: int, prompts_per_step: int, seed: int) -> list[Prompt]:
    """The prompts of one step, counted from 1: a function of (seed, step) alone, so resuming needs no state.

    Epochs are seeded permutations laid end to end, and steps take `prompts_per_step` in turn, across their ends too: no
    prompt is left out of an epoch. No prompt comes twice in a step either: where a step crosses into the next epoch,
    that epoch's prompts that the step already has wait until just after it. With fewer than two steps' worth of prompts
    (and not exactly one) there is no room to wait, and the first epoch's order repeats.

    Raises ValueError for a step below 1 and for more prompts a step than there are.
    """
    count = len(prompts)
    if step < 1:
        raise ValueError(f"step: expected at least 1, got {step}")
    if not 1 <= prompts_per_step <= count:
        raise ValueError(f"prompts_per_step: expected 1 to {count}, the number of prompts, got {prompts_per_step}")
    start = (step - 1) * prompts_per_step
    positions = range(start, start + prompts_per_step)
    order = {epoch: _epoch(seed, epoch, count, prompts_per_step) for epoch in {p // count for p in positions}}
    return [prompts[order[p // count][p % count]] for p in positions]


def _epoch(seed: int, epoch: int, count: int, per_step: int) -> list[int]:
    """The epoch's order; its head repeats nothing that the step across its start took from the epoch before."""
    carried = epoch * count % per_step  # positions of that step that lie in the epoch before
    if count % per_step and count < 2 * per_step:
        return _permutation(seed, 0, count)
    order = _permutation(seed, epoch, count)
    if carried == 0:
        return order
    # The rearranged part is within the first per_step positions, so the end of an epoch is its permutation's own.
    taken = set(_permutation(seed, epoch - 1, count)[count - carried :])
    head = per_step - carried
    first = [index for index in order if index not in taken][:head]
    chosen = set(first)
    return first + [index for index in order if index not in chosen]


def _permutation(seed: int, epoch: int, count: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def _rows(source: str | os.PathLike[str] | Sequence[Row]) -> Iterator[tuple[Row, str]]:
    """Every row with the words that say where it stands."""
    if isinstance(source, Mapping):
        raise ValueError(f"prompts: expected a list of rows, got columns ({', '.join(map(str, source))}); make one dict a row")
    if isinstance(source, str | os.PathLike):
        yield from json_rows(Path(source))
        return
    if isinstance(source, bytes) or not isinstance(source, Iterable):
        raise ValueError(f"prompts: expected a source's name, a path or a list of rows, got {kind_of(source)}")
    for index, row in enumerate(source):
        yield row, f"prompts[{index}]"


def json_rows(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Every object of a file of JSON lines with the words that say where it stands; raises as `load_prompts`."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a file of JSON lines with prompts, there is none")
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:  # integers of thousands of digits are a ValueError of their own
            raise ValueError(f"{where}: expected one JSON object, got {line.strip()[:40]!r} ({error})") from None
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected a JSON object, got {kind_of(row)}")
        yield row, where


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in made if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands there twice")
    return made


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8 text ({error})") from None


def _prompt(row: Row, column: str, where: str) -> Prompt:
    if isinstance(row, Prompt):
        messages = _messages(row.messages, where)
        return row if messages == row.messages else Prompt(messages, row.columns)
    if not isinstance(row, dict):
        return Prompt(_messages(row, where))
    if column not in row:
        raise ValueError(f"{where}: expected a column {column!r}, got {', '.join(map(repr, row)) or 'none'}")
    columns = {name: value for name, value in row.items() if name != column}
    return Prompt(_messages(row[column], f"{where}, {column!r}"), columns)


def _messages(value: Any, where: str) -> Messages:
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: expected text or a list of messages, got {kind_of(value)}")
    read: Messages = []
    for index, message in enumerate(messages):
        at = where if isinstance(value, str) else f"{where}, message {index}"
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f"{at}: expected an object with role and content, got {kind_of(message)}")
        if message["role"] not in ROLES:
            raise ValueError(f"{at}: expected a role among {', '.join(ROLES)}, got {message['role']!r}")
        if message["content"] is None:
            raise ValueError(f"{at}: expected content that is text or a list of parts with text, got null")
        try:
            read.append(dict(with_text(message)))
            read[-1]["content"].encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{at}: expected text, got half of a surrogate pair ({error})") from None
        except ValueError as error:
            raise ValueError(f"{at}: {error}") from None
    if len(read) == 1 and started_answer(read) is not None:
        raise ValueError(f"{where}: expected a message before the started answer (a last one of the assistant's), got none")
    if not read[-1]["content"].strip():
        raise ValueError(f"{where}: expected a last message with words in it, got {read[-1]['content']!r}")
    return read
