"""A real vLLM whose core dies or hangs within a run. T numbers: reports against other trainers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_engine_process import gone, lives
from test_train import lines
from test_vllm_engine import TIMEOUT, pytestmark  # noqa: F401
from test_vllm_runs import RUN, children

from datc_train import train
from datc_train.checkpoint import checkpoints
from datc_train.vllm_engine.process import EngineProcess


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
