"""The point at which the reward's gradient is taken: against autograd through whole rows of the stock model, in float64."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from test_reward_score import PROMPTS, rendered_row, responses
from test_reward_tiny import FAMILIES, chatml_tokenizer, llama_tokenizer, qwen3_tokenizer, tiny_classifier
from torch import Tensor

from datc_train import train
from datc_train.config import config_from
from datc_train.credit import METHODS
from datc_train.credit_point import DEFAULT, CreditPoint
from datc_train.reward import RewardModel
from datc_train.types import ScoredRollout

# The head is read in float32 whatever the model is; nothing else of the pass is.
TOLERANCE = 64 * torch.finfo(torch.float32).eps


def float64_model(family: str, **options: Any) -> RewardModel:
    """In float32 for Gemma 2: the library takes its softmax in float32, where a float64 mask is infinite and padding is NaN."""
    dtype = torch.float32 if family == "gemma2" else torch.float64
    tokenizer = {"llama": llama_tokenizer, "qwen3": qwen3_tokenizer}.get(family, chatml_tokenizer)()
    return RewardModel(tiny_classifier(family, len(tokenizer) + 5, dtype=dtype), tokenizer, **options)


def gradient_by_hand(model: Any, row: list[int], scale: Tensor) -> Tensor:
    """[L, K] d score / d input where the embeddings of one unpadded row are multiplied by scale [L]."""
    kept: list[Tensor] = []

    def move(module: torch.nn.Module, args: Any, output: Tensor) -> Tensor:
        kept.append((output.detach() * scale[None, :, None].to(output.dtype)).requires_grad_())
        return kept[0]

    handle = model.get_input_embeddings().register_forward_hook(move)
    try:
        with torch.enable_grad():
            score = model(input_ids=torch.tensor([row])).logits[0, 0]
            return torch.autograd.grad(score, kept[0])[0][0]
    finally:
        handle.remove()


def rows_with_places(reward: RewardModel, rows: list[list[int]], mapped: Tensor) -> list[tuple[list[int], list[int]]]:
    """Each response's row, and the places in it of the response's mapped ids, which stand in one piece."""
    found, at = [], 0
    for index, response in enumerate(rows):
        row = rendered_row(reward, PROMPTS[index // 3], response)
        content = [token for token, kept in zip(response, mapped[at : at + len(response)].tolist(), strict=True) if kept]
        starts = [s for s in range(len(row) - len(content) + 1) if row[s : s + len(content)] == content]
        found.append((row, list(range(starts[-1], starts[-1] + len(content)))))
        at += len(response)
    return found


def close(got: Tensor, expected: Tensor) -> None:
    assert (got - expected).norm() <= TOLERANCE * expected.norm()


@pytest.mark.parametrize("budget", [1, 8192])
@pytest.mark.parametrize("passes", [1, 2, 3, 50])
@pytest.mark.parametrize("family", FAMILIES)
def test_integrated_is_autograd_at_the_moved_row(family: str, passes: int, budget: int) -> None:
    """Every k-th mapped token moved, k times; prefix shared or not, rows alone or together."""
    reward = float64_model(family, max_tokens_per_batch=budget)
    rows = responses(reward.tokenizer)
    scale = 0.25 if passes == 3 else 0.5
    scored = reward.score(PROMPTS, rows, 3, credit_point="integrated", credit_passes=passes, credit_scale=scale)
    plain = reward.score(PROMPTS, rows, 3)
    assert torch.equal(scored.mapped, plain.mapped)
    assert torch.equal(scored.frozen, plain.frozen)
    assert (scored.score - plain.score).abs().max() <= TOLERANCE * plain.score.abs().max()
    assert scored.reward_grad is not None
    parts = scored.reward_grad.split([len(row) for row in rows])
    for got, (row, places), kept in zip(
        parts,
        rows_with_places(reward, rows, scored.mapped),
        scored.mapped.split([len(row) for row in rows]),
        strict=True,
    ):
        expected = torch.zeros(len(places), got.shape[1], dtype=got.dtype)
        for turn in range(min(passes, len(places))):
            moved = torch.ones(len(row), dtype=torch.float64)
            moved[places[turn::passes]] = scale
            expected[turn::passes] = gradient_by_hand(reward.model, row, moved)[places[turn::passes]]
        close(got[kept], expected)
        assert torch.equal(got[~kept], torch.zeros_like(got[~kept]))


@pytest.mark.parametrize("family", FAMILIES)
def test_tangent_is_orthogonal_to_the_tokens_embedding(family: str) -> None:
    reward = float64_model(family)
    rows = responses(reward.tokenizer)
    plain, tangent = reward.score(PROMPTS, rows, 3), reward.score(PROMPTS, rows, 3, credit_point="tangent")
    assert plain.reward_grad is not None
    assert plain.reward_embedding is not None
    assert tangent.reward_grad is not None
    assert torch.equal(tangent.score, plain.score)
    e = plain.reward_embedding[torch.tensor([token for row in rows for token in row])]
    bound = 64 * torch.finfo(e.dtype).eps
    assert bool(((tangent.reward_grad * e).sum(1).abs() <= bound * plain.reward_grad.norm(dim=1) * e.norm(dim=1)).all())
    along = (plain.reward_grad * e).sum(1, keepdim=True) * e / e.square().sum(1, keepdim=True)
    assert (tangent.reward_grad - (plain.reward_grad - along)).norm() <= bound * plain.reward_grad.norm()
    assert float(along.norm()) > 1e-3 * float(plain.reward_grad.norm())


def test_embedding_is_the_default_and_a_scale_of_one_is_it_too() -> None:
    reward = float64_model("llama")
    rows = responses(reward.tokenizer)
    plain = reward.score(PROMPTS, rows, 3)
    named = reward.score(PROMPTS, rows, 3, credit_point="embedding")
    whole = reward.score(PROMPTS, rows, 3, credit_point="integrated", credit_scale=1.0)
    assert plain.reward_grad is not None
    assert named.reward_grad is not None
    assert whole.reward_grad is not None
    assert torch.equal(named.reward_grad, plain.reward_grad)
    assert torch.equal(named.score, plain.score)
    assert (whole.reward_grad - plain.reward_grad).norm() <= TOLERANCE * plain.reward_grad.norm()


def other_vocabulary(reward: RewardModel) -> tuple[RewardModel, list[list[int]]]:
    """The same model behind a policy whose tokens are single bytes and whole words that the model spells in pieces."""
    from test_reward_tiny import QWEN_SPECIALS, QWEN_SPLIT, byte_level, finish

    policy = finish(byte_level(QWEN_SPLIT, size=300), QWEN_SPECIALS, bos=None, eos="<|im_end|>", template="", adds_bos=False)
    policy.add_tokens(["The quick brown fox", "fine, thank you"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="reward model: the policy has another vocabulary")
        crossed = RewardModel(reward.model, reward.tokenizer, policy_tokenizer=policy)
    texts = ["I am fine, thank you very much.", "The quick brown fox jumps", "no"]
    return crossed, [policy(text, add_special_tokens=False)["input_ids"] for text in texts]


def test_a_token_of_several_rows_moves_as_one_and_loses_each_rows_own_ray() -> None:
    """Another vocabulary: g of a policy token is the sum over its span; every reward token of it loses its own ray first."""
    reward = float64_model("qwen2")
    crossed, rows = other_vocabulary(reward)
    scored: dict[str, ScoredRollout] = {
        name: crossed.score(PROMPTS[:1], rows, 3, **point)
        for name, point in {
            "tangent": {"credit_point": "tangent"},
            "integrated": {"credit_point": "integrated", "credit_passes": 2},
        }.items()
    }
    texts = [crossed.policy_tokenizer.decode(row) for row in rows]
    at = 0
    widths = set()
    for text, response in zip(texts, rows, strict=True):
        chat = [*PROMPTS[0], {"role": "assistant", "content": text}]
        row = reward.tokenizer.apply_chat_template(chat, return_dict=False)
        content = reward.tokenizer(text, add_special_tokens=False)["input_ids"]
        start = next(s for s in range(len(row)) if row[s : s + len(content)] == content)
        ends, done = {}, 0
        for place, token in enumerate(content):  # byte offset -> place of the reward token that begins there
            ends[done] = start + place
            done += len(reward.tokenizer.decode([token]).encode())
        ends[done] = start + len(content)
        spans, byte = [], 0
        for token in response:
            size = len(crossed.policy_tokenizer.decode([token]).encode())
            spans.append((ends.get(byte), ends.get(byte + size)))
            byte += size
        held = [None not in span for span in spans]
        assert scored["tangent"].mapped[at : at + len(response)].tolist() == held
        places = [list(range(*span)) for span in spans if None not in span]
        widths |= {len(span) for span in places}
        e = reward.model.get_input_embeddings()(torch.tensor(row)).detach()
        g = gradient_by_hand(reward.model, row, torch.ones(len(row), dtype=torch.float64))
        flat = g - (g * e).sum(1, keepdim=True) * e / e.square().sum(1, keepdim=True)
        kept = torch.tensor(held)
        grads = {name: one.reward_grad[at : at + len(response)][kept] for name, one in scored.items()}  # type: ignore[index]
        close(grads["tangent"], torch.stack([flat[span].sum(0) for span in places]))
        expected: list[Tensor] = [torch.empty(0)] * len(places)
        for turn in range(2):
            moved = torch.ones(len(row), dtype=torch.float64)
            moved[[place for span in places[turn::2] for place in span]] = 0.5
            by_hand = gradient_by_hand(reward.model, row, moved)
            for i in range(turn, len(places), 2):
                expected[i] = by_hand[places[i]].sum(0)
        close(grads["integrated"], torch.stack(expected))
        at += len(response)
    assert max(widths) > 1


@pytest.mark.parametrize(
    ("key", "point"),
    [
        ("credit_point", {"credit_point": "middle"}),
        ("credit_passes", {"credit_point": "integrated", "credit_passes": 0}),
        ("credit_passes", {"credit_point": "integrated", "credit_passes": 1.5}),
        ("credit_passes", {"credit_point": "tangent", "credit_passes": 2}),
        ("credit_scale", {"credit_point": "integrated", "credit_scale": 0.0}),
        ("credit_scale", {"credit_point": "integrated", "credit_scale": 1.5}),
        ("credit_scale", {"credit_point": "integrated", "credit_scale": float("nan")}),
        ("credit_scale", {"credit_point": "embedding", "credit_scale": 0.25}),
    ],
)
def test_what_cannot_be_is_refused_everywhere_in_the_same_words(key: str, point: dict[str, Any]) -> None:
    from datc_train.integrations.trl import DATCConfig

    reward = float64_model("llama")
    for call in (
        lambda: CreditPoint(*(point | {}).values()) if len(point) == 3 else config_from(point),
        lambda: reward.score(PROMPTS[:1], [[5]], 1, **point),
        lambda: DATCConfig(**point),
    ):
        with pytest.raises(ValueError, match=rf"^{key}: expected"):
            call()


def test_one_default_for_the_loop_and_for_trl() -> None:
    from datc_train.integrations.trl import DATCConfig

    assert config_from({}).point == DATCConfig().point == DEFAULT


TINY = {"policy": "tiny", "reward": "tiny", "prompts": "quickstart", "group_size": 2, "prompts_per_step": 2, "max_new_tokens": 6}
TINY |= {"report": False, "device": "cpu"}


def metrics(folder: Path) -> list[dict[str, Any]]:
    import json

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if "second" not in key} for line in lines]


def test_a_run_takes_the_point_and_is_not_resumed_with_another(tmp_path: Path) -> None:
    paths = {}
    for name, point in {
        "embedding": {"credit_point": "embedding"},
        "integrated": {"credit_point": "integrated"},
        "passes": {"credit_point": "integrated", "credit_passes": 2},
        "tangent": {"credit_point": "tangent"},
    }.items():
        paths[name] = train({**TINY, "steps": 1, "run_dir": str(tmp_path / name)} | point)
    gains = {name: metrics(path)[0]["predicted_gain"] for name, path in paths.items()}
    assert len(set(gains.values())) == 4
    assert len({metrics(path)[0]["reward_mean"] for path in paths.values()}) == 1
    with pytest.raises(ValueError, match=r"^resume: .*credit_point: 'integrated' then, 'tangent' now"):
        train({**TINY, "steps": 2, "run_dir": str(paths["integrated"]), "resume": "auto", "credit_point": "tangent"})


def test_a_run_from_before_the_point_goes_on_at_the_embedding(tmp_path: Path) -> None:
    run = train({**TINY, "steps": 1, "run_dir": str(tmp_path / "run"), "credit_point": "embedding"})
    saved = yaml.safe_load((run / "config.yaml").read_text())
    for key in ("credit_point", "credit_passes", "credit_scale"):
        del saved[key]
    (run / "config.yaml").write_text(yaml.safe_dump(saved))
    with pytest.raises(ValueError, match=r"^resume: .*credit_point: 'embedding' then, 'integrated' now"):
        train({**TINY, "steps": 2, "run_dir": str(run), "resume": "auto", "credit_point": "integrated"})
    train({**TINY, "steps": 2, "run_dir": str(run), "resume": "auto", "credit_point": "embedding"})
    assert len(metrics(run)) == 2


@pytest.mark.parametrize("method", [name for name, m in METHODS.items() if m.needs_reward_gradient and not m.needs_credit])
def test_methods_without_credit_read_the_gradient_at_the_tokens(method: str, tmp_path: Path) -> None:
    """P2T and OAR are defined at the embeddings; the point is no matter of theirs."""
    runs = [
        train({**TINY, "steps": 2, "method": method, "credit_point": point, "run_dir": str(tmp_path / point)})
        for point in ("embedding", "integrated")
    ]
    assert metrics(runs[0]) == metrics(runs[1])
