"""What cannot be is refused in one clear line, before anything is lost. T numbers: reports against other trainers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_train import TINY
from tokenizers import Tokenizer

from datc_train import train
from datc_train.cli import config_of, main
from datc_train.config import Config, config_from
from datc_train.quickstart import load_tiny_policy


def run_cli(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as exit_:
        main(list(words))
    return int(exit_.value.code or 0), capsys.readouterr().err


def test_a_recipe_with_merged_keys(tmp_path: Path) -> None:
    """A key beside the merged one that it replaces stands there once, however often its mapping is referred to."""
    path = tmp_path / "r.yaml"
    path.write_text("steps: 3\nchat_template_kwargs: {p: &b {<<: {r: 1}, r: 2}, w: {<<: *b, r: 3}}\n")
    config = config_of(["--config", str(path)])
    assert config.steps == 3
    assert config.chat_template_kwargs == {"p": {"r": 2}, "w": {"r": 3}}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train"], "--config"),
        (["train", "--config", "missing.yaml"], "missing.yaml"),
        (["train", "--config", "tiny", "--no_such_key", "3"], "--no_such_key"),
        (["train", "--config", "tiny", "--steps", "many"], "steps"),
        (["train", "--config", "tiny", "--steps", "0"], "steps: expected at least 1"),
        (["train", "--config", "tiny", "--method", "ppo"], "method"),
        (["train", "--config", "tiny", "--loss", "ppo"], "loss"),
        (["train", "--config", "tiny", "--dtype", "int8"], "dtype"),
        (["train", "--config", "tiny", "--device", "quantum"], "device"),
        (["train", "--config", "tiny", "--backend", "fast"], "backend"),
        (["train", "--config", "tiny", "--backend", "cuda"], "cuda"),
        (["train", "--config", "tiny", "--group_size", "1"], "group_size: expected at least 2"),
        (["train", "--config", "tiny", "--ceiling", "0.5"], "ceiling"),
        (["train", "--config", "tiny", "--clip", "1.5"], "clip"),
        (["train", "--config", "tiny", "--temperature", "0"], "temperature"),
        (["train", "--config", "tiny", "--learning_rate", "0"], "learning_rate"),
        (["train", "--config", "tiny", "--lora.r", "0"], "lora.r"),
        (["train", "--config", "tiny", "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["train", "--config", "tiny", "--prompts_per_step", "100000"], "prompts_per_step"),
        (["train", "--config", "tiny", "--policy", "./no/such/folder"], "policy"),
        (["train", "--config", "tiny", "--reward", "./no/such/folder"], "reward: expected quickstart, tiny, a folder"),
        (["train", "--config", "tiny", "--max_prompt_tokens", "1"], "prompt"),
        (["train", "--config", "tiny", "--max_new_tokens", "100000"], "max_new_tokens: expected at most"),
        (["train", "--config", "tiny", "--lora.alpha", "0"], "lora.alpha: expected at least 1"),
        (["train", "--config", "tiny", "--seed", str(2**70)], "seed: expected below 2^63"),
        (["train", "--config", "tiny", "--chat_template_kwargs", "{tokenize: false}"], "chat_template_kwargs"),
        (["fly"], "fly"),
    ],
)
def test_a_users_mistake_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, error = run_cli(capsys, *words)
    assert status == 2
    assert error.startswith("datc: ")
    assert error.strip().count("\n") == 0
    assert says in error
    assert not list(tmp_path.iterdir())  # no folder of a run that never was


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "r.yaml, got nothing"),
        (b"steps", "r.yaml, got 'steps'"),
        (b"steps: [1", "YAML in"),
        (b"steps: 1\nseed: 2\nsteps: 3", "the key 'steps' stands there twice"),
        (b"lora: {r: 1, r: 2}", "the key 'r' stands there twice"),
        (b"lora: {r: 1}\nlora.r: 2", "r.yaml, got both lora and lora.r"),
        (b"lora: null\nlora.r: 2", "r.yaml, got both lora and lora.r"),
        ("seed: 1  # gr\u00fc\u00dfe".encode("latin-1"), "r.yaml"),
    ],
)
def test_a_recipe_that_is_none(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "r.yaml").write_bytes(content)
    status, error = run_cli(capsys, "train", "--config", str(tmp_path / "r.yaml"))
    assert status == 2
    assert error.startswith("datc: --config: expected")
    assert says in error


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--stepz", "3"], "--stepz: no such key; did you mean --steps?"),
        (["--xyzzy=3"], "--xyzzy: no such key; keys are listed by datc train --help"),
        (["--lora.rr", "3"], "lora.rr: no such key; did you mean lora.r?"),
        (["--steps", "many"], "steps: expected a whole number, got many"),
        (["--beta", "none"], "beta: expected a number, got none"),
        (["--method", "dact"], "method: expected one of grpo, datc, "),
        (["--lora.r", "x"], "lora.r: expected a whole number, got 'x'"),
        (["--lora", "{r: 4, alhpa: 3}"], "lora.alhpa: no such key; did you mean lora.alpha?"),
        (["--eval_every", "soon"], "eval_every: expected a whole number or null, got soon"),
        (["--trackers", "tensorboard"], "trackers: expected a list of text, got tensorboard"),
    ],
)
def test_the_parsers_errors_are_in_the_configs_words(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    status, error = run_cli(capsys, "train", "--config", "tiny", *words)
    assert status == 2
    assert error.startswith(f"datc: {says}"), error


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("stepz: 3", "stepz: no such key; did you mean steps?"),
        ("lora: {r: 8, alfa: 3}", "lora.alfa: no such key; did you mean lora.alpha?"),
        ("lora: {r: x}", "lora: expected a mapping of r, alpha and target_modules or null, got {'r': 'x'}"),
        ("method: dact", "method: expected one of grpo, datc, "),
        ("trackers: tensorboard", "trackers: expected a list of text, got tensorboard"),
    ],
)
def test_a_recipes_errors_too(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"policy: tiny\n{content}\n")
    status, error = run_cli(capsys, "train", "--config", str(path))
    assert status == 2
    assert says in error


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    status, error = run_cli(capsys, "train", "--config", "tiny", "--steps", "0", "--debug")
    assert status == 2
    assert "Traceback" in error


def test_an_unknown_key_in_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("policy: tiny\nstep: 3\n")
    status, error = run_cli(capsys, "train", "--config", str(recipe))
    assert status == 2
    assert "step" in error
    with pytest.raises(ValueError, match="^step: no such key"):
        config_from({"step": 3})


def test_an_existing_run_folder_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious").mkdir()
    status, error = run_cli(capsys, "train", "--config", "tiny", "--run_dir", str(tmp_path / "precious"))
    assert status == 2
    assert "exists" in error
    assert list((tmp_path / "precious").iterdir()) == []


def test_module_and_recipe_by_name_and_override(tmp_path: Path) -> None:
    words = ["train", "--config", "tiny", "--steps", "1", "--run_dir", str(tmp_path / "r"), "--device=cpu"]
    done = subprocess.run([sys.executable, "-m", "datc_train", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "r") in done.stdout
    assert len((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()) == 1


def test_help_names_every_key() -> None:
    done = subprocess.run([sys.executable, "-m", "datc_train", "train", "--help"], capture_output=True, text=True, check=True)
    for key in Config.__dataclass_fields__:
        assert f"--{key}" in done.stdout


def test_every_recipe_is_a_config() -> None:
    import yaml

    from datc_train.cli import recipes

    folder = Path(sys.modules["datc_train.cli"].__file__ or "").parent / "recipes"
    assert {"quickstart", "tiny"} <= set(recipes())
    for name in recipes():
        config_from(yaml.safe_load((folder / f"{name}.yaml").read_text()))


def test_the_quickstart_keeps_the_papers_beta() -> None:
    import yaml

    folder = Path(sys.modules["datc_train.cli"].__file__ or "").parent / "recipes"
    assert yaml.safe_load((folder / "quickstart.yaml").read_text())["beta"] == 0.03


def test_datc_refuses_a_reward_without_gradient(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^reward: method 'datc' needs the gradient.*grpo"):
        train(TINY | {"run_dir": str(tmp_path / "r")}, reward=lambda **_: [])
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("values", [[1.0], None, [float("nan")] * 8, ["good"] * 8])
def test_a_reward_function_that_gives_nonsense(tmp_path: Path, values: object) -> None:
    with pytest.raises(ValueError, match="^reward: expected"):
        train(TINY | {"run_dir": str(tmp_path / "r"), "method": "grpo"}, reward=lambda **_: values)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["policy", "reward", "prompts"])
def test_nothing_big_has_a_default(tmp_path: Path, key: str) -> None:
    """A forgotten `reward` would train against another model without a word."""
    with pytest.raises(ValueError, match=f"^{key}: expected a name, a folder or a file, got none"):
        train({k: v for k, v in TINY.items() if k != key} | {"run_dir": str(tmp_path / "r")})
    assert not (tmp_path / "r").exists()


def test_no_trainable_parameter_is_an_error(tmp_path: Path) -> None:
    """T38: an adapter loaded for inference would train nothing and log healthy curves."""
    from peft import LoraConfig, get_peft_model

    base, tokenizer = load_tiny_policy()
    model = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear"))
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="^policy: expected trainable parameters"):
        train(TINY | {"run_dir": str(tmp_path / "r")}, policy=model, tokenizer=tokenizer)


def test_an_adapter_on_the_head_is_refused(tmp_path: Path) -> None:
    """K39: its base weight alone would be used, in silence."""
    from peft import LoraConfig, get_peft_model

    base, tokenizer = load_tiny_policy()
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["lm_head", "q_proj"]))
    with pytest.raises(ValueError, match="^policy: expected an LM head that is a plain linear layer"):
        train(TINY | {"run_dir": str(tmp_path / "r")}, policy=model, tokenizer=tokenizer)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_stop_the_run(tmp_path: Path, poison: float) -> None:
    """T6: with the step or the prompt named, and the weights as they were."""
    policy, tokenizer = load_tiny_policy()
    with torch.no_grad():
        policy.model.norm.weight[0] = poison
    before = {k: v.clone() for k, v in policy.state_dict().items()}
    with pytest.raises(RuntimeError, match="prompt"):
        train(TINY | {"run_dir": str(tmp_path / "r"), "lora": None}, policy=policy, tokenizer=tokenizer)
    assert all(torch.equal(before[k].nan_to_num(), v.nan_to_num()) for k, v in policy.state_dict().items())


def test_a_loss_that_is_not_finite_names_step_and_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T6: nothing is updated."""
    import datc_train.passes as module

    real = module.linear_credit

    def poisoned(hidden, *args, **kwargs):  # type: ignore[no-untyped-def]
        return real(hidden * float("nan") if hidden.requires_grad else hidden, *args, **kwargs)

    monkeypatch.setattr(module, "linear_credit", poisoned)
    policy, tokenizer = load_tiny_policy()
    before = {k: v.clone() for k, v in policy.state_dict().items()}
    with pytest.raises(RuntimeError, match="loss of step 1 is nan; nothing was updated; prompts"):
        train(TINY | {"run_dir": str(tmp_path / "r"), "lora": None, "method": "grpo"}, policy=policy, tokenizer=tokenizer)
    assert all(torch.equal(before[k], v) for k, v in policy.state_dict().items())


def test_a_gradient_that_is_not_finite_names_step_and_prompts(tmp_path: Path) -> None:
    policy, tokenizer = load_tiny_policy()
    policy.model.norm.weight.register_hook(lambda g: g * float("inf"))
    before = {k: v.clone() for k, v in policy.state_dict().items()}
    with pytest.raises(RuntimeError, match="gradient's norm of step 1 is (nan|inf); nothing was updated; prompts"):
        train(TINY | {"run_dir": str(tmp_path / "r"), "lora": None}, policy=policy, tokenizer=tokenizer)
    assert all(torch.equal(before[k], v) for k, v in policy.state_dict().items())


def test_a_sampler_that_is_not_the_policy_is_found(tmp_path: Path) -> None:
    """T48, T55: log-probabilities of the first rollout are held against the policy's own."""
    import datc_train.rollout.make as module
    from datc_train.rollout import TransformersSampler

    class Colder(TransformersSampler):
        def __init__(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            super().__init__(*args, **kwargs | {"temperature": 0.5})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TransformersSampler", Colder)
        with pytest.raises(RuntimeError, match="log-prob"):
            train(TINY | {"run_dir": str(tmp_path / "r")})


def test_dropout_with_checkpointing_is_refused(tmp_path: Path) -> None:
    policy, tokenizer = load_tiny_policy()
    policy.config.attention_dropout = 0.1
    with pytest.raises(ValueError, match="^gradient_checkpointing: expected a policy without dropout"):
        train(TINY | {"run_dir": str(tmp_path / "r"), "gradient_checkpointing": True}, policy=policy, tokenizer=tokenizer)


def test_a_reward_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """T24: policy ids would be read as the reward model's."""
    from transformers import PreTrainedTokenizerFast

    from datc_train.quickstart import load_tiny_reward_model
    from datc_train.reward import RewardModel

    policy, tokenizer = load_tiny_policy()
    model, other = load_tiny_reward_model()
    assert isinstance(other, PreTrainedTokenizerFast)
    data = json.loads(other.backend_tokenizer.to_str())
    vocab = data["model"]["vocab"]
    first, second = [token for token, i in vocab.items() if i in (100, 101)]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    swapped = other.__class__(tokenizer_object=Tokenizer.from_str(json.dumps(data)), eos_token="<|im_end|>")
    swapped.chat_template = other.chat_template
    with pytest.raises(ValueError, match="^policy_tokenizer: expected the reward model's vocabulary"):
        train(TINY | {"run_dir": str(tmp_path / "r")}, policy, tokenizer, RewardModel(model, swapped))


def test_a_base_that_still_holds_an_adapter_is_refused(tmp_path: Path) -> None:
    policy, tokenizer = load_tiny_policy()
    train(TINY | {"run_dir": str(tmp_path / "a"), "steps": 1}, policy, tokenizer)
    with pytest.raises(ValueError, match="^policy: holds adapter layers of an earlier run"):
        train(TINY | {"run_dir": str(tmp_path / "b"), "steps": 1}, policy, tokenizer)


def test_the_command_line_has_the_last_word_wherever_the_recipe_stands() -> None:
    from datc_train.cli import _recipes_first

    assert _recipes_first(["train", "--steps", "1", "--config", "r"]) == ["train", "--config", "r", "--steps", "1"]
    assert _recipes_first(["train", "--steps", "1", "--config=r"]) == ["train", "--config=r", "--steps", "1"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"schedule": "linear"},
        {"mask_truncated": "no"},
        {"weight_decay": float("inf")},
        {"beta": float("inf")},
        {"method": "x"},
        {"loss": "x"},
        {"utility": "x"},
        {"dtype": "float8"},
        {"dtype": "float16", "lora": None},
        {"steps": "3"},
        {"steps": 1.5},
        {"steps": None},
        {"learning_rate": "3e-4"},
        {"device": None},
        {"policy": 3},
        {"run_dir": 3},
        {"chat_template_kwargs": "x"},
        {"chat_template_kwargs": {"add_generation_prompt": False}},
        {"max_prompt_tokens": "9"},
        {"lora": 8},
    ],
)
def test_values_given_in_python_are_checked(tmp_path: Path, wrong: dict) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: expected"):
        train(TINY | {"run_dir": str(tmp_path / "r")} | wrong)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("wrong", [{"rank": 8}, {"r": "8"}, {"alpha": 0}, {"target_modules": 3}])
def test_adapter_settings_are_checked(tmp_path: Path, wrong: dict) -> None:
    with pytest.raises(ValueError, match=rf"^lora\.{next(iter(wrong))}: "):
        train(TINY | {"run_dir": str(tmp_path / "r"), "lora": wrong})


def test_an_unfinished_download_names_the_key(tmp_path: Path) -> None:
    policy, tokenizer = load_tiny_policy()
    folder = tmp_path / "model"
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    for key in ("policy", "reward"):
        with pytest.raises(ValueError, match=f"^{key}: expected"):
            train(TINY | {"run_dir": str(tmp_path / "r"), key: str(folder)})
    assert not (tmp_path / "r").exists()


def test_a_bare_module_is_no_reward(tmp_path: Path) -> None:
    from datc_train.quickstart import load_tiny_reward_model

    for method in ("grpo", "datc"):
        with pytest.raises(ValueError, match=r"^reward: expected RewardModel\(model, tokenizer\) around it"):
            train(TINY | {"run_dir": str(tmp_path / "r"), "method": method}, reward=load_tiny_reward_model()[0])


@pytest.mark.parametrize("column", ["prompts", "completions", "completion_ids"])
def test_columns_that_a_reward_function_gets_from_the_trainer(tmp_path: Path, column: str) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", column: 1}]
    with pytest.raises(ValueError, match=f"^prompts: expected other columns.*got {column} in prompt 1"):
        train(TINY | {"run_dir": str(tmp_path / "r"), "method": "grpo"}, reward=lambda **_: [], prompts=rows)


def test_numbers_of_numpy_and_torch_are_numbers(tmp_path: Path) -> None:
    import numpy as np

    values = [1, 2.0, np.float32(3), np.int64(4), torch.tensor(5.0), np.array(6.0), True, np.bool_(False)]
    run = train(TINY | {"run_dir": str(tmp_path / "r"), "method": "grpo", "steps": 1}, reward=lambda **_: values)
    assert json.loads((run / "metrics.jsonl").read_text())["reward_mean"] == pytest.approx(22 / 8)


def test_a_score_beyond_float32_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^reward: expected finite float32 numbers.*in step 1$"):
        train(TINY | {"run_dir": str(tmp_path / "r"), "method": "grpo"}, reward=lambda **_: [1e39] * 8)


def test_a_prompt_learning_adapter_is_refused(tmp_path: Path) -> None:
    """Its virtual tokens are not part of the decoder: it would train nothing."""
    from peft import PromptTuningConfig, get_peft_model

    base, tokenizer = load_tiny_policy()
    model = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="^policy: expected an adapter of weights.*PROMPT_TUNING"):
        train(TINY | {"run_dir": str(tmp_path / "r")}, policy=model, tokenizer=tokenizer)


def test_trainable_parameters_that_the_loss_cannot_reach(tmp_path: Path) -> None:
    from datc_train.policy import take_policy

    base, tokenizer = load_tiny_policy()
    base.requires_grad_(False)
    base.extra = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="^policy: expected trainable parameters in the decoder or the LM head"):
        take_policy(base, tokenizer, starts_at_base=False, reference=False)


def test_a_template_of_the_reward_model_that_refuses(tmp_path: Path) -> None:
    from datc_train.quickstart import load_tiny_reward_model
    from datc_train.reward import RewardModel

    model, tokenizer = load_tiny_reward_model()
    tokenizer.chat_template = (
        "{% if messages[0].content != 'Hello' %}{{ raise_exception('no') }}{% endif %}" + tokenizer.chat_template
    )
    reward = RewardModel(model, tokenizer)
    with pytest.raises(ValueError, match="^prompts: the reward model's chat template refuses an answer to 'b': no$"):
        train(TINY | {"run_dir": str(tmp_path / "r")}, reward=reward, prompts=["b", "b"])
