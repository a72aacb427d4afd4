"""The training loop, top-down: prompts -> rollout -> scored rollout -> credit and weights -> loss -> update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, get_constant_schedule_with_warmup

from datc_kernels.dispatch import choose
from datc_train.advantages import group_advantages
from datc_train.checkpoint import check_room, checkpoints, prune, restore, save_checkpoint
from datc_train.clock import Clock
from datc_train.config import Config, config_from
from datc_train.credit import METHODS
from datc_train.data import Row, load_prompts, prompt_batch
from datc_train.evaluate import best_step, evaluate
from datc_train.interrupt import Interrupted, StopRequest
from datc_train.metrics import sample_lines, step_metrics
from datc_train.models import load_policy, load_reward, resolve_device
from datc_train.policy import Policy
from datc_train.progress import StepProgress
from datc_train.reward import RewardModel
from datc_train.reward.vocabulary import check_same_vocabulary
from datc_train.rollout import TransformersSampler
from datc_train.run_folder import RunFolder, check_run_dir
from datc_train.score import RewardFunction, check_columns, check_reward, score_rollout
from datc_train.summary import summary
from datc_train.trackers import Trackers, check_trackers
from datc_train.types import Prompt
from datc_train.update import reference_logprobs, update


def train(
    config: Config | dict[str, Any],
    policy: Any = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reward: RewardModel | RewardFunction | None = None,
    prompts: str | Sequence[Row] | None = None,
) -> Path:
    """Train a policy by DATC or GRPO and return the run's folder.

    Args:
        config: a `Config`, or a dict of its keys. Whatever else is given replaces what the config would load:
        policy: a causal language model of transformers, or a PEFT model; trained in place. Needs `tokenizer`.
        tokenizer: the policy's.
        reward: a `RewardModel`, or for `grpo` any function (prompts, completions, completion_ids, **columns) -> list of float.
        prompts: a file of JSON lines, or a list of texts, messages, rows or `Prompt`s.

    Raises:
        ValueError, FileNotFoundError, FileExistsError: what cannot be, before anything is trained or written.
        Interrupted: a KeyboardInterrupt; after Ctrl-C or SIGTERM the step was finished and saved.
        RuntimeError: a loss or gradient that is not finite, or a sampler whose log-probabilities are not the policy's; the
            optimizer has not moved then.
    """
    config = config_from(config)
    check_run_dir(config)
    check_trackers(config)
    device = resolve_device(config.device)
    train_prompts = _prompts(config.prompts if prompts is None else prompts, config, held_out=False)
    prompt_batch(train_prompts, 1, config.prompts_per_step, config.seed)  # enough of them?
    eval_prompts = [] if config.eval_prompts is None else _prompts(config.eval_prompts, config, held_out=True)
    eval_prompts = eval_prompts[: config.eval_limit]
    if reward is not None:
        check_reward(reward, config.method)
        if not isinstance(reward, RewardModel):
            check_columns([*train_prompts, *eval_prompts])
    choose(config.backend, device)
    actor = load_policy(config, device, policy, tokenizer)
    if isinstance(reward, RewardModel):
        check_same_vocabulary(actor.tokenizer, reward.policy_tokenizer)
    if reward is None:
        reward_device = device if config.reward_device is None else resolve_device(config.reward_device)
        reward = load_reward(config, reward_device, actor.tokenizer)
    return _run(config, actor, reward, train_prompts, eval_prompts)


def _run(
    config: Config,
    actor: Policy,
    reward: RewardModel | RewardFunction,
    train_prompts: list[Prompt],
    eval_prompts: list[Prompt],
) -> Path:
    sampler = _sampler(config, actor, config.group_size)
    eval_sampler = _sampler(config, actor, group_size=2)
    sampler.encode([*train_prompts, *eval_prompts])  # what cannot be sampled is found before the run's folder exists
    folder = RunFolder(config)
    check_room(folder.path, actor.trainable, config.keep)
    optimizer = torch.optim.AdamW(actor.trainable, lr=config.learning_rate, weight_decay=config.weight_decay)
    schedule = _schedule(optimizer, config, folder.schedule_steps)
    done, checkpoint = _go_on(folder, actor, optimizer, schedule)
    if done > config.steps:
        raise ValueError(f"steps: expected at least {done}, which the run in {folder.path} has done, got {config.steps}")
    history, evaluations = folder.lines("metrics.jsonl"), folder.lines("eval.jsonl")
    trackers = Trackers(config, folder.path)
    table: Tensor | None = None

    def evaluate_at(step: int) -> bool:
        """Whether this is the best so far."""
        if not eval_prompts or (evaluations and evaluations[-1]["step"] == step):
            return False
        evaluations.append(evaluate(step, eval_sampler, reward, eval_prompts))
        folder.append("eval.jsonl", evaluations[-1:])
        trackers.log(evaluations[-1], step, prefix="eval_")
        return best_step(evaluations) == step

    def save(step: int) -> Path:
        path = save_checkpoint(folder.path, step, actor.model, actor.tokenizer, optimizer, schedule)
        prune(folder.path, config.keep, also={best_step(evaluations)})
        return path

    with StepProgress(config.steps, config.method, done) as progress, StopRequest(progress.stopping) as stop:
        if done:
            progress.say(f"Going on after step {done} of {folder.path}")
        else:
            evaluate_at(0)
        for step in range(done + 1, config.steps + 1):
            if stop.signal is not None:
                break
            clock = Clock(actor.device)
            with _of_step(step), clock("sample"):
                batch = prompt_batch(train_prompts, step, config.prompts_per_step, config.seed)
                rollout = sampler.sample(batch, seed=_step_seed(config.seed, step))
            with _of_step(step), clock("score"):
                gradient = METHODS[config.method].needs_reward_gradient
                scored = score_rollout(reward, rollout, actor.tokenizer, sampler.stop_ids, gradient=gradient)
                if scored.reward_embedding is not None:  # a table of its own device crosses once
                    table = scored.reward_embedding.to(actor.device) if table is None else table
                    scored = replace(scored, reward_embedding=table)
            advantage = group_advantages(scored.score, config.group_size).to(actor.device)
            reference = None
            if config.beta > 0:
                with clock("reference"):
                    reference = reference_logprobs(actor, rollout, config, sampler.vocab_size)
            learning_rate = float(schedule.get_last_lr()[0])
            result = update(
                actor,
                optimizer,
                rollout,
                scored,
                advantage,
                reference,
                config,
                vocab_size=sampler.vocab_size,
                step=step,
                clock=clock,
                check_sampler=step == done + 1,
            )
            schedule.step()
            history.append(
                step_metrics(
                    step,
                    rollout,
                    scored,
                    advantage,
                    result,
                    clock,
                    ceiling=config.ceiling,
                    learning_rate=learning_rate,
                )
            )
            folder.append("metrics.jsonl", history[-1:])
            kept = sample_lines(step, rollout, scored, advantage, result, actor.tokenizer, config.samples_per_step)
            folder.append("samples.jsonl", kept)
            trackers.log(history[-1], step)
            progress.step(history[-1])
            last = step == config.steps
            best = evaluate_at(step) if last or _due(config.eval_every, step) else False
            if last or best or _due(config.save_every, step) or stop.signal is not None:
                checkpoint = save(step)
            done = step
        if done < config.steps:
            assert stop.signal is not None
            trackers.finish()
            raise Interrupted(f"stopped after step {done}; to go on: --run_dir {folder.path} --resume auto", stop.signal)
    trackers.finish()
    progress.say(summary(history, evaluations, str(folder.path), str(checkpoint)))
    return folder.path


def _go_on(folder: RunFolder, actor: Policy, optimizer: Any, schedule: Any) -> tuple[int, Path]:
    """The step to go on after and its checkpoint; 0 and the folder itself for a run that has none yet."""
    whole = checkpoints(folder.path)
    done = int(whole[-1].name) if whole else 0
    if whole:
        restore(whole[-1], actor.model, optimizer, schedule)
    folder.rewind(done if whole else -1)
    return done, whole[-1] if whole else folder.path


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def _prompts(source: str | Sequence[Row], config: Config, *, held_out: bool) -> list[Prompt]:
    if source == "quickstart":
        from datc_train import quickstart

        source = quickstart.heldout_prompts() if held_out else quickstart.train_prompts()
        return load_prompts(source)
    return load_prompts(source, config.prompt_column)


def _sampler(config: Config, actor: Policy, group_size: int) -> TransformersSampler:
    return TransformersSampler(
        actor.model,
        actor.tokenizer,
        group_size=group_size,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        max_batch_size=config.sample_batch_size,
        max_prompt_tokens=config.max_prompt_tokens,
        chat_template_kwargs=config.chat_template_kwargs,
    )


def _schedule(optimizer: torch.optim.Optimizer, config: Config, length: int) -> torch.optim.lr_scheduler.LambdaLR:
    if config.schedule == "constant":
        return get_constant_schedule_with_warmup(optimizer, config.warmup_steps)
    floor, warmup = config.min_learning_rate_ratio, config.warmup_steps

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        progress = min(1.0, (step - warmup) / max(1, length - warmup))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@contextmanager
def _of_step(step: int) -> Iterator[None]:
    """Says in which step a stage failed that does not know its step."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if type(error) not in (ValueError, RuntimeError):  # running out of memory is another thing
            raise
        raise type(error)(f"{error}; in step {step}") from error


def _step_seed(seed: int, step: int) -> int:
    return (seed * 1_000_003 + step) % 2**31
