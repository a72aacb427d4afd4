"""`datc doctor` finds what would stop a run before a model loads; `datc export` writes what was trained."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_refusals import run_cli
from test_train import TINY
from tolerances import FORWARD
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from datc_train import doctor, train
from datc_train.bench import overhead
from datc_train.cli import main
from datc_train.config import config_from
from datc_train.export import export
from datc_train.quickstart import load_tiny_policy, load_tiny_reward_model


def findings(config: dict) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.examine(config_from(config), say=lambda _: None)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    for name, (model, tokenizer) in {"policy": load_tiny_policy(), "reward": load_tiny_reward_model()}.items():
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root / "policy", root / "reward"


def outlined(load: Any, *args: Any, **options: Any) -> Any:
    assert options["device_map"] == "meta"
    return load(*args, **options)


def test_every_backend_is_there_or_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    said = capsys.readouterr().out
    for name in ("reference", "chunked", "cpu", "triton", "cuda"):
        assert f"backend {name} " in said


def test_a_recipe_that_would_run(folders: tuple[Path, Path], tmp_path: Path) -> None:
    seen = findings(TINY | {"policy": str(folders[0]), "reward": str(folders[1]), "run_dir": str(tmp_path / "r")})
    assert not [finding for finding in seen.values() if finding.state == "wrong"]
    assert "id by id" in seen["vocabularies"].text
    assert seen["policy weights"].text == seen["reward weights"].text == "all there, with the shapes of the config, and all used"
    assert "<|im_end|>" in seen["stop ids"].text
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("reward", ["quickstart", "untrained-half", "untrained-full"])
def test_what_comes_with_the_package_would_run(reward: str) -> None:
    seen = findings({"policy": "quickstart", "reward": reward, "prompts": "quickstart", "device": "cpu"})
    assert not [finding for finding in seen.values() if finding.state == "wrong"]


def test_nothing_big_is_read(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and shapes of the weights are read onto the meta device; what is packaged, not at all."""
    for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        monkeypatch.setattr(kind, "from_pretrained", partial(outlined, kind.from_pretrained))
    for models in ({"policy": str(folders[0]), "reward": str(folders[1])}, {"policy": "quickstart", "reward": "quickstart"}):
        assert findings(TINY | models)["memory"].state == "ok"


@pytest.mark.parametrize(
    ("change", "name", "says"),
    [
        ({"policy": "./no/such"}, "policy", "policy: expected quickstart"),
        ({"reward": "./no/such"}, "reward", "reward: expected quickstart"),
        ({"prompts": "nowhere.jsonl"}, "prompts", "nowhere.jsonl"),
        ({"prompts_per_step": 10**6}, "prompts", "prompts_per_step"),
        ({"max_new_tokens": 10**6}, "context", "context of 2048"),
        ({"device": "quantum"}, "device", "device"),
        ({"backend": "cuda"}, "device", "cannot run here"),
        ({"resume": "auto"}, "run_dir", "resume: expected run_dir"),
    ],
)
def test_what_would_stop_a_run_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict, name: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = findings(TINY | change)[name]
    assert found.state == "wrong"
    assert says in found.text


def test_a_method_that_needs_an_adapter(tmp_path: Path) -> None:
    """The doctor says what a run would say, and so does its dry run."""
    config = config_from({"policy": "tiny", "reward": "tiny", "prompts": "quickstart", "method": "arca", "lora": None})
    config = replace(config, run_dir=str(tmp_path / "r"), max_new_tokens=8)
    wrong = [finding for finding in doctor.examine(config, say=lambda _: None) if finding.state == "wrong"]
    assert [finding.name for finding in wrong] == ["recipe"]
    assert wrong[0].text.startswith("method: 'arca' compares the policy with and without its adapter")
    with pytest.raises(ValueError, match="^method: 'arca' compares"):
        doctor.dry_run(config, say=lambda _: None)


def test_a_reward_model_without_head_or_with_two_labels(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """T21, T22: it would be random, or a classifier of something else."""
    settings = AutoConfig.from_pretrained(folders[0], num_labels=1)
    AutoModelForCausalLM.from_pretrained(folders[0]).save_pretrained(tmp_path / "headless")
    AutoTokenizer.from_pretrained(folders[0]).save_pretrained(tmp_path / "headless")
    settings.save_pretrained(tmp_path / "headless")
    found = findings(TINY | {"reward": str(tmp_path / "headless")})["reward"]
    assert found.state == "wrong"
    assert "without score.weight (1 newly initialised)" in found.text
    settings.num_labels = 2
    settings.save_pretrained(tmp_path / "headless")
    found = findings(TINY | {"reward": str(tmp_path / "headless")})["reward"]
    assert "num_labels=1, got num_labels=2" in found.text


def test_doctor_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main(["doctor", "--config", "tiny", "--dry-run"])
    said = capsys.readouterr().out
    assert "a step on one prompt" in said
    assert not list(tmp_path.iterdir())
    status, error = run_cli(capsys, "doctor", "--config", "tiny", "--prompts", "nowhere.jsonl")
    assert status == 2
    assert "1 of these would stop the run" in error
    status, error = run_cli(capsys, "doctor", "--dry-run")
    assert (status, "--config" in error) == (2, True)


def test_an_exported_policy_is_the_trained_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from peft import PeftModel

    run = train(TINY | {"run_dir": str(tmp_path / "r"), "learning_rate": 0.05})
    main(["export", str(run)])
    assert "AutoModelForCausalLM" in capsys.readouterr().out
    base, tokenizer = load_tiny_policy()
    ids = torch.arange(3, 30)[None]
    untrained = base(input_ids=ids).logits
    trained = PeftModel.from_pretrained(base, str(run / "checkpoints" / "000002"))(input_ids=ids).logits
    exported = AutoModelForCausalLM.from_pretrained(run / "export")(input_ids=ids).logits
    assert (exported - trained).abs().max() < 4 * FORWARD  # logits of up to 4
    assert (exported - untrained).abs().max() > 1e-2
    assert AutoTokenizer.from_pretrained(run / "export").encode("Hello") == tokenizer.encode("Hello")


def test_an_adapter_on_a_tied_embedding_is_exported(tmp_path: Path) -> None:
    """The head that shares its weight stays as it was; without such an adapter the export is tied as its base is."""
    options = {"run_dir": str(tmp_path / "r"), "learning_rate": 0.05, "lora": {"target_modules": ["embed_tokens", "q_proj"]}}
    run = train(TINY | options)
    folder, difference = export(run)
    assert difference < FORWARD
    assert not AutoConfig.from_pretrained(folder).tie_word_embeddings
    plain, _ = export(train(TINY | {"run_dir": str(tmp_path / "p"), "steps": 1}))
    assert AutoConfig.from_pretrained(plain).tie_word_embeddings


def test_a_fully_tuned_policy_is_exported_too(tmp_path: Path) -> None:
    run = train(TINY | {"run_dir": str(tmp_path / "r"), "lora": None, "steps": 1})
    folder, difference = export(run, tmp_path / "out")
    assert folder == tmp_path / "out"
    assert difference < FORWARD


def test_exports_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(TINY | {"run_dir": str(tmp_path / "r"), "steps": 1})
    (tmp_path / "taken").mkdir()
    for words, says in (
        ([str(tmp_path / "taken")], "run: expected a run's folder"),
        ([str(run), "--out", str(tmp_path / "taken")], "exists"),
        ([str(run), "--checkpoint", "7"], "checkpoint: expected last, best or one of 1, got 7"),
        ([str(run), "--checkpoint", "best"], "checkpoint: expected last"),
    ):
        status, error = run_cli(capsys, "export", *words)
        assert status == 2
        assert says in error


def test_overhead_is_a_ratio_of_steps_on_the_same_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["bench", "overhead", "--config", "tiny", "--minutes", "0", "--json", str(tmp_path / "o.json")])
    result = json.loads((tmp_path / "o.json").read_text())
    assert result["overhead"] == result["methods"]["datc"]["step"] / result["methods"]["grpo"]["step"]
    assert len(result["overhead_of_each_round"]) == 3
    assert set(result["points"]) == set(overhead.POINTS)
    assert all(at["score"] > 0 for at in result["points"].values())
    assert result["response_tokens"] == 2 * 4 * 12  # prompts, responses, tokens: nothing stops early
    assert result["methods"]["grpo"]["weights"] < result["methods"]["datc"]["weights"]
    assert (tmp_path / "o.png").stat().st_size > 1000
    assert "overhead" in capsys.readouterr().out


def test_an_equal_reward_model_is_the_size_of_the_policy() -> None:
    from datc_train.models import load_reward

    config = config_from(TINY | {"policy": "quickstart", "reward": "untrained-full"})
    _, tokenizer = doctor._outline("quickstart", "policy")
    reward = load_reward(config, torch.device("cpu"), tokenizer)
    assert reward.model.config.num_hidden_layers == 30
    assert overhead.PAPER == (1.057, 1.091)
