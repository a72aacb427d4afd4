"""Times of calls that take turns, with a cold cache, and the memory of a call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .setting import Setting

_FLUSH_BYTES = 256 * 2**20  # several times any L2
Call = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call, round by round."""

    ms: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.ms)

    @property
    def spread(self) -> float:
        """(largest - smallest) / median."""
        return (max(self.ms) - min(self.ms)) / self.median

    def over(self, other: Times) -> float:
        """Median of the ratios within a round."""
        return statistics.median(a / b for a, b in zip(self.ms, other.ms, strict=True))


class Clock:
    """CUDA events around calls on a GPU, the wall clock elsewhere."""

    def __init__(self, setting: Setting) -> None:
        self.cuda = setting.device.type == "cuda"
        self._flush = torch.empty(_FLUSH_BYTES if self.cuda else 0, dtype=torch.int8, device=setting.device)

    def once(self, call: Call) -> float:
        """Milliseconds; the L2 holds none of the inputs."""
        if not self.cuda:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def compare(self, calls: dict[str, Call], *, seconds: float, most: int = 15) -> tuple[dict[str, Times], dict[str, str]]:
        """Times of calls that take turns, some 3 to `most` rounds in about `seconds`, and why others could not be timed."""
        failed, first = {}, {}
        for name, call in calls.items():
            try:
                first[name] = self.once(call)
                if self.cuda:  # the first compiles
                    first[name] = self.once(call)
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                self.release()
        if not self.cuda:
            return {name: Times([ms]) for name, ms in first.items()}, failed
        rounds = max(3, min(most, int(seconds * 1e3 / max(sum(first.values()), 1e-3))))
        times: dict[str, list[float]] = {name: [] for name in first}
        for _ in range(rounds):
            for name in first:
                times[name].append(self.once(calls[name]))
        return {name: Times(ms) for name, ms in times.items()}, failed

    def peak_extra(self, call: Call) -> int | None:
        """Bytes beyond what was allocated before that a call has at its peak, its results among them; None without a GPU."""
        if not self.cuda:
            return None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept = call()
        torch.cuda.synchronize()
        del kept
        return torch.cuda.max_memory_allocated() - before

    def release(self) -> None:
        if self.cuda:
            torch.cuda.empty_cache()
