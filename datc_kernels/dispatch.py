"""Which backend runs an op: the only place that decides.

A backend asked for by name runs or raises with the reason. `backend=None` takes the fastest exact one of the device; no
environment variable changes the choice.
"""

from __future__ import annotations

import torch

KNOWN = ("reference", "chunked", "cpu", "triton", "cuda")
AVAILABLE = ("reference", "chunked")

_WHY_NOT = {
    "cpu": "the C++ extension is not part of this build",
    "triton": "the Triton kernels are not part of this build",
    "cuda": "the CUDA kernels are not part of this build",
}


def missing_backends() -> dict[str, str]:
    """Known backends that cannot run here, each with the reason."""
    return dict(_WHY_NOT)


def choose(backend: str | None, device: torch.device) -> str:
    """Name of the backend to run on `device`.

    Raises ValueError for a name that no backend has, RuntimeError for a known backend that cannot run here.
    """
    del device  # every backend of this build runs on every device
    if backend is None:
        return "chunked"
    if backend not in KNOWN:
        raise ValueError(f"backend: expected None or one of {', '.join(KNOWN)}, got {backend!r}")
    if backend not in AVAILABLE:
        raise RuntimeError(f"backend: {backend!r} cannot run here: {_WHY_NOT[backend]}; here are {', '.join(AVAILABLE)}")
    return backend
