"""DATCTrainer: the stock trainer with one more argument. K and T numbers: reports against other trainers."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from tolerances import FORWARD, WEIGHT
from torch import Tensor

trl = pytest.importorskip("trl")

from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import set_seed  # noqa: E402

from datc_kernels import allocate_weights, linear_credit  # noqa: E402
from datc_train.integrations.trl import LOSSES, DATCConfig, DATCTrainer  # noqa: E402
from datc_train.modes import evaluating  # noqa: E402
from datc_train.quickstart import load_tiny_policy, load_tiny_reward_model, train_prompts  # noqa: E402
from datc_train.reward import RewardModel  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def reward_model() -> RewardModel:
    return RewardModel(*load_tiny_reward_model())


class OtherScore(RewardModel):
    def __call__(self, *arguments: Any, **columns: Any) -> list[float]:
        return [-score for score in super().__call__(*arguments, **columns)]


def length_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def make(kind: type, folder: Path, *, rewards: Any = None, lora: bool = True, datc: Any = None, **options: Any) -> Any:
    set_seed(1)  # older versions draw the adapter before they seed
    model, tokenizer = load_tiny_policy()
    model.name_or_path = model.config._name_or_path = ""
    defaults = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "seed": 1,
    }
    extra = {name: options.pop(name) for name in ("eval_dataset", "rollout_func") if name in options}
    arguments = trl.GRPOConfig(output_dir=str(folder), **defaults | options)
    if kind is DATCTrainer:
        extra["datc"] = datc
    return kind(
        model=model,
        reward_funcs=[reward_model()] if rewards is None else rewards,
        args=arguments,
        train_dataset=Dataset.from_list(train_prompts()[:16]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules="all-linear") if lora else None,
        **extra,
    )


def parameters(trainer: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def trained(kind: type, folder: Path, **options: Any) -> dict[str, Tensor]:
    trainer = make(kind, folder, **options)
    before = parameters(trainer)
    trainer.train()
    after = parameters(trainer)
    assert not equal(before, after)
    return after


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lora": False},
        {"beta": 0.1},
        {"num_iterations": 2, "gradient_accumulation_steps": 2},
        {"steps_per_generation": 2},
        {"gradient_accumulation_steps": 2, "loss_type": "grpo"},
    ],
    ids=lambda options: "-".join(map(str, options)) or "plain",
)
def test_method_grpo_is_the_stock_trainer_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    """T70: a copy of a trainer's loss ignores the options that come later; here the loss is the trainer's own."""
    stock = trained(trl.GRPOTrainer, tmp_path / "a", **options)
    ours = trained(DATCTrainer, tmp_path / "b", datc={"method": "grpo"}, **options)
    assert equal(stock, ours)


@pytest.mark.parametrize("loss", LOSSES)
def test_weights_of_one_change_nothing(tmp_path: Path, loss: str) -> None:
    """ceiling 1 makes every weight 1: the whole way of the weights is taken, and the bits are the stock trainer's."""
    options = {"loss_type": loss, "max_steps": 2, "num_iterations": 2, "steps_per_generation": 2, "beta": 0.05}
    stock = trained(trl.GRPOTrainer, tmp_path / "a", **options)
    ours = trained(DATCTrainer, tmp_path / "b", datc={"ceiling": 1.0}, **options)
    assert equal(stock, ours)


def test_weights_change_the_update(tmp_path: Path) -> None:
    assert not equal(trained(trl.GRPOTrainer, tmp_path / "a"), trained(DATCTrainer, tmp_path / "b"))


def test_advantages_and_loss_are_the_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, from the model's own logits: A w of the rollout, and the clipped surrogate of the second pass over it."""
    stock: dict[str, Any] = {}
    real = trl.GRPOTrainer._generate_and_score_completions

    def record(self: Any, inputs: Any) -> Any:
        stock.update(real(self, inputs), inputs=inputs)
        return {key: value for key, value in stock.items() if key != "inputs"}

    monkeypatch.setattr(trl.GRPOTrainer, "_generate_and_score_completions", record)
    trainer = make(DATCTrainer, tmp_path, loss_type="grpo", max_steps=2, num_iterations=2, learning_rate=0.05)
    policy = copy.deepcopy(trainer.model)
    losses: list[tuple[float, float]] = []
    compute = trainer._compute_loss

    def check(model: Any, inputs: Any) -> Tensor:
        loss = compute(model, inputs)
        whole = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad():
            logits = model(input_ids=whole, attention_mask=attention).logits[:, inputs["prompt_ids"].shape[1] - 1 : -1]
        logp = torch.log_softmax(logits, -1).gather(-1, inputs["completion_ids"][..., None])[..., 0]
        ratio, A, mask = (logp - inputs["old_per_token_logps"]).exp(), inputs["advantages"], inputs["completion_mask"]
        token = torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)
        losses.append((float(loss), -float(((token * mask).sum(1) / mask.sum(1)).mean())))
        return loss

    trainer._compute_loss = check
    rollouts = []
    inner = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: rollouts.append(inner(inputs)) or rollouts[-1]
    trainer.train()

    out, advantage = rollouts[0], stock["advantages"]
    ids, mask = out["completion_ids"], out["completion_mask"].bool()
    reward = reward_model()
    prompts = [row["prompt"] for row in stock["inputs"]]
    responses = [r[m].tolist() for r, m in zip(ids, mask, strict=True)]
    scored = reward.score(prompts[:1], responses, 4, **trainer.datc.point.arguments())
    whole = torch.cat([out["prompt_ids"], ids], 1)
    attention = torch.cat([out["prompt_mask"], out["completion_mask"]], 1)
    policy.eval()
    with torch.no_grad():
        states = policy.base_model.model.model(input_ids=whole, attention_mask=attention).last_hidden_state
    hidden = states[:, out["prompt_ids"].shape[1] - 1 : -1][mask]
    head = policy.base_model.model.lm_head.weight
    credit = linear_credit(hidden, head, ids[mask], scored.reward_grad, scored.reward_embedding, backend="reference")
    weights = allocate_weights(credit.credit, advantage, mask.sum(1), frozen=scored.frozen, backend="reference").weight
    assert (weights - 1).abs().max() > 0.1
    expected = advantage[:, None].expand(mask.shape).clone()
    expected[mask] *= weights
    assert torch.allclose(out["advantages"], expected, rtol=WEIGHT, atol=2 * WEIGHT)
    assert len(losses) == 2
    assert abs(losses[1][1]) > 1e-3  # at the ratio 1 a loss cannot tell: weights have mean 1
    for reported, by_hand in losses:
        assert reported == pytest.approx(by_hand, abs=2 * FORWARD)


def test_other_rewards_and_metrics(tmp_path: Path) -> None:
    trainer = make(DATCTrainer, tmp_path, rewards=[length_reward, reward_model()], log_completions=True)
    trainer.train()
    logged = trainer.state.log_history[0]
    for name in ("ess", "tau", "band_share", "predicted_gain", "mapped", "credit_seconds"):
        assert f"datc/{name}" in logged
    assert 0 < logged["datc/ess"] <= 1
    assert logged["datc/tau"] >= 1
    assert logged["datc/predicted_gain"] > 0
    assert {"rewards/length_reward/mean", "rewards/reward_model/mean"} <= set(logged)
    import pandas as pd

    table = pd.read_parquet(next((tmp_path / "completions").glob("*.parquet")))
    assert len(table["datc_weight"]) == len(table["completion"])
    assert all(weight > 0 for weights in table["datc_weight"] for weight in weights)


def test_rows_of_an_evaluation_have_no_weights_in_the_table(tmp_path: Path) -> None:
    """Each row of the table stands beside its own completion's weights, or none."""
    options = {
        "log_completions": True,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 4,
        "max_steps": 2,
    }
    trainer = make(DATCTrainer, tmp_path, eval_dataset=Dataset.from_list(train_prompts()[20:21]), **options)
    shown: list[tuple[bool, dict[str, list[Any]]]] = []
    log = trainer.log

    def watch(logs: dict[str, float], *arguments: Any, **named: Any) -> None:
        table = {name: list(trainer._logs[name]) for name in ("prompt", "completion")}
        if "train_runtime" not in logs:  # the run's own line, beside the table of the last evaluation
            evaluated = any(key.startswith("eval_") for key in logs)
            shown.append((evaluated, table | {"weight": list(trainer._logs["extra"]["datc_weight"])}))
        log(logs, *arguments, **named)

    trainer.log = watch
    trainer.train()
    assert {evaluated for evaluated, _ in shown} == {False, True}
    for evaluated, table in shown:
        assert len(table["weight"]) == len(table["completion"]) == 4
        assert all((weights is None) == evaluated for weights in table["weight"])


def test_the_reward_model_runs_once_a_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = RewardModel.score
    monkeypatch.setattr(RewardModel, "score", lambda self, *a, **k: calls.append(k["gradient"]) or real(self, *a, **k))
    make(DATCTrainer, tmp_path, num_iterations=3, max_steps=3).train()
    assert calls == [True]


def test_evaluation_has_no_gradient_and_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = RewardModel.score
    monkeypatch.setattr(RewardModel, "score", lambda self, *a, **k: calls.append(k["gradient"]) or real(self, *a, **k))
    trainer = make(DATCTrainer, tmp_path, per_device_eval_batch_size=4)
    assert "eval_reward" in trainer.evaluate(Dataset.from_list(train_prompts()[:1]))
    assert calls == [False]


def test_truncated_responses_that_the_loss_leaves_out(tmp_path: Path) -> None:
    trained_options = {"mask_truncated_completions": True, "max_completion_length": 24, "num_generations": 4}
    make(DATCTrainer, tmp_path, **trained_options).train()


def test_dropout_does_not_reach_the_credit(tmp_path: Path) -> None:
    """The pass for the credit is in evaluation mode, and every module is afterwards as it was."""
    trainer = make(DATCTrainer, tmp_path, max_steps=1)
    seen: list[bool] = []
    inner = trainer._hidden_states

    def watch(policy: Any, output: Any, lengths: Tensor) -> Tensor:
        modules = dict(policy.model.named_modules())
        before = {name: module.training for name, module in modules.items()}
        hook = policy.backbone.register_forward_hook(lambda *_: seen.append(any(m.training for m in modules.values())))
        states = inner(policy, output, lengths)
        hook.remove()
        assert before == {name: module.training for name, module in modules.items()}
        assert any(before.values())
        return states

    trainer._hidden_states = watch
    trainer.train()
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_pass_for_the_credit_reads_a_groups_prompt_once(tmp_path: Path, checkpointing: bool) -> None:
    """And gives the states of the rows as TRL pads them, in fewer tokens; TRL checkpoints activations by default."""
    trainer = make(DATCTrainer, tmp_path, max_steps=1, per_device_train_batch_size=8, gradient_checkpointing=checkpointing)
    inner, compared = trainer._hidden_states, []

    def watch(policy: Any, output: Any, lengths: Tensor) -> Tensor:
        read: list[int] = []
        embedding = policy.model.get_input_embeddings()
        hook = embedding.register_forward_hook(lambda _, arguments, __: read.append(arguments[0].numel()))
        states = inner(policy, output, lengths)
        hook.remove()
        prompts, answers = output["prompt_ids"], output["completion_ids"]
        real = torch.arange(answers.shape[1]) < lengths[:, None]
        mask = torch.cat([output["prompt_mask"], real.to(output["prompt_mask"].dtype)], 1)
        with torch.no_grad(), evaluating(policy.model):
            whole = policy.backbone(input_ids=torch.cat([prompts, answers], 1), attention_mask=mask, use_cache=False)
        expected = whole.last_hidden_state[:, prompts.shape[1] - 1 : -1][real]
        torch.testing.assert_close(states, expected, rtol=FORWARD, atol=4 * FORWARD)
        assert not bool(output["prompt_mask"].all())  # prompts of two lengths
        compared.append(sum(read[-4:]) < int(mask.sum()))
        return states

    trainer._hidden_states = watch
    trainer.train()
    assert compared == [True]


def test_a_run_goes_on_from_a_checkpoint_of_trls(tmp_path: Path) -> None:
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "save_only_model": False}
    whole = make(DATCTrainer, tmp_path / "a", **options)
    whole.train()
    half = make(DATCTrainer, tmp_path / "b", **options)
    half.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert equal(parameters(whole), parameters(half))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rewards": [length_reward]}, "reward_funcs: expected a .*RewardModel.*got length_reward"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level: expected token"),
        ({"loss_type": "vespo"}, "loss_type: expected one of"),
        ({"datc": {"method": "ppo"}}, "method: expected one of datc, grpo"),
        ({"datc": {"ceiling": 0.5}}, "ceiling: expected"),
        ({"datc": {"utility": "x"}}, "utility: expected"),
        ({"datc": {"rate": 1}}, "datc: no such key 'rate'"),
        ({"datc": {1: 2, "rate": 3}}, "datc: no such key 1"),
        ({"datc": {"backend": "x"}}, "backend: expected None or one of reference, "),
        ({"datc": {"backend": "cuda"}}, "backend: 'cuda' cannot run here"),
        ({"reward_weights": [0.0]}, "reward_weights: expected finite numbers for the RewardModels.*got 0"),
        ({"rewards": [reward_model(), reward_model()], "reward_weights": [1.0, float("nan")]}, "reward_weights: .*got 1, nan"),
        ({"reward_weights": [float("inf")]}, "reward_weights: .*got inf"),
        ({"rewards": [OtherScore(*load_tiny_reward_model())]}, "reward_funcs: .*got OtherScore, which replaces __call__"),
        ({"rewards": [length_reward, reward_model()], "reward_weights": [1.0, 0.0]}, "reward_weights: .*got 0"),
        ({"datc": 4.0}, "datc: expected a DATCConfig"),
    ],
)
def test_what_would_lose_the_weights_is_refused(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=f"^{says}"):
        make(DATCTrainer, tmp_path, **options)


def test_ligers_loss_is_refused(tmp_path: Path) -> None:
    trainer = make(DATCTrainer, tmp_path)
    trainer.args.use_liger_kernel = True
    with pytest.raises(ValueError, match="^use_liger_kernel: expected False"):
        trainer._check_options()


def test_the_list_of_reward_functions_stays_the_callers(tmp_path: Path) -> None:
    rewards = [reward_model(), length_reward]
    before = list(rewards)
    for _ in range(2):
        make(DATCTrainer, tmp_path, rewards=rewards)
    assert rewards == before


@pytest.mark.skipif(
    "rollout_func" not in inspect.signature(trl.GRPOTrainer.__init__).parameters, reason="this TRL has no rollout_func"
)
def test_tokens_that_an_environment_wrote_take_no_part(tmp_path: Path) -> None:
    """TRL trains on the policy's own tokens alone: over them the mean weight is 1, and the others have none."""
    mask = [1, 1, 0, 0, 0, 0, 1, 1]

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        dice = torch.Generator().manual_seed(3)
        read = trainer.processing_class.apply_chat_template
        return {
            "prompt_ids": [read(prompt, add_generation_prompt=True, return_dict=False) for prompt in prompts],
            "completion_ids": [torch.randint(5, 500, (8,), generator=dice).tolist() for _ in prompts],
            "logprobs": None,
            "env_mask": [mask for _ in prompts],
        }

    trainer = make(DATCTrainer, tmp_path, max_steps=1, rollout_func=rollout)
    trainer.train()
    kept = torch.tensor(mask).bool()
    weights = torch.tensor(list(trainer._logs["extra"]["datc_weight"]))
    assert weights.shape == (4, 8)
    assert (weights[:, ~kept] == 1).all()
    assert (weights[:, kept] != 1).any()
    assert (weights[:, kept].mean(1) - 1).abs().max() < 1e-3  # they are logged with three decimals


@pytest.mark.parametrize("how", ["flattened", "averaged", "averaged, equal rewards"])
def test_a_trl_that_ignores_token_advantages_is_found(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test: another version could drop the weights, and every curve would still look healthy."""
    real = trl.GRPOTrainer._compute_loss

    def other(self: Any, model: Any, inputs: Any) -> Tensor:
        return real(self, model, inputs | {"advantages": inputs["advantages"].mean(1)})

    trainer = make(DATCTrainer, tmp_path)
    if how == "averaged, equal rewards":
        score = trainer._calculate_rewards
        trainer._calculate_rewards = lambda *arguments: torch.zeros_like(score(*arguments))
    if how.startswith("averaged"):
        monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", other)
    else:
        inner = trainer._generate_and_score_completions

        def flatten(inputs: Any) -> Any:
            out = inner(inputs)
            return out | {"advantages": out["advantages"][:, 0]}

        trainer._generate_and_score_completions = flatten
    with pytest.raises(RuntimeError, match="does not use each token's own advantage"):
        trainer.train()


def test_the_self_test_leaves_no_trace(tmp_path: Path) -> None:
    trainer = make(DATCTrainer, tmp_path, beta=0.05)
    trainer.train()
    assert trainer._loss_is_checked
    assert "_get_per_token_logps_and_entropies" not in vars(trainer)
    assert all(abs(line["entropy"]) > 0 for line in trainer.state.log_history if "entropy" in line)


def test_config_defaults_are_the_papers() -> None:
    assert DATCConfig() == DATCConfig(method="datc", ceiling=4.0, utility="advantage")


def other_model() -> RewardModel:
    model, tokenizer = load_tiny_reward_model()
    torch.manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return RewardModel(model, tokenizer)


AGGREGATIONS = [
    "sum_then_normalize",
    pytest.param(
        "normalize_then_sum",
        marks=pytest.mark.skipif(
            "multi_objective_aggregation" not in inspect.signature(trl.GRPOConfig.__init__).parameters, reason="not in this TRL"
        ),
    ),
]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_several_reward_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aggregation: str) -> None:
    """The gradient is that of the sum that TRL makes: held against autograd of TRL's own formula by the scores, in float64."""
    rewards, weights = [reward_model(), length_reward, other_model(), reward_model()], [1.5, 0.3, -0.7, 0.0]
    options = {"reward_weights": weights, "max_steps": 1}
    if aggregation != "sum_then_normalize":
        options["multi_objective_aggregation"] = aggregation
    trainer = make(DATCTrainer, tmp_path, rewards=rewards, **options)
    seen: dict[str, Any] = {}
    real = trainer._sum

    def watched(scored: dict[int, Any], responses: list[list[int]]) -> Any:
        seen.update(scored=scored, all=trainer._all_rewards.double(), total=real(scored, responses))
        seen["owner"] = torch.repeat_interleave(torch.tensor([len(r) for r in responses]))
        return seen["total"]

    monkeypatch.setattr(trainer, "_sum", watched)
    trainer.train()
    assert sorted(seen["scored"]) == [0, 2]
    scores = seen["all"].clone().requires_grad_()  # one group of four
    w = torch.tensor(weights, dtype=torch.float64)
    if aggregation == "sum_then_normalize":
        objective = (scores * w).sum()
    else:  # mean and deviation are of the group: constants for a token
        centre, deviation = scores.detach().mean(0), scores.detach().std(0)
        objective = ((scores - centre) / (deviation + 1e-4) * w).sum()
    (by_score,) = torch.autograd.grad(objective, scores)
    total, owner = seen["total"], seen["owner"]
    u = total.reward_grad.double() @ total.reward_embedding.double().T
    expected = sum(
        by_score[owner, i, None] * (one.reward_grad.double() @ one.reward_embedding.double().T)
        for i, one in seen["scored"].items()
    )
    torch.testing.assert_close(u, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))
    names = [f"rewards/{name}/mean" for name in ("reward_model", "length_reward", "reward_model_2", "reward_model_3")]
    assert all(name in trainer.state.log_history[0] for name in names)


def test_a_second_model_turns_the_update(tmp_path: Path) -> None:
    alone = trained(DATCTrainer, tmp_path / "a")
    with_zero = trained(DATCTrainer, tmp_path / "b", rewards=[reward_model(), other_model()], reward_weights=[1.0, 0.0])
    both = trained(DATCTrainer, tmp_path / "c", rewards=[reward_model(), other_model()])
    assert equal(alone, with_zero)
    assert not equal(alone, both)
