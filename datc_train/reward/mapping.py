"""Where each response token is in the reward model's row.

    response ids -> bytes -> text -> (chat template) -> row text -> row ids
                      |________________ the same bytes? _______________|

A response token is mapped when the row holds the same id on the same bytes. Both sides are followed byte by byte, so a
piece that differs (split digits, a half character, a trimmed newline) costs its own tokens and nothing after them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from datc_train.reward.rows import Region, Tokenized

Positions = NDArray[np.int64]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WHITESPACE = b" \t\r\n\f\v"
_WORDS = re.compile(r"\s+|\w+|[^\w\s]")


def decode(source: bytes) -> tuple[str, Positions]:
    """UTF-8 text of `source` with U+FFFD for each invalid piece, and for each byte *of the text* its place in `source`.

    Returns:
        text, and [len(text.encode())] int64: index into `source`, -1 for the bytes of a U+FFFD that stands in.
    """
    texts: list[str] = []
    places: list[Positions] = []
    start = 0
    while start < len(source):
        try:
            piece, valid, after = source[start:].decode(), len(source), len(source)
        except UnicodeDecodeError as error:
            valid, after = start + error.start, start + error.end
            piece = source[start:valid].decode() + _REPLACEMENT
        texts.append(piece)
        places.append(np.arange(start, valid))
        if after > valid:
            places.append(np.full(len(_REPLACEMENT.encode()), -1))
        start = after
    return "".join(texts), np.concatenate([np.zeros(0, dtype=np.int64), *places])


def aligned_pieces(response: str, region: str) -> list[tuple[int, int, int]]:
    """Pieces (start in response, start in region, length), in characters, of the text that the template kept.

    Mostly one piece: the response itself, or what trimming left of it. A template that rewrites the middle (thoughts with
    other blank lines around them) leaves several; they are matched by whole words and signs.
    """
    if not region:
        return []
    # The last occurrence: a template that drops thoughts keeps the answer behind them, which they may have quoted.
    kept = response.rfind(region)
    if kept >= 0:
        return [(kept, 0, len(region))]
    response_words, region_words = _WORDS.findall(response), _WORDS.findall(region)
    response_start = [0, *accumulate(map(len, response_words))]
    region_start = [0, *accumulate(map(len, region_words))]
    # Frequent words only extend matches (autojunk): a response that repeats itself would take quadratic time otherwise.
    blocks = SequenceMatcher(None, response_words, region_words, autojunk=True).get_matching_blocks()
    return [(response_start[a], region_start[b], response_start[a + size] - response_start[a]) for a, b, size in blocks if size]


def row_byte_of(source: bytes, text: str, text_places: Positions, region: Region) -> Positions:
    """[len(source)] int64: the byte of the row's text that each response byte became, -1 where it did not survive."""
    target = np.full(len(source), -1, dtype=np.int64)
    region_start = len(region.text[: region.start].encode())
    for in_text, in_region, length in aligned_pieces(text, region.content):
        first = len(text[:in_text].encode())
        count = len(text[in_text : in_text + length].encode())
        row_first = region_start + len(region.content[:in_region].encode())
        places = text_places[first : first + count]
        kept = places >= 0
        target[places[kept]] = row_first + np.flatnonzero(kept)
    return target


def row_spans(row: Tokenized, text: str, bytes_of: Sequence[bytes | None]) -> tuple[Positions, Positions]:
    """Start and end byte in `text` of every id of the row, [L] each; start -1 where the id's bytes are not the text's.

    Walks the row along the text. Character offsets alone would not do: they are equal for the pieces of one character,
    and some tokenizers leave blanks out of them. They say where to go on after ids that are not their text (normalised
    text, a blank put in front, an unknown token).
    """
    source = text.encode()
    pieces = [b"" if inserted else bytes_of[i] or b"" for i, inserted in zip(row.ids, row.inserted, strict=True)]
    if b"".join(pieces) == source:
        end = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        start = end - np.array([len(piece) for piece in pieces], dtype=np.int64)
        return np.where(np.array(row.inserted), -1, start), end

    byte_of = np.cumsum([0, *(len(character.encode()) for character in text)]).tolist()
    start, end = np.full(len(pieces), -1, dtype=np.int64), np.full(len(pieces), -1, dtype=np.int64)
    cursor = 0
    for i, piece in enumerate(pieces):
        if row.inserted[i]:
            continue
        low, high = (byte_of[offset] for offset in row.offsets[i])
        leading = len(piece) - len(piece.lstrip(_WHITESPACE))
        trailing = len(piece) - len(piece.rstrip(_WHITESPACE))
        for at in (cursor, low, low - leading):
            inside = max(0, low - leading) <= at and at + len(piece) - trailing <= high
            if piece and inside and source.startswith(piece, at):
                start[i], end[i] = at, at + len(piece)
                break
        cursor = end[i] if start[i] >= 0 else max(cursor, high)
    return start, end


def map_response(
    response: Sequence[int],
    pieces: Sequence[bytes],
    row_byte: Positions,
    row: Tokenized,
    spans: tuple[Positions, Positions],
) -> Positions:
    """[len(response)] int64: index in the row of the same id on the same bytes, -1 where there is none.

    Args:
        response: token ids.
        pieces: their bytes, empty for ids that stand for none.
        row_byte: [sum of the pieces' lengths] the byte of the row's text that each response byte became, or -1.
        row: the tokenized row.
        spans: start and end byte of each of its ids (`row_spans`).
    """
    position, width = map_spans(pieces, row_byte, spans)
    same = (width == 1) & (np.array(row.ids)[position] == np.array(response, dtype=np.int64))
    return np.where(same, position, -1)


def map_spans(pieces: Sequence[bytes], row_byte: Positions, spans: tuple[Positions, Positions]) -> tuple[Positions, Positions]:
    """Which ids of the row, one or several in succession, have exactly a response token's bytes.

    Arguments as for `map_response`. Returns [len(pieces)] int64 each: index of the first one, -1 where there are none, and
    their number, 0 there.
    """
    lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
    nowhere = np.full(len(pieces), -1, dtype=np.int64)
    if not lengths.any():
        return nowhere, np.zeros_like(nowhere)
    end = np.cumsum(lengths)
    first, last = np.minimum(end - lengths, end[-1] - 1), end - 1  # an empty piece has neither; `whole` drops it
    lost = np.cumsum([0, *(row_byte < 0)])
    whole = (lengths > 0) & (lost[end] == lost[end - lengths]) & (row_byte[last] - row_byte[first] == lengths - 1)

    located = np.flatnonzero((spans[0] >= 0) & (spans[1] > spans[0]))
    bounds = max(int(spans[1].max(initial=0)), int(row_byte.max())) + 2
    starting_at, ending_at = np.full(bounds, -1, dtype=np.int64), np.full(bounds, -1, dtype=np.int64)
    starting_at[spans[0][located]] = located
    ending_at[spans[1][located]] = located
    opening = np.where(whole, starting_at[row_byte[first]], -1)
    closing = np.where(whole, ending_at[row_byte[last] + 1], -1)
    # Ids between the two that are not located, or not where the one before ends, would be others' bytes.
    follows = np.concatenate([[False], (spans[0][1:] >= 0) & (spans[0][1:] == spans[1][:-1])])
    breaks = np.cumsum(~follows)
    found = (opening >= 0) & (closing >= opening) & (breaks[opening] == breaks[closing])
    return np.where(found, opening, -1), np.where(found, closing - opening + 1, 0)
