"""A process that we own answers, or is an error in finite time; and nothing of it is left. T numbers: reports against others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from datc_train.vllm_engine.process import EngineProcess

FAKE = Path(__file__).parent / "fake_engine.py"
COMMAND = (sys.executable, str(FAKE))


def lives(pid: int) -> bool:
    """A zombie whose parent has not looked yet is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pids: list[int], within: float = 10.0) -> bool:
    deadline = time.monotonic() + within
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(lives, pids))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., EngineProcess]]:
    made: list[EngineProcess] = []

    def make(timeout: float = 60.0) -> EngineProcess:
        made.append(EngineProcess(tmp_path / "engine.log", timeout=timeout, command=COMMAND))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def test_it_answers_and_ends_in_order(start: Any) -> None:
    engine = start()
    assert engine.ask("echo", value=[1, float("inf")]) == [1, float("inf")]
    pids = engine.ask("pids")
    assert pids[0] == engine.pid
    assert all(map(lives, pids))
    engine.close()
    assert gone(pids, 0.5)  # what the worker started, too
    engine.close()
    with pytest.raises(RuntimeError, match="^sampler: the vLLM engine has ended"):
        engine.ask("echo", value=1)


def test_ctrl_c_in_the_terminal_is_the_trainers_alone(start: Any) -> None:
    engine = start()
    engine.ask("pids")
    assert os.getsid(engine.pid) == engine.pid != os.getsid(0)


def test_t66_a_sign_of_life_moves_the_deadline(start: Any) -> None:
    engine = start()
    engine.ask("pids")  # it has started
    engine.timeout = 0.7
    assert engine.ask("be_slow", seconds=2.0) == "done"


@pytest.mark.parametrize("deaf", [False, True])
def test_t66_no_sign_of_life_is_an_error(start: Any, deaf: bool) -> None:
    engine = start()
    pids = engine.ask("pids")
    engine.timeout = 0.5
    began = time.monotonic()
    with pytest.raises(
        RuntimeError, match=r"gave no sign of life for 0.5 s \(vllm_timeout\), asked to hang; its log is .*--resume auto"
    ):
        engine.ask("hang", deaf=deaf)
    assert time.monotonic() - began < 8
    assert gone(pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_t60_a_death_is_an_error_and_leaves_no_children(start: Any, number: int) -> None:
    engine = start()
    pids = engine.ask("pids")
    with pytest.raises(RuntimeError, match=rf"died \(exit status -{int(number)}\), asked to die"):
        engine.ask("die", number=number)
    assert gone(pids)


def test_its_last_words_are_in_the_error(start: Any) -> None:
    with pytest.raises(RuntimeError, match=r"died \(exit status 3\), asked to leave \(SomeError: out of paper\)"):
        start().ask("leave", status=3)


def test_a_failure_ends_it(start: Any) -> None:
    engine = start()
    pids = engine.ask("pids")
    with pytest.raises(RuntimeError, match="the vLLM engine failed: LookupError: no such layer, asked to fail"):
        engine.ask("fail")
    assert gone(pids)


def test_an_interrupted_question_ends_it_at_once(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    pids = engine.ask("pids")
    monkeypatch.setattr(engine, "_answer", lambda what: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.ask("hang")
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 5
    assert gone(pids)


TRAINER = f"""
import sys, time
from pathlib import Path
from datc_train.vllm_engine.process import EngineProcess
engine = EngineProcess(Path(sys.argv[1]), timeout=60, command=(sys.executable, {str(FAKE)!r}))
print(*engine.ask("pids"), flush=True)
if sys.argv[2] == "raise":
    raise SystemExit(1)
engine.ask("hang")
"""


@pytest.mark.parametrize("how", ["raise", signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_t60_however_the_trainer_ends_nothing_is_left(tmp_path: Path, how: Any) -> None:
    """Also where nothing of the trainer's runs any more: by SIGTERM outside of a handler, and by SIGKILL."""
    command = [sys.executable, "-c", TRAINER, str(tmp_path / "log"), str(how)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as trainer:
        assert trainer.stdout is not None
        pids = [int(word) for word in trainer.stdout.readline().split()]
        assert len(pids) == 2
        if how != "raise":
            trainer.send_signal(how)
        trainer.wait(30)
    assert gone(pids)
