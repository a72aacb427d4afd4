"""Several optimizer steps a rollout: cached weights, ratios that move, resuming. T numbers: reports against other trainers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from test_train import TINY, adapter, lines, same
from tolerances import FORWARD, MEAN, NORM, assert_same_update

from datc_train import train
from datc_train.checkpoint import checkpoints
from datc_train.config import config_from
from datc_train.credit import METHODS
from datc_train.interrupt import Interrupted

MANY = TINY | {"prompts_per_step": 4, "updates_per_epoch": 2, "epochs_per_rollout": 2, "steps": 8, "learning_rate": 3e-2}
KINDS = pytest.mark.parametrize("lora", [{"r": 4, "alpha": 8}, None], ids=["lora", "full"])


def untimed(run: Path) -> list[dict]:
    return [
        {k: v for k, v in line.items() if not k.startswith("seconds_") and k != "tokens_per_second"}
        for line in lines(run, "metrics.jsonl")
    ]


def weights(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(next(checkpoints(run)[-1].glob("*model.safetensors")))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(MANY | {"run_dir": str(tmp_path_factory.mktemp("many") / "r")})


def test_steps_count_updates(many: Path) -> None:
    metrics = lines(many, "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 9))
    assert [line["rollout"] for line in metrics] == [1] * 4 + [2] * 4
    assert ["seconds_sample" in line for line in metrics] == [True, False, False, False] * 2
    assert ["seconds_old_policy" in line for line in metrics] == [True, False, False, False] * 2
    assert {line["step"] for line in lines(many, "samples.jsonl")} == {1, 2, 5, 6}  # an epoch's responses, once
    assert all(line["sampler_difference"] < FORWARD for line in metrics)  # of the policy that sampled, not of the one that moved


def test_an_epoch_sees_every_response_once(many: Path) -> None:
    """T46: parts are whole groups, in an order of each epoch's own."""
    one, two, three, four = (line["reward_mean"] for line in lines(many, "metrics.jsonl")[:4])
    assert one + two == pytest.approx(three + four, abs=MEAN)


def test_the_first_update_is_on_policy_and_later_ones_are_not(many: Path) -> None:
    metrics = lines(many, "metrics.jsonl")
    assert metrics[0]["clip_fraction"] == metrics[4]["clip_fraction"] == 0.0
    assert metrics[0]["kl"] == pytest.approx(0.0, abs=FORWARD**2)  # other rows share its passes than the reference's
    assert metrics[1]["kl"] > 0.0
    assert any(metrics[i]["clip_fraction"] > 0 for i in (2, 3, 6, 7))


def test_weights_are_cached_for_every_update(tmp_path: Path) -> None:
    """The same responses in a second epoch have the weights and the credit of the first, whatever the policy has become."""
    run = train(TINY | {"epochs_per_rollout": 2, "learning_rate": 1e-1, "run_dir": str(tmp_path / "r")})
    first, second = lines(run, "metrics.jsonl")
    for key in ("ess_ratio", "tau_mean", "predicted_gain", "negative_share", "reward_mean"):
        assert first[key] == second[key]
    assert first["entropy"] != second["entropy"]
    assert first["grad_norm"] != second["grad_norm"]


@KINDS
def test_one_part_of_one_epoch_is_the_fused_step(tmp_path: Path, lora: dict | None) -> None:
    """The keys at 1 are the loop without them, bit for bit."""
    options = TINY | {"lora": lora, "learning_rate": 1e-3}
    plain = train(options | {"run_dir": str(tmp_path / "a")})
    explicit = train(options | {"run_dir": str(tmp_path / "b"), "epochs_per_rollout": 1, "updates_per_epoch": 1})
    assert all(torch.equal(a, b) for a, b in zip(weights(plain).values(), weights(explicit).values(), strict=True))
    assert "seconds_old_policy" not in lines(plain, "metrics.jsonl")[0]


@KINDS
def test_two_halves_are_the_whole(tmp_path: Path, lora: dict | None) -> None:
    """T32: checkpoints fall on the ends of rollouts, so that no buffer is lost; bit for bit."""
    options = MANY | {"lora": lora, "learning_rate": 1e-3, "save_every": 3, "schedule": "cosine", "schedule_steps": 8}
    whole = train(options | {"run_dir": str(tmp_path / "whole")})
    train(options | {"steps": 4, "run_dir": str(tmp_path / "half")})
    half = train(options | {"run_dir": str(tmp_path / "half"), "resume": "auto"})
    assert [p.name for p in checkpoints(whole)] == ["000004", "000008"]
    assert untimed(whole) == untimed(half)
    assert (whole / "samples.jsonl").read_text() == (half / "samples.jsonl").read_text()
    one, other = weights(whole), weights(half)
    assert all(torch.equal(one[k], other[k]) for k in one)


def test_killed_in_the_middle_of_a_rollout(tmp_path: Path, many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T32: it goes on from the rollout's start, and nothing is counted twice."""
    import datc_train.step as module

    class Died(BaseException):
        pass

    real = module.Trainer.update

    def dying(self, step, *args, **kwargs):  # type: ignore[no-untyped-def]
        if step == 7:
            raise Died
        return real(self, step, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module.Trainer, "update", dying)
        with pytest.raises(Died):
            train(MANY | {"run_dir": str(tmp_path / "r"), "save_every": 1})
    assert [line["step"] for line in lines(tmp_path / "r", "metrics.jsonl")] == list(range(1, 7))
    run = train(MANY | {"run_dir": str(tmp_path / "r"), "save_every": 1, "resume": "auto"})
    assert same(run, many)
    assert untimed(run) == untimed(many)


def test_a_signal_finishes_the_rollout_and_saves(tmp_path: Path, many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datc_train.step as module

    real = module.Trainer.update

    def signalled(self, step, *args, **kwargs):  # type: ignore[no-untyped-def]
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, step, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module.Trainer, "update", signalled)
        with pytest.raises(Interrupted, match="stopped after step 4"):
            train(MANY | {"run_dir": str(tmp_path / "r")})
    run = train(MANY | {"run_dir": str(tmp_path / "r"), "resume": "auto"})
    assert same(run, many)


def test_evaluation_waits_for_the_end_of_a_rollout(tmp_path: Path) -> None:
    options = {"eval_prompts": "quickstart", "eval_limit": 2, "eval_every": 3, "run_dir": str(tmp_path / "r")}
    run = train(MANY | options | {"learning_rate": 1e-3})
    assert [line["step"] for line in lines(run, "eval.jsonl")] == [0, 4, 8]


@pytest.mark.parametrize("method", METHODS)
def test_every_method(tmp_path: Path, method: str) -> None:
    run = train(MANY | {"method": method, "steps": 4, "learning_rate": 1e-3, "run_dir": str(tmp_path / "r")})
    assert all(line["grad_norm"] > 0 for line in lines(run, "metrics.jsonl"))


@pytest.mark.parametrize("loss", ["dapo", "dr_grpo", "gspo_token", "cispo"])
def test_every_loss(tmp_path: Path, loss: str) -> None:
    run = train(MANY | {"loss": loss, "steps": 4, "sampler_correction": "truncate", "run_dir": str(tmp_path / "r")})
    metrics = lines(run, "metrics.jsonl")
    assert all(line["grad_norm"] > 0 for line in metrics)
    assert all(line["correction_mean"] == pytest.approx(1, abs=FORWARD) for line in metrics)


def test_micro_batches_add_up(tmp_path: Path) -> None:
    """T31: in every update."""
    norms = []
    for budget in (100_000, 1):
        options = {"steps": 4, "learning_rate": 1e-5, "micro_batch_tokens": budget, "run_dir": str(tmp_path / str(budget))}
        norms.append([line["grad_norm"] for line in lines(train(MANY | options), "metrics.jsonl")])
    assert norms[0] == pytest.approx(norms[1], rel=NORM)


def test_masked_truncated_responses_leave_every_update(tmp_path: Path) -> None:
    """T9: with every response of every part cut off, nothing moves."""
    options = {"mask_truncated": True, "max_new_tokens": 1, "beta": 0.0, "steps": 4, "run_dir": str(tmp_path / "r")}
    run = train(MANY | options)
    for line in lines(run, "metrics.jsonl"):
        if line["frac_truncated"] == 1.0:
            assert line["grad_norm"] == line["update_norm"] == 0.0


def test_gradient_checkpointing_takes_the_old_policys_pass_in_evaluation_mode(tmp_path: Path) -> None:
    plain = train(MANY | {"steps": 4, "run_dir": str(tmp_path / "a")})
    saved = train(MANY | {"steps": 4, "run_dir": str(tmp_path / "b"), "gradient_checkpointing": True})
    # Prompts are read for every response there.
    assert_same_update(adapter(saved), adapter(plain), farthest=3 * 4 * MANY["learning_rate"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"updates_per_epoch": 3, "steps": 3},  # T45: groups stay whole
        {"steps": 6},
        {"epochs_per_rollout": 0},
        {"updates_per_epoch": 0},
        {"clip_high": -1.0},
        {"sampler_correction": "off"},
        {"sampler_correction_bound": 0.5},
    ],
)
def test_what_cannot_be_is_named(wrong: dict) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: expected"):
        config_from(MANY | wrong)
