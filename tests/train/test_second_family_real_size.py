"""Qwen3-0.6B's sizes and vocabulary, random weights: the shipped recipe's way at its real scale, minutes on two cores."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from test_reward_real_vocabularies import qwen as qwen  # a fixture
from test_second_family import THINKING, hold_against_the_stock_models
from test_train import lines
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from datc_kernels.testing.rounding import rounding
from datc_train import train
from datc_train.cli import config_of

pytestmark = pytest.mark.slow
pytest.importorskip("trl")  # carries the templates

SIZES = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "max_position_embeddings": 40_960,
    "initializer_range": 0.05,
}


@pytest.fixture(scope="module")
def folders(qwen: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("qwen3-0.6b")
    settings = Qwen3Config(**SIZES, eos_token_id=qwen.eos_token_id, pad_token_id=qwen.pad_token_id)
    torch.manual_seed(0)
    Qwen3ForCausalLM(settings).save_pretrained(root / "policy")
    settings.num_labels = 1
    reward = Qwen3ForSequenceClassification(settings)
    torch.nn.init.normal_(reward.score.weight, std=0.1)
    reward.save_pretrained(root / "reward")
    for name in ("policy", "reward"):
        qwen.save_pretrained(root / name)
    return root


def test_two_steps_of_the_recipe(folders: Path, tmp_path: Path) -> None:
    words = ["--config", "qwen3", "--policy", str(folders / "policy"), "--reward", str(folders / "reward")]
    words += ["--prompts", "quickstart", "--steps", "2", "--prompts_per_step", "2", "--group_size", "4", "--max_new_tokens", "16"]
    words += [
        "--dtype",
        "float32",
        "--learning_rate",
        "1e-3",
        "--samples_per_step",
        "100",
        "--report",
        "false",
        "--device",
        "cpu",
    ]
    run = train(config_of([*words, "--run_dir", str(tmp_path / "r")]))
    metrics = lines(run, "metrics.jsonl")
    assert len(metrics) == 2
    for line in metrics:
        assert 0 < line["grad_norm"] < float("inf")
        assert line["update_norm"] > 0
        assert line["kl"] is not None
    print(json.dumps({"seconds_step": [line["seconds_step"] for line in metrics]}))
    samples: list[dict[str, Any]] = lines(run, "samples.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(folders / "policy")
    assert max(i for sample in samples for i in sample["token_ids"]) < len(tokenizer)
    assert statistics.mean(frozen for sample in samples for frozen in sample["frozen"]) < 0.5
    compared = 0
    for sample in (s for s in samples if s["step"] == 1):
        if tokenizer.encode(sample["response"], add_special_tokens=False) != sample["token_ids"]:
            continue  # noise that the reward model reads in other tokens
        if sample["response"] != sample["response"].strip():
            continue
        # 28 layers over 1024 numbers, 2048 of them in the heads and 3072 in the feed-forward layer; logits near 8.
        allowed = rounding(length=28 * (5 * 1024 + 2048 + 3072), condition=8)
        hold_against_the_stock_models(sample, folders, rtol=allowed)
        compared += 1
        if compared == 2:
            break
    assert compared
    assert config_of(words).chat_template_kwargs == THINKING
