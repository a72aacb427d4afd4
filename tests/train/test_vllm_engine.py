"""A real vLLM: does it draw from the policy and serve its updates? `make test-vllm` runs it.

T numbers: reports against other trainers. One process instead of vLLM's three saves half a minute a start; the tests that
are about processes leave vLLM's default as it is. Engines take most of the time: two files run at a time, each of which starts
as few as its assertions allow.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import PATIENCE
from peft import LoraConfig, get_peft_model
from test_engine_process import gone
from test_rollout import split, teacher_forced, user

from datc_train.quickstart import load_tiny_policy
from datc_train.rollout import VllmSampler, check_sampler
from datc_train.rollout.vllm_sampler import EngineSettings
from datc_train.types import Rollout

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vllm is not installed here; make test-vllm makes an environment with it"
    ),
]

IDS = 512  # of the tiny tokenizer
COLUMNS = 520
LARGEST = 1e-3  # difference of a log-probability: what training itself takes in float32 (`check_sampler`)
TIMEOUT = PATIENCE
SETTINGS = EngineSettings(memory=0.05, timeout=TIMEOUT)


def padded_policy() -> tuple[Any, Any]:
    """The tiny policy over a vocabulary with eight columns that stand for no token, and that it likes best; an adapter on top."""
    model, tokenizer = load_tiny_policy()
    model.config.tie_word_embeddings = False
    head = torch.nn.Linear(64, COLUMNS, bias=False)
    head.weight.data = torch.cat([model.lm_head.weight.data, 3 * model.lm_head.weight.data[10:18]])
    model.lm_head = head
    embedding = torch.nn.Embedding(COLUMNS, 64)
    embedding.weight.data = torch.cat([model.model.embed_tokens.weight.data, torch.zeros(COLUMNS - IDS, 64)])
    model.model.embed_tokens = embedding
    model.config.vocab_size = COLUMNS
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")), tokenizer


def move(model: Any, seed: int, by: float = 0.1) -> None:
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(by * torch.randn(parameter.shape, generator=dice))


def differences(model: Any, rollout: Rollout, made: VllmSampler) -> tuple[float, float]:
    """Mean and maximum."""
    expected = teacher_forced(model, rollout, made.temperature, made.vocab_size)
    check_sampler(rollout.sampler_logprob, expected, dtype=torch.float32)
    apart = (rollout.sampler_logprob - expected).abs()
    return float(apart.mean()), float(apart.max())


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmSampler]:
    """At version 0. The tests move it on, in their order."""
    model, tokenizer = padded_policy()
    made = VllmSampler(model, tokenizer, base=None, settings=SETTINGS, group_size=4, max_new_tokens=24, temperature=0.7)
    made.open(tmp_path_factory.mktemp("served"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        began = time.monotonic()
        made.sync(0)
        print(f"the engine started in {time.monotonic() - began:.1f} s")
    yield made
    made.close()


PROMPTS = ("hello", "Name a quiet hobby.", "hello", "a b c d e f g")


# ---------------------------------------------------------------- the distribution


def test_log_probabilities_are_the_policys(served: VllmSampler) -> None:
    """T48: a temperature; T42: columns of no token, which the policy likes best, are never drawn and have no share."""
    rollout = served.sample(user(*PROMPTS), seed=0)
    assert served.vocab_size == IDS < served.columns == COLUMNS
    assert int(rollout.response_ids.max()) < IDS
    mean, highest = differences(served.model, rollout, served)
    print(f"log-probabilities of {len(rollout.response_ids)} tokens differ by {mean:.1e} in the mean, {highest:.1e} at most")
    assert mean <= highest <= LARGEST
    with torch.no_grad():
        logits = served.model(input_ids=torch.tensor([rollout.prompt_ids[0]])).logits[0, -1]
    assert float(torch.softmax(logits, -1)[IDS:].sum()) > 0.02  # would have been drawn


def test_frequencies_are_the_softmax(served: VllmSampler) -> None:
    """First tokens of 2,000 responses, as independent draws have them: chi-square over the tokens that come five times."""
    count = 2000
    many = served.with_group_size(count)
    many.max_new_tokens = 1
    rollout = many.sample(user("hello"), seed=1)
    with torch.no_grad():
        logits = served.model(input_ids=torch.tensor([rollout.prompt_ids[0]])).logits[0, -1, :IDS].double()
    p = torch.softmax(logits / served.temperature, -1)
    observed = torch.bincount(rollout.response_ids, minlength=IDS).double()
    often = count * p >= 5
    groups = torch.stack([torch.cat([x[often], x[~often].sum()[None]]) for x in (observed, count * p)])
    chi_square = float(((groups[0] - groups[1]).square() / groups[1].clamp(min=1e-9)).sum())
    freedom = groups.shape[1] - 1
    assert freedom > 20
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5


def test_samples_depend_on_seed_and_prompt_alone(served: VllmSampler) -> None:
    together = split(served.sample(user(*PROMPTS), seed=3))
    assert split(served.sample(user(*PROMPTS), seed=3)) == together
    assert split(served.sample(user(PROMPTS[1]), seed=3)) == together[4:8]
    assert together[:4] != together[8:12]  # the same prompt twice
    assert len(set(map(tuple, together[:4]))) > 1
    assert split(served.sample(user(*PROMPTS), seed=4)) != together


def test_stops_are_ours_alone(served: VllmSampler) -> None:
    """A token that was drawn ends a response where it is a stop, and the EOS does not where it is none."""
    rollout = served.sample(user(*PROMPTS), seed=5)
    stop = split(rollout)[0][3]
    other = served.with_group_size(4)
    other.stop_ids = (stop,)
    stopped = other.sample(user(*PROMPTS), seed=5)
    for row, finished in zip(split(stopped), stopped.finished.tolist(), strict=True):
        assert [i for i, token in enumerate(row) if token == stop] == ([len(row) - 1] if finished else [])
        assert finished or len(row) == 24
    assert stopped.finished[0]
    other.stop_ids = ()
    assert other.sample(user("hello"), seed=5).lengths.tolist() == [24] * 4


def test_both_of_vllms_model_runners_take_the_processor() -> None:
    """The second one needs a GPU: the class is called directly, it has never gone through the engine's own loader."""
    from types import SimpleNamespace

    from vllm.v1.sample.logits_processor import LogitsProcessor as First
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as Second

    from datc_train.vllm_engine.support import KEY, Support

    assert issubclass(Support, First)
    assert issubclass(Support, Second)
    for arguments in ((torch.device("cpu"), False), (object(),)):  # as each runner makes it, and calls it
        made = Support(SimpleNamespace(additional_config={KEY: 3}), *arguments)
        logits = made.apply(torch.zeros(2, 5), *arguments[1:])
        assert logits.isinf().tolist() == [[False] * 3 + [True] * 2] * 2


# ---------------------------------------------------------------- updates


def test_t51_t55_every_sync_is_served(served: VllmSampler) -> None:
    earlier = [split(served.sample(user(*PROMPTS), seed=6))]
    for version in (1, 2, 3):
        move(served.model, version)
        served.sync(version)
        rollout = served.sample(user(*PROMPTS), seed=6)
        assert max(differences(served.model, rollout, served)) <= LARGEST
        assert split(rollout) not in earlier
        earlier.append(split(rollout))


def test_a_response_of_before_the_sync_is_told_apart(served: VllmSampler) -> None:
    """The check of every rollout, had nobody called sync."""
    rollout = served.sample(user(*PROMPTS), seed=7)
    move(served.model, 4)
    with pytest.raises(RuntimeError, match="an adapter or update that it has not loaded"):
        differences(served.model, rollout, served)
    served.sync(4)


def test_t52_an_id_that_is_used_again_is_found(served: VllmSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps the weights that it knows under an id, whatever the folder; the sync says so. (Last: the engine ends.)"""
    engine = served._served.engine
    assert engine is not None
    real = engine.ask

    def again(what: str, **arguments: Any) -> Any:
        if what == "use_adapter":
            arguments |= {"name": "version-4", "number": 5}
        return real(what, **arguments)

    monkeypatch.setattr(engine, "ask", again)
    move(served.model, 5)
    with pytest.raises(RuntimeError, match="does not serve the weights after 5 updates: .* the engine's by nothing"):
        served.sync(5)
    assert gone([engine.pid])


def test_full_fine_tuning_reloads_in_place(tmp_path: Path, one_process: None) -> None:
    """Through the engine's `reload_weights`; a head that is the embedding, and one of its own under a padded vocabulary."""
    model, tokenizer = load_tiny_policy()
    made = VllmSampler(model, tokenizer, base=None, settings=SETTINGS, group_size=4, max_new_tokens=24)
    made.open(tmp_path)
    try:
        for version in range(3):
            made.sync(version)
            rollout = made.sample(user(*PROMPTS), seed=0)
            assert max(differences(model, rollout, made)) <= LARGEST
            move(model, version, by=0.03)
    finally:
        made.close()


def test_an_engine_that_cannot_start_says_why(tmp_path: Path, one_process: None) -> None:
    """The cause, out of a log of hundreds of lines."""
    model, tokenizer = padded_policy()
    options: dict[str, Any] = {"group_size": 2, "max_new_tokens": 8, "temperature": 1.0}
    made = VllmSampler(model, tokenizer, base=str(tmp_path / "nowhere"), settings=SETTINGS, **options)
    made.open(tmp_path)
    with pytest.raises(
        RuntimeError, match=r"^sampler: the vLLM engine failed: .*nowhere.*, asked to start.*its log is .*engine\.log"
    ):
        made.sync(0)
    made.close()
