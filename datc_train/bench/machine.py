"""What stands beside every figure: the machine and the versions."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "processor": _processor(),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "threads": torch.get_num_threads(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
