"""DATC in TRL: `GRPOTrainer` with one more argument.

    trainer = DATCTrainer(model=..., reward_funcs=[RewardModel(...)], args=..., train_dataset=..., datc={"ceiling": 4.0})

TRL generates, scores, normalises and optimises. Where it hands over a scored rollout, [B] advantages become [B, T], A w, which
its loss takes as they are; its buffering carries them through every inner iteration. Nothing of TRL is copied or patched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
import trl
from accelerate.utils import gather_object
from torch import Tensor
from trl import GRPOTrainer

from datc_kernels import effective_sample_ratio, predicted_gain
from datc_kernels.allocate_weights.diagnostics import at_band
from datc_kernels.dispatch import KNOWN, choose
from datc_train.credit_point import DEFAULT, CreditPoint, Kind
from datc_train.integrations.token_advantages import TokenAdvantages, token_advantages
from datc_train.policy import Policy, take_policy
from datc_train.reward import RewardModel
from datc_train.reward.checks import conversations
from datc_train.reward.functions import name_of
from datc_train.reward.several import JoinedTables, distinct_names, weighted_sum
from datc_train.rollout.policy_mode import sampling_mode
from datc_train.types import ScoredRollout

# Held against the stock trainer in this repository's tests: with w = 1 the same bits.
LOSSES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo")
METHODS = ("datc", "grpo")


@dataclass(frozen=True)
class DATCConfig:
    """What `DATCTrainer` adds to TRL's arguments.

    Args:
        method: "datc", or "grpo": the stock trainer, bit for bit.
        ceiling: lambda; weights lie within [1/ceiling, ceiling].
        utility: "advantage", or "sign" (the sign of the advantage only).
        credit_point, credit_passes, credit_scale: where the reward's gradient is taken, see `datc_train/credit_point.py`.
        backend: of the kernels; None takes the fastest exact one of the device.

    Raises ValueError, beginning with the key, for values that cannot be.
    """

    method: str = "datc"
    ceiling: float = 4.0
    utility: str = "advantage"
    credit_point: Kind = DEFAULT.kind
    credit_passes: int = DEFAULT.passes
    credit_scale: float = DEFAULT.scale
    backend: str | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {self.method!r}")
        if isinstance(self.ceiling, bool) or not isinstance(self.ceiling, int | float) or not 1 <= self.ceiling < float("inf"):
            raise ValueError(f"ceiling: expected a finite number of at least 1, got {self.ceiling!r}")
        if self.utility not in ("advantage", "sign"):
            raise ValueError(f"utility: expected advantage or sign, got {self.utility!r}")
        _ = self.point
        if self.backend is not None and self.backend not in KNOWN:
            raise ValueError(f"backend: expected None or one of {', '.join(KNOWN)}, got {self.backend!r}")

    @property
    def point(self) -> CreditPoint:
        return CreditPoint(self.credit_point, self.credit_passes, self.credit_scale)


class DATCTrainer(GRPOTrainer):
    """TRL's GRPOTrainer with token credit. All of its arguments, and

    datc  a DATCConfig, a dict of its keys, or None for the defaults

    The `RewardModel`s in `reward_funcs` give the credit beside their rewards: that of their sum by `reward_weights`. Other
    reward functions work as ever, and the advantage stays TRL's. With `multi_objective_aggregation="normalize_then_sum"` the
    credit is of the sum that TRL makes then: there a reward weighs w / (its deviation within the group + 1e-4).

    Raises:
        ValueError: no RewardModel, or none of a weight that is finite and not 0; an option of TRL under which token weights
            vanish or are wrong; a policy whose LM head is not one plain linear layer.
        RuntimeError: when training starts, a TRL whose loss does not use each token's own advantage.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "datc"]
    reward_funcs: list[Any]

    def __init__(self, *args: Any, datc: DATCConfig | dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.datc = _config(datc)
        super().__init__(*args, **kwargs)
        self._recorders: dict[int, _Recorder] = {}  # by their place in reward_funcs; those of weight 0 are none
        self._all_rewards: Tensor | None = None
        self._join = JoinedTables()
        self._loss_is_checked = self.datc.method == "grpo"
        if self.datc.method == "grpo":
            return
        models = [i for i, function in enumerate(self.reward_funcs) if isinstance(function, RewardModel)]
        if not models:
            raise ValueError(
                "reward_funcs: expected a datc_train.reward.RewardModel, whose gradient gives the credit, got "
                f"{', '.join(map(name_of, self.reward_funcs)) or 'none'}"
            )
        for i in models:
            if type(self.reward_funcs[i]).__call__ is not RewardModel.__call__:
                raise ValueError(
                    f"reward_funcs: expected RewardModels whose gradient is that of what they return, got "
                    f"{type(self.reward_funcs[i]).__name__}, which replaces __call__; put a function beside the RewardModel "
                    "instead"
                )
        self._check_options()
        weights = {i: float(self.reward_weights[i]) for i in models}
        if not all(map(math.isfinite, weights.values())) or not any(weights.values()):
            raise ValueError(
                "reward_weights: expected finite numbers for the RewardModels, whose gradients say which way is up, one of them "
                f"not 0, got {', '.join(f'{weight:g}' for weight in weights.values())}"
            )
        choose(self.datc.backend, self.accelerator.device)
        self._policy()
        self.reward_funcs = list(self.reward_funcs)  # TRL keeps the caller's list
        for i in models:
            if weights[i] != 0:
                self.reward_funcs[i] = self._recorders[i] = _Recorder(self.reward_funcs[i], self.datc.point)
        if len({self.reward_func_names[i] for i in models}) < len(models):  # TRL would log them as one
            for i, name in zip(models, distinct_names([self.reward_func_names[i] for i in models]), strict=True):
                self.reward_func_names[i] = name

    def _check_options(self) -> None:
        """Raises ValueError for what would drop, cancel or misread weights."""
        arguments = self.args
        reasons = {
            "importance_sampling_level": (
                arguments.importance_sampling_level != "token",
                "token: a sequence's ratio has the same gradient for all tokens, which cancels weights of mean 1",
            ),
            "loss_type": (arguments.loss_type not in LOSSES, f"one of {', '.join(LOSSES)}, which take token advantages"),
            "use_liger_kernel": (
                bool(getattr(arguments, "use_liger_kernel", False)),
                "False: Liger's loss takes one advantage a response",
            ),
            "multi_objective_aggregation": (
                self._aggregation not in ("sum_then_normalize", "normalize_then_sum"),
                "sum_then_normalize or normalize_then_sum, whose sums are known",
            ),
        }
        for name, (wrong, expected) in reasons.items():
            if wrong:
                raise ValueError(f"{name}: expected {expected}; got {getattr(arguments, name)!r}")

    @property
    def _aggregation(self) -> str:
        return getattr(self.args, "multi_objective_aggregation", "sum_then_normalize")

    def _policy(self) -> Policy:
        model = self.accelerator.unwrap_model(self.model)
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        return take_policy(model, tokenizer, starts_at_base=True, reference=False)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self._recorders:
            return super()._generate_and_score_completions(inputs)
        training = self.model.training
        for recorder in self._recorders.values():
            recorder.gradient = training
        inputs = [row | {"prompt": _with_text(row["prompt"])} for row in inputs]
        output = super()._generate_and_score_completions(inputs)
        taken = {i: recorder.take() for i, recorder in self._recorders.items()}
        responses = next(iter(taken.values()))[1]
        if not training:
            self._log_weights([None] * len(responses))
            return output
        started = time.perf_counter()
        advantages = output["advantages"]
        lengths = torch.tensor([len(ids) for ids in responses], device=advantages.device)
        scored = self._sum({i: one for i, (one, _) in taken.items()}, responses)
        made = self._token_advantages(output, lengths, scored)
        columns = torch.arange(output["completion_ids"].shape[1], device=advantages.device)
        real = columns < lengths[:, None]  # [B, T]; padding keeps weight 1
        token = advantages[:, None].expand(real.shape).clone()
        token[real] = made.value.to(token.dtype)
        self._log_credit(made, advantages, lengths, scored, time.perf_counter() - started)
        return output | {"advantages": token}

    def _calculate_rewards(self, *arguments: Any, **keywords: Any) -> Tensor:
        self._all_rewards = super()._calculate_rewards(*arguments, **keywords)
        return self._all_rewards

    def _sum(self, scored: dict[int, ScoredRollout], responses: list[list[int]]) -> ScoredRollout:
        """The scored rollout of the sum that TRL makes of the RewardModels' scores.

        TRL has added up the scores: a row that a model could not read has its group's mean there, and the other models' scores
        count, so their gradients do.
        """
        weights: dict[int, float | Tensor] = {i: float(self.reward_weights[i]) for i in scored}
        if len(scored) > 1 and self._aggregation == "normalize_then_sum":  # of one, a factor a group changes no weight
            assert self._all_rewards is not None
            groups = self._all_rewards.double().view(-1, self.num_generations, len(self.reward_funcs))
            deviation = groups.std(dim=1).repeat_interleave(self.num_generations, dim=0)  # [B of all processes, rewards]
            mine = slice(self.accelerator.process_index * len(responses), (self.accelerator.process_index + 1) * len(responses))
            weights = {i: weight / (deviation[mine, i] + 1e-4) for i, weight in weights.items()}
        return weighted_sum(
            [replace(one, unread=None) for one in scored.values()],
            list(weights.values()),
            response_ids=torch.tensor([token for ids in responses for token in ids], dtype=torch.int64),
            lengths=torch.tensor([len(ids) for ids in responses]),
            group_size=1,
            join=self._join,
        )

    def _token_advantages(self, output: dict[str, Any], lengths: Tensor, scored: ScoredRollout) -> TokenAdvantages:
        policy = self._policy()
        hidden = self._hidden_states(policy, output, lengths)
        real = torch.arange(output["completion_ids"].shape[1], device=lengths.device) < lengths[:, None]
        if "tool_mask" in output:  # what a tool or an environment wrote is not trained on: the mean of 1 is over the rest
            written = ~output["tool_mask"][real].bool()
            scored = replace(scored, frozen=scored.frozen.to(written.device) | written)
        return token_advantages(
            hidden,
            policy.weight,
            output["completion_ids"][real],
            lengths,
            scored,
            output["advantages"],
            head_bias=policy.bias,
            temperature=self.temperature,
            softcap=policy.softcap,
            logit_scale=policy.logit_scale,
            ceiling=self.datc.ceiling,
            utility=self.datc.utility,
            backend=self.datc.backend,
        )

    def _hidden_states(self, policy: Policy, output: dict[str, Any], lengths: Tensor) -> Tensor:
        """[N, D]: one pass of the decoder in evaluation mode, a training batch of rows at a time, a group's prompt once; the LM
        head is not called.
        """
        prompts = [ids[mask.bool()].tolist() for ids, mask in zip(output["prompt_ids"], output["prompt_mask"], strict=True)]
        # From the lengths: TRL empties the mask of truncated responses that it leaves out of the loss.
        rows = zip(prompts, output["completion_ids"], lengths.tolist(), strict=True)
        read = [(prompt, ids[:length]) for prompt, ids, length in rows if length]
        parts, size = [], self.args.per_device_train_batch_size
        with sampling_mode(policy.model), self.compute_loss_context_manager():
            for start in range(0, len(read), size):
                batch = read[start : start + size]
                parts.append(policy.hidden_states([prompt for prompt, _ in batch], [ids for _, ids in batch]))
        return torch.cat(parts)

    def _log_credit(
        self, made: TokenAdvantages, advantages: Tensor, lengths: Tensor, scored: ScoredRollout, seconds: float
    ) -> None:
        weight = made.weights.weight
        assert made.credit.credit is not None
        values = {
            "datc/ess": effective_sample_ratio(weight, lengths).mean(),
            "datc/tau": made.weights.temperature.mean(),
            "datc/band_share": at_band(weight, lengths, self.datc.ceiling).float().mean(),
            "datc/predicted_gain": predicted_gain(made.credit.credit, advantages.float(), weight, lengths).mean(),
            "datc/mapped": scored.mapped.float().mean().to(weight.device),
            "datc/credit_seconds": torch.tensor(seconds, device=weight.device),
        }
        for name, value in values.items():
            self._metrics["train"][name].append(self.accelerator.gather(value.float()).mean().item())
        per_response = [[round(w, 3) for w in part.tolist()] for part in weight.split(lengths.tolist())]
        self._log_weights(per_response)

    def _log_weights(self, per_response: list[list[float]] | list[None]) -> None:
        """A row for every completion that TRL has put into its table; None where there is no credit."""
        self._logs["extra"]["datc_weight"].extend(gather_object(per_response))

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if not self._loss_is_checked and self.model.training:
            self._loss_is_checked = self._check_loss(model, inputs)
        return super()._compute_loss(model, inputs)

    def _check_loss(self, model: Any, inputs: dict[str, Any]) -> bool:
        """Hold TRL's loss against the contract, on the first batch with a response of two tokens, without a pass of the model.

        With the ratio 1, the derivative by log p_t minus that at advantage 0 (the KL term's) is -c A_t, one c > 0 a response.

        Returns whether any process had such a response. Raises RuntimeError where the contract is broken.
        """
        problem = f"TRL {trl.__version__} with loss_type={self.args.loss_type!r} does not use each token's own advantage; "
        problem += "token credit would be lost or wrong, so training stops here"
        advantages = inputs["advantages"]
        if advantages.shape != inputs["completion_ids"].shape:
            raise RuntimeError(f"{problem} (advantages arrive as {list(advantages.shape)})")
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        scale = float(advantages.abs().mean()) or 1.0  # equal rewards are common at the start, and say nothing about the loss
        probe = advantages + torch.linspace(0.5, 1.5, advantages.shape[1], device=advantages.device) * scale
        with_probe, without = (self._derivative(model, inputs, a) for a in (probe, torch.zeros_like(probe)))
        compared = False
        for row in range(len(probe)):
            kept = mask[row].bool() & (probe[row] != 0)
            if int(kept.sum()) < 2:
                continue
            compared = True
            share = -(with_probe - without)[row][kept] / probe[row][kept]
            if not bool(share.min() > 0) or float(share.max() - share.min()) > 1e-3 * float(share.mean()):
                raise RuntimeError(problem)
        return bool(self.accelerator.gather(torch.tensor([compared], device=advantages.device)).any())

    def _derivative(self, model: Any, inputs: dict[str, Any], advantages: Tensor) -> Tensor:
        """dL / d log p [B, T] of TRL's loss, at log-probabilities that equal the old policy's."""
        old = inputs.get("old_per_token_logps")
        leaf = (torch.full_like(advantages, -1.0) if old is None else old.detach().clone()).float().requires_grad_(True)
        changed = dict(inputs) | {"advantages": advantages}
        for ratio in ("importance_sampling_ratio",):
            if ratio in changed:
                changed[ratio] = torch.ones_like(changed[ratio])
        metrics = {mode: {name: list(values) for name, values in by_name.items()} for mode, by_name in self._metrics.items()}
        flag = self.model.training
        self._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, torch.zeros_like(leaf).detach(), leaf.new_zeros(()))
        self.model.training = False  # the flag of the top module alone: TRL takes it for the mode, nothing runs through the model
        try:
            with torch.enable_grad():
                loss = super()._compute_loss(model, changed)
            (derivative,) = torch.autograd.grad(loss, leaf)
        finally:
            del self._get_per_token_logps_and_entropies
            self.model.training = flag
            for mode, by_name in self._metrics.items():
                for name in list(by_name):
                    if name in metrics[mode]:
                        by_name[name] = metrics[mode][name]
                    else:
                        del by_name[name]
        return derivative


def _with_text(prompt: Any) -> Any:
    """Parts of text as text, before TRL gives them to a chat template that may know text alone."""
    return prompt if isinstance(prompt, str) else conversations([prompt])[0]


class _Recorder:
    """A reward function in front of a RewardModel: scores as it would, and keeps what the credit needs."""

    def __init__(self, reward: RewardModel, point: CreditPoint) -> None:
        self.reward = reward
        self.point = point
        self.gradient = False
        self.__name__ = reward.__name__
        self._kept: tuple[ScoredRollout, list[list[int]]] | None = None

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float]:
        scored = self.reward.score_call(prompts, completions, completion_ids, gradient=self.gradient, **self.point.arguments())
        self._kept = (scored, [list(ids) for ids in completion_ids])
        return [float(value) for value in scored.score.tolist()]

    def take(self) -> tuple[ScoredRollout, list[list[int]]]:
        assert self._kept is not None
        kept, self._kept = self._kept, None
        return kept


def _config(datc: DATCConfig | dict[str, Any] | None) -> DATCConfig:
    if datc is None or isinstance(datc, DATCConfig):
        return datc or DATCConfig()
    if not isinstance(datc, dict):
        raise ValueError(f"datc: expected a DATCConfig, a dict of its keys or None, got {type(datc).__name__}")
    known = {field.name for field in fields(DATCConfig)}
    unknown = sorted(set(datc) - known, key=str)
    if unknown:
        raise ValueError(f"datc: no such key {unknown[0]!r}; known are {', '.join(sorted(known))}")
    return DATCConfig(**datc)
