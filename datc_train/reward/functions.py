"""Reward functions of the caller: called in TRL's way, in time, and with errors that say whose they are."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

RewardFunction = Callable[..., Any]  # -> list[float | None], or a coroutine of it

Outcome = tuple[Any, BaseException | None]

_PATIENCE = 1.0  # seconds that cancelled coroutines have for tidying up
_THREADS = 32  # of what coroutines hand to threads (asyncio.to_thread)


class RewardError(RuntimeError):
    """A reward function that raised (its error is the `__cause__`), or that did not return within `reward_timeout`."""

    def in_step(self, step: int) -> RewardError:
        return RewardError(f"{self}; in step {step}")


def name_of(reward: object) -> str:
    """What a reward is called: a function's own name, that of the type for an object without one."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return str(getattr(reward, "__name__", type(reward).__name__))


def is_async(function: RewardFunction) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def call_functions(
    functions: Mapping[str, RewardFunction], arguments: Mapping[str, Any], where: str, timeout: float | None = None
) -> dict[str, Any]:
    """What each of `functions` returns, under its name.

    The synchronous ones run one after another, then all asynchronous ones at once, on an event loop that lives as long as
    the process (so that they may keep a client). With `timeout` a synchronous one runs in a daemon thread.

    Args:
        functions: by the names that errors call them.
        arguments: keywords of every call; each gets lists of its own.
        where: the prompts, in words for an error.
        timeout: seconds of one call; None: no bound.

    Raises:
        RewardError: from whatever a function raised but KeyboardInterrupt and SystemExit, which pass; or for one that hangs.
            Coroutines are cancelled then. A thread cannot be: it is left behind, and does not keep the process alive.
    """

    def call(name: str) -> Any:
        return functions[name](**{key: list(v) if isinstance(v, list) else v for key, v in arguments.items()})

    found: dict[str, Any] = {}
    for name in (name for name, function in functions.items() if not is_async(function)):
        work = functools.partial(_attempt, functools.partial(call, name))
        outcome = work() if timeout is None else _in_a_thread(work, timeout)
        found[name] = _value(name, outcome, where, timeout)
    later = [name for name, function in functions.items() if is_async(function)]
    if later:
        outcomes = _at_once({name: functools.partial(call, name) for name in later}, timeout)
        for name in sorted(later, key=lambda name: outcomes.get(name) is None):  # what was raised before what was cancelled
            found[name] = _value(name, outcomes.get(name), where, timeout)
    return found


def _value(name: str, outcome: Outcome | None, where: str, timeout: float | None) -> Any:
    if outcome is None:
        raise RewardError(f"reward: expected {name} to return within reward_timeout, {timeout:g} s; it has not, {where}")
    value, error = outcome
    if error is None:
        return value
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        raise error
    words = " ".join(str(error).split())[:300]
    raise RewardError(f"reward: {name} raised {type(error).__name__}{': ' if words else ''}{words}; {where}") from error


def _attempt(work: Callable[[], Any]) -> Outcome:
    try:
        return work(), None
    except BaseException as error:  # told apart by the caller, in its own thread
        return None, error


def _in_a_thread(work: Callable[[], Outcome], timeout: float) -> Outcome | None:
    """None where it takes longer."""
    box: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    context = contextvars.copy_context()
    threading.Thread(target=lambda: box.put(context.run(work)), name="datc-reward", daemon=True).start()
    try:
        return box.get(timeout=timeout)
    except queue.Empty:
        return None


def _at_once(calls: Mapping[str, Callable[[], Any]], timeout: float | None) -> dict[str, Outcome]:
    """Without those that take longer, or that another one's error stopped."""
    outcomes: dict[str, Outcome] = {}
    over = threading.Event()

    async def one(name: str) -> None:
        try:
            outcomes[name] = (await calls[name](), None)
        except BaseException as error:
            if not stopping:
                outcomes[name] = (None, error)
                raise _StopError from None

    async def everyone() -> None:
        tasks = [asyncio.ensure_future(one(name)) for name in calls]
        try:
            await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            stopping.append(True)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=_PATIENCE)
            for task in tasks:
                if task.done() and not task.cancelled():
                    task.exception()
            over.set()

    stopping: list[bool] = []
    loop = _loop()
    task = asyncio.run_coroutine_threadsafe(everyone(), loop)
    # The loop cannot count the time where a coroutine blocks it: then it is left behind, and the next call has another.
    try:
        ended = over.wait(None if timeout is None else timeout + 2 * _PATIENCE)
    except BaseException:
        task.cancel()
        raise
    if not ended:
        stopping.append(True)
        _loop.cache_clear()
    return dict(outcomes)


class _StopError(Exception):
    """One coroutine raised: the others are not waited for."""


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_default_executor(_DaemonThreads(_THREADS))
    threading.Thread(target=loop.run_forever, name="datc-rewards", daemon=True).start()
    return loop


class _DaemonThreads(ThreadPoolExecutor):
    """An executor whose threads the interpreter does not wait for as it ends."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._places = threading.BoundedSemaphore(workers)

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            with self._places:
                if not future.set_running_or_notify_cancel():
                    return
                value, error = _attempt(functools.partial(work, *args, **kwargs))
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(error)

        threading.Thread(target=run, name="datc-reward", daemon=True).start()
        return future


def of_prompts(prompts: Sequence[Any], responses: int) -> str:
    """The words of an error for the prompts of a call."""
    first = str(prompts[0].messages[-1]["content"])[:80]
    return f"on {responses} responses to {len(prompts)} prompts, the first of them {first!r}"
