"""`datc doctor` finds wrong what `train` refuses before it makes anything, and nothing else: each config goes to both."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train import TINY
from transformers import AutoModelForCausalLM, AutoTokenizer

from datc_train import doctor, train
from datc_train.config import config_from
from datc_train.models import resolve_device
from datc_train.quickstart import load_tiny_policy, load_tiny_reward_model, train_prompts
from datc_train.quickstart.smollm2 import policy_path

SMALL = TINY | {"steps": 1, "prompts_per_step": 1, "group_size": 2, "max_new_tokens": 4}
PATTERN = r".*layers\.0.*(q|k)_proj"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def findings(config: dict[str, Any]) -> list[doctor.Finding]:
    return doctor.examine(config_from(config), say=lambda _: None)


def both_refuse(change: dict[str, Any], says: str) -> None:
    config = SMALL | {"run_dir": "r"} | change
    with pytest.raises((ValueError, OSError)) as refused:
        train(config)
    assert str(refused.value).startswith(says)
    assert not Path("r").exists()
    wrong = [finding.text for finding in findings(config) if finding.state == "wrong"]
    assert " ".join(str(refused.value).split()) in wrong


def both_run(change: dict[str, Any]) -> list[doctor.Finding]:
    config = SMALL | {"run_dir": "r"} | change
    seen = findings(config)
    assert not [finding for finding in seen if finding.state == "wrong"]
    assert train(config) == Path("r")
    return seen


def saved(kind: str, **settings: Any) -> str:
    """A tiny model in a folder of its own, with other settings in its config."""
    model, tokenizer = load_tiny_policy() if kind == "policy" else load_tiny_reward_model()
    for key, value in settings.items():
        setattr(model.config, key, value)
    model.save_pretrained(kind)
    tokenizer.save_pretrained(kind)
    return kind


def without(folder: str, key: str) -> str:
    """Takes something off the saved tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    setattr(tokenizer, key, None)
    for path in Path(folder).glob("*token*"):
        path.unlink()
    shutil.rmtree(Path(folder) / "chat_templates", ignore_errors=True)
    (Path(folder) / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    return folder


def lines(name: str, *rows: Any) -> str:
    Path(name).write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return name


def with_unknown_token() -> str:
    """A policy whose tokenizer knows a word that has no embedding."""
    tokenizer = AutoTokenizer.from_pretrained(saved("policy"))
    tokenizer.add_tokens(["zzzq"])
    tokenizer.save_pretrained("policy")
    return "policy"


@pytest.mark.parametrize(
    "targets", ["nope", "all-linears", ["lm_head"], ["q_proj", "lm_head"], ".*", [], "", "(", ["nope", "q_proj"]]
)
def test_modules_that_cannot_be_adapted(targets: str | list[str]) -> None:
    both_refuse({"lora": {"target_modules": targets}}, "lora.target_modules: ")


def test_the_module_that_none_has_is_named() -> None:
    says = "lora.target_modules: expected names of the policy's modules, got 'nope'"
    both_refuse({"lora": {"target_modules": ["q_proj", "nope", "v_proj"]}}, says)


@pytest.mark.parametrize("targets", ["all-linear", PATTERN, ["q_proj", "layers.1.mlp.up_proj"], ["embed_tokens"]])
def test_modules_that_can(targets: str | list[str]) -> None:
    both_run({"lora": {"target_modules": targets}})


@pytest.mark.parametrize("key", ["device", "reward_device"])
@pytest.mark.parametrize("name", ["cuda", "gpu", "mps", "meta"])
def test_devices(monkeypatch: pytest.MonkeyPatch, key: str, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    both_refuse({key: name}, f"{key}: ")
    with pytest.raises(ValueError, match=f"^{key}: "):
        doctor.dry_run(config_from(SMALL | {key: name}), say=lambda _: None)
    with pytest.raises(ValueError, match="^reward_device: "):
        resolve_device(name, "reward_device")


EVALS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "missing": (lambda: {"eval_prompts": "nowhere.jsonl"}, "eval_prompts: nowhere.jsonl: expected a file"),
    "bad line": (lambda: {"eval_prompts": lines("e.jsonl", {"prompt": "a"}, "{")}, "eval_prompts: e.jsonl, line 2"),
    "missing column": (lambda: {"eval_prompts": lines("e.jsonl", {"question": "a"})}, "eval_prompts: e.jsonl, line 1"),
    "too long": (
        lambda: {"eval_prompts": lines("e.jsonl", {"prompt": "word " * 300}), "max_prompt_tokens": 100},
        "eval_prompts: expected at most 100 tokens",
    ),
    "no embedding": (
        lambda: {"eval_prompts": lines("e.jsonl", {"prompt": "say zzzq"}), "policy": with_unknown_token()},
        "eval_prompts: policy: expected ids below 512",
    ),
}


@pytest.mark.parametrize("name", EVALS)
def test_prompts_to_evaluate_on(name: str) -> None:
    change, says = EVALS[name]
    both_refuse(change(), says)


def test_dropout_under_gradient_checkpointing() -> None:
    policy = saved("policy", attention_dropout=0.1)
    both_refuse({"policy": policy, "gradient_checkpointing": True}, "gradient_checkpointing: expected a policy without dropout")
    both_run({"policy": policy})


def test_a_reward_tokenizer_without_padding() -> None:
    reward = without(saved("reward"), "pad_token")
    both_refuse({"reward": reward, "method": "p2t"}, "reward: method 'p2t' needs")
    both_run({"reward": reward})


def test_a_reward_tokenizer_without_a_chat_template() -> None:
    both_refuse({"reward": without(saved("reward"), "chat_template")}, "reward: ")


def test_a_reward_model_whose_context_holds_no_answer() -> None:
    prompt = train_prompts()[0]
    reward = saved("reward", max_position_embeddings=20)
    change = {"reward": reward, "prompts": lines("p.jsonl", prompt)}
    both_refuse(change, "reward: expected a context of at least")
    both_refuse(change | {"prompts": "quickstart", "eval_prompts": "p.jsonl"}, "reward: expected a context of at least")
    both_run(change | {"reward_on_overflow": "neutral"})


def test_a_context_that_an_answer_may_overflow_is_a_note() -> None:
    """Responses may stop before; to the token: what the row takes and one more."""
    _, tokenizer = load_tiny_policy()
    prompt = train_prompts()[0]
    row = tokenizer.apply_chat_template([*prompt["prompt"], {"role": "assistant", "content": ""}], return_dict=False)
    change = {"prompts": lines("p.jsonl", prompt), "reward": saved("reward", max_position_embeddings=len(row) + 1)}
    seen = findings(SMALL | change)
    assert not [finding for finding in seen if finding.state == "wrong"]
    assert next(finding.state for finding in seen if finding.name == "reward context") == "note"
    both_refuse(change | {"reward": saved("reward", max_position_embeddings=len(row))}, "reward: expected a context")


@pytest.mark.parametrize("kwargs", [{"tools": 3}, {"chat_template": 3}])
def test_values_on_which_the_chat_template_breaks(kwargs: dict[str, Any]) -> None:
    both_refuse({"chat_template_kwargs": kwargs}, "chat_template_kwargs: ")


def test_another_vocabulary_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DATC_CACHE", str(tmp_path / "cache"))
    tokenizer = AutoTokenizer.from_pretrained(policy_path())
    settings = load_tiny_policy()[0].config
    settings.vocab_size = len(tokenizer)
    AutoModelForCausalLM.from_config(settings).save_pretrained("other")
    tokenizer.save_pretrained("other")
    with pytest.warns(RuntimeWarning, match="another vocabulary"):
        seen = both_run({"policy": "other"})
    note = next(finding for finding in seen if finding.name == "vocabularies")
    assert note.state == "note"
    assert "credit goes by bytes" in note.text
    with pytest.warns(RuntimeWarning, match="another vocabulary"):
        doctor.dry_run(config_from(SMALL | {"policy": "other"}), say=lambda _: None)


def test_stop_ids_of_the_generation_config_alone() -> None:
    folder = without(saved("policy", eos_token_id=None), "eos_token")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    generation = Path(folder) / "generation_config.json"
    settings = json.loads(generation.read_text())
    generation.write_text(json.dumps(settings | {"eos_token_id": None}))
    both_refuse({"policy": folder}, "stop_ids: ")
    generation.write_text(json.dumps(settings | {"eos_token_id": 2}))
    both_run({"policy": folder})
