"""The reward model: raw scores of responses, and what the reward says about each of their tokens."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from datc_train.credit_point import EMBEDDING, CreditPoint, Kind
from datc_train.messages import started_answer
from datc_train.prefix import why_not_shared
from datc_train.pretrained import classifier
from datc_train.reward.checks import check_batch, check_call, conversations, name_prompt
from datc_train.reward.classifier import embedding_table, take_apart
from datc_train.reward.frozen import frozen_table
from datc_train.reward.gradient_point import turns
from datc_train.reward.mapped_rows import MappedRow, RowBuilder
from datc_train.reward.micro_batches import SplitRow
from datc_train.reward.overflow import OnOverflow, at_group_mean, unmapped
from datc_train.reward.rows import RowTemplate
from datc_train.reward.scoring import score_rows
from datc_train.reward.shared_prefix import split_rows, whole
from datc_train.reward.spelling import cached_spelling, span_sums, spelled_table
from datc_train.reward.token_bytes import token_bytes
from datc_train.reward.token_rewards import token_rewards
from datc_train.reward.vocabulary import policy_vocabulary
from datc_train.types import Messages, ScoredRollout


class RewardModel:
    """A frozen sequence classifier with one label, read in its own chat template.

        R(x, y) = head(hidden at the last token of  template(x, y))        float32
        g_t     = dR / d(input embedding at response token t)              [K], the model's dtype

    Args:
        model: a transformers `...ForSequenceClassification` (or PEFT on top) with num_labels=1. It is frozen and put in
            evaluation mode; nothing else of it changes.
        tokenizer: the reward model's, a fast one with a chat template.
        policy_tokenizer: what the response ids belong to; None says the reward model's own. Where its vocabulary is another
            (id by id where both have the id), a token is mapped to the reward tokens of its bytes, one or several, has the
            sum of their gradients, and `reward_embedding` has a row for each policy id (`spelling.py`).
        max_tokens_per_batch: bound of rows x longest row in one pass of the model. Memory grows with it, scores do not
            depend on it beyond rounding. Where memory runs out it is halved, with a warning, and stays so.
        response_prefix: text that the policy's prompt already puts at the head of its answer and that the sampled ids
            therefore lack (`"<think>\\n"`); it goes in front of every response in the reward model's row, but for those of
            prompts that have started the answer themselves.
        on_overflow: what a row longer than the model's context is. "error": a ValueError before anything runs. "neutral":
            not read; its score is the mean of the group's others (0 where there are none), so that it teaches nothing,
            none of its tokens is mapped, and a warning says so once. It is never cut.
        outline: the model's weights are not there (it may lie on torch's meta device): what cannot be is refused, nothing scored.

    Raises:
        ValueError: a model, tokenizer or pair of vocabularies that cannot be right; says what was expected and got.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        policy_tokenizer: PreTrainedTokenizerBase | None = None,
        max_tokens_per_batch: int = 8192,
        response_prefix: str = "",
        on_overflow: OnOverflow = "error",
        outline: bool = False,
    ) -> None:
        if max_tokens_per_batch < 1:
            raise ValueError(f"max_tokens_per_batch: expected at least 1, got {max_tokens_per_batch}")
        if on_overflow not in ("error", "neutral"):
            raise ValueError(f"on_overflow: expected 'error' or 'neutral', got {on_overflow!r}")
        self.__name__ = "reward_model"  # trainers log a reward function under its name
        self.model = model
        self.tokenizer = tokenizer
        self.policy_tokenizer = policy_tokenizer if policy_tokenizer is not None else tokenizer
        self.max_tokens_per_batch = max_tokens_per_batch
        self.on_overflow = on_overflow
        self._scorer = take_apart(model, outline=outline)
        self.context = _context(model)

        reward_bytes = token_bytes(tokenizer)
        self.policy_vocabulary = policy = policy_vocabulary(self.policy_tokenizer, tokenizer, reward_bytes)
        self._rows = RowBuilder(RowTemplate(tokenizer), reward_bytes, policy, response_prefix)
        self._vocab_size = max(len(policy.bytes_of), self._scorer.vocab_size)
        self._frozen = frozen_table(policy.bytes_of, policy.special_ids, max(self._vocab_size, len(reward_bytes)))
        self._spelling = None
        self._table: Tensor | None = None
        self._said: set[str] = set()
        if policy.difference is not None and not outline:
            self._spelling = cached_spelling(policy.bytes_of, tokenizer, reward_bytes)
            self._say(f"the policy has another vocabulary ({policy.difference}); credit goes by equal bytes, to first order")

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "cpu",
        policy_tokenizer: PreTrainedTokenizerBase | None = None,
        max_tokens_per_batch: int = 8192,
        response_prefix: str = "",
        on_overflow: OnOverflow = "error",
    ) -> RewardModel:
        """Load model and tokenizer from a folder or a hub name; `dtype="auto"` keeps the checkpoint's.

        Raises:
            ValueError: num_labels is not 1; an adapter without its base; parameters (the score head above all) that the
                checkpoint does not hold and that would be random, has in another shape, or holds and the classifier does not
                use (a language model's `lm_head` may be there).
        """
        try:
            model = classifier(path, dtype)
        except ValueError as error:
            raise ValueError(f"path: {error}") from error
        return cls(
            model.to(device),
            AutoTokenizer.from_pretrained(path),
            policy_tokenizer=policy_tokenizer,
            max_tokens_per_batch=max_tokens_per_batch,
            response_prefix=response_prefix,
            on_overflow=on_overflow,
        )

    @property
    def device(self) -> torch.device:
        """Where ids go in, and where results lie: the input embedding's device."""
        return self._scorer.device

    @property
    def pad_embedding(self) -> Tensor | None:
        """[K] what the embedding returns for the tokenizer's pad token; None without one that has a row."""
        pad = self.tokenizer.pad_token_id
        if pad is None or pad >= self._scorer.vocab_size:
            return None
        with torch.no_grad():
            return self._scorer.embedding(torch.tensor([pad], device=self.device))[0]

    def score(
        self,
        prompts: Sequence[Messages],
        responses: Sequence[Sequence[int]],
        group_size: int,
        *,
        gradient: bool = True,
        stop_ids: Collection[int] | None = None,
        credit_point: Kind = EMBEDDING.kind,
        credit_passes: int = EMBEDDING.passes,
        credit_scale: float = EMBEDDING.scale,
    ) -> ScoredRollout:
        """Score B = len(prompts) * group_size responses of N tokens in all; with gradient, in the same pass.

        Works under the caller's no_grad, inference mode and autocast, and changes none of its numbers for them.

        Args:
            prompts: chat messages, one list a group; their content is text, or parts of text. A last message of the assistant's
                is the start of the answer, which the responses go on with.
            responses: policy token ids, group after group, stop token included where one was sampled; may be empty.
            group_size: responses a prompt.
            gradient: False runs one forward pass only; `reward_grad` and `reward_embedding` are None then.
            stop_ids: ids that end a response, beside the policy tokenizer's EOS and the template's own end of turn. All
                of them are taken off the response's end for the reward model's row, whose template closes every answer.
            credit_point: where the gradient is taken, "embedding" (the paper's), "tangent" or "integrated"; with
                credit_passes and credit_scale see `CreditPoint`. The scores are those of the row as it is at any of them.

        Returns:
            score [B] float32; reward_grad [N, K] in the model's dtype, zero rows where not mapped; mapped [N] and frozen
            [N] bool; reward_embedding [rows, K], what the embedding module returns for every id; unread [B] bool, rows left
            out as too long, None where there are none.

        Raises:
            ValueError: arguments that do not fit together; ids outside the policy's vocabulary; a row longer than the
                model's context (before anything runs, unless `on_overflow` is neutral); a score or gradient that is not
                finite. The prompt is named.
            torch.OutOfMemoryError (on CPUs RuntimeError): memory does not hold one row alone.
        """
        point = CreditPoint(credit_point, credit_passes, credit_scale)
        with torch.inference_mode(False), torch.autocast(self.device.type, enabled=False):
            stops = {*(stop_ids or ()), self.policy_tokenizer.eos_token_id} - {None}
            rows, left_out, names = self._build(prompts, responses, group_size, stops)
            return self._run(rows, left_out, names, responses, group_size, stops, point if gradient else None)

    def token_rewards(
        self,
        prompts: Sequence[Messages],
        responses: Sequence[Sequence[int]],
        group_size: int,
        *,
        stop_ids: Collection[int] | None = None,
    ) -> Tensor:
        """r_t = R(x, y up to t) - R(x, y up to t - 1) of every token, [N] float32, in one more forward pass over whole rows.

        Arguments and errors as for `score`; formula and what is 0: `reward/token_rewards.py`.
        """
        with torch.inference_mode(False), torch.autocast(self.device.type, enabled=False):
            stops = {*(stop_ids or ()), self.policy_tokenizer.eos_token_id} - {None}
            rows, _, _ = self._build(prompts, responses, group_size, stops)
            return token_rewards(self._scorer, rows, self.max_tokens_per_batch)

    def check_prompts(self, prompts: Sequence[Messages]) -> int:
        """Returns the tokens of the longest row before an answer is in it.

        Raises ValueError for a prompt that the template refuses, that has ids without embedding, or that leaves no room for a
        token of an answer in the model's context (unless `on_overflow` is neutral).
        """
        prompts = conversations(prompts)
        names = [name_prompt(index, prompt) for index, prompt in enumerate(prompts)]
        template = self._rows.template
        frames = [template.frame(prompt, name) for prompt, name in zip(prompts, names, strict=True)]
        rows = [row.ids for row in template.tokenize([frame.head + frame.tail for frame in frames])]
        for ids, name in zip(rows, names, strict=True):
            self._check_ids(ids, "reward", name)
            if self.on_overflow == "error" and self.context is not None and len(ids) >= self.context:
                raise ValueError(
                    f"reward: expected a context of at least {len(ids) + 1} tokens, for a token of an answer to {name}, got "
                    f"{self.context} (reward_on_overflow: neutral leaves such rows out)"
                )
        return max(map(len, rows), default=0)

    def __call__(
        self,
        prompts: Sequence[str | Messages],
        completions: Sequence[str | Messages],
        completion_ids: Sequence[Sequence[int]],
        **columns: Any,
    ) -> list[float]:
        """TRL's reward function: one raw score a completion, without gradient; other columns are not read.

        The row is built from `completion_ids`, the tokens that were trained on; a prompt that is a string is one user
        message. A stop token at the end is recognised as in `score`. Behind a prompt that ends with the assistant's words the
        answer is one more turn, as TRL (1.16) samples it, and a warning says so once; `score` goes on from those words.

        Raises:
            ValueError: as `score`; and completions that their ids do not spell (a policy with another tokenizer).
        """
        return self.score_call(prompts, completions, completion_ids, gradient=False).score.tolist()

    def score_call(
        self,
        prompts: Sequence[str | Messages],
        completions: Sequence[str | Messages],
        completion_ids: Sequence[Sequence[int]],
        *,
        gradient: bool,
        **point: Any,
    ) -> ScoredRollout:
        """What a call as TRL's reward function scores, with everything that `score` returns; `point` holds the `credit_...`
        arguments of `score`. Raises as the call.
        """
        messages = check_call(prompts, completions, completion_ids, self._rows.text, self._vocab_size)
        if any(started_answer(prompt) == "" for prompt in messages):
            self._say(
                "a prompt ends with the assistant's words; its answer is read as one more turn, as TRL samples it", once="turn"
            )
        size = _group_size(messages)
        return self.score(messages[::size], completion_ids, size, gradient=gradient, **point)

    def _build(
        self, prompts: Sequence[Messages], responses: Sequence[Sequence[int]], group_size: int, stops: Collection[int]
    ) -> tuple[list[MappedRow], set[int], list[str]]:
        """Rows that can be read, with nothing mapped in those that are left out; which those are; what the prompts are called."""
        prompts = conversations(prompts)
        check_batch(prompts, responses, group_size, self._vocab_size)
        names = [name_prompt(index, prompt) for index, prompt in enumerate(prompts)]
        rows = self._rows.build(prompts, names, responses, group_size, stops)
        left_out = self._check_fit(rows, names, group_size)
        if self.model.training:
            self.model.eval()
        return [unmapped(row) if index in left_out else row for index, row in enumerate(rows)], left_out, names

    def _check_fit(self, rows: Sequence[MappedRow], names: Sequence[str], group_size: int) -> set[int]:
        """Rows that are longer than the model's context and left out; ValueError for those that cannot be read at all."""
        left_out = set()
        for index, row in enumerate(rows):
            name = names[index // group_size]
            if not row.ids:
                raise ValueError(f"prompts: expected a row of at least one token, got an empty one for {name}")
            self._check_ids(row.ids, "tokenizer", name)
            if self.context is not None and len(row.ids) > self.context:
                words = (
                    f"responses: expected rows of at most {self.context} tokens (the reward model's context), got "
                    f"{len(row.ids)} for response {index % group_size} of {name}"
                )
                if self.on_overflow == "error":
                    raise ValueError(words)
                left_out.add(index)
                self._say(f"{words}; such rows get the mean score of their group and no gradient", once="overflow")
        return left_out

    def _check_ids(self, ids: Sequence[int], key: str, name: str) -> None:
        if max(ids, default=0) >= self._scorer.vocab_size:
            raise ValueError(
                f"{key}: expected ids below {self._scorer.vocab_size} (the model's embedding rows), got {max(ids)} for {name}"
            )

    def _run(
        self,
        rows: Sequence[MappedRow],
        left_out: set[int],
        names: Sequence[str],
        responses: Sequence[Sequence[int]],
        group_size: int,
        stops: Collection[int],
        point: CreditPoint | None,
    ) -> ScoredRollout:
        """The rows' scores, with `point` their gradients there."""
        device = self.device
        ids = torch.tensor([i for response in responses for i in response], dtype=torch.long)
        position = torch.tensor([i for row in rows for i in row.position.tolist()], dtype=torch.long)
        width = torch.tensor([i for row in rows for i in row.width.tolist()], dtype=torch.long)
        owner = torch.repeat_interleave(torch.tensor([len(response) for response in responses], dtype=torch.long))
        mapped = position >= 0
        frozen = self._frozen[ids] | torch.isin(ids, torch.tensor(sorted(stops), dtype=torch.long)) | ~mapped

        table = None if point is None else self._embedding_table()
        reward_grad = None if table is None else table.new_zeros(len(ids), table.shape[1])

        first = torch.tensor([0, *(len(response) for response in responses)]).cumsum(0).tolist()
        read = [row for row in range(len(rows)) if row not in left_out]
        split = self._split(rows, group_size, point is not None)

        def spans(row: int) -> tuple[Tensor, Tensor]:
            """Mapped tokens of a row, and where in its rest each begins."""
            tokens = first[row] + torch.nonzero(mapped[first[row] : first[row + 1]]).squeeze(1)
            return tokens, position[tokens] - len(split[row].prefix)

        def keep(place: int, row_gradient: Tensor) -> None:
            assert reward_grad is not None
            tokens, start = spans(read[place])
            reward_grad[tokens.to(device)] = span_sums(row_gradient, start, width[tokens])

        when: list[list[int]] = []
        if point is not None and point.moves:
            for row in read:
                tokens, start = spans(row)
                when.append(turns(split[row], start.tolist(), width[tokens].tolist(), point.passes))
        scores, self.max_tokens_per_batch = score_rows(
            self._scorer,
            [split[row] for row in read],
            self.max_tokens_per_batch,
            None if point is None else keep,
            self._say,
            EMBEDDING if point is None else point,
            when,
        )
        score, unread = scores, None
        if left_out:
            unread = torch.ones(len(rows), dtype=torch.bool, device=device)
            unread[read] = False
            score = at_group_mean(scores.new_zeros(len(rows)).masked_scatter(~unread, scores), unread, group_size)
        bad = set(torch.nonzero(~score.isfinite()).flatten().tolist())
        if reward_grad is not None:
            bad |= set(owner[(~reward_grad.sum(1, dtype=torch.float32).isfinite()).cpu()].tolist())
        if bad:
            index = min(bad)
            raise ValueError(
                f"model: expected a finite score and gradient, got score {score[index].item()} "
                f"{'with a gradient that is not finite ' if score[index].isfinite() else ''}"
                f"for response {index % group_size} of {names[index // group_size]}"
            )
        return ScoredRollout(score, reward_grad, mapped.to(device), frozen.to(device), table, unread=unread)

    def _split(self, rows: Sequence[MappedRow], group_size: int, gradient: bool) -> list[SplitRow]:
        """Rows with what is shared in front cut off, or whole where that would change the numbers or save nothing."""
        if not rows or (group_size == 1 and not gradient):
            return whole(rows)
        reason = why_not_shared(self._scorer.backbone, max((row.ids for row in rows), key=len), self.device)
        if reason is not None:
            self._say(f"rows are read whole, prompts once for every response: {reason}")
            return whole(rows)
        return split_rows(rows, group_size)

    def _say(self, words: str, once: str | None = None) -> None:
        """A warning; the same words, or words of the same kind `once`, come only once."""
        if (once or words) not in self._said:
            self._said.add(once or words)
            warnings.warn(f"reward model: {words}", RuntimeWarning, stacklevel=2)

    def _embedding_table(self) -> Tensor:
        if self._table is None:
            table = embedding_table(self._scorer.embedding)
            self._table = table if self._spelling is None else spelled_table(table, self._spelling)
        return self._table


def _group_size(prompts: Sequence[Messages]) -> int:
    """The largest size of which all runs of equal prompts are multiples."""
    return math.gcd(*(len(list(run)) for _, run in groupby(prompts))) or 1


def _context(model: nn.Module) -> int | None:
    config: Any = model.config
    return getattr(config.get_text_config(), "max_position_embeddings", None)
