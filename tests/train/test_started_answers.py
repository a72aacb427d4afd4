"""Prompts that have begun the answer: the policy goes on from it, and the reward model reads one answer, start and rest."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from test_reward_tiny import (
    CHATML,
    LLAMA_SPECIALS,
    LLAMA_SPLIT,
    byte_level,
    chatml_tokenizer,
    finish,
    llama_tokenizer,
    qwen3_tokenizer,
    sentencepiece_tokenizer,
    single_row,
    tiny_classifier,
    trl_template,
)
from test_train import TINY

from datc_train import doctor, train
from datc_train.config import config_from
from datc_train.data import load_prompts
from datc_train.quickstart import load_tiny_policy, load_tiny_reward_model
from datc_train.quickstart.tiny import tiny_tokenizer
from datc_train.reward import RewardModel
from datc_train.reward.mapped_rows import MappedRow
from datc_train.rollout import encode_prompts
from datc_train.rollout.make import make_sampler
from datc_train.types import Messages, Prompt

QUESTION: Messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How are you today?"}]
TOKENIZERS = [chatml_tokenizer, llama_tokenizer, qwen3_tokenizer, sentencepiece_tokenizer, tiny_tokenizer]


def begun(text: str) -> Messages:
    return [*QUESTION, {"role": "assistant", "content": text}]


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def spelled(tokenizer: Any, text: str) -> list[int]:
    """As it goes on inside a text: tokenizers like SentencePiece's put a blank in front of one that stands alone."""
    return encode(tokenizer, "\n" + text)[len(encode(tokenizer, "\n")) :]


def build(reward: RewardModel, prompt: Messages, *responses: list[int]) -> list[MappedRow]:
    return reward._rows.build([prompt], ["prompt 0"], responses, len(responses), {reward.policy_tokenizer.eos_token_id})


def reward_model(tokenizer: Any, **options: Any) -> RewardModel:
    return RewardModel(tiny_classifier("llama", len(tokenizer), **options.pop("changes", {})), tokenizer, **options)


# ---------------------------------------------------------------- the policy's row


@pytest.mark.parametrize("make", TOKENIZERS)
def test_the_policys_row_is_the_templates_continuation(make: Any) -> None:
    tokenizer, started = make(), "I am fine, and"
    (row,) = encode_prompts(tokenizer, [Prompt(begun(started))])
    text = tokenizer.apply_chat_template(begun(started), tokenize=False)
    text = text[: text.rindex(started) + len(started)]
    assert row == tuple(encode(tokenizer, text))
    expected = tokenizer.apply_chat_template(begun(started), continue_final_message=True, return_dict=False)
    assert row == tuple(expected)


def test_by_hand() -> None:
    tokenizer = tiny_tokenizer()
    text = "<|im_start|>user\nName a hobby.<|im_end|>\n<|im_start|>assistant\nI like"
    prompt = [{"role": "user", "content": "Name a hobby."}, {"role": "assistant", "content": "I like"}]
    assert encode_prompts(tokenizer, [Prompt(prompt)]) == (tuple(encode(tokenizer, text)),)


def test_template_arguments_reach_it_and_other_prompts_stay_as_they_are() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if loud %}LOUD {% endif %}" + tokenizer.chat_template
    plain, going_on = encode_prompts(tokenizer, [Prompt(QUESTION), Prompt(begun("Fine"))], chat_template_kwargs={"loud": True})
    assert tokenizer.decode(plain).startswith("LOUD <|im_start|>")
    assert tokenizer.decode(plain).endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(going_on).startswith("LOUD <|im_start|>")
    assert tokenizer.decode(going_on).endswith("<|im_start|>assistant\nFine")
    with pytest.raises(ValueError, match=r"^prompts: expected at most 5 tokens a prompt, got \d+ in prompt 0 \('How are you"):
        encode_prompts(tokenizer, [Prompt(begun("Fine"))], max_prompt_tokens=5)


@pytest.mark.parametrize(
    ("template", "started", "came"),
    [
        ("llama3_1", "Fine.\n", "a row that ends with"),  # trims both ends
        ("llama3_1", " Fine", "a row that ends with"),
        ("qwen3", "\n\n\nFine", "a row that ends with"),  # takes line breaks off the start
        ("qwen3", "<think>so</think>Fine", "a row without it"),  # writes thoughts in its own way
        ("{% for m in messages %}{{ m.role }}: {{ m.content.split('.')[0] }}\n{% endfor %}", "Fine. And", "a row without it"),
        ("{{ messages[0].content }}", "Fine", "a row without it"),
    ],
)
def test_what_the_template_writes_otherwise_is_refused(template: str, started: str, came: str) -> None:
    tokenizer = qwen3_tokenizer()
    tokenizer.chat_template = trl_template(template) if "{" not in template else template
    with pytest.raises(ValueError) as error:
        encode_prompts(tokenizer, [Prompt(QUESTION), Prompt(begun(started))] if "{" not in template else [Prompt(begun(started))])
    assert str(error.value).startswith(
        f"prompts: expected a started answer that the policy's chat template writes as it is, got {started!r}"
    )
    assert "('How are you today?')" in str(error.value)
    assert came in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("template", "started"), [("qwen3", "Fine.\n"), ("qwen3", "<think>\nso\n</think>\n\nFine"), ("phi3", " Fine \n")]
)
def test_blanks_and_thoughts_that_the_template_keeps(template: str, started: str) -> None:
    tokenizer = qwen3_tokenizer()
    tokenizer.chat_template = trl_template(template)
    (row,) = encode_prompts(tokenizer, [Prompt(begun(started))])
    assert tokenizer.decode(row).endswith(started)


def test_a_template_that_refuses_the_assistants_turn() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    with pytest.raises(ValueError, match=r"^prompts: the policy's chat template refuses prompt 0 \('How are you today\?'\): no$"):
        encode_prompts(tokenizer, [Prompt(begun("Fine"))])


# ---------------------------------------------------------------- where prompts come in


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (begun(""), "'prompt': expected a last message with words in it, got ''"),
        (begun(" \n"), r"'prompt': expected a last message with words in it, got ' \n'"),
        ([{"role": "assistant", "content": "Fine"}], "'prompt': expected a message before the started answer"),
        ([*QUESTION, {"role": "assistant", "content": None}], "message 2: expected content that is text or a list of parts"),
    ],
)
def test_what_is_no_started_answer(messages: Messages, words: str) -> None:
    with pytest.raises(ValueError) as error:
        load_prompts([{"prompt": messages}])
    assert words in str(error.value)


def test_reading() -> None:
    parts = [*QUESTION, {"role": "assistant", "content": [{"type": "text", "text": "I "}, {"type": "text", "text": "am"}]}]
    assert load_prompts([parts, begun("I am")]) == [Prompt(begun("I am"))] * 2


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (begun(""), r"prompts: expected text in the started answer .*got '' in prompt 1 \('How are you today\?'\)"),
        (
            [*QUESTION, {"role": "assistant", "content": None}],
            "prompts: expected text in the started answer .*got None in prompt 1",
        ),
        ([{"role": "assistant", "content": "Fine"}], "prompts: expected a message before the started answer .*in prompt 1"),
    ],
)
def test_the_reward_model_refuses_what_is_none(prompt: Messages, words: str) -> None:
    reward = reward_model(chatml_tokenizer())
    for call in (lambda: reward.score([QUESTION, prompt], [[300]] * 2, 1), lambda: reward.check_prompts([QUESTION, prompt])):
        with pytest.raises(ValueError, match=f"^{words}"):
            call()


# ---------------------------------------------------------------- the reward model's row


@pytest.mark.parametrize("make", TOKENIZERS)
@pytest.mark.parametrize("closed", [True, False])
def test_the_row_is_one_answer(make: Any, closed: bool) -> None:
    tokenizer, started, rest = make(), "I am fine.", " Hello there, how are you"
    reward = reward_model(tokenizer)
    content = spelled(tokenizer, rest)
    (row,) = build(reward, begun(started), content + [tokenizer.eos_token_id] * closed)
    text = tokenizer.apply_chat_template(begun(started + rest), tokenize=False)
    (expected,) = reward._rows.template.tokenize([text.removeprefix(reward._rows.template._redundant_bos)])
    assert row.ids == expected.ids
    assert (row.position[: len(content)] >= 0).all()
    assert [row.ids[p] for p in row.position[: len(content)]] == content
    assert (row.position[len(content) :] == -1).all()
    assert row.head == row.position[0]  # what the group shares reaches up to where the responses begin


def test_without_a_started_answer_a_turn_of_its_own_has_the_same_row() -> None:
    tokenizer = chatml_tokenizer()
    reward = reward_model(tokenizer)
    whole = encode(tokenizer, "I am fine. Hello there")
    (split,) = build(reward, begun("I am fine."), encode(tokenizer, " Hello there"))
    (own,) = build(reward, QUESTION, whole)
    assert split.ids == own.ids
    assert split.position.tolist() == own.position.tolist()[-len(split.position) :]


def test_a_token_that_runs_across_the_border_is_not_mapped() -> None:
    """The policy's row keeps the two apart; in the reward model's they are one token, which is nobody's."""
    tokenizer = chatml_tokenizer()
    assert len(encode(tokenizer, " answer")) == 1
    rest = [*encode(tokenizer, "wer"), *encode(tokenizer, " there")]
    reward = reward_model(tokenizer)
    (row,) = build(reward, begun("I am ans"), rest)
    assert tokenizer.decode(row.ids).endswith("I am answer there<|im_end|>\n")
    lost = len(encode(tokenizer, "wer"))
    assert (row.position[:lost] == -1).all()
    assert (row.position[lost:] >= 0).all()
    assert tokenizer.decode(row.ids[: row.head]).endswith("I am")
    scored = reward.score([begun("I am ans")], [rest], 1)
    assert scored.frozen[:lost].all()
    assert not scored.reward_grad[:lost].any()
    assert scored.reward_grad[lost:].any(1).all()


def test_qwen_writes_the_empty_thought_before_the_started_answer() -> None:
    tokenizer = qwen3_tokenizer()
    reward, rest = reward_model(tokenizer), encode(tokenizer, " fine. Hello")
    (row,) = build(reward, begun("I am"), rest)
    assert tokenizer.decode(row.ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nI am fine. Hello<|im_end|>\n")
    assert (row.position >= 0).all()
    (ids,) = encode_prompts(tokenizer, [Prompt(begun("I am"))])
    assert list(ids) + rest == row.ids[: -len(encode(tokenizer, "<|im_end|>\n"))]


@pytest.mark.parametrize("started", ["<think>\n", "<think>\nI am", "<think>\nI am fine. I am"])
def test_a_started_thought_that_the_template_moves(started: str) -> None:
    """The row begins otherwise than with any other answer; the response is found behind what was started, not in it."""
    tokenizer = qwen3_tokenizer()
    reward = reward_model(tokenizer)
    response = encode(tokenizer, " I am fine\n</think>\n\nHello there, I am")
    (row,) = build(reward, begun(started), response)
    text = tokenizer.decode(row.ids)
    assert text.count("<think>") == 1
    assert text.endswith("\n</think>\n\nHello there, I am<|im_end|>\n")
    mapped = [i for i, p in enumerate(row.position) if p >= 0]
    assert len(mapped) >= len(response) - 2  # the blank at the thought's edge may be another token
    places = row.position[mapped].tolist()
    assert places == sorted(places)
    assert places[-1] == len(row.ids) - 1 - len(encode(tokenizer, "<|im_end|>\n"))
    assert tokenizer.decode(row.ids[places[0] :]).startswith(tokenizer.decode(response[mapped[0] :]))


def test_trimmed_ends_are_the_templates() -> None:
    """Llama's trims the answer; inside it a blank between start and rest stays."""
    tokenizer = llama_tokenizer()
    reward = reward_model(tokenizer)
    rest = encode(tokenizer, "fine.\n\n")
    rows = build(reward, begun("I am\n"), rest, [])
    assert tokenizer.decode(rows[0].ids).endswith("I am\nfine.<|eot_id|>")
    assert tokenizer.decode(rows[1].ids).endswith("I am<|eot_id|>")
    assert (rows[0].position >= 0).any()


def test_response_prefix_is_for_answers_that_no_prompt_starts() -> None:
    tokenizer = chatml_tokenizer()
    reward = reward_model(tokenizer, response_prefix="<think>\n")
    rest = encode(tokenizer, " fine")
    assert tokenizer.decode(build(reward, begun("I am"), rest)[0].ids).endswith("assistant\nI am fine<|im_end|>\n")
    assert tokenizer.decode(build(reward, QUESTION, rest)[0].ids).endswith("assistant\n<think>\n fine<|im_end|>\n")


def test_other_keys_of_the_message_stay() -> None:
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", "{{ m.note }}{{ m.content }}")
    prompt = [*QUESTION, {"role": "assistant", "content": "I am", "note": "!"}]
    (row,) = build(reward_model(tokenizer), prompt, encode(tokenizer, " fine"))
    assert tokenizer.decode(row.ids).endswith("assistant\n!I am fine<|im_end|>\n")


def test_what_a_prompt_takes_counts_its_started_answer() -> None:
    tokenizer = chatml_tokenizer()
    started = "I am fine. " * 5
    row = tokenizer.apply_chat_template(begun(started), return_dict=False)
    reward = reward_model(tokenizer)
    assert reward.check_prompts([begun(started), QUESTION]) == len(row)
    tight = reward_model(tokenizer, changes={"max_position_embeddings": len(row)})
    tight.check_prompts([QUESTION])
    with pytest.raises(ValueError, match=r"^reward: expected a context of at least \d+ tokens, .*prompt 0 \('How are you"):
        tight.check_prompts([begun(started)])


# ---------------------------------------------------------------- score and gradient


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_score_and_gradient_are_autograds_through_the_whole_row(family: str) -> None:
    """In float64, by the stock model, one unpadded row a response, written by hand; the shared prefix holds the start."""
    tokenizer = {"llama": llama_tokenizer, "qwen3": qwen3_tokenizer}.get(family, chatml_tokenizer)()
    started = "I am fine, thank you very much. The answer"
    reward = RewardModel(tiny_classifier(family, len(tokenizer), dtype=torch.float64), tokenizer)
    texts = [" is 123.", " is what? Hello there, how are you", ", I", " is 4567 and Paris"]
    contents = [encode(tokenizer, text) for text in texts]
    responses = [[*content, tokenizer.eos_token_id] for content in contents]
    prompts = [begun(started), begun("Hello")]
    scored = reward.score(prompts, responses * 2, 4)
    parts = scored.reward_grad.split([len(response) for response in responses * 2])
    mapped = scored.mapped.split([len(response) for response in responses * 2])
    for index, (text, content) in enumerate(zip(texts * 2, contents * 2, strict=True)):
        whole = tokenizer.apply_chat_template(begun(prompts[index // 4][-1]["content"] + text), tokenize=False)
        ids = encode(tokenizer, whole)
        score, gradient = single_row(reward.model, ids)
        assert scored.score[index].item() == pytest.approx(score, rel=1e-6)  # scores are float32
        closing = len(encode(tokenizer, whole[whole.rindex(text) + len(text) :]))
        assert mapped[index].tolist() == [True] * len(content) + [False]
        own = gradient[len(ids) - closing - len(content) : len(ids) - closing]
        assert (parts[index][:-1] - own).norm() <= 1e-5 * gradient.norm()  # the score head runs in float32
        assert not parts[index][-1].any()


def test_what_a_group_shares_is_read_once_its_started_answer_too() -> None:
    tokenizer = chatml_tokenizer()
    reward = reward_model(tokenizer)
    started, responses = "I am fine. " * 6 + "The", [encode(tokenizer, text) for text in (" answer", " capital of France", "")]
    rows = build(reward, begun(started), *responses)
    (ids,) = encode_prompts(tokenizer, [Prompt(begun(started))])
    split = reward._split(rows, 3, gradient=True)
    assert [row.prefix for row in split] == [ids] * 3


def test_token_rewards_begin_at_the_started_answer() -> None:
    """They telescope to R(whole) - R(up to the response), the start included in both."""
    tokenizer = chatml_tokenizer()
    reward = reward_model(tokenizer)
    response = encode(tokenizer, " fine. Hello there")
    (row,) = build(reward, begun("I am"), response)
    first, last = row.position[0], row.position[-1]
    before, after = (single_row(reward.model, row.ids[:end])[0] for end in (first, last + 1))
    total = reward.token_rewards([begun("I am")], [response], 1).sum().item()
    assert total == pytest.approx(after - before, rel=1e-4, abs=1e-4)


def test_another_vocabulary() -> None:
    """Policy ids behind a started answer, spans of reward ids in the row."""
    policy, tokenizer = llama_tokenizer(), chatml_tokenizer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reward = RewardModel(tiny_classifier("llama", len(tokenizer)), tokenizer, policy_tokenizer=policy)
    response = encode(policy, " is 123 🙂 and fine")
    (row,) = build(reward, begun("The answer"), response)
    assert tokenizer.decode(row.ids).endswith("assistant\nThe answer is 123 🙂 and fine<|im_end|>\n")
    pieces = [policy.decode([i]) for i in response]
    for piece, position, width in zip(pieces, row.position, row.width, strict=True):
        if position >= 0 and "\N{REPLACEMENT CHARACTER}" not in piece:
            assert tokenizer.decode(row.ids[position : position + width]) == piece
    assert (row.position >= 0).sum() >= len(response) // 2


# ---------------------------------------------------------------- as TRL's reward function


def test_trl_begins_another_turn_and_so_does_the_call() -> None:
    tokenizer = chatml_tokenizer()
    reward = reward_model(tokenizer)
    ids = encode(tokenizer, " fine")
    with pytest.warns(RuntimeWarning, match="a prompt ends with the assistant's words; its answer is read as one more turn"):
        (score,) = reward([begun("I am")], [[{"role": "assistant", "content": " fine"}]], [ids])
    row = tokenizer.apply_chat_template([*begun("I am"), {"role": "assistant", "content": " fine"}], return_dict=False)
    assert score == pytest.approx(single_row(reward.model, row)[0], rel=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reward([begun("I am")], [" fine"], [ids]) == [score]
        assert reward.score([begun("I am")], [ids], 1, gradient=False).score.item() != score
        turn = [*begun("I am"), {"role": "assistant", "content": ""}]  # the same, said to `score`
        assert reward.score([turn], [ids], 1, gradient=False).score.tolist() == [score]


def test_in_trl_both_models_read_the_same_row(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from datasets import Dataset
    from test_trl import make

    from datc_train.integrations.trl import DATCTrainer

    trainer = make(DATCTrainer, tmp_path, max_steps=1)
    prompt = begun("I am")
    trainer.train_dataset = Dataset.from_list([{"prompt": prompt}] * 4)
    (recorder,) = trainer._recorders.values()
    reward = recorder.reward
    rows: list[MappedRow] = []
    sampled: list[Any] = []
    real_build, real_tokenize = reward._rows.build, trainer._tokenize_prompts
    reward._rows.build = lambda *args: rows.extend(real_build(*args)) or rows  # type: ignore[method-assign]
    trainer._tokenize_prompts = lambda prompts: sampled.append(real_tokenize(prompts)) or sampled[-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    assert rows
    for ids in sampled[0][0]:
        assert trainer.processing_class.decode(ids).endswith("assistant\nI am<|im_end|>\n<|im_start|>assistant\n")
        assert all(row.ids[: len(ids)] == list(ids) for row in rows)


# ---------------------------------------------------------------- runs


def file_of(tmp_path: Path) -> str:
    path = tmp_path / "p.jsonl"
    rows = [{"prompt": begun(f"Hobby {i}:"), "id": i} for i in range(2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the file to the report: rows of the sampler, scores of the whole answer, samples of the sampled part alone."""
    source = file_of(tmp_path)
    config = TINY | {"prompts": source, "eval_prompts": source, "run_dir": str(tmp_path / "r"), "steps": 1, "report": True}
    wrong = [finding for finding in doctor.examine(config_from(config), say=lambda _: None) if finding.state == "wrong"]
    assert not wrong
    run = train(config)
    samples = [json.loads(line) for line in (run / "samples.jsonl").open()]
    reward, (_, tokenizer) = RewardModel(*load_tiny_reward_model()), load_tiny_policy()
    for sample in samples:
        started = sample["prompt"][-1]
        assert started["role"] == "assistant"
        assert started["content"].startswith("Hobby ")
        assert sample["response"] == tokenizer.decode(sample["token_ids"], skip_special_tokens=True)
        whole = tokenizer.apply_chat_template(begun(started["content"] + sample["response"]), return_dict=False)
        assert sample["reward"] == pytest.approx(single_row(reward.model, whole)[0], rel=1e-4, abs=1e-4)
    for line in map(json.loads, (run / "eval.jsonl").open()):
        assert [(s["prompt"], s["started"]) for s in line["samples"]] == [("How are you today?", f"Hobby {i}:") for i in range(2)]
    said = capsys.readouterr().out
    assert "Q: How are you today?" in said
    assert "begun:  Hobby 0:" in said
    page = (run / "report.html").read_text()
    assert '<span class="tag">prompt</span> How are you today?' in page
    assert '<span class="tag">started answer, not sampled</span> Hobby ' in page


def test_other_runs_are_shown_as_they_were(tmp_path: Path) -> None:
    run = train(
        TINY | {"run_dir": str(tmp_path / "r"), "steps": 1, "report": True, "eval_prompts": "quickstart", "eval_limit": 1}
    )
    assert "started answer" not in (run / "report.html").read_text()
    assert "started" not in json.loads((run / "eval.jsonl").open().readline())["samples"][0]


def test_reward_functions_get_the_start_in_the_prompt_and_what_was_sampled_alone(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def function(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        seen.append({"prompts": prompts, "completions": completions, "ids": completion_ids} | columns)
        return [float(len(ids)) + i for i, ids in enumerate(completion_ids)]

    train(TINY | {"method": "grpo", "run_dir": str(tmp_path / "r"), "steps": 1}, reward=function, prompts=file_of(tmp_path))
    tokenizer = tiny_tokenizer()
    call = seen[0]
    assert {json.dumps(prompt) for prompt in call["prompts"]} == {json.dumps(begun(f"Hobby {i}:")) for i in range(2)}
    for completion, ids in zip(call["completions"], call["ids"], strict=True):
        assert completion == [{"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}]


def test_the_sampler_goes_on_from_it_and_its_log_probabilities_are_the_policys() -> None:
    from datc_train.models import load_policy

    config = config_from(TINY)
    actor = load_policy(config, torch.device("cpu"))
    rollout = make_sampler(config, actor, None).sample([Prompt(begun("I am"))], seed=0)
    (prompt,) = rollout.prompt_ids
    assert actor.tokenizer.decode(prompt).endswith("<|im_start|>assistant\nI am")
    start = 0
    for length in rollout.lengths.tolist():
        response = rollout.response_ids[start : start + length]
        with torch.no_grad():
            logits = actor.model(input_ids=torch.cat([torch.tensor(prompt), response])[None]).logits[0, len(prompt) - 1 : -1]
        known = make_sampler(config, actor, None).vocab_size
        expected = torch.log_softmax(logits[:, :known].double(), -1).gather(1, response[:, None])[:, 0]
        torch.testing.assert_close(rollout.sampler_logprob[start : start + length].double(), expected, rtol=1e-4, atol=1e-4)
        start += length


def test_characters_of_several_bytes_before_the_border() -> None:
    tokenizer = finish(byte_level(LLAMA_SPLIT), LLAMA_SPECIALS, bos=None, eos="<|eot_id|>", template=CHATML, adds_bos=False)
    started = "naïve 🙂\n\nHe"
    (ids,) = encode_prompts(tokenizer, [Prompt(begun(started))])
    (row,) = build(reward_model(tokenizer), begun(started), encode(tokenizer, "llo"))
    assert tokenizer.decode(ids).endswith(started)
    assert tokenizer.decode(row.ids).endswith("naïve 🙂\n\nHello<|im_end|>\n")
