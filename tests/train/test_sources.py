"""What a config cannot say: parts given in Python, and what a file of prompts held when the run began."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from test_train import TINY

from datc_train import train
from datc_train.cli import main
from datc_train.export import export
from datc_train.quickstart import load_tiny_policy, load_tiny_reward_model
from datc_train.reward import RewardModel
from datc_train.run_folder import read_lines
from datc_train.sources import read_sources

ONE = TINY | {"steps": 1, "save_every": 1, "prompts_per_step": 1, "report": False}
LINES = ['{"prompt": "Name a quiet hobby."}', '{"prompt": "How do I keep guacamole green?"}']


def given(name: str) -> dict[str, Any]:
    if name == "policy":
        model, tokenizer = load_tiny_policy()
        return {"policy": get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")), "tokenizer": tokenizer}
    if name == "reward":
        return {"reward": RewardModel(*load_tiny_reward_model())}
    return {"prompts": ["Name a quiet hobby."]}


@pytest.mark.parametrize("name", ["policy", "reward", "prompts"])
def test_a_run_given_a_part_goes_on_with_it_alone(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(ONE | {"run_dir": str(tmp_path / "r")}, **given(name))
    sources = read_sources(run)
    assert sources is not None
    assert sources.given == (name,)
    with pytest.raises(SystemExit):
        main(["train", "--config", str(run / "config.yaml"), "--resume", "auto", "--steps", "2"])
    error = capsys.readouterr().err
    assert f"resume: expected the same parts as at the start of {run}, where train(...) was given {name} in Python" in error
    assert len(read_lines(run / "metrics.jsonl")) == 1
    train(ONE | {"run_dir": str(run), "resume": "auto", "steps": 2}, **given(name))
    assert len(read_lines(run / "metrics.jsonl")) == 2


def test_an_adapter_to_a_model_that_was_given_is_not_exported(tmp_path: Path) -> None:
    """Merged into the config's own policy it would be another model, and agree with itself."""
    run = train(ONE | {"run_dir": str(tmp_path / "r")}, **given("policy"))
    with pytest.raises(ValueError, match=r"^run: expected one whose config names its policy, .*merge_and_unload"):
        export(run)
    assert not (run / "export").exists()


@pytest.mark.parametrize("name", ["prompts", "eval_prompts"])
def test_prompts_that_changed_are_found(tmp_path: Path, name: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(LINES))
    options = ONE | {"run_dir": str(tmp_path / "r"), name: str(file)}
    train(options)
    train(options | {"resume": "auto", "steps": 2})
    file.write_text("\n".join(reversed(LINES)))
    with pytest.raises(ValueError, match=f"^{name}: expected those that the run in .* began with"):
        train(options | {"resume": "auto", "steps": 3})
    file.write_text("\n".join(LINES))
    train(options | {"resume": "auto", "steps": 3})


def test_a_last_line_that_was_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "rew')
    assert read_lines(path) == [{"step": 0}]
    path.write_text('{"step": 0\n{"step": 1}\n')
    with pytest.raises(ValueError, match=r"eval.jsonl: line 1 is not JSON"):
        read_lines(path)
