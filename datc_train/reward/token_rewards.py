"""Token rewards: what each token adds to the score of the row so far.

    r_t = R(row up to token t) - R(row up to the mapped token before t)        for the first one: up to what stands before it

The score head is read at every mapped token of one forward pass: attention is causal, so a state knows nothing of what comes
later. They telescope: their sum over a response is R(row up to its last mapped token) - R(row up to what stands before the
first).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from datc_train.prefix import rest_rows
from datc_train.reward.mapped_rows import MappedRow
from datc_train.reward.micro_batches import micro_batches
from datc_train.reward.pooling import head_score
from datc_train.reward.scorer import Scorer


@torch.no_grad()
def token_rewards(scorer: Scorer, rows: Sequence[MappedRow], max_tokens: int) -> Tensor:
    """[N] float32 over the response tokens of all rows, end to end; 0 where a token is not mapped.

    A pass takes at most `max_tokens` padded tokens, or one row. Several tokens at one place of a row are one: the first has it.
    """
    device = scorer.device
    first = torch.tensor([0, *(len(row.position) for row in rows)]).cumsum(0).tolist()
    out = torch.zeros(first[-1], dtype=torch.float32, device=device)
    read = [i for i, row in enumerate(rows) if max(row.position.tolist(), default=-1) >= 0]
    for members in micro_batches([len(rows[i].ids) for i in read], max_tokens):
        batch = [read[member] for member in members]
        padded = rest_rows([rows[i].ids for i in batch], None, device)
        hidden = scorer.hidden(scorer.embedding(padded.ids), padded)
        for place, i in enumerate(batch):
            position = torch.as_tensor(rows[i].position, dtype=torch.long).to(device)
            tokens = torch.nonzero(position >= 0).squeeze(1)
            start, end = position[tokens[0]] - 1, position + torch.as_tensor(rows[i].width, dtype=torch.long).to(device) - 1
            score = head_score(scorer.head, hidden[place, torch.cat([start.clamp(min=0)[None], end[tokens]]).to(hidden.device)])
            score[0] = torch.where(start < 0, torch.zeros_like(score[0]), score[0])
            out[first[i] + tokens] = score.diff().to(device)
    return out
