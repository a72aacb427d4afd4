"""From the names in a config to models: what comes with the package, a folder, or a hub name."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jinja2.exceptions import TemplateError
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from datc_train.config import Config, Lora
from datc_train.policy import Policy, check_dropout, take_policy
from datc_train.pretrained import causal_model
from datc_train.reward import RewardModel

REWARDS = ("quickstart", "tiny", "untrained-half", "untrained-full")  # names that are no folder and no hub name


def resolve_device(name: str, key: str = "device") -> torch.device:
    """ "auto" is a GPU where there is one. Raises ValueError, beginning with the key, for a device that is not here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{key}: expected auto, cpu, cuda or cuda:<index>, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{key}: expected auto, cpu, cuda or cuda:<index>, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{key}: {name!r} asked for, but torch sees no GPU here (torch {torch.__version__})")
    return device


def reward_device(config: Config, device: torch.device) -> torch.device:
    """Where the reward model of a policy on `device` lives. Raises as `resolve_device`."""
    return device if config.reward_device is None else resolve_device(config.reward_device, "reward_device")


def load_policy(
    config: Config, device: torch.device, model: Any = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> Policy:
    """The policy of a run, with a fresh adapter where the config has `lora` and `model` is not a PEFT model already.

    On torch's meta device, of a model there, it is the policy without its numbers: what cannot be is refused all the same.
    """
    dtype = getattr(torch, config.dtype)
    if model is None:
        model, own_tokenizer = load_causal(config.policy, dtype, device)
        tokenizer = own_tokenizer if tokenizer is None else tokenizer
    if tokenizer is None:
        raise ValueError("tokenizer: expected one beside policy, got None")
    _check_template_kwargs(tokenizer, config.chat_template_kwargs)
    model = model.to(device)
    if not isinstance(model, PeftModel) and any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError("policy: holds adapter layers of an earlier run; pass its PeftModel, or load the model afresh")
    starts_at_base = False
    if config.lora is not None and not hasattr(model, "peft_config"):
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(config.seed)
            model = _with_adapter(model, config.lora)
        starts_at_base = True
    elif config.lora is None and not hasattr(model, "peft_config"):
        model.requires_grad_(True)
    if config.gradient_checkpointing:
        check_dropout(model)
        # Older versions of transformers know the second name alone.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    model.train(config.gradient_checkpointing)
    return take_policy(model, tokenizer, starts_at_base=starts_at_base, reference=config.beta > 0)


def read_policy(
    config: Config, device: torch.device, model: Any = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> Policy:
    """The policy that training would start from, to look at: no adapter is put on it, and its mode, and which of its
    parameters train, stay as they are. Arguments and errors as for `load_policy`."""
    if model is None:
        model, own_tokenizer = load_causal(config.policy, getattr(torch, config.dtype), device)
        tokenizer = own_tokenizer if tokenizer is None else tokenizer
    if tokenizer is None:
        raise ValueError("tokenizer: expected one beside policy, got None")
    _check_template_kwargs(tokenizer, config.chat_template_kwargs)
    model = model.to(device)
    flags = [p.requires_grad for p in model.parameters()]
    model.requires_grad_(True)
    try:
        return take_policy(model, tokenizer, starts_at_base=True, reference=False)
    finally:
        for p, flag in zip(model.parameters(), flags, strict=True):
            p.requires_grad_(flag)


def _check_template_kwargs(tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any]) -> None:
    """Raises ValueError for values on which the chat template breaks; what it refuses in words is said of the prompts."""
    if not kwargs or not tokenizer.chat_template:
        return
    try:
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True, **kwargs
        )
    except TemplateError:
        return
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"chat_template_kwargs: expected values that the policy's chat template can use, got {kwargs}: {error}"
        ) from error


@contextmanager
def wrapping() -> Iterator[None]:
    """Around a model on which PEFT puts an adapter: it asks for an attribute that transformers has renamed, and nobody can act on
    the warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        yield


def _with_adapter(model: Any, lora: Lora) -> PeftModel:
    """Raises ValueError for target_modules that PEFT refuses, of which one is no module's, or that take in the LM head."""
    from peft import LoraConfig, get_peft_model

    targets = lora.target_modules
    settings = LoraConfig(r=lora.r, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=targets)
    try:
        with wrapping():
            model = get_peft_model(model, settings)
    except (ValueError, re.error) as error:
        raise ValueError(f"lora.target_modules: {targets!r} does not fit this policy: {error}") from error
    asked = model.peft_config["default"].target_modules  # PEFT has put today's names in place of what older models called them
    found = model.base_model.targeted_module_names
    names = [] if isinstance(asked, str) else sorted(asked)
    missing = [name for name in names if not any(f".{module}".endswith(f".{name}") for module in found)]
    if missing:
        raise ValueError(f"lora.target_modules: expected names of the policy's modules, got {missing[0]!r}, which none has")
    if isinstance(model.get_base_model().get_output_embeddings(), BaseTunerLayer):
        raise ValueError(f"lora.target_modules: expected modules below the LM head, got {targets!r}, which takes in the head")
    return model


def load_base(config: Config, dtype: torch.dtype) -> Any:
    """The model that a run's adapter sits on, without one, on the CPU."""
    return load_causal(config.policy, dtype, torch.device("cpu"))[0]


def base_folder(config: Config) -> str | None:
    """The folder or hub name from which other programs can load the config's policy; None for "tiny", which is in none."""
    if config.policy == "quickstart":
        from datc_train.quickstart.smollm2 import policy_path

        return str(policy_path())
    return None if config.policy == "tiny" else config.policy


def load_reward(
    config: Config,
    device: torch.device,
    policy_tokenizer: PreTrainedTokenizerBase,
    outline: tuple[Any, PreTrainedTokenizerBase] | None = None,
) -> RewardModel:
    """The reward model of a run, reading the policy's token ids; `outline`: of this model and tokenizer, without weights."""
    assert isinstance(config.reward, str)  # of several, `rewards.py` loads each
    dtype = getattr(torch, config.dtype)
    options: dict[str, Any] = {
        "policy_tokenizer": policy_tokenizer,
        "max_tokens_per_batch": config.reward_batch_tokens,
        "on_overflow": config.reward_on_overflow,
    }
    with named_errors("reward", config.reward):
        if outline is not None:
            return RewardModel(*outline, outline=True, **options)
        if config.reward not in REWARDS:
            return RewardModel.from_pretrained(config.reward, dtype=dtype, device=device, **options)
        from datc_train import quickstart

        match config.reward:
            case "quickstart":
                model, tokenizer = quickstart.load_reward_model(dtype=dtype, device=str(device))
            case "tiny":
                model, tokenizer = quickstart.load_tiny_reward_model(dtype=dtype, device=str(device))
            case _:
                layers = 14 if config.reward == "untrained-half" else None
                model, tokenizer = quickstart.load_untrained_reward_model(layers, dtype=dtype, device=device)
        return RewardModel(model, tokenizer, **options)


def load_causal(name: str, dtype: torch.dtype, device: torch.device) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model of a config's `policy` and its tokenizer; a folder's or the hub's is on the CPU still.

    Raises ValueError, beginning with `policy`, as `causal_model`.
    """
    if name in ("quickstart", "tiny"):
        from datc_train import quickstart

        load = quickstart.load_policy if name == "quickstart" else quickstart.load_tiny_policy
        return load(dtype=dtype, device=str(device))
    with named_errors("policy", name):
        return causal_model(name, dtype), AutoTokenizer.from_pretrained(name)


@contextmanager
def named_errors(key: str, name: str) -> Iterator[None]:
    """Says which key of the config could not be loaded: its name, an unfinished download, another kind of model."""
    try:
        yield
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        said = str(error).removeprefix("path: ")
        if said.startswith("expected "):
            raise ValueError(f"{key}: {said}") from error
        raise ValueError(f"{key}: expected quickstart, tiny, a folder or a hub name, got {name!r}: {error}") from error
