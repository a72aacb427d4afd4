"""A run that is ended at any moment, or whose sampler is: nothing half is left, and `--resume auto` ends with the same bits.

What the engine's process alone does is in `test_engine_process.py`.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_engine_process import gone
from test_resume import same_end
from test_run_faults import HERE, RUN, half_files, same_whole
from test_run_faults import straight as straight  # a fixture
from test_train import TINY
from test_vllm_sampler import TransformersEngine
from test_vllm_sampler import engines as engines  # a fixture

from datc_train import train
from datc_train.checkpoint import checkpoints
from datc_train.interrupt import StopRequest
from datc_train.progress import StepProgress
from datc_train.report.runs import read_run
from datc_train.vllm_engine.process import EngineProcess

# ---------------------------------------------------------------- a sampler that is killed


def test_an_engine_that_is_killed_between_two_steps(tmp_path: Path, engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process, killed as step 2 is scored, which is still learned from: no process is left, and the same end."""
    config = TINY | {"sampler": "vllm", "method": "grpo", "steps": 3, "save_every": 1, "prompts_per_step": 1}
    made: list[EngineProcess] = []
    calls = 0

    def start(*arguments: Any, **options: Any) -> EngineProcess:
        command = (sys.executable, str(HERE / "small_engine.py"))
        made.append(EngineProcess(*arguments, **options, command=command))
        return made[-1]

    def reward(completions: Any, **_: Any) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 2 and made:
            os.kill(made[0].pid, signal.SIGKILL)
        return [float(len(completion[0]["content"])) for completion in completions]

    whole = train(config | {"run_dir": str(tmp_path / "whole")}, reward=reward)
    calls = 0
    monkeypatch.setattr("datc_train.rollout.vllm_sampler.EngineProcess", start)
    with pytest.raises(RuntimeError, match=r"^sampler: the vLLM engine died .*--resume auto; in step 3$"):
        train(config | {"run_dir": str(tmp_path / "r")}, reward=reward)
    assert gone([made[0].pid])
    assert [path.name for path in checkpoints(tmp_path / "r")] == ["000001", "000002"]
    monkeypatch.setattr("datc_train.rollout.vllm_sampler.EngineProcess", TransformersEngine)
    run = train(config | {"run_dir": str(tmp_path / "r"), "resume": "auto"}, reward=reward)
    assert same_end(run, whole)
    assert not half_files(run)


# ---------------------------------------------------------------- a process that is ended

Start = Callable[[Path], Any]


@pytest.fixture(scope="module")
def start() -> Start:
    """`datc train` as a process of its own, forked off one that has imported everything and computed nothing."""
    from datc_train.cli import main

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["datc_train.loop", "datc_train.report.write", "datc_train.cli"])
    server = context.Process(target=os.getpid)
    server.start()
    server.join()

    def make(folder: Path) -> Any:
        options = {k: json.dumps(v) if isinstance(v, dict) else str(v).lower() for k, v in RUN.items()}
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        words = ["train", "--config", "tiny", *words, "--run_dir", str(folder), "--resume", "auto"]
        process = context.Process(target=main, args=(words,))
        process.start()
        return process

    return make


def sound(run: Path) -> int:
    """Whatever is there can be read, and every checkpoint is whole; the newest one's step."""
    if (run / "config.yaml").is_file():
        read_run(run)
    for path in checkpoints(run) if run.is_dir() else []:
        assert load_file(path / "adapter_model.safetensors")
        assert torch.load(path / "trainer_state.pt", weights_only=True)["step"] == int(path.name)
    return int(checkpoints(run)[-1].name) if run.is_dir() and checkpoints(run) else 0


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_any_moment_of_its_life(tmp_path: Path, straight: Path, start: Start, kills: int) -> None:
    """From its first import to its report's last figure. A run that got through is taken away, and the next begins anew."""
    dice, run = random.Random(kills), tmp_path / "r"
    began = time.monotonic()
    process = start(tmp_path / "first")
    process.join()
    life = time.monotonic() - began
    assert process.exitcode == 0
    killed = done = 0
    while killed < kills:
        process = start(run)
        process.join(dice.random() * life)
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        now = sound(run)
        assert now >= done
        done = now
        killed += process.exitcode != 0
        if process.exitcode == 0:
            assert same_whole(run, straight)
            shutil.rmtree(run)
            done = 0
    process = start(run)
    process.join()
    assert process.exitcode == 0
    assert same_whole(run, straight)
    assert not half_files(run)


def test_asked_to_stop_while_it_trains(tmp_path: Path, straight: Path, start: Start) -> None:
    """Again and again, at the first sign of a new step: it finishes what it is at, saves, and leaves with 143."""
    run, statuses = tmp_path / "r", []
    while not statuses or statuses[-1] != 0:
        process, before = start(run), sound(run)
        while process.is_alive() and not (run / "metrics.jsonl").is_file():
            time.sleep(0.002)
        while process.is_alive() and len((run / "metrics.jsonl").read_bytes().splitlines()) <= before:
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGTERM)
        process.join()
        statuses.append(process.exitcode)
        assert sound(run) > before
        assert not half_files(run)
    assert set(statuses) <= {0, 143}
    assert len(statuses) > 1
    assert same_whole(run, straight)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_comes_in_the_middle_of_a_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: int
) -> None:
    """It is noted and said, and the line goes on."""

    class Out(io.StringIO):
        def write(self, text: str) -> int:
            if not stop.signal:
                os.kill(os.getpid(), number)
            return super().write(text)

    out = Out()
    monkeypatch.setattr(sys, "stdout", out)
    progress = StepProgress(3, "datc")
    with StopRequest() as stop:
        progress.say("as it was")
    assert stop.signal == number
    assert out.getvalue() == "as it was\n"
    assert capfd.readouterr().err == f"{signal.Signals(number).name}: finishing this step and saving; once more to stop at once\n"
