"""The bytes that every id of a tokenizer stands for.

Texts differ between the policy's response and the reward model's row (trimming, invalid UTF-8, other splits of the same
words); bytes are what both have in common, so spans, rules and comparisons are all stated in them.
"""

from __future__ import annotations

import json
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in piece])
    except KeyError:
        return piece.encode()  # a piece outside the alphabet is written as it is


def _sentencepiece(piece: str) -> bytes:
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace("▁", " ").encode()


def _decoder_kinds(state: dict[str, Any]) -> set[str]:
    kinds = {state["type"]}
    if state["type"] == "Replace" and state.get("pattern") == {"String": "▁"}:
        kinds.add("Metaspace")
    for part in state.get("decoders", []):
        kinds |= _decoder_kinds(part)
    return kinds


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes | None]:
    """Bytes of every id: a list of length `highest id + 1`, None for an id that no token has.

    Byte-level BPE pieces are read through GPT-2's alphabet, SentencePiece-like pieces with ▁ as a space and `<0xXX>` as
    one byte; added and special tokens are their own content in UTF-8.

    Raises:
        ValueError: not a fast tokenizer, or one whose pieces do not say their bytes (WordPiece, for instance).
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"tokenizer: expected a fast tokenizer (with offsets), got {type(tokenizer).__name__}")
    decoder = backend.decoder
    kinds = _decoder_kinds(json.loads(decoder.__getstate__())) if decoder is not None else set()
    if "ByteLevel" in kinds:
        to_bytes = _byte_level
    elif kinds & {"Metaspace", "ByteFallback"}:
        to_bytes = _sentencepiece
    else:
        raise ValueError(
            "tokenizer: expected byte-level BPE or SentencePiece-like pieces, whose bytes are known; "
            f"got a decoder of {sorted(kinds) or 'no kind'}"
        )
    vocabulary = tokenizer.get_vocab()
    table: list[bytes | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for piece, token_id in backend.get_vocab(with_added_tokens=False).items():
        table[token_id] = to_bytes(piece)
    for token_id, added in tokenizer.added_tokens_decoder.items():
        table[token_id] = added.content.encode()
    return table
