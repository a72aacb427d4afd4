"""What the doctor says of memory against what training holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_train import TINY, lines

from datc_train import train
from datc_train.config import Config, config_from
from datc_train.memory_estimate import estimate, training_bytes
from datc_train.quickstart import load_tiny_policy, load_tiny_reward_model


@pytest.mark.parametrize("beta", [0.0, 0.03])
@pytest.mark.parametrize(("lora", "dtype"), [({"r": 4, "alpha": 8}, "bfloat16"), (None, "float32"), (None, "bfloat16")])
def test_training_holds_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: dict | None, dtype: str, beta: float
) -> None:
    """Byte by byte: weights, gradients, moments and the reference's copy after an update."""
    import datc_train.loop as module

    seen = {}
    real = module._run

    def watched(config, actor, *rest):  # type: ignore[no-untyped-def]
        seen["actor"] = actor
        return real(config, actor, *rest)

    def optimizer(parameters, config):  # type: ignore[no-untyped-def]
        seen["optimizer"] = torch.optim.AdamW(parameters, lr=config.learning_rate)
        return seen["optimizer"]

    monkeypatch.setattr(module, "_run", watched)
    monkeypatch.setattr(module, "make_optimizer", optimizer)
    config = config_from(TINY | {"lora": lora, "dtype": dtype, "beta": beta, "steps": 1, "run_dir": str(tmp_path / "r")})
    train(config)
    actor = seen["actor"]
    held = {id(p): p for p in actor.model.parameters()} | {id(p.grad): p.grad for p in actor.trainable}
    held |= {id(copy): copy for copy in actor.start or ()}
    held |= {id(x): x for state in seen["optimizer"].state.values() for x in state.values() if x.ndim}
    bytes_held = sum(x.numel() * x.element_size() for x in held.values())
    trainable = sum(p.numel() for p in actor.trainable)
    parameters = sum(p.numel() for p in actor.model.parameters()) - (trainable if lora else 0)
    # Bytes; some tensors of one number are not counted.
    assert training_bytes(config, parameters, trainable) == pytest.approx(bytes_held, rel=1e-3)


def test_methods_differ_in_what_they_keep_of_a_rollout() -> None:
    policy, reward = load_tiny_policy()[0], load_tiny_reward_model()[0]

    def kept(method: str) -> int:
        config = Config(method=method, prompts_per_step=2, group_size=4, max_new_tokens=10, lora=None)  # type: ignore[arg-type]
        return estimate(config, policy, reward, 0).rollout

    d, k = policy.config.hidden_size, reward.config.hidden_size
    assert [kept(m) for m in ("grpo", "entropy", "datc", "delta", "arca")] == [0, 0, 80 * k * 4, 80 * d * 4, 80 * d * 4]


def test_a_reference_copy_is_only_kept_where_it_is_needed(tmp_path: Path) -> None:
    run = train(TINY | {"lora": None, "beta": 0.0, "steps": 1, "run_dir": str(tmp_path / "r")})
    assert lines(run, "metrics.jsonl")[0]["kl"] is None
    p = 1000
    assert training_bytes(Config(lora=None, beta=0.0), p, p) == 4 * 4 * p
    assert training_bytes(Config(lora=None, beta=0.03), p, p) == 5 * 4 * p
