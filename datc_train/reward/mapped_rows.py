"""From prompts and responses to the rows that the reward model reads, each response token placed in its row."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from datc_train.messages import started_answer
from datc_train.reward.mapping import Positions, decode, map_response, map_spans, row_byte_of, row_spans
from datc_train.reward.rows import RowTemplate, without_stop
from datc_train.reward.vocabulary import PolicyVocabulary
from datc_train.types import Messages


@dataclass(frozen=True)
class MappedRow:
    """One row of the reward model and where the response is in it."""

    ids: list[int]
    head: int  # so many of `ids` lie before whatever the response may have a part in
    position: Positions  # [tokens of the response] index in `ids`, -1 where the row does not hold the token
    width: Positions  # [tokens of the response] so many ids of the row are the token, one where the vocabulary is shared


class RowBuilder:
    """Builds rows for one reward tokenizer and the policy tokenizer that wrote the responses.

    Args:
        template: the reward model's.
        reward_bytes: bytes of every reward id (`token_bytes`).
        policy: what the response ids are.
        response_prefix: text that the policy's template had already put at the head of its answer (`<think>\\n`). It writes none
            before a started answer (a last message of the assistant's), which is in the head of the row.
    """

    def __init__(
        self,
        template: RowTemplate,
        reward_bytes: Sequence[bytes | None],
        policy: PolicyVocabulary,
        response_prefix: str,
    ) -> None:
        self.template = template
        self._reward_bytes = reward_bytes
        self._policy = policy
        self._prefix = response_prefix.encode()

    def build(
        self,
        prompts: Sequence[Messages],
        names: Sequence[str],
        responses: Sequence[Sequence[int]],
        group_size: int,
        stop_ids: Collection[int],
    ) -> list[MappedRow]:
        """One row a response, whole; `names` are what errors call the prompts.

        Stop tokens at the end of a response, the template's own end of turn included, are left out of the text: the
        template writes its closing after every response, also after one that was cut off.
        """
        frames = [self.template.frame(prompt, name) for prompt, name in zip(prompts, names, strict=True)]
        stops = frozenset(stop_ids) | self._policy.own_ids(self.template.closing_ids(frames))

        started = [(started_answer(prompt) or "").encode() for prompt in prompts]

        all_pieces, regions, row_bytes = [], [], []
        for index, response in enumerate(responses):
            group = index // group_size
            content = without_stop(response, stops)
            pieces = self._pieces(content)
            prefix = b"" if started[group] else self._prefix
            source = prefix + b"".join(pieces)
            text, places = decode(source)
            region = self.template.region(prompts[group], text, frames[group])
            if started[group] and region.text[: region.start] != frames[group].head:
                # The template has moved the answer's start (into a thought, say): the region holds some of it.
                prefix = started[group]
                source = prefix + source
                text, places = decode(source)
            all_pieces.append(pieces + [b""] * (len(response) - len(content)))
            regions.append(region)
            row_bytes.append(row_byte_of(source, text, places, region)[len(prefix) :])

        rows = self.template.tokenize([region.text for region in regions])
        mapped = []
        for response, pieces, region, row_byte, row in zip(responses, all_pieces, regions, row_bytes, rows, strict=True):
            spans = row_spans(row, region.text, self._reward_bytes)
            beyond = np.flatnonzero(spans[1] > len(region.text[: region.start].encode()))
            head = int(beyond[0]) if len(beyond) else len(row.ids)
            if self._policy.difference is None:
                position = map_response(response, pieces, row_byte, row, spans)
                width = np.ones_like(position)
            else:
                position, width = map_spans(pieces, row_byte, spans)
            mapped.append(MappedRow(row.ids, head, position, width))
        return mapped

    def text(self, response: Sequence[int]) -> str:
        """What the policy's ids spell without special tokens, as trainers hand out completions."""
        content = [token for token in response if token not in self._policy.special_ids]
        return decode(b"".join(self._pieces(content)))[0]

    def _pieces(self, response: Sequence[int]) -> list[bytes]:
        known = len(self._policy.bytes_of)
        return [(self._policy.bytes_of[i] if i < known else None) or b"" for i in response]
