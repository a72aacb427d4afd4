"""What holds for an adapter holds when every parameter trains. T numbers: reports against other trainers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_train import TINY, lines
from tolerances import NORM, assert_same_update
from torch import Tensor

from datc_train import train
from datc_train.checkpoint import checkpoints
from datc_train.credit import METHODS
from datc_train.quickstart import load_tiny_policy

FULL = TINY | {"lora": None, "learning_rate": 1e-3}


def run(folder: Path, **options: object) -> dict[str, Tensor]:
    """The weights of the run's last checkpoint."""
    from safetensors.torch import load_file

    path = train(FULL | options | {"run_dir": str(folder)})
    return load_file(checkpoints(path)[-1] / "model.safetensors")


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_runs_repeat_bit_for_bit_and_depend_on_the_seed(tmp_path: Path) -> None:
    first = run(tmp_path / "a")
    assert same(first, run(tmp_path / "b"))
    assert not same(first, run(tmp_path / "c", seed=1))


def test_uniform_weights_are_grpo_bit_for_bit(tmp_path: Path) -> None:
    grpo = run(tmp_path / "grpo", method="grpo")
    assert same(grpo, run(tmp_path / "uniform", ceiling=1.0))
    assert not same(grpo, run(tmp_path / "datc"))


@pytest.mark.parametrize("method", [name for name, m in METHODS.items() if not m.needs_base_hidden])
def test_every_method_trains_and_micro_batches_add_up(tmp_path: Path, method: str) -> None:
    """T30, T31"""
    norms = []
    for budget in (100_000, 1):
        folder = tmp_path / str(budget)
        run(folder, method=method, steps=1, micro_batch_tokens=budget)
        norms.append(lines(folder, "metrics.jsonl")[0]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=NORM)
    assert norms[0] > 0


def test_every_parameter_moves_and_the_reference_does_not(tmp_path: Path) -> None:
    """T38, T39: the KL is to a frozen copy of the start."""
    policy, tokenizer = load_tiny_policy()
    start = {name: p.detach().clone() for name, p in policy.named_parameters()}
    path = train(FULL | {"run_dir": str(tmp_path / "r")}, policy, tokenizer)
    assert all(not torch.equal(start[name], p) for name, p in policy.named_parameters())
    kl = [line["kl"] for line in lines(path, "metrics.jsonl")]
    assert kl[0] == 0.0
    assert kl[1] > 0.0


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    """T40. Prompts are read for every response then: the same numbers up to rounding."""
    plain, saved = run(tmp_path / "a", steps=1), run(tmp_path / "b", steps=1, gradient_checkpointing=True)
    assert_same_update(saved, plain, farthest=3 * FULL["learning_rate"])


def test_a_tied_head_and_embedding_are_one_parameter(tmp_path: Path) -> None:
    """K41: neither counted nor moved twice."""
    policy, tokenizer = load_tiny_policy()
    assert policy.config.tie_word_embeddings
    train(FULL | {"run_dir": str(tmp_path / "r"), "steps": 1}, policy, tokenizer)
    assert policy.get_input_embeddings().weight is policy.get_output_embeddings().weight


def test_bfloat16_trains(tmp_path: Path) -> None:
    run(tmp_path / "r", dtype="bfloat16", learning_rate=1e-2)
    first, second = lines(tmp_path / "r", "metrics.jsonl")
    assert first["kl"] == 0.0
    assert second["kl"] > 0.0
    assert second["update_norm"] > 0


def test_the_checkpoint_loads_in_plain_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy, tokenizer = load_tiny_policy()
    path = train(FULL | {"run_dir": str(tmp_path / "r")}, policy, tokenizer)
    ids = torch.arange(20, 40)[None]
    loaded = AutoModelForCausalLM.from_pretrained(checkpoints(path)[-1])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, policy(ids).logits)


def test_masked_truncated_responses_leave_the_loss(tmp_path: Path) -> None:
    """T9: with nothing left neither momentum nor weight decay moves the weights."""
    run(tmp_path / "r", mask_truncated=True, max_new_tokens=1, steps=1)
    line = lines(tmp_path / "r", "metrics.jsonl")[0]
    if line["frac_truncated"] == 1.0:
        assert line["grad_norm"] == line["update_norm"] == 0.0
