"""samples.jsonl keeps the most likely alternatives of every token; training does not notice."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest
import torch
from tolerances import FORWARD, NORM

from datc_train import train
from datc_train.config import Config

TINY = {
    "policy": "tiny",
    "reward": "tiny",
    "prompts": "quickstart",
    "device": "cpu",
    "steps": 1,
    "prompts_per_step": 2,
    "group_size": 4,
    "max_new_tokens": 8,
    "lora": {"r": 4, "alpha": 8},
}


def lines(run: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().split("\n") if line]


def adapter(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(sorted((run / "checkpoints").iterdir())[-1] / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    settings = {
        "datc": {},
        "many passes": {"micro_batch_tokens": 1, "samples_per_step": 7},
        "grpo": {"method": "grpo"},
        "off": {"candidates_per_token": 0},
        "nothing kept": {"samples_per_step": 0},
    }
    return {name: train(TINY | changes | {"run_dir": str(folder / name)}) for name, changes in settings.items()}


def test_five_alternatives_a_token(runs: dict[str, Path]) -> None:
    for line in lines(runs["datc"], "samples.jsonl"):
        n = len(line["token_ids"])
        for key in ("candidates", "candidate_ids", "candidate_probability", "candidate_advantage"):
            assert [len(row) for row in line[key]] == [5] * n
        for t in range(n):
            p = line["candidate_probability"][t]
            assert p == sorted(p, reverse=True)
            assert sum(p) <= 1 + 1e-6
            if line["token_ids"][t] in line["candidate_ids"][t]:
                at = line["candidate_ids"][t].index(line["token_ids"][t])
                assert line["candidates"][t][at] == line["tokens"][t]
                assert p[at] == pytest.approx(line["probability"][t], rel=FORWARD)
    spread = [row for line in lines(runs["datc"], "samples.jsonl") for row in line["candidate_advantage"]]
    assert any(min(row) < 0 < max(row) for row in spread)


def test_micro_batches_put_them_in_their_places(runs: dict[str, Path]) -> None:
    whole, parts = lines(runs["datc"], "samples.jsonl"), lines(runs["many passes"], "samples.jsonl")
    assert len(whole) == 4
    assert len(parts) == 7
    for a, b in zip(whole, parts, strict=False):
        assert a["token_ids"] == b["token_ids"]
        assert a["candidate_ids"] == b["candidate_ids"]
        for x, y in zip(a["candidate_advantage"], b["candidate_advantage"], strict=True):
            assert x == pytest.approx(y, rel=NORM, abs=NORM * max(map(abs, chain(*b["candidate_advantage"]))))


def test_without_a_reward_gradient_there_are_probabilities_only(runs: dict[str, Path]) -> None:
    for line in lines(runs["grpo"], "samples.jsonl"):
        assert line["candidate_advantage"] is None
        assert len(line["candidate_probability"]) == len(line["token_ids"])


def test_a_phase_of_its_own_and_none_when_off(runs: dict[str, Path]) -> None:
    assert lines(runs["datc"], "metrics.jsonl")[0]["seconds_candidates"] > 0
    assert "seconds_candidates" not in lines(runs["off"], "metrics.jsonl")[0]
    assert not any("candidates" in line for line in lines(runs["off"], "samples.jsonl"))
    assert lines(runs["nothing kept"], "metrics.jsonl")[0]["step"] == 1
    assert not (runs["nothing kept"] / "samples.jsonl").exists() or not lines(runs["nothing kept"], "samples.jsonl")


def test_looking_changes_nothing(runs: dict[str, Path]) -> None:
    a, b = adapter(runs["datc"]), adapter(runs["off"])
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_the_key_is_checked() -> None:
    with pytest.raises(ValueError, match=r"^candidates_per_token: expected at least 0, got -1"):
        Config(candidates_per_token=-1)
