"""Several --config on one command line: recipes in their order, a later one over an earlier one, and keys over all of them."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
from test_refusals import run_cli

from datc_train import cli
from datc_train.config import Config, Lora

FILES = {
    "a": "steps: 5\nseed: 1\nlora: {r: 8, alpha: 16}\nchat_template_kwargs: {x: 1}\ntrackers: [wandb]\n",
    "b": "steps: 7\nbeta: 0.5\nlora: {r: 4}\nchat_template_kwargs: {y: 2}\ntrackers: [tensorboard]\n",
    "none": "lora: null\n",
}


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, str]:
    for name, text in FILES.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return {name: str(tmp_path / f"{name}.yaml") for name in FILES}


def read(monkeypatch: pytest.MonkeyPatch, *words: str) -> Config:
    """What `datc train` and the function of the benchmarks make of the words."""
    seen: list[Config] = []
    monkeypatch.setitem(cli.COMMANDS, "train", lambda parser, arguments: seen.append(cli._config(parser, arguments)))
    cli.main(["train", *words])
    assert cli.config_of(list(words)) == seen[0]
    return seen[0]


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("order", list(permutations(["a", "b", "steps", "lora"])))
def test_every_order(monkeypatch: pytest.MonkeyPatch, recipe: dict[str, str], order: tuple[str, ...], joined: bool) -> None:
    keys = {"steps": ("--steps", "3"), "lora": ("--lora.alpha", "2")}
    keys |= {name: ("--config", recipe[name]) for name in ("a", "b")}
    words = [word for name in order for word in (["=".join(keys[name])] if joined else keys[name])]
    config = read(monkeypatch, *words)
    last = max("ab", key=order.index)
    assert (config.steps, config.seed, config.beta) == (3, 1, 0.5)
    assert config.lora == Lora(r={"a": 8, "b": 4}[last], alpha=2)
    assert config.chat_template_kwargs == {"a": {"x": 1}, "b": {"y": 2}}[last]
    assert config.trackers == {"a": ["wandb"], "b": ["tensorboard"]}[last]


@pytest.mark.parametrize("place", range(3))
def test_a_key_between_recipes_has_the_last_word(monkeypatch: pytest.MonkeyPatch, recipe: dict[str, str], place: int) -> None:
    words = [["--config", recipe["a"]], ["--config", recipe["b"]]]
    words.insert(place, ["--steps", "3"])
    assert read(monkeypatch, *[word for pair in words for word in pair]).steps == 3


def test_a_key_given_twice_is_the_later_one(monkeypatch: pytest.MonkeyPatch, recipe: dict[str, str]) -> None:
    assert read(monkeypatch, "--steps", "3", "--config", recipe["a"], "--steps", "4", "--config", recipe["b"]).steps == 4


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("a", Lora(r=8, alpha=16)),
        ("a b", Lora(r=4, alpha=16)),
        ("b a", Lora(r=8, alpha=16)),
        ("a none", None),
        ("none a", Lora(r=8, alpha=16)),
        ("a none b", Lora(r=4)),
        ("b none a", Lora(r=8, alpha=16)),
    ],
)
def test_adapters_key_by_key(monkeypatch: pytest.MonkeyPatch, recipe: dict[str, str], order: str, expected: Lora | None) -> None:
    assert read(monkeypatch, *[word for name in order.split() for word in ("--config", recipe[name])]).lora == expected


def test_recipes_of_the_package_among_them(monkeypatch: pytest.MonkeyPatch, recipe: dict[str, str]) -> None:
    config = read(monkeypatch, "--config", "tiny", "--method", "grpo", "--config", recipe["a"])
    assert (config.policy, config.method, config.steps) == ("tiny", "grpo", 5)
    config = read(monkeypatch, "--config", recipe["a"], "--config=tiny")
    assert (config.policy, config.seed, config.steps) == ("tiny", 1, cli.config_of(["--config", "tiny"]).steps)


def test_what_is_wrong_in_the_second_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("step: 3\n")
    for second, says in (
        (str(tmp_path / "bad.yaml"), f"--config: in {tmp_path / 'bad.yaml'} step: no such key"),
        ("nope", "no file nope"),
    ):
        status, error = run_cli(capsys, "train", "--config", "tiny", "--steps", "1", "--config", second)
        assert status == 2
        assert says in error
