"""What the quickstart's reward model was trained to know: the valence of an answer's words in a lexicon that is looked up."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

SCALE = 1 / 3  # brings the standard deviation among the policy's answers to one prompt to about 1
WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*")


def true_utility(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
    """The words' summed valence, a number a completion: a reward function in TRL's sense. Prompts and columns are not read.

        U(y) = 1/3 * sum over the words w of y of valence(w)

    Words are the runs of letters, apostrophes inside them included, in lower case; valence(w) is VADER's (Hutto and Gilbert
    2014; package `vaderSentiment`), from -4 to 4, and 0 for a word that its lexicon does not have. None of VADER's rules for
    negation, degree or punctuation is applied: "not good" is worth as much as "good". A completion is a text, or messages, of
    which the contents count.

    Raises:
        RuntimeError: `vaderSentiment` is not installed.
    """
    return [utility(text if isinstance(text, str) else " ".join(m["content"] for m in text)) for text in completions]


def utility(text: str) -> float:
    """U of one text, as `true_utility` defines it."""
    valence = lexicon()
    return SCALE * sum(valence.get(word, 0.0) for word in words(text))


def words(text: str) -> list[str]:
    """The words of a text in lower case, in order."""
    return WORD.findall(text.lower().replace("\u2019", "'"))


@cache
def lexicon() -> dict[str, float]:
    """VADER's words and their valence. Raises RuntimeError where the package is missing."""
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise RuntimeError("the quickstart's true utility needs vaderSentiment; run: pip install 'datc[quickstart]'") from error
    entries = SentimentIntensityAnalyzer().lexicon
    return {word: value for word, value in entries.items() if WORD.fullmatch(word)}
