"""`datc probe`: what is drawn, forecast and true, each against an independent way to it; errors, table, JSON and page."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from report_pages import Page, make_run
from test_refusals import run_cli
from test_reward_spelling import other_tokenizer

from datc_train import doctor
from datc_train.cli import main
from datc_train.config import config_from
from datc_train.credit_point import CreditPoint
from datc_train.probe import Probe, probe, table
from datc_train.probe.judge import POINTS
from datc_train.quickstart import load_tiny_policy, load_tiny_reward_model
from datc_train.report import write_report
from datc_train.reward import RewardModel
from datc_train.types import ScoredRollout

TINY = {"policy": "tiny", "reward": "tiny", "prompts": "quickstart", "device": "cpu", "max_new_tokens": 12, "temperature": 0.7}
SIZES = {"responses": 6, "positions": 4, "alternatives": 4}
QUALITIES = {f"{what}_{how}" for what in ("all", "within", "advantage") for how in ("pearson", "spearman")}


def without_seconds(found: Probe) -> dict[str, Any]:
    result = found.to_dict()
    for point in result["points"]:
        del point["cost"]
    del result["machine"]
    return result


@pytest.fixture(scope="module")
def found() -> Probe:
    return probe(TINY, **SIZES)


class Linear:
    """R = sum over t of <w_t, E of the token there>, with gradients as asked for; every third position is frozen.

    noise: by the point's kind, the size of what is added to its gradient.
    """

    def __init__(self, noise: dict[str, float] | None = None, frozen_every: int = 3, unread: int | None = None) -> None:
        random = torch.Generator().manual_seed(0)
        self.weight = torch.randn(64, 8, generator=random, dtype=torch.float64)
        self.table = torch.randn(512, 8, generator=random, dtype=torch.float64)
        self.noise, self.frozen_every, self.unread = noise or {}, frozen_every, unread

    def score(self, prompts: Any, responses: list[list[int]], group_size: int, **asked: Any) -> ScoredRollout:
        assert len(responses) == len(prompts) * group_size
        place = torch.cat([torch.arange(len(row)) for row in responses])
        score = torch.stack([(self.weight[: len(row)] * self.table[row]).sum() for row in responses])
        mapped = torch.ones(len(place), dtype=torch.bool)
        frozen = place % self.frozen_every == 0
        if not asked["gradient"]:
            unread = None
            if self.unread is not None:
                unread = torch.tensor([self.unread in row for row in responses])
            return ScoredRollout(score, None, mapped, frozen, None, unread=unread)
        gradient = self.weight[place]
        if asked["credit_point"] == "tangent":
            e = self.table[torch.tensor([token for row in responses for token in row])]
            gradient = gradient - (gradient * e).sum(1, keepdim=True) * e / e.square().sum(1, keepdim=True)
        size = self.noise.get(asked["credit_point"], 0.0)
        noise = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return ScoredRollout(score, gradient + size * noise, mapped, frozen, self.table)


def correlations(found: Probe, kind: str) -> dict[str, list[float]]:
    return {
        point.name: [one["value"] for one in asdict(getattr(point, kind)).values()]
        for point in found.points
        if getattr(point, kind) is not None
    }


@pytest.mark.parametrize("kind", ["free", "frozen"])
def test_where_the_score_is_linear_in_the_embeddings_its_gradient_forecasts_exactly(kind: str) -> None:
    found = probe(TINY, reward=Linear(), **SIZES)
    for name, values in correlations(found, kind).items():
        if name == "tangent":
            assert all(value < 0.99 for value in values)
        else:
            assert all(abs(value - 1) < 1e-6 for value in values), name
    for one in found.replacements:
        assert one.forecast["integrated, 2 passes"] == pytest.approx(one.change, rel=1e-5, abs=1e-6)
    assert found.recommended == CreditPoint()
    assert found.config_lines == "credit_point: embedding"


def test_a_dearer_point_is_recommended_only_where_it_is_clearly_better() -> None:
    found = probe(TINY, reward=Linear({"embedding": 30.0, "tangent": 30.0}), **SIZES)
    assert found.recommended == CreditPoint("integrated", 1)
    assert found.config_lines == "credit_point: integrated\ncredit_passes: 1\ncredit_scale: 0.5"
    assert "consider method: grpo" not in found.reason
    assert config_from({key: value for key, _, value in (x.partition(": ") for x in found.config_lines.splitlines()[:1])})


def test_where_nothing_forecasts_the_verdict_says_so() -> None:
    noise = dict.fromkeys(("embedding", "tangent", "integrated"), 1e4)
    assert "no point's is told from 0" in probe(TINY, reward=Linear(noise), **SIZES).reason


def test_changes_and_forecasts_are_the_reward_models_own(found: Probe) -> None:
    """Each replaced response scored alone, and <g, E_v - E_y> of its response alone."""
    policy, tokenizer = load_tiny_policy()
    reward = RewardModel(*load_tiny_reward_model(), policy_tokenizer=tokenizer)
    from datc_train.data import find_train_prompts, prompt_batch
    from datc_train.rollout import TransformersSampler

    prompts = prompt_batch(find_train_prompts(config_from(TINY)), 1, SIZES["responses"], 0)
    sampler = TransformersSampler(policy, tokenizer, group_size=2, max_new_tokens=12, temperature=0.7).with_group_size(1)
    rollout = sampler.sample(prompts, seed=0)
    responses = [part.tolist() for part in rollout.response_ids.split(rollout.lengths.tolist())]
    scores = {
        (response, point): reward.score([prompts[response].messages], [row], 1, stop_ids=sampler.stop_ids, **point.arguments())
        for response, row in enumerate(responses)
        for point in POINTS
    }
    for one in found.replacements[::3]:
        prompt, row = prompts[one.response].messages, responses[one.response]
        assert row[one.position] == one.token
        for point in POINTS:
            scored = scores[one.response, point]
            assert bool(scored.mapped[one.position])
            assert bool(scored.frozen[one.position]) == one.frozen
            assert scored.reward_grad is not None
            assert scored.reward_embedding is not None
            table = scored.reward_embedding.double()
            by_hand = (table[list(one.alternatives)] - table[one.token]) @ scored.reward_grad[one.position].double()
            assert np.allclose(one.forecast[point.name], by_hand, rtol=1e-3, atol=1e-6)
        for v, change in zip(one.alternatives, one.change, strict=True):
            other = [*row[: one.position], v, *row[one.position + 1 :]]
            new = reward.score([prompt], [other], 1, gradient=False, stop_ids=sampler.stop_ids).score
            assert change == pytest.approx(float(new - scores[one.response, POINTS[0]].score), rel=1e-3, abs=2e-6)
        # what the policy thinks of them, by the model's own logits
        ids = [*rollout.prompt_ids[one.response], *row[: one.position]]
        with torch.no_grad():
            logits = policy(torch.tensor([ids])).logits[0, -1, : sampler.vocab_size].double()
        p = (logits / 0.7).softmax(-1)
        assert one.token_probability == pytest.approx(float(p[one.token]), rel=1e-3)
        assert one.probability == pytest.approx(p[list(one.alternatives)].tolist(), rel=1e-3)
        assert len({one.token, *one.alternatives, *sampler.stop_ids}) == 1 + 4 + len(sampler.stop_ids)
        assert one.text == tuple(tokenizer.decode([i]) for i in (one.token, *one.alternatives))


def test_of_each_response_as_many_positions_as_asked_for(found: Probe) -> None:
    for response in range(SIZES["responses"]):
        here = [one for one in found.replacements if one.response == response]
        assert len({one.position for one in here}) == len(here)
        assert sum(not one.frozen for one in here) <= 4
        assert sum(one.frozen for one in here) <= 2
    assert found.free == sum(not one.frozen for one in found.replacements) > 12
    every_token_frozen_but_one = probe(TINY, reward=Linear(frozen_every=1000), **SIZES)
    assert every_token_frozen_but_one.points[0].frozen is not None  # the first one of each response


def test_alternatives_come_as_often_as_the_policy_would_sample_them() -> None:
    """The first draw of many positions with the same logits: frequencies of p without the token, renormalised."""
    from datc_train.models import read_policy
    from datc_train.probe.replacements import draw_alternatives
    from datc_train.types import Prompt, Rollout

    actor = read_policy(config_from(TINY), torch.device("cpu"))
    actor.model.lm_head.weight.data[8:] = 0  # every hidden state alike is not needed: few likely tokens are
    actor.model.lm_head.weight.data[:8] *= 30
    size = 400
    ids = torch.full((size * 2,), 5)
    rollout = Rollout(
        prompts=(Prompt([{"role": "user", "content": "a"}]),),
        prompt_ids=((7, 8, 9),),
        group_size=size,
        response_ids=ids,
        lengths=torch.full((size,), 2),
        sampler_logprob=torch.zeros(size * 2),
        finished=torch.zeros(size, dtype=torch.bool),
    )
    scored = Linear().score([None], [[5, 5]] * size, size, gradient=True, credit_point="embedding")
    drawn = draw_alternatives(
        actor, rollout, scored, [(i, 0) for i in range(size)], [2], 1, temperature=1.3, vocab_size=512, seed=3
    )
    with torch.no_grad():
        p = (actor.model(torch.tensor([[7, 8, 9]])).logits[0, -1].double() / 1.3).softmax(-1)
    p[[5, 2]] = 0
    p /= p.sum()
    seen = torch.bincount(torch.tensor([one.alternatives[0] for one in drawn]), minlength=512) / size
    assert p.max() > 0.05
    assert (seen - p).abs().max() < 5 * (0.25 / size) ** 0.5
    assert seen[5] == seen[2] == 0


def test_the_same_call_finds_the_same_and_another_seed_does_not(found: Probe) -> None:
    assert without_seconds(probe(TINY, **SIZES)) == without_seconds(found)
    other = probe(TINY | {"seed": 1}, **SIZES)
    assert [one.token for one in other.replacements] != [one.token for one in found.replacements]


def test_every_interval_holds_its_estimate_and_every_pass_costs_something(found: Probe) -> None:
    for point in found.points:
        assert point.cost > 0
        for quality in (point.free, point.frozen):
            for one in asdict(quality).values() if quality is not None else ():
                assert -1 <= one["low"] <= one["value"] <= one["high"] <= 1
    assert [point.point for point in found.points] == list(POINTS)


def test_the_policy_stays_as_it_was() -> None:
    from peft import LoraConfig, get_peft_model

    policy, tokenizer = load_tiny_policy()
    model = get_peft_model(policy, LoraConfig(r=2, target_modules=["q_proj"])).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    probe(TINY | {"policy": ""}, model, tokenizer, responses=3, positions=2, alternatives=2)
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(module.training for module in model.modules())
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.filterwarnings("ignore:reward model. the policy has another vocabulary")
def test_a_policy_with_another_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATC_CACHE", str(tmp_path))
    policy, _ = load_tiny_policy()
    tokenizer = other_tokenizer()
    reward = RewardModel(*load_tiny_reward_model(), policy_tokenizer=tokenizer)
    assert reward.policy_vocabulary.difference is not None
    found = probe(TINY, policy, tokenizer, reward, **SIZES)
    assert found.free >= 6
    assert all(value is not None for values in correlations(found, "free").values() for value in values)


def test_rows_that_the_reward_model_cannot_hold_are_left_out() -> None:
    everything = probe(TINY, reward=Linear(), **SIZES)
    token = everything.replacements[0].alternatives[0]
    left = probe(TINY, reward=Linear(unread=token), **SIZES)
    kept = [(one.response, one.position) for one in left.replacements]
    assert kept == [
        (one.response, one.position)
        for one in everything.replacements
        if token not in one.alternatives and everything.replacements and (one.response, one.position) in kept
    ]
    assert (everything.replacements[0].response, everything.replacements[0].position) not in kept
    assert 0 < len(kept) < len(everything.replacements)


def test_fewer_prompts_than_responses() -> None:
    found = probe(TINY | {"prompts": ""}, prompts=["Why is the sky blue?", "Name a hobby."], responses=5, positions=2)
    assert found.responses == 6
    assert len({one.token for one in found.replacements if one.position == 0}) > 1 or found.free > 4


def brief(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [0.0 for _ in completions]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"responses": 1}, "responses: expected a whole number of at least 2, got 1"),
        ({"positions": 0}, "positions: expected a whole number of at least 1, got 0"),
        ({"alternatives": 1}, "alternatives: expected a whole number of at least 2, got 1"),
        ({"alternatives": 512}, r"alternatives: expected at most \d+"),
        ({"reward": brief}, "reward: expected a reward model: the probe reads its gradient; got brief, which has none"),
        ({"reward": load_tiny_reward_model()[0]}, r"reward: expected RewardModel\(model, tokenizer\) around it"),
        ({"reward": Linear(frozen_every=1)}, "policy: expected responses with free positions .*, got none among the"),
        ({"policy": load_tiny_policy()[0]}, "tokenizer: expected one beside policy"),
        ({"prompts": []}, "prompts: expected at least one"),
    ],
)
def test_what_cannot_be_probed(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        probe(TINY, **(SIZES | given))


def test_a_policy_that_repeats_itself() -> None:
    with pytest.raises(ValueError, match=r"^policy: expected tokens that the policy might have sampled otherwise, got a prob"):
        probe(TINY | {"temperature": 1e-6}, **SIZES)


def test_several_rewards_are_probed_as_the_sum_of_their_models(found: Probe) -> None:
    """A function moves no forecast and no change; a weight scales both; a sum without a model is refused."""
    model, tokenizer = load_tiny_reward_model()
    given = [RewardModel(model, tokenizer, policy_tokenizer=load_tiny_policy()[1]), brief]
    beside = probe(TINY | {"reward_weights": [1.0, 5.0]}, reward=given, **SIZES)
    twice = probe(TINY | {"reward_weights": [2.0, 0.0]}, reward=given, **SIZES)
    for one, same, doubled in zip(found.replacements, beside.replacements, twice.replacements, strict=True):
        assert same == one
        assert doubled.alternatives == one.alternatives
        assert doubled.change == pytest.approx([2 * x for x in one.change], rel=1e-5, abs=1e-6)
        for name, values in one.forecast.items():
            assert doubled.forecast[name] == pytest.approx([2 * x for x in values], rel=1e-5, abs=1e-6)
    with pytest.raises(ValueError, match=r"^reward: expected a reward model of a weight other than 0"):
        probe(TINY | {"reward_weights": [0.0, 1.0]}, reward=given, **SIZES)


def test_a_reward_without_gradient_is_found_when_it_gives_none() -> None:
    class Without(Linear):
        def score(self, *words: Any, **asked: Any) -> ScoredRollout:
            return super().score(*words, **asked | {"gradient": False})

    with pytest.raises(ValueError, match=r"^reward: expected a reward model that gives its gradient"):
        probe(TINY, reward=Without(), **SIZES)


def test_by_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", 2)
    out = run / "probe.json"
    sizes = "--responses 5 --positions 3 --alternatives 3 --max_new_tokens 8 --device cpu"
    main(["probe", "--config", "tiny", "--json", str(out), *sizes.split()])
    said = capsys.readouterr().out
    found = json.loads(out.read_text())
    assert f"5 responses; {sum(not one['frozen'] for one in found['replacements'])} free" in said
    assert all(f"\n{point.name} " in said for point in POINTS)
    assert found["reason"] in said
    assert said.rstrip().endswith("\n".join(f"{key}: {value}" for key, value in found["recommended"].items()))
    assert max(map(len, said.splitlines()[:5])) <= 130

    assert set(found) == {"points", "recommended", "reason", "responses", "replacements", "settings", "machine"}
    for point in found["points"]:
        assert set(point) == {"credit_point", "credit_passes", "credit_scale", "name", "free", "frozen", "cost"}
        assert set(point["free"]) == QUALITIES
        assert all(set(one) == {"value", "low", "high"} for one in point["free"].values())
    names = [point["name"] for point in found["points"]]
    for one in found["replacements"]:
        assert list(one["forecast"]) == names
        assert {len(one[key]) for key in ("alternatives", "probability", "change")} == {3}
        assert {len(values) for values in one["forecast"].values()} == {3}
    assert found["settings"]["max_new_tokens"] == 8
    assert found["settings"]["responses"] == 5

    for page in (out.with_suffix(".html"), write_report(run)):
        parsed = Page(page)
        text = " ".join(" ".join(parsed.text).split())
        assert all(name in text for name in names)
        assert " ".join(found["reason"].split()) in text
        assert not [a for _, a in parsed.elements if any((a.get(key) or "").startswith("http") for key in ("src", "href"))]
        assert parsed.tagged("figure")
    assert (run / "figures" / "probe.png").read_bytes().startswith(b"\x89PNG")
    assert "Where to take the reward" not in " ".join(Page(write_report(make_run(tmp_path / "other", 2))).text)


def test_several_reports_with_probes_have_sections_of_their_own(found: Probe, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, 2) for name in ("a", "b", "c")]
    for run in runs[:2]:
        found.save(run / "probe.json")
    page = Page(write_report(runs, tmp_path / "all.html"))
    ids = [a["id"] for a in page.tagged("figure") if a["id"].startswith("figure-probe")]  # type: ignore[union-attr]
    assert ids == ["figure-probe_1", "figure-probe_2"]
    every = [a["id"] for _, a in page.elements if a.get("id")]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"points": []}', '{"points": [{"free": 1}]}'])
def test_what_is_no_probe_of_a_run(text: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "probe.json").write_text(text)
    with pytest.raises(ValueError, match=r"^run: expected what `datc probe --json` writes in "):
        write_report(run)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--config", "tiny", "--json", "probe.html"], "json: expected a file that ends in .json"),
        (["--config", "tiny", "--responses", "0"], "responses: expected"),
        (["--config", "tiny", "--reward", "nowhere/at/all"], "reward: expected"),
        ([], "--config: expected a recipe"),
    ],
)
def test_errors_of_the_command(words: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, said = run_cli(capsys, "probe", *words)
    assert code == 2
    assert said.startswith(f"datc: {says}")


def test_the_table_without_what_is_undefined(found: Probe) -> None:
    """A score that nothing changes has no correlations."""

    class Constant(Linear):
        def score(self, *words: Any, **asked: Any) -> ScoredRollout:
            scored = super().score(*words, **asked)
            scored.score.zero_()
            return scored

    nothing = probe(TINY, reward=Constant(), **SIZES)
    assert all(one["value"] is None for one in asdict(nothing.points[0].free).values())
    assert "nothing varies" in nothing.reason
    assert "–" in table(nothing)
    json.dumps(nothing.to_dict(), allow_nan=False)
    assert all(point.name in table(found) for point in found.points)


@pytest.mark.parametrize(("method", "there"), [("datc", True), ("datc_shuffled", True), ("grpo", False), ("p2t", False)])
def test_the_doctor_points_at_it(method: str, there: bool) -> None:
    config = config_from(TINY | {"method": method, "credit_point": "integrated", "credit_passes": 2})
    seen = {finding.name: finding.text for finding in doctor.examine(config, say=lambda _: None)}
    assert ("credit point" in seen) == there
    if there:
        assert seen["credit point"].startswith("integrated, 2 passes; datc probe")
