"""A process that we own answers, or is an error in finite time; and nothing of it is left. T numbers: reports against others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from limits import PATIENCE

from datc_train.vllm_engine import process
from datc_train.vllm_engine.process import EngineProcess

FAKE = Path(__file__).parent / "fake_engine.py"
COMMAND = (sys.executable, str(FAKE))


def lives(pid: int) -> bool:
    """A zombie whose parent has not looked yet is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pids: list[int], within: float = PATIENCE) -> bool:
    deadline = time.monotonic() + within
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(lives, pids))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., EngineProcess]]:
    made: list[EngineProcess] = []

    def make(timeout: float = PATIENCE) -> EngineProcess:
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
    assert gone(pids)  # what the worker started, too
    engine.close()
    with pytest.raises(RuntimeError, match="^sampler: the vLLM engine has ended"):
        engine.ask("echo", value=1)


def test_ctrl_c_in_the_terminal_is_the_trainers_alone(start: Any) -> None:
    engine = start()
    engine.ask("pids")
    assert os.getsid(engine.pid) == engine.pid != os.getsid(0)


def test_t66_a_sign_of_life_moves_the_deadline(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    engine.ask("pids")  # it has started
    clock, pipe = [0.0], engine._pipe

    class Slow:
        """Every answer takes 60 seconds, by a clock of its own: a real one would be a bet on the machine."""

        poll, send, close = pipe.poll, pipe.send, pipe.close

        def recv(self) -> Any:
            clock[0] += 60
            return pipe.recv()

    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep))
    monkeypatch.setattr(engine, "_pipe", Slow())
    engine.timeout = 90.0
    assert engine.ask("be_slow", times=20) == "done"
    assert clock[0] >= 20 * 60
    monkeypatch.undo()


@pytest.mark.parametrize("deaf", [False, True])
def test_t66_no_sign_of_life_is_an_error(start: Any, deaf: bool) -> None:
    engine = start()
    pids = engine.ask("pids")
    engine.timeout = 0.5
    with pytest.raises(
        RuntimeError, match=r"gave no sign of life for 0.5 s \(vllm_timeout\), asked to hang; its log is .*--resume auto"
    ):
        engine.ask("hang", deaf=deaf)
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
    monkeypatch.setattr(engine, "_wait_for_end", lambda: pytest.fail("it is not asked to end in order"))
    engine.close()
    assert gone(pids)


TRAINER = f"""
import signal, sys
from pathlib import Path
from datc_train.vllm_engine.process import EngineProcess
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background begins with it ignored
engine = EngineProcess(Path(sys.argv[1]), timeout={PATIENCE}, command=(sys.executable, {str(FAKE)!r}))
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
        trainer.wait(PATIENCE)
    assert gone(pids)
