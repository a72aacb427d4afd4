"""Score and input gradient of whole rows, micro-batch by micro-batch, one pass each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from datc_train.reward.pooling import pooled_score


@dataclass(frozen=True)
class Scorer:
    """The three parts of a sequence classifier that a score needs, each frozen."""

    embedding: nn.Module  # ids -> [.., K]
    backbone: nn.Module  # takes inputs_embeds, gives last_hidden_state
    head: nn.Module  # hidden state -> [.., 1]
    vocab_size: int  # rows of the embedding
    device: torch.device  # of the embedding


def micro_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Rows of like length together, longest first, so that rows x longest row stays within `max_tokens`.

    A row longer than the budget is a batch of its own. Every row comes exactly once; the longest batch comes first, so
    a budget that memory cannot hold fails at once and not in the middle.
    """
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > max_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def score_whole_rows(
    scorer: Scorer,
    rows: Sequence[Sequence[int]],
    max_tokens: int,
    on_gradient: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """Raw score of every row, and the gradient of each score with respect to its own input embeddings.

    Args:
        scorer: the frozen classifier's parts.
        rows: ids of each row, none empty.
        max_tokens: bound of rows x longest row in a micro-batch.
        on_gradient: called once a row as `on_gradient(row, gradient [len(row), K])`, gradient in the embedding's dtype;
            without it, one forward pass without gradient.

    Returns:
        [len(rows)] float32 scores, on the embedding's device, in the order of `rows`.
    """
    scores = torch.zeros(len(rows), dtype=torch.float32, device=scorer.device)
    for batch in micro_batches([len(row) for row in rows], max_tokens):
        lengths = [len(rows[row]) for row in batch]
        # Padding repeats the row's own last id: no pad token is needed, and nothing compares ids with one.
        padded = [[*rows[row], *[rows[row][-1]] * (lengths[0] - len(rows[row]))] for row in batch]
        ids = torch.tensor(padded, device=scorer.device)
        positions = torch.arange(lengths[0], device=scorer.device).expand(len(batch), -1)
        mask = (positions < torch.tensor(lengths, device=scorer.device)[:, None]).long()
        with torch.no_grad():
            inputs = scorer.embedding(ids)
        inputs.requires_grad_(on_gradient is not None)
        with torch.set_grad_enabled(on_gradient is not None):
            hidden = scorer.backbone(
                inputs_embeds=inputs, attention_mask=mask, position_ids=positions, use_cache=False
            ).last_hidden_state
            score = pooled_score(scorer.head, hidden, mask.to(hidden.device))
        scores[batch] = score.detach().to(scorer.device)
        if on_gradient is not None:
            # Rows do not see each other, so the gradient of the sum is each row's own.
            (gradient,) = torch.autograd.grad(score.sum(), inputs)
            for place, row in enumerate(batch):
                on_gradient(row, gradient[place, : lengths[place]])
    return scores
