"""What a run is: one typed dataclass, the same in YAML, on the command line and in Python. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from datc_train.credit_point import DEFAULT, CreditPoint, Kind

# What the trainer itself tells `apply_chat_template`.
RESERVED_TEMPLATE_KWARGS = frozenset(
    "conversation messages tokenize add_generation_prompt continue_final_message return_dict return_tensors "
    "return_assistant_tokens_mask tokenizer_kwargs padding truncation max_length".split()
)

TRACKERS = ("tensorboard", "wandb", "trackio")

Method = Literal[
    "grpo", "datc", "datc_no_angle", "datc_shuffled", "datc_random", "entropy", "red", "p2t", "oar_g", "oar_p", "delta", "arca"
]
Loss = Literal["grpo", "dapo", "dr_grpo", "gspo_token", "cispo", "gspo"]
Correction = Literal["truncate", "mask"]


MAX_VLLM_RANK = 512

GSPO = (
    "gspo_token: in gspo's one ratio a response, token weights of mean 1 cancel; gspo_token clips the same ratio, has the same "
    "gradient where all tokens are alike, and lets token advantages count"
)


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters; float32 whatever the base's dtype.

    Args:
        r: rank.
        alpha: scale; the update is alpha / r times B A.
        target_modules: names of linear layers, or "all-linear" (every one but the LM head).
    """

    r: int = 16
    alpha: int = 32
    target_modules: str | list[str] = "all-linear"


@dataclass(frozen=True)
class Config:
    """A training run.

    Args:
        policy: the model to train: "quickstart" (SmolLM2-135M-Instruct), "tiny" (random), a folder or a hub name of a causal
            language model whose weights are all there and all used (an adapter has to be merged first).
        reward: the reward model: "quickstart", "tiny", a folder or a hub name of a sequence classifier with one label; to
            measure time, "untrained-half" and "untrained-full": layers of the quickstart's policy under a random head. Or
            "module:function", a reward function that can be imported, also from the current folder. Or a list of these: the
            score is their weighted sum, token credit is of the reward models in it.
        reward_weights: a number for each reward, negative ones too; one of weight 0 is scored and logged only. null: all 1.
        reward_timeout: seconds that a reward function may take for a rollout, after which it counts as hanging; null: no bound.
        prompts: what to train on: "quickstart" ("quickstart-long", to measure time), a file of JSON lines or Parquet, a folder
            or a Hugging Face dataset's name (these through the package datasets).
        prompt_column: its column that holds the prompt, as text or as messages, whose content is text or parts of text. A last
            message of the assistant's is a started answer: the policy goes on from it.
        prompt_split: the split of a folder or a dataset; what has no splits takes the default only.
        system_prompt: goes in front of prompts that have none.
        eval_prompts: held-out prompts, two samples of each scored before and after training: a source as for prompts, or null.
        eval_split: the split of eval_prompts; null: prompt_split, where they have splits. To be named where eval_prompts and
            prompts are one source with splits.
        eval_every: scored every so many steps as well; the best checkpoint by it is kept.
        eval_limit: at most so many of them.
        run_dir: folder of the run; null makes a new one under runs/. An existing folder is an error without resume.
        resume: "auto" goes on with the run in run_dir from its last checkpoint, or starts it where there is none.
        steps: optimizer updates; a multiple of those that a rollout gets.
        seed: of prompts' order, sampling and the adapter's start.
        device: "auto" (a GPU where there is one), "cpu", "cuda", "cuda:1", ...
        reward_device: where the reward model lives; null: with the policy.
        dtype: of the policy and the reward model.
        method: how a response's advantage is shared out over its tokens: "datc", "grpo" (all alike), or another one of
            datc_train/credit/README.md.
        loss: the objective, see datc_train/losses: "grpo", "dapo", "dr_grpo", "gspo_token" or "cispo". ("gspo" is refused, with
            the reason.)
        credit_point: where the reward's gradient is taken for methods that need credit, "embedding" (the paper's), "tangent" or
            "integrated", see datc_train/reward/README.md; `datc probe` measures them on one's own models.
        credit_passes: of "integrated": 1 moves all tokens of a response at once, k every k-th one at a time, in k passes.
        credit_scale: of "integrated": the moved embeddings are multiplied by it.
        ceiling: lambda; weights lie within [1/ceiling, ceiling].
        utility: "advantage", or "sign" (the sign of the advantage only).
        beta: weight of the KL term to the policy that training started from; 0 runs no reference pass.
        clip: the ratio's clip range. Papers: 0.2, gspo_token 3e-4.
        clip_high: the same above 1; null: clip. Papers: dapo 0.28, gspo_token 4e-4.
        sampler_correction: weigh tokens by the training model's probability over the sampler's: "truncate" (bounded above),
            "mask" (0 outside of the bound), or null: not at all.
        sampler_correction_bound: at least 1.
        mask_truncated: leave responses that were cut off out of the loss.
        prompts_per_step: prompts a rollout.
        group_size: responses a prompt.
        epochs_per_rollout: so many times a rollout's responses are learned from.
        updates_per_epoch: an epoch's updates, each on an equal part of the groups; credit and weights stay those of the policy
            that sampled. Checkpoints, evaluations and stops wait for a rollout's last update.
        max_new_tokens: a response that has not stopped by then is cut off.
        max_prompt_tokens: a longer prompt is an error; null: no bound.
        temperature: of sampling, and of the policy that the loss and the credit see.
        sample_batch_size: responses sampled together.
        chat_template_kwargs: handed to the policy's chat template, such as {enable_thinking: false}.
        sampler: "transformers", or "vllm": an engine in a process of its own, see datc_train/rollout/README.md.
        vllm_memory: the engine's share of its GPU's memory, for weights and cache; without a GPU, of the machine's.
        vllm_max_model_len: tokens of a prompt and its response; null: max_prompt_tokens + max_new_tokens, and without
            max_prompt_tokens the model's context. The cache must hold one of these at least.
        vllm_devices: indices of the engine's GPUs, tensor parallel over them; null: the policy's own.
        vllm_enforce_eager: run without compilation and CUDA graphs; null: on CPUs only.
        vllm_sleep: the engine gives its GPU memory back between rollouts (sleep level 1; weights wait in the machine's memory).
        vllm_timeout: seconds without a sign of the engine (it starts, or a token comes) after which it counts as hanging.
        learning_rate: of AdamW.
        schedule: "constant", or "cosine" down to min_learning_rate_ratio; both after the warm-up.
        schedule_steps: length of the schedule; null: steps.
        warmup_steps: of linear warm-up.
        min_learning_rate_ratio: where the cosine ends, as a share of learning_rate.
        weight_decay: of AdamW.
        max_grad_norm: the gradient's norm is clipped to it.
        lora: adapters; null trains every parameter.
        gradient_checkpointing: less memory in the update for a second forward pass, and prompts are read once for every
            response instead of once a group.
        micro_batch_tokens: padded tokens of a forward and backward pass; a step's gradient does not depend on it.
        reward_batch_tokens: padded tokens of a pass of the reward model.
        reward_on_overflow: a response that the reward model's context cannot hold is an "error", or "neutral": it gets its
            group's mean score, and mean shaped reward.
        reward_shaping: prices for short and for very long responses and a floor under the deviation that advantages are divided
            by, in units of the scores' spread at the start; degenerate responses go 1 below their group; groups none of whose
            responses finished are sampled once more and then left out of the loss. Formulas: datc_train/reward/shaping.py.
        shaping_prompts: groups that the spread is measured on, of prompts of the first epoch.
        backend: of the kernels; null takes the fastest exact one of the device.
        save_every: a checkpoint every so many steps; null: only at the end, or when stopped.
        keep: so many checkpoints, the newest ones, and the best one by evaluation; null: all.
        trackers: live curves elsewhere, any of tensorboard, wandb, trackio.
        samples_per_step: responses of a step that go to samples.jsonl, token by token.
        candidates_per_token: so many of the most likely alternatives with each of their tokens, and what credit thinks of
            them; 0: none.
        report: report.html at the end of the run; see `datc report --help`.
    """

    policy: str = ""
    reward: str | list[str] = ""
    reward_weights: list[float] | None = None
    reward_timeout: float | None = None
    prompts: str = ""
    prompt_column: str = "prompt"
    prompt_split: str = "train"
    system_prompt: str | None = None
    eval_prompts: str | None = None
    eval_split: str | None = None
    eval_limit: int = 24
    eval_every: int | None = None
    run_dir: str | None = None
    resume: Literal["auto"] | None = None
    steps: int = 250
    seed: int = 0
    device: str = "auto"
    reward_device: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    method: Method = "datc"
    loss: Loss = "grpo"
    credit_point: Kind = DEFAULT.kind
    credit_passes: int = DEFAULT.passes
    credit_scale: float = DEFAULT.scale
    ceiling: float = 4.0
    utility: Literal["advantage", "sign"] = "advantage"
    beta: float = 0.03
    clip: float = 0.2
    clip_high: float | None = None
    sampler_correction: Correction | None = None
    sampler_correction_bound: float = 2.0
    mask_truncated: bool = False
    prompts_per_step: int = 8
    group_size: int = 8
    epochs_per_rollout: int = 1
    updates_per_epoch: int = 1
    max_new_tokens: int = 256
    max_prompt_tokens: int | None = None
    temperature: float = 1.0
    sample_batch_size: int = 64
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    sampler: Literal["transformers", "vllm"] = "transformers"
    vllm_memory: float = 0.3
    vllm_max_model_len: int | None = None
    vllm_devices: list[int] | None = None
    vllm_enforce_eager: bool | None = None
    vllm_sleep: bool = False
    vllm_timeout: float = 600.0
    learning_rate: float = 5e-5
    schedule: Literal["constant", "cosine"] = "constant"
    schedule_steps: int | None = None
    warmup_steps: int = 0
    min_learning_rate_ratio: float = 0.1
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    lora: Lora | None = field(default_factory=Lora)
    gradient_checkpointing: bool = False
    micro_batch_tokens: int = 4096
    reward_batch_tokens: int = 8192
    reward_on_overflow: Literal["error", "neutral"] = "error"
    reward_shaping: bool = False
    shaping_prompts: int = 128
    backend: Literal["reference", "chunked", "cpu", "triton", "cuda"] | None = None
    save_every: int | None = 10
    keep: int | None = 3
    trackers: list[str] = field(default_factory=list)
    samples_per_step: int = 4
    candidates_per_token: int = 5
    report: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError that begins with the key, for values that cannot be."""
        _check_types(self, "")
        if self.lora is not None:
            _check_types(self.lora, "lora.")
            _require("lora.r", self.lora.r, self.lora.r >= 1, "at least 1")
            _require("lora.alpha", self.lora.alpha, self.lora.alpha >= 1, "at least 1")
        full_half = self.lora is None and self.dtype == "float16"
        _require("dtype", self.dtype, not full_half, "float32 or bfloat16 without lora: AdamW underflows in float16")
        at_least_one = ("steps", "prompts_per_step", "max_new_tokens", "sample_batch_size", "micro_batch_tokens", "eval_limit")
        for key in (*at_least_one, "reward_batch_tokens", "epochs_per_rollout", "updates_per_epoch", "shaping_prompts"):
            _require(key, getattr(self, key), getattr(self, key) >= 1, "at least 1")
        for key in ("schedule_steps", "save_every", "keep", "eval_every", "max_prompt_tokens", "vllm_max_model_len"):
            value = getattr(self, key)
            _require(key, value, value is None or value >= 1, "null or at least 1")
        for key in ("warmup_steps", "samples_per_step", "candidates_per_token", "seed", "beta", "weight_decay"):
            _require(key, getattr(self, key), getattr(self, key) >= 0, "at least 0")
        _require("seed", self.seed, self.seed < 2**63, "below 2^63")
        for key in ("beta", "weight_decay"):
            _require(key, getattr(self, key), getattr(self, key) < float("inf"), "a finite number")
        for key in ("temperature", "learning_rate", "max_grad_norm", "vllm_timeout"):
            _require(key, getattr(self, key), 0 < getattr(self, key) < float("inf"), "a finite number above 0")
        parts, updates = self.updates_per_epoch, self.updates_per_rollout
        _require("updates_per_epoch", parts, self.prompts_per_step % parts == 0, "a divisor of prompts_per_step: whole groups")
        _require("steps", self.steps, self.steps % updates == 0, f"a multiple of {updates}, the updates of a rollout")
        _require("group_size", self.group_size, self.group_size >= 2, "at least 2: advantages compare responses of a group")
        _require("ceiling", self.ceiling, 1 <= self.ceiling < float("inf"), "a finite number of at least 1")
        _require("clip", self.clip, 0 <= self.clip < 1, "in [0, 1)")
        evaluated = self.eval_split is None or self.eval_prompts is not None
        _require("eval_split", self.eval_split, evaluated, "null without eval_prompts")
        high, bound = self.clip_high, self.sampler_correction_bound
        _require("clip_high", high, high is None or 0 <= high < float("inf"), "null or a finite number of at least 0")
        _require("sampler_correction_bound", bound, 1 <= bound < float("inf"), "a finite number of at least 1")
        _require("loss", self.loss, self.loss != "gspo", GSPO)
        ratio = self.min_learning_rate_ratio
        _require("min_learning_rate_ratio", ratio, 0 <= ratio <= 1, "in [0, 1]")
        unknown = sorted(set(self.trackers) - set(TRACKERS))
        _require("trackers", ", ".join(unknown), not unknown, f"any of {', '.join(TRACKERS)}")
        taken = sorted(RESERVED_TEMPLATE_KWARGS & set(self.chat_template_kwargs))
        _require("chat_template_kwargs", ", ".join(taken), not taken, "keys of the template, not the trainer's own")
        _ = self.point
        self._check_rewards()
        if self.sampler == "vllm":
            self._check_vllm()

    def _check_rewards(self) -> None:
        unnamed = isinstance(self.reward, list) and not (self.reward and all(self.reward))
        _require("reward", self.reward, not unnamed, "a name, or a list of at least one")
        weights, timeout = self.reward_weights, self.reward_timeout
        finite = weights is None or (all(abs(weight) < float("inf") for weight in weights) and any(weights))
        _require("reward_weights", weights, finite, "null or finite numbers, one of them not 0")
        _require("reward_timeout", timeout, timeout is None or 0 < timeout < float("inf"), "null or a finite number above 0")

    def _check_vllm(self) -> None:
        """What the engine could not do, and would do in another way without a word."""
        _require("vllm_memory", self.vllm_memory, 0 < self.vllm_memory < 1, "a share, above 0 and below 1")
        devices = self.vllm_devices
        distinct = devices is None or (len(set(devices)) == len(devices) > 0 and min(devices) >= 0)
        _require("vllm_devices", devices, distinct, "null or indices of GPUs, each once")
        length, shortest = self.vllm_max_model_len, self.max_new_tokens + (self.max_prompt_tokens or 1)
        _require("vllm_max_model_len", length, length is None or length >= shortest, f"null or at least {shortest}")
        rank = 0 if self.lora is None else self.lora.r
        _require("lora.r", rank, rank <= MAX_VLLM_RANK, f"at most {MAX_VLLM_RANK} with sampler: vllm")
        _require("temperature", self.temperature, self.temperature >= 0.01, "at least 0.01 with sampler: vllm")
        if self.device == "cpu":
            _require("vllm_sleep", self.vllm_sleep, not self.vllm_sleep, "false on device: cpu, where engines do not sleep")
            _require("vllm_devices", devices, devices is None, "null on device: cpu")

    @property
    def point(self) -> CreditPoint:
        """Where the reward's gradient is taken for credit; raises ValueError for what cannot be."""
        return CreditPoint(self.credit_point, self.credit_passes, self.credit_scale)

    @property
    def updates_per_rollout(self) -> int:
        return self.epochs_per_rollout * self.updates_per_epoch

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _check_types(settings: Any, prefix: str) -> None:
    for key, hint in get_type_hints(type(settings)).items():
        value = getattr(settings, key)
        _require(prefix + key, repr(value), _is_a(value, hint), type_in_words(hint))


def _is_a(value: object, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_is_a(value, option) for option in get_args(hint))
    if origin is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if origin is list:
        return isinstance(value, list) and all(_is_a(item, get_args(hint)[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if hint in (int, float):  # True is an int to Python, not to a user
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    return isinstance(value, hint)


def type_in_words(hint: Any) -> str:
    """A type in words for an error."""
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(type_in_words(option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    if get_origin(hint) is list:
        return f"a list of { {str: 'text', int: 'whole numbers', float: 'numbers'}[get_args(hint)[0]] }"
    names = {NoneType: "null", str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    return names.get(hint) or {dict: "a mapping", Lora: "a mapping of r, alpha and target_modules"}[get_origin(hint) or hint]


def _require(key: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"{key}: expected {expected}, got {value}")


def check_sources(config: Config, **given: Any) -> None:
    """Raises ValueError for a part that neither the config names nor the caller gives: a default would be another model; and
    for `reward_weights` of another number of rewards."""
    for key in ("policy", "reward", "prompts"):
        if given.get(key) is None and not getattr(config, key):
            raise ValueError(f"{key}: expected a name, a folder or a file, got none (the recipe quickstart names all three)")
    reward, weights = given.get("reward"), config.reward_weights
    names = config.reward if reward is None else reward
    count = len(names) if isinstance(names, list | tuple) else 1
    if weights is not None and len(weights) != count:
        raise ValueError(f"reward_weights: expected {count}, one for each reward, got {len(weights)}: {weights}")


def config_from(source: Config | dict[str, Any]) -> Config:
    """A Config from itself or from a dict of its keys; ValueError for a key that does not exist."""
    if isinstance(source, Config):
        return source
    known = {f.name for f in fields(Config)}
    unknown = sorted(set(source) - known)
    if unknown:
        raise ValueError(f"{unknown[0]}: no such key; known are {', '.join(sorted(known))}")
    values = dict(source)
    lora = values.get("lora")
    if isinstance(lora, dict):
        strange = sorted(set(lora) - {f.name for f in fields(Lora)})
        if strange:
            raise ValueError(f"lora.{strange[0]}: no such key; known are {', '.join(f.name for f in fields(Lora))}")
        values["lora"] = Lora(**lora)
    return Config(**values)
