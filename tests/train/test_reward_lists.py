"""Runs with several rewards: from a config's list, from the command line and from Python; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_several_rewards import brief, tiny
from test_train import TINY, lines, same

from datc_train import train
from datc_train.credit import METHODS
from datc_train.quickstart import load_tiny_reward_model
from datc_train.reward import weighted_rewards
from datc_train.reward.several import distinct_names
from datc_train.score import check_reward

ONE = TINY | {"steps": 1, "save_every": None, "prompts_per_step": 1}


def test_a_list_of_one_is_bit_equal_to_the_model_alone(tmp_path: Path) -> None:
    alone = train(ONE | {"run_dir": str(tmp_path / "a"), "steps": 2})
    listed = train(ONE | {"run_dir": str(tmp_path / "b"), "steps": 2, "reward": ["tiny"]})
    assert same(alone, listed)
    one, other = (lines(run, "metrics.jsonl")[1] for run in (alone, listed))
    assert {k: v for k, v in one.items() if "second" not in k}.items() <= other.items()
    assert other["reward_tiny_mean"] == other["reward_mean"]
    assert other["reward_tiny_std"] == other["reward_std"]


def test_a_model_and_rules_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line: metrics, samples, evaluations and the report know the parts; resuming wants the same."""
    from datc_train.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rules_1.py").write_text(
        "def brief(completion_ids, **_):\n    return [-float(len(x)) for x in completion_ids]\n"
        "async def even(completion_ids, **_):\n    return [None if len(x) % 2 else 1.0 for x in completion_ids]\n"
    )
    words = ["train", "--config", "tiny", "--run_dir", "r", "--eval_prompts", "quickstart", "--eval_limit", "2", "--save_every=1"]
    words += ["--reward", "[tiny, my_rules_1:brief, my_rules_1:even]", "--max_new_tokens", "8", "--samples_per_step", "2"]
    main([*words, "--reward_weights", "[1, 0.5, -0.1]", "--steps", "2"])
    for line in lines(Path("r"), "metrics.jsonl"):
        parts = [line[f"reward_{name}_mean"] for name in ("tiny", "brief", "even")]
        assert line["reward_mean"] == pytest.approx(parts[0] + 0.5 * parts[1] - 0.1 * parts[2], abs=1e-5)
        assert parts[1] >= -8.0
    for line in lines(Path("r"), "samples.jsonl"):
        length = len(line["token_ids"])
        assert line["rewards"]["brief"] == -length
        assert line["rewards"]["even"] == (None if length % 2 else 1.0)
        assert line["reward"] == pytest.approx(line["rewards"]["tiny"] - 0.5 * length - 0.1 * (length % 2 == 0), abs=1e-5)
    evaluated = lines(Path("r"), "eval.jsonl")[-1]
    assert -8.0 <= evaluated["reward_brief_mean"] < 0.0
    assert all(sample["rewards"]["even"] in (1.0, None) for sample in evaluated["samples"])
    assert Path("r/figures/reward_brief.png").is_file()
    assert "1 x tiny + 0.5 x my_rules_1:brief + -0.1 x my_rules_1:even" in Path("r/report.html").read_text()
    with pytest.raises(SystemExit):
        main([*words, "--reward_weights", "[1, 2, 3]", "--steps", "3", "--resume", "auto"])
    main([*words, "--reward_weights", "[1, 0.5, -0.1]", "--steps", "3", "--resume", "auto", "--reward_timeout", "60"])
    assert len(lines(Path("r"), "metrics.jsonl")) == 3
    from datc_train.bench.overhead import measure
    from datc_train.config import config_from
    from datc_train.doctor import dry_run, examine

    config = config_from(ONE | {"reward": ["tiny", "my_rules_1:brief"], "reward_weights": [1.0, 0.5]})
    assert not [finding for finding in examine(config, say=lambda _: None) if finding.state == "wrong"]
    dry_run(config, say=lambda _: None)
    assert measure(config, minutes=0)["parameters"]["reward"] > 0


def test_given_rewards_must_be_given_again(tmp_path: Path) -> None:
    config = ONE | {"run_dir": str(tmp_path / "r"), "save_every": 1}
    train(config, reward=[tiny(), brief])
    assert json.loads((tmp_path / "r" / "sources.json").read_text())["rewards"] == ["reward_model", "brief"]
    more = config | {"resume": "auto", "steps": 2}
    for other in ([tiny()], tiny(), [brief, tiny()]):
        with pytest.raises(ValueError, match="^reward: expected those that the run in .* began with, reward_model, brief, got"):
            train(more, reward=other)
    train(more, reward=[tiny(), brief])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"reward": []}, "reward: expected a name, or a list of at least one, got"),
        ({"reward": ["tiny", ""]}, "reward: expected a name, or a list"),
        ({"reward": ["tiny", "tiny"], "reward_weights": [1.0]}, "reward_weights: expected 2, one for each reward, got 1"),
        ({"reward_weights": [1.0, 2.0]}, "reward_weights: expected 1, one for each reward, got 2"),
        ({"reward_weights": [float("inf")]}, "reward_weights: expected null or finite numbers"),
        ({"reward_weights": [0.0]}, "reward_weights: expected null or finite numbers, one of them not 0"),
        ({"reward_weights": []}, "reward_weights: expected null or finite numbers"),
        ({"reward_weights": ["much"]}, "reward_weights: expected a list of numbers or null"),
        ({"reward_timeout": 0}, "reward_timeout: expected null or a finite number above 0"),
        ({"reward": "no_such_module_1:brief"}, "reward: expected quickstart, tiny, a folder, a hub name or module:function"),
        ({"reward": "json:nothing"}, "reward: expected a function in the module json"),
        ({"reward": "json:JSONDecoder"}, "reward: expected a function, got 'json:JSONDecoder', which is the class"),
        ({"reward": "json:dumps"}, "reward: method 'datc' needs the gradient of a RewardModel, got function"),
        (
            {"reward": ["tiny", "json:dumps"], "reward_weights": [0.0, 1.0]},
            "reward: method 'datc' needs the gradient of a RewardModel, got RewardModel of weight 0, function",
        ),
    ],
)
def test_what_is_refused_by_the_doctor_and_by_training(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    from datc_train.config import config_from
    from datc_train.doctor import examine

    config = ONE | {"run_dir": str(tmp_path / "r")} | change
    with pytest.raises(ValueError, match=".") as refused:
        train(config)
    assert str(refused.value).startswith(says)
    assert not (tmp_path / "r").exists()
    try:
        wrong = [finding.text for finding in examine(config_from(config), say=lambda _: None) if finding.state == "wrong"]
    except ValueError as error:
        wrong = [str(error)]
    assert any(text.startswith(says) for text in wrong), wrong


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "reward: expected at least one, got none"),
        ([lambda **_: []], "reward: method 'datc' needs the gradient of a RewardModel, got function"),
        ([tiny, [brief]], "reward: expected reward models and functions in the list, got list"),
        (["tiny"], "reward: expected a RewardModel or a function, got str"),
    ],
)
def test_lists_that_are_none(tmp_path: Path, given: list[Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        train(ONE | {"run_dir": str(tmp_path / "r")}, reward=given)
    with pytest.raises(ValueError, match="^reward: expected RewardModel.* around it"):
        check_reward(weighted_rewards([load_tiny_reward_model()[0]]), "grpo")


def test_what_is_a_function_and_what_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datc_train.rewards import is_function

    monkeypatch.chdir(tmp_path)
    assert is_function("rules:brief")
    assert is_function("my.rules:Judge.score")
    for name in (r"C:\models\rm", "C:/models/rm", "C:rm", "tiny", "org/model", "./a:b", "rules:", ":f", "a:b:c", "a-b:c"):
        assert not is_function(name), name
    (tmp_path / "rules:brief").mkdir()
    assert not is_function("rules:brief")


def test_names_are_distinct_and_fit_a_metric() -> None:
    names = distinct_names(["tiny", "tiny", "<lambda>", "Qwen/RM 0.6B", "shaped", "tiny_2", "ü"])
    assert names == ["tiny", "tiny_2", "lambda", "Qwen_RM_0.6B", "shaped_2", "tiny_2_2", "reward"]


def test_shaping_and_several_updates_take_sums(tmp_path: Path) -> None:
    options = {"reward_shaping": True, "shaping_prompts": 2, "epochs_per_rollout": 2, "updates_per_epoch": 2, "steps": 4}
    run = train(TINY | options | {"run_dir": str(tmp_path / "r"), "reward_weights": [1.0, 0.1]}, reward=[tiny(), odd])
    first, second = lines(run, "metrics.jsonl")[:2]
    assert first["reward_odd_mean"] != second["reward_odd_mean"]  # of the responses that this update learned from
    assert first["reward_shaped_mean"] is not None


def odd(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(response) % 11) for response in completion_ids]


def test_a_sum_trains_with_every_method(tmp_path: Path) -> None:
    for method in METHODS:
        run = train(ONE | {"run_dir": str(tmp_path / method), "method": method}, reward=[tiny(), tiny(1), odd])
        assert lines(run, "metrics.jsonl")[0]["update_norm"] > 0
