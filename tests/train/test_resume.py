"""A run that was stopped, killed or out of disk goes on to the same end, bit for bit."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from limits import PATIENCE
from test_train import TINY, adapter, lines, same
from tolerances import FORWARD

from datc_kernels.testing.rounding import rounding
from datc_train import train
from datc_train.checkpoint import checkpoints, random_state, set_random_state
from datc_train.config import config_from
from datc_train.export import export
from datc_train.interrupt import Interrupted
from datc_train.run_folder import RunFolder
from datc_train.sources import Sources

RUN = TINY | {"steps": 4, "save_every": 1, "learning_rate": 1e-3}


def untimed(run: Path) -> list[dict]:
    return [
        {k: v for k, v in line.items() if not k.startswith("seconds_") and k != "tokens_per_second"}
        for line in lines(run, "metrics.jsonl")
    ]


def same_end(a: Path, b: Path) -> bool:
    samples = [(run / "samples.jsonl").read_text() for run in (a, b)]
    return same(a, b) and untimed(a) == untimed(b) and samples[0] == samples[1]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(RUN | {"run_dir": str(tmp_path_factory.mktemp("straight") / "run")})


@pytest.mark.parametrize("options", [{}, {"schedule": "cosine", "schedule_steps": 6, "warmup_steps": 2}], ids=["plain", "cosine"])
def test_two_halves_are_the_whole(tmp_path: Path, options: dict) -> None:
    """Without save_every and with it; steps is the only key that differs."""
    config = TINY | {"learning_rate": 1e-3, "save_every": None} | options
    whole = train(config | {"steps": 4, "run_dir": str(tmp_path / "whole")})
    half = train(config | {"steps": 2, "run_dir": str(tmp_path / "half")})
    again = train(config | {"steps": 4, "run_dir": str(tmp_path / "half"), "resume": "auto"})
    assert again == half
    assert same_end(whole, half)


def test_a_cosine_is_not_stretched_by_more_steps(tmp_path: Path) -> None:
    config = TINY | {"schedule": "cosine", "run_dir": str(tmp_path / "r"), "resume": "auto"}
    train(config | {"steps": 2})
    run = train(config | {"steps": 4})
    rates = [line["learning_rate"] for line in lines(run, "metrics.jsonl")]
    assert rates[0] > rates[1] > rates[2] == rates[3] == pytest.approx(0.1 * rates[0])


def test_full_fine_tuning_goes_on_bit_for_bit(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    config = RUN | {"lora": None, "steps": 2}
    ends = []
    for name, parts in (("whole", [2]), ("half", [1, 2])):
        for steps in parts:
            run = train(config | {"steps": steps, "run_dir": str(tmp_path / name), "resume": "auto"})
        ends.append(load_file(checkpoints(run)[-1] / "model.safetensors"))
    assert all(torch.equal(ends[0][k], ends[1][k]) for k in ends[0])
    assert untimed(tmp_path / "whole") == untimed(tmp_path / "half")


def test_an_adapter_that_was_its_own_reference_keeps_it(tmp_path: Path) -> None:
    """The KL is to where training started, not to where it went on."""
    from peft import LoraConfig, get_peft_model

    from datc_train.quickstart import load_tiny_policy

    def started():  # type: ignore[no-untyped-def]
        torch.manual_seed(3)
        base, tokenizer = load_tiny_policy()
        return get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)), tokenizer

    whole = train(RUN | {"steps": 3, "run_dir": str(tmp_path / "whole")}, *started())
    for steps in (1, 3):
        half = train(RUN | {"steps": steps, "run_dir": str(tmp_path / "half"), "resume": "auto"}, *started())
    assert same_end(whole, half)
    assert untimed(half)[0]["kl"] == pytest.approx(0, abs=FORWARD**2)
    assert untimed(half)[2]["kl"] > 0


def run_and_kill(folder: Path, delay: float) -> bool:
    """Start or continue the run in a process of its own; SIGKILL `delay` seconds after it has a folder. True: it was done."""
    options = {k: json.dumps(v) if isinstance(v, dict) else str(v) for k, v in RUN.items()}
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    command = [sys.executable, "-m", "datc_train", "train", "--config", "tiny", *words, "--run_dir", str(folder)]
    seen = (folder / "metrics.jsonl").stat().st_mtime if (folder / "metrics.jsonl").is_file() else 0.0
    process = subprocess.Popen([*command, "--resume", "auto"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        if (folder / "metrics.jsonl").is_file() and (folder / "metrics.jsonl").stat().st_mtime > seen:
            break
        time.sleep(0.005)
    try:
        process.wait(delay)
    except subprocess.TimeoutExpired:
        process.kill()
    _, error = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), error.decode()
    return process.returncode == 0


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments(tmp_path: Path, straight: Path, kills: int) -> None:
    dice = random.Random(kills)
    folder = tmp_path / "r"
    for left in reversed(range(kills)):
        if run_and_kill(folder, dice.random() * 0.6):
            if not left:
                break
            (folder / "metrics.jsonl").unlink()  # it got through: once more from the start
            for path in sorted(folder.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
    run = train(RUN | {"run_dir": str(folder), "resume": "auto"})
    assert same_end(run, straight)


@pytest.mark.parametrize("moment", ["rename", "weights", "metrics"])
def test_killed_within_a_checkpoint(tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """As if the process had died there: nothing after it runs, not even what cleans up."""
    import datc_train.checkpoint as module
    from datc_train.run_folder import RunFolder

    class Died(BaseException):
        pass

    calls = 0

    def die(real, at: int):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += 1
            if calls == at:
                raise Died
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        if moment == "rename":
            patch.setattr(module.os, "replace", die(os.replace, 4))
        elif moment == "weights":
            patch.setattr(module.torch, "save", die(torch.save, 2))
        else:
            patch.setattr(RunFolder, "append", die(RunFolder.append, 4))
        with pytest.raises(Died):
            train(RUN | {"run_dir": str(tmp_path / "r")})
    with (tmp_path / "r" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward_mean": 0.')
    run = train(RUN | {"run_dir": str(tmp_path / "r"), "resume": "auto"})
    assert same_end(run, straight)
    assert not list(run.rglob("*.tmp"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_saves(tmp_path: Path, number: int) -> None:
    def reward(completions, **_):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if calls == 2:
            os.kill(os.getpid(), number)
        return [float(len(c[0]["content"])) for c in completions]

    config = RUN | {"method": "grpo", "save_every": None}
    calls = 10
    whole = train(config | {"run_dir": str(tmp_path / "whole")}, reward=reward)
    calls = 0
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=r"stopped after step 2; to go on: --run_dir .*r --resume auto") as stop:
        train(config | {"run_dir": str(tmp_path / "r")}, reward=reward)
    assert stop.value.signal == number
    assert signal.getsignal(number) == before
    assert [p.name for p in checkpoints(tmp_path / "r")] == ["000002"]
    run = train(config | {"run_dir": str(tmp_path / "r"), "resume": "auto"}, reward=reward)
    assert same_end(run, whole)


def test_the_command_line_leaves_with_130(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import datc_train.loop as module
    from datc_train.cli import main

    def stop(*_, **__):  # type: ignore[no-untyped-def]
        raise Interrupted("stopped after step 2; to go on: --run_dir r --resume auto", signal.SIGINT)

    monkeypatch.setattr(module, "train", stop)
    with pytest.raises(SystemExit) as exit_:
        main(["train", "--config", "tiny"])
    assert exit_.value.code == 130
    assert "--resume auto" in capsys.readouterr().err


def test_only_steps_trackers_and_folders_may_differ(tmp_path: Path, straight: Path) -> None:
    changed = RUN | {"run_dir": str(straight), "resume": "auto", "learning_rate": 1.0, "method": "grpo"}
    with pytest.raises(
        ValueError, match="^resume: only .* may differ .*method: 'datc' then, 'grpo' now; learning_rate: 0.001 then, 1.0"
    ):
        train(changed)
    with pytest.raises(ValueError, match="^steps: expected at least 4"):
        train(RUN | {"run_dir": str(straight), "resume": "auto", "steps": 2})
    with pytest.raises(ValueError, match="^resume: expected run_dir"):
        train(RUN | {"resume": "auto"})
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(ValueError, match="^resume: expected a run's folder"):
        train(RUN | {"run_dir": str(tmp_path / "photos"), "resume": "auto"})


def test_a_checkpoint_of_another_policy_is_refused(tmp_path: Path) -> None:
    from datc_train.quickstart import load_tiny_policy

    config = RUN | {"steps": 1, "run_dir": str(tmp_path / "r")}
    model, tokenizer = load_tiny_policy()
    run = train(config, policy=model, tokenizer=tokenizer)
    model, tokenizer = load_tiny_policy()
    model.model.layers = model.model.layers[:1]
    with pytest.raises(ValueError, match=f"^resume: {checkpoints(run)[-1]} does not fit this policy"):
        train(config | {"steps": 2, "resume": "auto"}, model, tokenizer)


def test_a_finished_run_stays_as_it_is(tmp_path: Path) -> None:
    run = train(RUN | {"steps": 1, "run_dir": str(tmp_path / "r")})
    before = (run / "metrics.jsonl").read_text()
    train(RUN | {"steps": 1, "run_dir": str(run), "resume": "auto"})
    assert (run / "metrics.jsonl").read_text() == before


def test_a_full_disk_loses_no_whole_checkpoint(tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datc_train.checkpoint as module

    def full(*_, **__):  # type: ignore[no-untyped-def]
        raise OSError(errno.ENOSPC, "No space left on device")

    real = torch.save
    with monkeypatch.context() as patch:
        patch.setattr(module.torch, "save", lambda state, path: full() if state["step"] == 3 else real(state, path))
        with pytest.raises(OSError, match=r"checkpoint of step 3 could not be written .*No space.*last whole one is .*000002"):
            train(RUN | {"run_dir": str(tmp_path / "r")})
    assert same_end(train(RUN | {"run_dir": str(tmp_path / "r"), "resume": "auto"}), straight)


def test_a_disk_without_room_is_found_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datc_train.checkpoint as module

    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(OSError, match="^run_dir: expected .* GiB of free disk"):
        train(RUN | {"run_dir": str(tmp_path / "r")})
    assert not (tmp_path / "r" / "metrics.jsonl").exists()


def test_newest_and_best_checkpoints_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datc_train.loop as module

    values = iter([9.0, 1.0, 3.0, 2.0, 2.5, 0.5])  # before training, then after every step
    monkeypatch.setattr(module, "evaluate", lambda step, *_: {"step": step, "reward_mean": next(values), "samples": []})
    monkeypatch.setattr(module, "summary", lambda *_: "")
    config = RUN | {"steps": 5, "keep": 2, "eval_prompts": "quickstart", "eval_every": 1}
    run = train(config | {"run_dir": str(tmp_path / "r")})
    assert [p.name for p in checkpoints(run)] == ["000002", "000004", "000005"]


def test_evaluation_every_so_many_steps(tmp_path: Path) -> None:
    config = RUN | {"eval_prompts": "quickstart", "eval_limit": 2, "eval_every": 2, "steps": 3, "save_every": None}
    run = train(config | {"run_dir": str(tmp_path / "r")})
    assert [line["step"] for line in lines(run, "eval.jsonl")] == [0, 2, 3]
    assert checkpoints(run)[-1].name == "000003"


def test_tensorboard_gets_the_curves(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = train(RUN | {"steps": 2, "run_dir": str(tmp_path / "r"), "trackers": ["tensorboard"]})
    events = accumulator.EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("reward_mean")] == [1, 2]
    logged = lines(run, "metrics.jsonl")[1]["reward_mean"]
    assert events.Scalars("reward_mean")[1].value == pytest.approx(logged, rel=rounding())  # TensorBoard keeps float32


def test_trackers_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="^trackers: expected any of tensorboard, wandb, trackio, got mlflow"):
        train(RUN | {"run_dir": str(tmp_path / "r"), "trackers": ["mlflow"]})
    monkeypatch.setattr("datc_train.trackers.find_spec", lambda _: None)
    with pytest.raises(ValueError, match="^trackers: 'wandb' asked for, but its package is not installed: pip install wandb"):
        train(RUN | {"run_dir": str(tmp_path / "r"), "trackers": ["wandb"]})
    assert not (tmp_path / "r").exists()


def test_random_states_come_back() -> None:
    import numpy as np

    state = random_state()
    drawn = [random.random(), np.random.rand(), float(torch.rand(()))]  # noqa: NPY002
    set_random_state(state)
    assert drawn == [random.random(), np.random.rand(), float(torch.rand(()))]  # noqa: NPY002


def test_adapter_files_are_plain(straight: Path) -> None:
    assert adapter(straight)
    assert {p.name for p in checkpoints(straight)[-1].iterdir()} >= {"adapter_config.json", "trainer_state.pt", "tokenizer.json"}


def test_one_process_writes_a_run(tmp_path: Path) -> None:
    """Two trainings with one run_dir: the second is refused, and the first one's end lets the next in."""
    path = tmp_path / "r"
    config = config_from(TINY | {"run_dir": str(path), "resume": "auto"})
    folder = RunFolder(config, Sources())
    with pytest.raises(BlockingIOError, match=rf"^run_dir: .* is being written by process {os.getpid()}; wait"):
        RunFolder(config, Sources())
    folder.close()
    RunFolder(config, Sources()).close()


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "trainer_state.pt", "adapter_config.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_too(tmp_path: Path, name: str) -> None:
    options = TINY | {"run_dir": str(tmp_path / "r"), "steps": 2, "save_every": 1, "report": False}
    run = train(options)
    newest = run / "checkpoints" / "000002"
    data = (newest / name).read_bytes()
    (newest / name).write_bytes(data[: len(data) // 2])
    words = r"^checkpoint: .*000002 cannot be read \(.*\); without it the run goes on from .*000001$"
    if name != "adapter_config.json":  # which going on does not read
        with pytest.raises(ValueError, match=words):
            train(options | {"resume": "auto", "steps": 3})
    if name != "trainer_state.pt":
        with pytest.raises(ValueError, match=words):
            export(run)
    shutil.rmtree(newest)
    train(options | {"resume": "auto", "steps": 3})


@pytest.mark.parametrize("content", ["", "- a list", "steps: [", "\udcff"])
def test_a_damaged_config_is_named(tmp_path: Path, content: str) -> None:
    options = TINY | {"run_dir": str(tmp_path / "r"), "steps": 1, "report": False}
    run = train(options)
    (run / "config.yaml").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"config\.yaml: expected the keys of a run, got"):
        train(options | {"resume": "auto", "steps": 2})


def test_a_run_without_a_checkpoint_begins_again_with_any_config(tmp_path: Path) -> None:
    """A mistake that showed in the first steps does not keep its folder for ever."""
    options = TINY | {"run_dir": str(tmp_path / "r"), "steps": 2, "report": False}
    with pytest.raises(RuntimeError):
        train(options | {"learning_rate": 1e30})
    run = train(options | {"resume": "auto"})
    straight = train(options | {"run_dir": str(tmp_path / "s")})
    assert same(run, straight)


def test_lines_that_are_gone_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = TINY | {"run_dir": str(tmp_path / "r"), "steps": 3, "report": False}
    run = train(options)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0] + lines[2])
    train(options | {"resume": "auto", "steps": 4})
    assert "metrics.jsonl has no line for 1 of these steps, the first of them 2" in " ".join(capsys.readouterr().out.split())
