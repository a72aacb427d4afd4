"""How well the gradient predicts what replacing a token does to the score, for one vocabulary and for two.

    python -m benchmarks.replacement [--json FILE] [--positions 4] [--candidates 8]

    predicted   <g_t, E_v - E_y>                first order in the embedding, at token t = y
    true        R(response with v at t) - R     the row read anew, its text tokenized anew

The reward model is the quickstart's. "shared": responses in its own tokens. "other": in tokens of a vocabulary of 8,000 merges
with ids of its own, mapped by bytes. Replacements come from the other tokens of the same texts, so they are words, in the wrong
places: the largest steps that the prediction is ever asked about. Rank correlations over all replacements, and within a position
(the mean over positions): which of several candidates is better there, which is what credit asks. `part` is the same in the
shared vocabulary for embeddings that go only a part of the way from E_y to E_v: how far the first order reaches.
"""

from __future__ import annotations

import argparse
import json
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from datc_train.bench.machine import machine
from datc_train.reward import RewardModel
from datc_train.types import Messages

ANSWERS = {
    "What is the capital of France?": "The capital of France is Paris. It lies on the river Seine and is known for its museums.",
    "How do plants make food?": "Plants make food by photosynthesis: leaves take in light, water and carbon dioxide.",
    "Give me a tip for better sleep.": "Go to bed at the same time every night, and keep your phone out of the bedroom.",
    "Why is the sky blue?": "Sunlight is scattered by the air, and blue light is scattered more than red light, so we see blue.",
    "What should I cook tonight?": "You could make a simple soup with carrots, onions and lentils. It is cheap and warm.",
    "Who wrote Hamlet?": "Hamlet was written by William Shakespeare around the year 1600. It is one of his longest plays.",
}


def fewer_merges(tokenizer: PreTrainedTokenizerBase, merges: int = 8000) -> PreTrainedTokenizerFast:
    """The same kind of tokenizer with the first merges only and ids in another order."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    kept = state["model"]["merges"][:merges]
    pieces = sorted({"".join(m if isinstance(m, list) else m.split(" ")) for m in kept})
    letters = sorted(token for token in state["model"]["vocab"] if len(token) == 1)
    special = [added["content"] for added in state["added_tokens"]]
    state["model"] |= {"vocab": {token: i for i, token in enumerate([*pieces, *letters, *special])}, "merges": kept}
    state["added_tokens"] = [added | {"id": state["model"]["vocab"][added["content"]]} for added in state["added_tokens"]]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token=tokenizer.eos_token, pad_token=tokenizer.pad_token
    )


def changes(reward: RewardModel, positions: int, candidates: int) -> tuple[Tensor, Tensor, float]:
    """[positions in all, candidates] predicted and true change, and the share of response tokens that were mapped."""
    chance = random.Random(0)
    tokenizer = reward.policy_tokenizer
    prompts: list[Messages] = [[{"role": "user", "content": question}] for question in ANSWERS]
    responses = [tokenizer(answer, add_special_tokens=False)["input_ids"] for answer in ANSWERS.values()]
    scored = reward.score(prompts, responses, 1)
    assert scored.reward_grad is not None
    assert scored.reward_embedding is not None
    table = scored.reward_embedding
    free = (~scored.frozen).split([len(response) for response in responses])
    gradient = scored.reward_grad.split([len(response) for response in responses])
    words = [
        token for response, is_free in zip(responses, free, strict=True) for token in torch.tensor(response)[is_free].tolist()
    ]
    pool = sorted(set(words))
    predicted, rows = [], []
    for response, is_free, g in zip(responses, free, gradient, strict=True):
        for t in chance.sample(torch.nonzero(is_free).flatten().tolist(), positions):
            for v in chance.sample([v for v in pool if v != response[t]], candidates):
                predicted.append(float(g[t] @ (table[v] - table[response[t]])))
                rows.append([*response[:t], v, *response[t + 1 :]])
    size = positions * candidates
    true = reward.score(prompts, rows, size, gradient=False).score - scored.score.repeat_interleave(size)
    shape = (-1, candidates)
    return torch.tensor(predicted).view(shape), true.cpu().view(shape), float(scored.mapped.float().mean())


def parts_of_the_way(reward: RewardModel, replacements: int, parts: Sequence[float] = (0.01, 0.1, 0.3, 1.0)) -> dict[str, float]:
    """Rank correlation of <g_t, E_v - E_y> with R(e_t + part (E_v - E_y)) - R, in the reward model's own tokens."""
    chance = random.Random(0)
    model: Any = reward.model
    embedding = model.get_input_embeddings()
    predicted, true = [], []
    for question, answer in ANSWERS.items():
        prompt = [{"role": "user", "content": question}]
        response = reward.tokenizer(answer, add_special_tokens=False)["input_ids"]
        gradient = reward.score([prompt], [response], 1).reward_grad
        assert gradient is not None
        row = reward.tokenizer.apply_chat_template([*prompt, {"role": "assistant", "content": answer}], return_dict=False)
        start = next(i for i in range(len(row)) if row[i : i + len(response)] == response)
        inputs = embedding(torch.tensor([row])).detach()
        for _ in range(replacements):
            t, v = chance.randrange(len(response)), chance.choice(response)
            step = embedding.weight[v] - embedding.weight[response[t]]
            predicted.append(float(gradient[t] @ step))
            rows = inputs.repeat(len(parts) + 1, 1, 1)
            rows[1:, start + t] += torch.tensor(parts)[:, None] * step
            with torch.no_grad():
                score = model.score(model.model(inputs_embeds=rows).last_hidden_state[:, -1].float()).squeeze(-1)
            true.append(score[1:] - score[0])
    columns = torch.stack(true).unbind(1)
    return {str(part): correlation(ranks(torch.tensor(predicted)), ranks(c)) for part, c in zip(parts, columns, strict=True)}


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])


def ranks(values: Tensor) -> Tensor:
    return values.argsort().argsort()


def measure(positions: int = 4, candidates: int = 8) -> dict[str, Any]:
    from datc_train.quickstart import load_reward_model

    model, tokenizer = load_reward_model()
    result: dict[str, Any] = {"machine": machine()}
    for name, policy in (("shared", tokenizer), ("other", fewer_merges(tokenizer))):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="reward model: the policy has another vocabulary")
            reward = RewardModel(model, tokenizer, policy_tokenizer=policy)
        predicted, true, mapped = changes(reward, positions, candidates)
        within = [correlation(ranks(a), ranks(b)) for a, b in zip(predicted, true, strict=True)]
        result[name] = {
            "replacements": true.numel(),
            "mapped": mapped,
            "spearman": correlation(ranks(predicted.flatten()), ranks(true.flatten())),
            "spearman_within_position": sum(within) / len(within),
            "standard_error": float(torch.tensor(within).std() / len(within) ** 0.5),
        }
    result["part"] = parts_of_the_way(RewardModel(model, tokenizer), candidates)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--positions", type=int, default=4, help="of each response")
    parser.add_argument("--candidates", type=int, default=8, help="at each position")
    arguments = parser.parse_args()
    result = measure(arguments.positions, arguments.candidates)
    print(f"{'vocabulary':<12}{'n':>6}{'mapped':>9}{'Spearman':>10}{'within a position':>20}")
    for name in ("shared", "other"):
        line = result[name]
        inside = f"{line['spearman_within_position']:.3f} ± {line['standard_error']:.3f}"
        print(f"{name:<12}{line['replacements']:>6}{line['mapped']:>9.3f}{line['spearman']:>10.3f}{inside:>20}")
    print("Spearman by part of the way: " + ", ".join(f"{part} {value:.3f}" for part, value in result["part"].items()))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
