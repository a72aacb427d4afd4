"""What each credit point forecasts of the replacements, what its passes cost, and what the replacements do.

Legend: N response tokens, k alternatives, K width of the reward model's embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from datc_train.clock import Clock
from datc_train.credit_point import CreditPoint
from datc_train.probe.replacements import Drawn
from datc_train.types import Messages, Rollout, ScoredRollout

Values = np.ndarray
_BATCHES = 6  # of responses, each scored at every point in turn


class Scoring:
    """A reward model's scores of the responses to some prompts.

    reward: whatever has the method `score` of `RewardModel`.
    """

    def __init__(self, reward: Any, rollout: Rollout, stop_ids: Sequence[int]) -> None:
        self.reward, self.stop_ids = reward, stop_ids
        self.prompts: list[Messages] = [rollout.prompts[i // rollout.group_size].messages for i in range(len(rollout.lengths))]
        self.responses = [part.tolist() for part in rollout.response_ids.cpu().split(rollout.lengths.tolist())]
        self.clock = Clock(rollout.response_ids.device)

    def __call__(
        self, prompts: list[Messages], responses: list[list[int]], size: int, point: CreditPoint | None
    ) -> ScoredRollout:
        """`point` None: without gradient."""
        where = {} if point is None else point.arguments()
        found: ScoredRollout = self.reward.score(
            prompts, responses, size, gradient=point is not None, stop_ids=self.stop_ids, **where
        )
        if point is not None and (found.reward_grad is None or found.reward_embedding is None):
            raise ValueError("reward: expected a reward model that gives its gradient, got one whose score has none")
        return found

    def warm_up(self, points: Sequence[CreditPoint]) -> None:
        """First calls allocate and look a model over: no part of a cost."""
        for point in (None, *points):
            self(self.prompts[:1], [self.responses[0][:4]], 1, point)


def forecasts(
    scoring: Scoring, drawn: Sequence[Drawn], points: Sequence[CreditPoint], done: Callable[[], None]
) -> tuple[dict[CreditPoint, list[Values]], dict[CreditPoint, float]]:
    """By point: <g, E_v - E_y> [k] of every drawn position in float64, and the seconds over those without gradient.

    Responses are scored in batches, each at every point and without gradient, in an order that turns: what disturbs the machine
    disturbs all alike. The cost is the median of the batches' ratios. `done` is called after each pass.
    """
    found: dict[CreditPoint, list[Values]] = {point: [] for point in points}
    ratios: dict[CreditPoint, list[float]] = {point: [] for point in points}
    scoring.warm_up(points)
    passes: list[CreditPoint | None] = [None, *points]
    for number, batch in enumerate(batches(len(scoring.responses))):
        prompts, responses = scoring.prompts[batch.start : batch.stop], scoring.responses[batch.start : batch.stop]
        start = sum(map(len, scoring.responses[: batch.start]))
        here = [one for one in drawn if one.response in batch]
        seconds = {}
        turn = number % len(passes)
        for point in passes[turn:] + passes[:turn]:
            clock = Clock(scoring.clock.device)
            with clock("score"):
                scored = scoring(prompts, responses, 1, point)
            seconds[point] = clock.seconds["score"]
            if point is not None:
                found[point] += [forecast(one, one.index - start, scored) for one in here]
            done()
        for point in points:
            ratios[point].append(seconds[point] / seconds[None])
    return found, {point: median(values) for point, values in ratios.items()}


def passes_in_all(responses: int, points: Sequence[CreditPoint]) -> int:
    """How often `forecasts` calls `done`."""
    return len(batches(responses)) * (1 + len(points))


def batches(responses: int) -> list[range]:
    size = -(-responses // _BATCHES)
    return [range(start, min(start + size, responses)) for start in range(0, responses, size)]


def forecast(one: Drawn, index: int, scored: ScoredRollout) -> Values:
    """[k] float64 of the token at `index` of what was scored."""
    assert scored.reward_grad is not None
    assert scored.reward_embedding is not None
    ids = torch.tensor([one.token, *one.alternatives], device=scored.reward_embedding.device)
    rows = scored.reward_embedding[ids].double().cpu()
    gradient = scored.reward_grad[index].double().cpu()
    return ((rows[1:] - rows[0]) @ gradient).numpy()


def changes(scoring: Scoring, drawn: Sequence[Drawn], done: Callable[[], None]) -> list[Values | None]:
    """[k] R(response with v at the position) - R(response) of every drawn position, in their order.

    A response and all of its replacements are one group: their rows share the prompt's pass, and are of one precision. None
    where a row is longer than the model's context and was left out (`on_overflow="neutral"`). `done` is called after each
    response.
    """
    found: list[Values | None] = []
    for response in sorted({one.response for one in drawn}):
        here = [one for one in drawn if one.response == response]
        ids = scoring.responses[response]
        rows = [ids] + [[*ids[: one.position], v, *ids[one.position + 1 :]] for one in here for v in one.alternatives]
        scored = scoring([scoring.prompts[response]], rows, len(rows), None)
        score = scored.score.double().cpu().numpy()
        read = np.ones(len(rows), dtype=bool) if scored.unread is None else ~scored.unread.cpu().numpy()
        at = 1
        for one in here:
            span = slice(at, at + len(one.alternatives))
            found.append(score[span] - score[0] if read[0] and read[span].all() else None)
            at = span.stop
        done()
    return found
