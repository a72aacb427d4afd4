"""A run from its config to its folder. What one step does is in `step.py`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from datc_kernels.dispatch import choose
from datc_train.checkpoint import check_room, checkpoints, prune, restore, save_checkpoint
from datc_train.clock import Clock
from datc_train.config import Config, check_sources, config_from
from datc_train.data import Row, find_eval_prompts, find_train_prompts, of_eval_prompts, prompt_batch
from datc_train.evaluate import best_step, evaluate
from datc_train.interrupt import Interrupted, StopRequest
from datc_train.metrics import sample_lines, step_metrics
from datc_train.models import base_folder, load_policy, resolve_device, reward_device
from datc_train.optimizer import make_optimizer, make_schedule
from datc_train.policy import Policy
from datc_train.progress import StepProgress
from datc_train.reward import RewardModel
from datc_train.reward.functions import RewardFunction
from datc_train.reward.several import WeightedRewards
from datc_train.reward.vocabulary import check_same_vocabulary
from datc_train.rewards import given_names, given_rewards, has_function, is_function, load_rewards, models_of, reward_items
from datc_train.rollout import Sampler, make_sampler
from datc_train.run_folder import RunFolder, check_run_dir
from datc_train.score import Reward, check_adapter, check_columns, check_reward
from datc_train.shaping import starting_spread
from datc_train.sources import sources
from datc_train.step import Trainer, of_step, parts
from datc_train.summary import summary
from datc_train.trackers import Trackers, check_trackers
from datc_train.types import Prompt
from datc_train.vllm_engine import check_installed


def train(
    config: Config | dict[str, Any],
    policy: Any = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reward: RewardModel | RewardFunction | WeightedRewards | Sequence[RewardModel | RewardFunction] | None = None,
    prompts: str | Sequence[Row] | None = None,
) -> Path:
    """Train a policy by the config's credit method and loss, and return the run's folder.

    Args:
        config: a `Config`, or a dict of its keys. Whatever else is given replaces what the config would load:
        policy: a causal language model of transformers, or a PEFT model; trained in place. Needs `tokenizer`.
        tokenizer: the policy's.
        reward: a `RewardModel`, or for methods that need no more any function (prompts, completions, completion_ids,
            **columns) -> list of float, async ones too; or a list of them, whose weights are the config's `reward_weights` (a
            function may then return None for a sample: it has no part in that score).
        prompts: a file of JSON lines, or a list of texts, messages, rows or `Prompt`s.

    Raises:
        ValueError, FileNotFoundError, FileExistsError: what cannot be, before anything is trained or written.
        Interrupted: a KeyboardInterrupt; after Ctrl-C or SIGTERM the step was finished and saved.
        RewardError: a reward function that raised (its error is the `__cause__`) or took longer than `reward_timeout`.
        RuntimeError: a loss or gradient that is not finite, a sampler whose log-probabilities are not the policy's, or an
            engine that died or hangs; the optimizer has not moved then.
    """
    config = config_from(config)
    check_sources(config, policy=policy, reward=reward, prompts=prompts)
    check_run_dir(config)
    check_trackers(config)
    if config.sampler == "vllm":
        check_installed()
    device = resolve_device(config.device)
    train_prompts = find_train_prompts(config, prompts)
    prompt_batch(train_prompts, 1, config.prompts_per_step, config.seed)  # enough of them?
    eval_prompts = find_eval_prompts(config, config.prompts if prompts is None else prompts)
    given = None if reward is None else given_rewards(config, reward)
    if given is not None:
        check_reward(given, config.method)
    named = any(map(is_function, reward_items(config)))
    if named if given is None else has_function(given):
        check_columns(train_prompts)
        with of_eval_prompts():
            check_columns(eval_prompts)
    choose(config.backend, device)
    base = base_folder(config) if policy is None else None
    actor = load_policy(config, device, policy, tokenizer)
    check_adapter(config.method, has_one=hasattr(actor.model, "peft_config"))
    scorer = load_rewards(config, reward_device(config, device), actor.tokenizer) if given is None else given
    for model in models_of(scorer):
        check_same_vocabulary(actor.tokenizer, model.policy_tokenizer)
    check_reward(scorer, config.method)
    with closing(make_sampler(config, actor, base)) as sampler:
        # What cannot be sampled or scored is found before the run's folder exists.
        check_prompts(sampler, scorer, train_prompts)
        with of_eval_prompts():
            check_prompts(sampler, scorer, eval_prompts)
        check_room(config.run_dir, actor.trainable, config.keep)
        given_parts = {"policy": policy, "reward": reward, "prompts": prompts}
        made_of = sources(train_prompts, eval_prompts, rewards=given_names(reward), **given_parts)
        with closing(RunFolder(config, made_of)) as folder:
            return _run(config, actor, folder, sampler, scorer, train_prompts, eval_prompts)


def check_prompts(sampler: Sampler, reward: Reward, prompts: Sequence[Prompt]) -> None:
    """Raises ValueError for a prompt that cannot be sampled (`Sampler.encode`) or scored (`RewardModel.check_prompts`)."""
    sampler.encode(prompts)
    for model in models_of(reward):
        model.check_prompts([prompt.messages for prompt in prompts])


def _run(
    config: Config,
    actor: Policy,
    folder: RunFolder,
    sampler: Sampler,
    reward: Reward,
    train_prompts: list[Prompt],
    eval_prompts: list[Prompt],
) -> Path:
    optimizer = make_optimizer(actor.trainable, config)
    schedule = make_schedule(optimizer, config, folder.schedule_steps)
    done, checkpoint = _go_on(folder, actor, optimizer, schedule)
    if done > config.steps:
        raise ValueError(f"steps: expected at least {done}, which the run in {folder.path} has done, got {config.steps}")
    history, evaluations = folder.lines("metrics.jsonl"), folder.lines("eval.jsonl")
    trackers = Trackers(config, folder.path)
    sampler.open(folder.path)

    def evaluate_at(step: int) -> bool:
        """Whether this is the best so far."""
        if not eval_prompts or (evaluations and evaluations[-1]["step"] == step):
            return False
        with of_step(step):
            evaluations.append(evaluate(step, sampler.with_group_size(2), reward, eval_prompts))
        folder.append("eval.jsonl", evaluations[-1:])
        trackers.log(evaluations[-1], step, prefix="eval_")
        return best_step(evaluations) == step

    def save(step: int) -> Path:
        path = save_checkpoint(folder.path, step, actor.model, actor.tokenizer, optimizer, schedule)
        prune(folder.path, config.keep, also={best_step(evaluations)})
        return path

    with StepProgress(config.steps, config.method, done) as progress, StopRequest() as stop:
        if done:
            progress.say(f"Going on after step {done} of {folder.path}")
            missing = sorted(set(range(1, done + 1)) - {line["step"] for line in history})
            if missing:
                progress.say(f"metrics.jsonl has no line for {len(missing)} of these steps, the first of them {missing[0]}")
        else:
            evaluate_at(0)
        sigma0 = None
        if config.reward_shaping:
            some = prompt_batch(train_prompts, 1, min(config.shaping_prompts, len(train_prompts)), config.seed)
            with of_step(done):
                sigma0 = starting_spread(folder.path, done, sampler, reward, some, progress.say)
        trainer = Trainer(config, actor, reward, sampler, optimizer, sigma0)
        updates, first = config.updates_per_rollout, done + 1
        for number in range(done // updates + 1, config.steps // updates + 1):
            if stop.signal is not None:
                break
            clock = Clock(actor.device)
            batch = prompt_batch(train_prompts, number, config.prompts_per_step, config.seed)
            rollout = trainer.sample(done + 1, batch, _rollout_seed(config.seed, number), clock)
            lesson = trainer.prepare(done + 1, number, rollout, clock, updates=updates)
            for index, part in enumerate(parts(lesson, config)):
                step = done + 1
                learning_rate = float(schedule.get_last_lr()[0])
                # Another process's sampler is looked at every time: what it serves may go wrong at any sync.
                check = step == first or config.sampler != "transformers"
                one = trainer.update(step, part, clock, check_sampler=check)
                clock = Clock(actor.device)
                schedule.step()
                history.append(step_metrics(step, one, ceiling=config.ceiling, learning_rate=learning_rate))
                folder.append("metrics.jsonl", history[-1:])
                if index < config.updates_per_epoch:  # later epochs see the same responses
                    folder.append("samples.jsonl", sample_lines(step, one, actor.tokenizer, config.samples_per_step))
                trackers.log(history[-1], step)
                progress.step(history[-1])
                done = step
            # Only here: the buffer of a rollout is no part of a checkpoint.
            last = done == config.steps
            best = evaluate_at(done) if last or _due(config.eval_every, done, updates) else False
            if last or best or _due(config.save_every, done, updates) or stop.signal is not None:
                checkpoint = save(done)
        if done < config.steps:
            assert stop.signal is not None
            trackers.finish()
            raise Interrupted(f"stopped after step {done}; to go on: --run_dir {folder.path} --resume auto", stop.signal)
    trackers.finish()
    if config.report:
        from datc_train.report import write_report  # brings matplotlib

        try:
            progress.say(f"Report: {write_report(folder.path)}")
        except OSError:  # the run is whole without it
            progress.say(summary(history, evaluations, str(folder.path), str(checkpoint)))
            raise
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


def _due(every: int | None, step: int, updates: int) -> bool:
    """Whether a multiple of `every` is among the last `updates` steps."""
    return every is not None and step % every < updates


def _rollout_seed(seed: int, number: int) -> int:
    return (seed * 1_000_003 + number) % 2**31
