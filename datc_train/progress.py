"""What a person sees while a run goes on: a live bar on a terminal, a line a step elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from datc_train.disk import written

_TEXT = "reward {reward_mean:+.3f}  KL {kl}  length {length_mean:.0f}  ESS {ess_ratio:.2f}  {tokens_per_second:.0f} tok/s"


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Called while BrokenPipeError is handled, which goes on from here; rich would end the process without a word."""
        raise


class StepProgress:
    def __init__(self, steps: int, method: str, done: int = 0) -> None:
        self.console = _Console(highlight=False)
        self.steps = steps
        self.bar = Progress(
            TextColumn(f"[bold]{method}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task("train", total=steps, completed=done, text="first step ...")

    def __enter__(self) -> StepProgress:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def step(self, metrics: dict[str, Any]) -> None:
        kl = "off" if metrics["kl"] is None else f"{metrics['kl']:.4f}"
        text = _TEXT.format(**metrics | {"kl": kl, "tokens_per_second": metrics["tokens_per_second"] or 0.0})
        self.bar.update(self.task, advance=1, text=text)
        if not self.console.is_terminal:
            self._print(f"step {metrics['step']}/{self.steps}  {text}")

    def say(self, text: str) -> None:
        self._print(text, markup=False)

    def _print(self, text: str, *, markup: bool = True) -> None:
        with written("standard output"):
            self.console.print(text, soft_wrap=True, markup=markup)


class WorkProgress:
    """Stages of some work, one bar; on a terminal only, and not where it is to be quiet."""

    def __init__(self, name: str, quiet: bool = False) -> None:
        console = Console(highlight=False, stderr=True)
        self.bar = Progress(
            TextColumn(f"[bold]{name}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self.task: TaskID | None = None

    def __enter__(self) -> WorkProgress:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def begin(self, stage: str, parts: int) -> None:
        if self.task is not None:
            self.bar.remove_task(self.task)
        self.task = self.bar.add_task(stage, total=parts)

    def advance(self) -> None:
        assert self.task is not None
        self.bar.advance(self.task)
