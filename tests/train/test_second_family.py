"""A policy and a reward model of Qwen3's layout from folders (QK norm, grouped heads, tied head, think block): the whole way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_credit_point import gradient_by_hand
from test_reward_tiny import llama_tokenizer, qwen3_tokenizer, single_row, tiny_classifier
from test_train import lines, same
from tolerances import TERMS, WEIGHT
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from datc_kernels import allocate_weights
from datc_kernels.testing.rounding import rounding
from datc_train import doctor, train
from datc_train.config import config_from
from datc_train.credit_point import DEFAULT
from datc_train.export import export
from datc_train.quickstart import train_prompts

pytest.importorskip("trl")  # carries the templates

THINKING = {"enable_thinking": False}


def taught(model: Any, tokenizer: Any) -> Any:
    """A model that answers with words: what noise spells is tokenised otherwise when a reward model reads it."""
    answers = "Thank you very much. The quick brown fox jumps over the lazy dog. I am fine. Hello there, how are you today?"
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for i in range(60):
        question = train_prompts()[i]["prompt"]
        turns = [*question, {"role": "assistant", "content": answers[answers.find(".", i) + 2 :]}]
        ids = torch.tensor([tokenizer.apply_chat_template(turns, return_dict=False, **THINKING)])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """policy/, reward/ and llama/: the last reads in another vocabulary."""
    root = tmp_path_factory.mktemp("qwen3")
    tokenizer = qwen3_tokenizer()
    torch.manual_seed(0)
    settings = Qwen3Config(
        vocab_size=len(tokenizer) + 12,  # padded, as Qwen's own
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    taught(Qwen3ForCausalLM(settings), tokenizer).save_pretrained(root / "policy")
    tiny_classifier("qwen3", len(tokenizer) + 3, pad_token_id=tokenizer.pad_token_id).save_pretrained(root / "reward")
    other = llama_tokenizer()
    other.pad_token = "<|end_of_text|>"
    tiny_classifier("llama", len(other), pad_token_id=other.pad_token_id).save_pretrained(root / "llama")
    for name, one in (("policy", tokenizer), ("reward", tokenizer), ("llama", other)):
        one.save_pretrained(root / name)
    return root


def options(folders: Path, **more: Any) -> dict[str, Any]:
    return {
        "policy": str(folders / "policy"),
        "reward": str(folders / "reward"),
        "prompts": "quickstart",
        "device": "cpu",
        "steps": 2,
        "prompts_per_step": 2,
        "group_size": 4,
        "max_new_tokens": 12,
        "learning_rate": 1e-3,
        "lora": {"r": 4, "alpha": 8},
        "chat_template_kwargs": THINKING,
        "samples_per_step": 100,
        "report": False,
    } | more


@pytest.fixture(scope="module")
def run(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(options(folders, run_dir=str(tmp_path_factory.mktemp("run") / "r")))


def textbook(folders: Path, sample: dict[str, Any]) -> tuple[float, Tensor, Tensor]:
    """Score, probabilities and credit of a response by the stock models, whole rows, float64 after their logits."""
    tokenizer = AutoTokenizer.from_pretrained(folders / "policy")
    policy = AutoModelForCausalLM.from_pretrained(folders / "policy").eval()
    reward = AutoModelForSequenceClassification.from_pretrained(folders / "reward").eval()
    ids = sample["token_ids"]
    prompt = tokenizer.apply_chat_template(sample["prompt"], add_generation_prompt=True, return_dict=False, **THINKING)
    with torch.no_grad():
        logits = policy(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1, : len(tokenizer)].double()
    content = ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids
    answer = {"role": "assistant", "content": tokenizer.decode(content)}
    row = tokenizer.apply_chat_template([*sample["prompt"], answer], return_dict=False)
    score, _ = single_row(reward, row)
    start = next(i for i in range(len(row) - len(content), -1, -1) if row[i : i + len(content)] == content)
    scale = torch.ones(len(row))
    scale[start : start + len(content)] = DEFAULT.scale  # the run's credit point: all tokens of the response moved at once
    gradient = gradient_by_hand(reward, row, scale)
    g = torch.zeros(len(ids), gradient.shape[1], dtype=torch.float64)
    g[: len(content)] = gradient[start : start + len(content)].double()
    table = reward.get_input_embeddings().weight.detach().double()
    p, u = torch.softmax(logits, -1), g @ table[: len(tokenizer)].T
    A = u - (p * u).sum(-1, keepdim=True)
    y = torch.tensor(ids)[:, None]
    credit = (p * A).gather(1, y)[:, 0] - (p * p * A).sum(-1)
    return score, p.gather(1, y)[:, 0], credit


def hold_against_the_stock_models(sample: dict[str, Any], folders: Path, *, rtol: float) -> None:
    score, probability, credit = textbook(folders, sample)
    assert sample["reward"] == pytest.approx(score, abs=rtol * max(1, abs(score)))
    torch.testing.assert_close(torch.tensor(sample["probability"]).double(), probability, rtol=rtol, atol=rounding())
    scale = float(credit.abs().max())
    torch.testing.assert_close(torch.tensor(sample["credit"]).double(), credit, rtol=2 * rtol, atol=rtol * scale)
    weights = allocate_weights(
        torch.tensor(sample["credit"]), torch.tensor([sample["advantage"]]), frozen=torch.tensor(sample["frozen"])
    )
    torch.testing.assert_close(torch.tensor(sample["weight"]), weights.weight, rtol=rtol, atol=rtol)


def test_every_number_of_the_first_step_is_that_of_the_stock_models(run: Path, folders: Path) -> None:
    samples = [line for line in lines(run, "samples.jsonl") if line["step"] == 1]
    tokenizer = AutoTokenizer.from_pretrained(folders / "policy")
    compared = 0
    for sample in samples:
        if "\ufffd" in sample["response"] or not sample["response"].strip() or sample["response"] != sample["response"].strip():
            continue  # the row would not hold the same tokens
        again = tokenizer.encode(sample["response"], add_special_tokens=False)
        if again != [i for i in sample["token_ids"] if i != tokenizer.eos_token_id]:
            continue
        hold_against_the_stock_models(
            sample, folders, rtol=rounding(length=TERMS, condition=32)
        )  # logits near 8, credits of either sign
        compared += 1
    assert compared >= 2


def test_columns_beyond_the_ids_are_never_sampled(run: Path, folders: Path) -> None:
    known = len(AutoTokenizer.from_pretrained(folders / "policy"))
    assert max(i for line in lines(run, "samples.jsonl") for i in line["token_ids"]) < known


def test_it_goes_on_to_the_same_bits(run: Path, folders: Path, tmp_path: Path) -> None:
    half = options(folders, run_dir=str(tmp_path / "r"))
    train(half | {"steps": 1, "schedule_steps": 2})
    assert same(train(half | {"resume": "auto", "schedule_steps": 2}), run)


def test_doctor_and_export(run: Path, folders: Path, tmp_path: Path) -> None:
    findings = doctor.examine(config_from(options(folders, run_dir=str(tmp_path / "new"))), say=lambda _: None)
    assert not [finding for finding in findings if finding.state == "wrong"]
    merged, difference = export(run, tmp_path / "merged")
    assert difference < WEIGHT
    settings = json.loads((merged / "config.json").read_text())
    assert settings["model_type"] == "qwen3"
    assert settings["tie_word_embeddings"] is True


@pytest.mark.parametrize("method", ["datc", "p2t", "oar_g"])
def test_a_reward_model_of_another_family_and_vocabulary(folders: Path, tmp_path: Path, method: str) -> None:
    with pytest.warns(RuntimeWarning, match="vocabular"):
        run = train(options(folders, reward=str(folders / "llama"), run_dir=str(tmp_path / "r"), method=method))
    samples = lines(run, "samples.jsonl")
    assert any(not all(sample["frozen"]) for sample in samples)  # tokens of the same bytes are mapped
    if method == "datc":
        assert any(len(set(sample["weight"])) > 1 for sample in samples)
    assert all(abs(sample["reward"]) < 1e3 for sample in samples)
