"""The loop end to end on tiny random models: files, metrics, parity, refusals. T numbers: reports against other trainers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from tolerances import FORWARD, MEAN, NORM, assert_same_update

from datc_train import train
from datc_train.config import Config
from datc_train.models import load_policy
from datc_train.quickstart import load_tiny_policy, load_tiny_reward_model, train_prompts
from datc_train.reward import RewardModel

TINY = {
    "policy": "tiny",
    "reward": "tiny",
    "prompts": "quickstart",
    "device": "cpu",
    "steps": 2,
    "prompts_per_step": 2,
    "group_size": 4,
    "max_new_tokens": 8,
    "learning_rate": 1e-2,
    "lora": {"r": 4, "alpha": 8},
    "report": False,
}

KEYS = (
    "step reward_mean reward_std frac_reward_zero_std kl entropy length_mean clip_fraction grad_norm ess_ratio tau_mean "
    "band_share negative_share predicted_gain tokens_per_second"
).split()


def lines(run: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def adapter(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    newest = sorted((run / "checkpoints").iterdir())[-1]
    return load_file(newest / "adapter_model.safetensors")


def same(a: Path, b: Path) -> bool:
    x, y = adapter(a), adapter(b)
    return x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)


@pytest.fixture(scope="module")
def datc_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "datc"
    return train(TINY | {"run_dir": str(folder), "eval_prompts": "quickstart", "eval_limit": 2})


def test_run_folder(datc_run: Path) -> None:
    metrics = lines(datc_run, "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2]
    for line in metrics:
        assert set(KEYS) <= set(line)
        assert all(value is None or math.isfinite(value) for value in line.values())
        for phase in ("sample", "score", "credit", "weights", "reference", "update"):
            assert line[f"seconds_{phase}"] > 0
        assert 0 < line["ess_ratio"] < 1
        assert line["tau_mean"] >= 1
        assert line["predicted_gain"] > 0
        assert 0 <= line["band_share"] <= 1
        assert 0 <= line["sampler_difference"] < FORWARD
    config = yaml.safe_load((datc_run / "config.yaml").read_text())
    assert config["run_dir"] == str(datc_run)
    assert config["learning_rate"] == 1e-2
    assert config["beta"] == Config().beta
    assert config["schedule_steps"] == 2  # resolved: more steps later must not stretch a cosine
    assert [e["step"] for e in lines(datc_run, "eval.jsonl")] == [0, 2]


def test_every_metric_is_explained(datc_run: Path) -> None:
    from datc_train.metrics import step_metrics

    said = step_metrics.__doc__ or ""
    for key in lines(datc_run, "metrics.jsonl")[0]:
        assert f" {key} " in said or f" {key}," in said or key.startswith("seconds_"), key


def test_kl_is_zero_before_the_first_update_and_not_after(datc_run: Path) -> None:
    first, second = lines(datc_run, "metrics.jsonl")
    assert first["kl"] == 0.0
    assert second["kl"] > 0.0
    assert first["clip_fraction"] == 0.0


def test_samples_hold_every_token(datc_run: Path) -> None:
    for line in lines(datc_run, "samples.jsonl"):
        n = len(line["token_ids"])
        assert n > 0
        assert all(len(line[key]) == n for key in ("tokens", "credit", "weight", "probability", "frozen"))
        assert all(w == 1.0 for w, frozen in zip(line["weight"], line["frozen"], strict=True) if frozen)
        assert sum(line["weight"]) == pytest.approx(n, rel=MEAN)
        assert all(0 < p <= 1 for p in line["probability"])


def test_checkpoint_loads_in_plain_peft(datc_run: Path) -> None:
    from peft import PeftModel

    base, _ = load_tiny_policy()
    ids = torch.arange(20, 40)[None]
    before = base(ids).logits
    with torch.no_grad():
        after = PeftModel.from_pretrained(base, str(datc_run / "checkpoints" / "000002"))(ids).logits
    assert (after - before).abs().max() > 1e-5


def test_runs_repeat_bit_for_bit_and_depend_on_the_seed(tmp_path: Path, datc_run: Path) -> None:
    again = train(TINY | {"run_dir": str(tmp_path / "again")})
    other = train(TINY | {"run_dir": str(tmp_path / "other"), "seed": 1})
    assert same(datc_run, again)
    assert not same(datc_run, other)


def test_uniform_weights_are_grpo_bit_for_bit(tmp_path: Path, datc_run: Path) -> None:
    grpo = train(TINY | {"run_dir": str(tmp_path / "grpo"), "method": "grpo"})
    uniform = train(TINY | {"run_dir": str(tmp_path / "uniform"), "ceiling": 1.0})
    assert same(grpo, uniform)
    assert not same(grpo, datc_run)
    line = lines(grpo, "metrics.jsonl")[-1]
    assert line["ess_ratio"] == 1.0
    assert line["negative_share"] is None
    assert line["predicted_gain"] is None


@pytest.mark.parametrize("method", ["grpo", "datc"])
def test_micro_batches_add_up(tmp_path: Path, method: str) -> None:
    """T30, T31: the gradient of a step does not depend on how it is split."""
    options = TINY | {"method": method, "steps": 1, "learning_rate": 1e-3}
    one = adapter(train(options | {"run_dir": str(tmp_path / "one"), "micro_batch_tokens": 100_000}))
    many = adapter(train(options | {"run_dir": str(tmp_path / "many"), "micro_batch_tokens": 1}))
    checked = lines(tmp_path / "one", "metrics.jsonl")[0]["grad_norm"]
    assert lines(tmp_path / "many", "metrics.jsonl")[0]["grad_norm"] == pytest.approx(checked, rel=NORM)
    # Adam's first step is the gradient's sign: elements whose gradient is rounding noise may differ by two steps.
    off = sum(int((one[k] - many[k]).abs().gt(1e-5).sum()) for k in one)
    assert off <= 0.01 * sum(v.numel() for v in one.values())


def test_no_reference_pass_without_beta(tmp_path: Path) -> None:
    run = train(TINY | {"run_dir": str(tmp_path / "r"), "beta": 0.0, "steps": 1})
    line = lines(run, "metrics.jsonl")[0]
    assert line["kl"] is None
    assert "seconds_reference" not in line


def test_equal_rewards_give_no_advantage_and_no_step(tmp_path: Path) -> None:
    """T1, T3: a group whose rewards are equal has advantage exactly 0; without KL nothing moves."""
    run = train(
        TINY | {"run_dir": str(tmp_path / "r"), "method": "grpo", "beta": 0.0, "steps": 1, "weight_decay": 0.0},
        reward=lambda prompts, completions, completion_ids, **columns: [17.3] * len(completions),
    )
    line = lines(run, "metrics.jsonl")[0]
    assert line["frac_reward_zero_std"] == 1.0
    assert line["grad_norm"] == 0.0
    assert all(not bool(v.any()) for k, v in adapter(run).items() if "lora_B" in k)


def test_reward_function_sees_what_trl_gives(tmp_path: Path) -> None:
    seen = {}

    def reward(prompts, completions, completion_ids, **columns):  # type: ignore[no-untyped-def]
        seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids, columns=columns)
        return [float(len(ids)) for ids in completion_ids]

    rows = [{"prompt": "One?", "answer": "1"}, {"prompt": "Two?", "answer": "2"}]
    train(TINY | {"run_dir": str(tmp_path / "r"), "method": "grpo", "steps": 1}, reward=reward, prompts=rows)
    assert len(seen["completions"]) == len(seen["completion_ids"]) == 8
    assert seen["completions"][0][0]["role"] == "assistant"
    owners = [messages[-1]["content"] for messages in seen["prompts"]]
    assert [{"One?": "1", "Two?": "2"}[o] for o in owners] == seen["columns"]["answer"]


def test_given_models_are_used(tmp_path: Path) -> None:
    policy, tokenizer = load_tiny_policy(seed=5)
    model, reward_tokenizer = load_tiny_reward_model(seed=6)
    reward = RewardModel(model, reward_tokenizer, policy_tokenizer=tokenizer)
    run = train(TINY | {"run_dir": str(tmp_path / "r"), "steps": 1}, policy, tokenizer, reward, train_prompts()[:5])
    assert lines(run, "metrics.jsonl")[0]["grad_norm"] > 0


def test_full_fine_tuning_has_a_frozen_copy_as_reference(tmp_path: Path) -> None:
    run = train(TINY | {"run_dir": str(tmp_path / "r"), "lora": None, "learning_rate": 1e-3})
    first, second = lines(run, "metrics.jsonl")
    assert first["kl"] == 0.0
    assert second["kl"] > 0.0
    assert (run / "checkpoints" / "000002" / "model.safetensors").exists()


def test_a_trained_adapter_is_its_own_reference(tmp_path: Path) -> None:
    """T39: the KL is to the adapter that training started from, not to the base under it."""
    from peft import LoraConfig, get_peft_model

    base, tokenizer = load_tiny_policy()
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    run = train(TINY | {"run_dir": str(tmp_path / "r")}, policy=model, tokenizer=tokenizer)
    first, second = lines(run, "metrics.jsonl")
    assert first["kl"] == 0.0
    assert second["kl"] > 0.0


def test_the_reference_pass_leaves_training_flags_alone() -> None:
    """PEFT's switches change requires_grad on their way back."""
    model, tokenizer = load_tiny_policy()
    actor = load_policy(Config(policy="tiny"), torch.device("cpu"), model, tokenizer)
    flags = {name: p.requires_grad for name, p in actor.model.named_parameters()}
    with actor.as_it_started():
        pass
    assert flags == {name: p.requires_grad for name, p in actor.model.named_parameters()}
    assert any(flags.values())
    assert not all(flags.values())


def test_masked_truncated_responses_leave_the_loss(tmp_path: Path) -> None:
    """T9, T10: with every response cut off nothing is left, the loss is 0 and lengths are logged unmasked."""
    policy, tokenizer = load_tiny_policy()
    options = {"run_dir": str(tmp_path / "r"), "steps": 1, "mask_truncated": True, "max_new_tokens": 1}
    run = train(TINY | options, policy, tokenizer)
    line = lines(run, "metrics.jsonl")[0]
    assert line["length_mean"] == 1.0
    if line["frac_truncated"] == 1.0:
        assert line["grad_norm"] == 0.0


def test_the_cosine_stays_down_after_its_length(tmp_path: Path) -> None:
    options = {"schedule": "cosine", "schedule_steps": 2, "steps": 4, "method": "grpo", "beta": 0.0}
    rates = [line["learning_rate"] for line in lines(train(TINY | options | {"run_dir": str(tmp_path / "r")}), "metrics.jsonl")]
    assert rates[2:] == pytest.approx([1e-3, 1e-3])


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    """T40: it is off while sampling. Prompts are read for every response then: the same numbers up to rounding."""
    plain = train(TINY | {"run_dir": str(tmp_path / "a"), "steps": 1})
    saved = train(TINY | {"run_dir": str(tmp_path / "b"), "steps": 1, "gradient_checkpointing": True})
    assert_same_update(adapter(saved), adapter(plain), farthest=3 * TINY["learning_rate"])


def test_nothing_of_the_size_of_the_logits_in_training(tmp_path: Path) -> None:
    """T62: [tokens, V] never exists in a training step."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from datc_train.clock import Clock
    from datc_train.config import config_from
    from datc_train.lesson import Lesson
    from datc_train.models import load_reward
    from datc_train.passes import reference_pass
    from datc_train.rollout import TransformersSampler
    from datc_train.score import score_rollout
    from datc_train.types import Prompt
    from datc_train.update import update

    config = config_from(TINY | {"max_new_tokens": 300, "group_size": 8})
    actor = load_policy(config, torch.device("cpu"))
    sampler = TransformersSampler(actor.model, actor.tokenizer, group_size=8, max_new_tokens=300, stop_ids=[0])
    rollout = sampler.sample([Prompt([{"role": "user", "content": "Hello"}])], seed=0)
    scored = score_rollout(load_reward(config, actor.device, actor.tokenizer), rollout, actor.tokenizer, (), gradient=True)
    n, v = len(rollout.response_ids), actor.weight.shape[0]
    assert n > 1024

    class Largest(TorchDispatchMode):
        rows = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor) and leaf.ndim >= 2 and leaf.shape[-1] in (v, sampler.vocab_size):
                    self.rows = max(self.rows, leaf.numel() // leaf.shape[-1])
            return out

    with Largest() as largest:
        reference = reference_pass(actor, rollout, config, sampler.vocab_size).logprob
        lesson = Lesson(1, rollout, scored, torch.linspace(-1, 1, 8), reference_logprob=reference)
        optimizer = torch.optim.AdamW(actor.trainable, lr=0.0)
        update(actor, optimizer, lesson, config, vocab_size=sampler.vocab_size, step=1, clock=Clock(actor.device))
    assert largest.rows < n
    with Largest() as largest, torch.no_grad():  # and this is how they would have been seen
        actor.model(rollout.response_ids[None])
    assert largest.rows >= n


def test_bfloat16_policy_keeps_float32_adapters(tmp_path: Path) -> None:
    """T67: an update of 1e-5 would vanish in bfloat16."""
    run = train(TINY | {"run_dir": str(tmp_path / "r"), "dtype": "bfloat16"})
    assert {v.dtype for v in adapter(run).values()} == {torch.float32}
    assert lines(run, "metrics.jsonl")[0]["kl"] == 0.0


def test_every_held_out_prompt_counts(tmp_path: Path) -> None:
    """T65: no last, smaller batch is dropped."""
    prompts = tmp_path / "held_out.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Question {i}?"}) + "\n" for i in range(5)))
    options = {"run_dir": str(tmp_path / "r"), "eval_prompts": str(prompts), "sample_batch_size": 3, "steps": 1}
    run = train(TINY | options)
    for line in lines(run, "eval.jsonl"):
        assert [s["prompt"] for s in line["samples"]] == [f"Question {i}?" for i in range(5)]


def test_cut_off_responses_are_pointed_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """T12"""
    run = train(TINY | {"run_dir": str(tmp_path / "r"), "steps": 1, "max_new_tokens": 2})
    assert lines(run, "metrics.jsonl")[0]["frac_truncated"] > 0.5
    assert "were cut off at max_new_tokens" in capsys.readouterr().out


def test_reward_change_is_judged_by_its_standard_error() -> None:
    from datc_train.summary import reward_change

    assert reward_change([{"reward_mean": float(i)} for i in range(7)]) is None
    change = reward_change([{"reward_mean": r} for r in (0.0, 2.0, 5.0, 5.0, 5.0, 5.0, 4.0, 8.0)])
    assert change == pytest.approx((1.0, 6.0, math.sqrt((2.0 + 8.0) / 2)))


def test_schedules(tmp_path: Path) -> None:
    """Warm-up, then constant or cosine; the cosine's length is its own, so more steps change nothing before."""
    rates = {}
    for name, options in {
        "constant": {"warmup_steps": 2},
        "cosine": {"schedule": "cosine", "schedule_steps": 8, "min_learning_rate_ratio": 0.1},
    }.items():
        run = train(TINY | options | {"run_dir": str(tmp_path / name), "steps": 4, "method": "grpo", "beta": 0.0})
        rates[name] = [line["learning_rate"] for line in lines(run, "metrics.jsonl")]
    assert rates["constant"] == pytest.approx([0.0, 0.005, 0.01, 0.01])
    expected = [1e-2 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * i / 8))) for i in range(4)]
    assert rates["cosine"] == pytest.approx(expected)
