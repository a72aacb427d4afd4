"""The most memory that was in use at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_STATM = Path("/proc/self/statm")
_PAGE = 4096


@dataclass
class Peak:
    bytes: int = 0  # 0 where it cannot be known (a CPU without /proc)


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """On a GPU the allocator's own peak; on a CPU the process's resident size, looked at every 5 ms."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device)
        return
    if not _STATM.exists():
        yield peak
        return
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak.bytes = max(peak.bytes, int(_STATM.read_text().split()[1]) * _PAGE)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()
