"""Reward functions of the caller: asynchronous ones, ones that raise, ones that hang."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from test_train import TINY, lines

from datc_train import train
from datc_train.cli import main
from datc_train.quickstart import load_tiny_reward_model
from datc_train.reward import RewardModel
from datc_train.reward.functions import RewardError, call_functions, is_async

ONE = TINY | {"steps": 1, "save_every": None, "prompts_per_step": 2, "group_size": 2, "method": "grpo"}
LATE = 60.0  # seconds that no test waits for


def brief(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [-float(len(response)) for response in completion_ids]


def call(timeout: float | None = None, **functions: Any) -> dict[str, Any]:
    return call_functions(functions, {"completion_ids": [[1], [2, 3]]}, "on 2 responses", timeout)


class BrokenError(Exception):
    pass


class Judge:
    async def __call__(self, **_: Any) -> list[float]:
        return [1.0, 2.0]


def test_asynchronous_functions_run_at_once() -> None:
    """Each waits for the other: one after another they would wait for ever."""
    here, there = asyncio.Event(), asyncio.Event()

    async def first(completion_ids: list[list[int]], **_: Any) -> list[float]:
        here.set()
        await asyncio.wait_for(there.wait(), LATE)
        return [1.0 for _ in completion_ids]

    async def second(**_: Any) -> list[float]:
        there.set()
        await asyncio.wait_for(here.wait(), LATE)
        return [2.0, 3.0]

    found = call(first=first, brief=brief, second=second, third=Judge(), fourth=functools.partial(second, extra=1))
    assert found == {"first": [1, 1], "brief": [-1, -2], "second": [2, 3], "third": [1, 2], "fourth": [2, 3]}
    assert is_async(Judge())
    assert not is_async(brief)


def test_within_a_running_loop() -> None:
    """A notebook has one."""

    async def cell() -> dict[str, Any]:
        return call(judge=Judge())

    assert asyncio.run(cell()) == {"judge": [1.0, 2.0]}


def test_one_loop_for_all_calls() -> None:
    """A client that a function keeps belongs to its loop."""
    seen = []

    async def judge(**_: Any) -> list[float]:
        seen.append(asyncio.get_running_loop())
        return []

    call(judge=judge)
    call(judge=judge)
    assert seen[0] is seen[1]


def test_functions_cannot_disturb_each_others_lists() -> None:
    def greedy(completion_ids: list[list[int]], **_: Any) -> list[float]:
        completion_ids.clear()
        return []

    assert call(greedy=greedy, brief=brief)["brief"] == [-1, -2]


ERRORS = [
    BrokenError("no\n key"),
    ValueError("x"),
    asyncio.CancelledError(),
    GeneratorExit(),
    TimeoutError("slow"),
    AssertionError(),
]


@pytest.mark.parametrize("timeout", [None, LATE])
@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_is_raised_has_the_functions_name(error: BaseException, kind: str, timeout: float | None) -> None:
    def raises(**_: Any) -> list[float]:
        raise error

    async def raises_later(**_: Any) -> list[float]:
        await asyncio.sleep(0)
        raise error

    async def waits(**_: Any) -> list[float]:
        await asyncio.sleep(LATE)
        return []

    functions = {"raises": raises} if kind == "sync" else {"waits": waits, "raises": raises_later}
    began = time.monotonic()
    with pytest.raises(RewardError, match=rf"^reward: raises raised {type(error).__name__}\b.*; on 2 responses$") as found:
        call(timeout, **functions)
    assert "\n" not in str(found.value)
    assert found.value.__cause__ is error
    assert time.monotonic() - began < LATE / 2


@pytest.mark.parametrize("timeout", [None, LATE])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_asks_for_the_end_passes(kind: type[BaseException], timeout: float | None) -> None:
    def stop(**_: Any) -> list[float]:
        raise kind

    async def stop_later(**_: Any) -> list[float]:
        raise kind

    for function in (stop, stop_later):
        with pytest.raises(kind):
            call(timeout, stop=function)
    assert call(judge=Judge()) == {"judge": [1.0, 2.0]}


def test_the_error_of_a_run(tmp_path: Path) -> None:
    calls = []

    def second_time(completion_ids: list[list[int]], **_: Any) -> list[float]:
        calls.append(1)
        if len(calls) > 1:
            raise BrokenError("no key")
        return [0.0 for _ in completion_ids]

    config = ONE | {"run_dir": str(tmp_path / "r"), "steps": 3, "save_every": 1}
    says = r"^reward: second_time raised BrokenError: no key; on 4 responses to 2 prompts, the first of them '.+'; in step 2$"
    with pytest.raises(RewardError, match=says) as found:
        train(config, reward=[brief, second_time])
    assert isinstance(found.value.__cause__, BrokenError)
    calls.clear()
    train(config | {"resume": "auto", "steps": 2}, reward=[brief, second_time])
    assert [line["step"] for line in lines(tmp_path / "r", "metrics.jsonl")] == [1, 2]


def test_at_evaluation_and_before_shaping(tmp_path: Path) -> None:
    def raises(**_: Any) -> list[float]:
        raise BrokenError

    for options in ({"eval_prompts": "quickstart", "eval_limit": 1}, {"reward_shaping": True, "shaping_prompts": 2}):
        config = ONE | {"run_dir": str(tmp_path / next(iter(options)))} | options
        with pytest.raises(RewardError, match=r"^reward: raises raised BrokenError; on .*; in step 0$"):
            train(config, reward=raises)


def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rules_2.py").write_text("def broken(**_):\n    return {}['the missing key']\n")
    words = ["train", "--config", "tiny", "--reward", "[tiny, my_rules_2:broken]", "--steps", "1"]
    for debug in ([], ["--debug"]):
        with pytest.raises(SystemExit) as exit_:
            main([*words, *debug])
        assert exit_.value.code == 2
        error = capsys.readouterr().err
        assert "datc: reward: broken raised KeyError: 'the missing key'; on " in error
        assert "; in step " in error
        assert ("return {}['the missing key']" in error) == bool(debug)
        assert debug or error.count("\n") == 1


@pytest.mark.parametrize("kind", ["sync", "async", "async that blocks"])
def test_a_function_that_hangs(kind: str) -> None:
    cancelled, go_on = threading.Event(), threading.Event()

    def sync(**_: Any) -> list[float]:
        go_on.wait(LATE)
        return []

    async def waits(**_: Any) -> list[float]:
        try:
            await asyncio.sleep(LATE)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return []

    async def blocks(**_: Any) -> list[float]:
        return sync()

    function = {"sync": sync, "async": waits, "async that blocks": blocks}[kind]
    began = time.monotonic()
    with pytest.raises(
        RewardError, match=r"^reward: expected slow to return within reward_timeout, 0.2 s; it has not, on 2 resp"
    ):
        call(0.2, quick=brief, slow=function)
    assert time.monotonic() - began < LATE / 2
    assert kind != "async" or cancelled.is_set()
    assert call(LATE, judge=Judge()) == {"judge": [1.0, 2.0]}
    go_on.set()


def test_time_enough() -> None:
    assert call(LATE, brief=brief, judge=Judge()) == {"brief": [-1, -2], "judge": [1.0, 2.0]}


HANGS = """
import asyncio, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_reward_functions import ONE, brief
from datc_train import train

calls = []

def forever(**columns):
    calls.append(1)
    return brief(**columns) if len(calls) < 3 else time.sleep(10**6)

async def forever_async(**columns):
    return await asyncio.to_thread(forever, **columns)

for name, function in (("sync", forever), ("async", forever_async)):
    calls.clear()
    config = ONE | {{"run_dir": name, "steps": 5, "save_every": 1, "reward_timeout": 2.0}}
    try:
        train(config, reward=function)
    except RuntimeError as error:
        print(error)
    calls.clear()
    train(config | {{"resume": "auto", "steps": 3, "reward_timeout": None}}, reward=function)
print("the end")
"""


def test_a_process_with_a_hanging_function_ends(tmp_path: Path) -> None:
    """Its last checkpoint is good, and neither thread nor coroutine keeps the interpreter alive."""
    code = textwrap.dedent(HANGS).format(tests=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("the end")
    for name in ("forever", "forever_async"):
        assert f"reward: expected {name} to return within reward_timeout, 2 s; it has not, on 4 responses" in done.stdout
    assert done.stdout.count("; in step 3") == 2
    for run in ("sync", "async"):
        assert [line["step"] for line in lines(tmp_path / run, "metrics.jsonl")] == [1, 2, 3]


def test_a_time_for_functions_beside_a_model(tmp_path: Path) -> None:
    config = ONE | {"run_dir": str(tmp_path / "r"), "method": "datc", "reward_timeout": LATE}
    run = train(config, reward=[RewardModel(*load_tiny_reward_model()), brief, Judge4()])
    assert lines(run, "metrics.jsonl")[0]["reward_Judge4_mean"] == 1.0


class Judge4:
    async def __call__(self, completions: list[Any], **_: Any) -> list[float]:
        return [1.0 for _ in completions]
