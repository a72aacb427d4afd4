"""Which backend runs an op: the only place that decides.

A backend asked for by name runs or raises with the reason. `backend=None` takes the fastest exact one of the device; no
environment variable changes the choice.
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

import torch

KNOWN = ("reference", "chunked", "cpu", "triton", "cuda")

_NOT_BUILT = {
    "cpu": "the C++ extension is not part of this build",
    "cuda": "the CUDA kernels are not part of this build",
}
_OLDEST_TRITON = (3, 6)
_OLDEST_GPU = (8, 0)


def missing_backends() -> dict[str, str]:
    """Known backends that cannot run here, each with the reason."""
    triton = _why_no_triton()
    return dict(_NOT_BUILT) if triton is None else _NOT_BUILT | {"triton": triton}


def choose(backend: str | None, device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    """Name of the backend to run on tensors of `device` with results in `dtype`.

    Raises ValueError for a name that no backend has, RuntimeError for a known backend that cannot run here.
    """
    if backend is None:
        return "chunked"
    if backend not in KNOWN:
        raise ValueError(f"backend: expected None or one of {', '.join(KNOWN)}, got {backend!r}")
    if backend in _NOT_BUILT:
        raise _cannot_run(backend, _NOT_BUILT[backend])
    # What Triton can do is not for a compiler to trace: then the op itself asks when it runs.
    if backend == "triton" and not torch.compiler.is_compiling():
        require_triton(device, dtype)
    return backend


def require_triton(device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    """RuntimeError with the reason where the Triton kernels cannot run."""
    reason = _why_no_triton()
    if reason is None and dtype == torch.float64:
        reason = "its kernels compute in float32, and an input is float64"
    if reason is None and not _interprets():
        if device.type != "cuda":
            reason = f"it needs tensors on a CUDA device, these are on {device.type}"
        elif torch.cuda.get_device_capability(device) < _OLDEST_GPU:
            reason = f"it needs compute capability 8.0, this GPU has {torch.cuda.get_device_capability(device)}"
    if reason is not None:
        raise _cannot_run("triton", reason)


def _cannot_run(backend: str, reason: str) -> RuntimeError:
    return RuntimeError(f"backend: {backend!r} cannot run here: {reason}; reference and chunked run everywhere")


def _why_no_triton() -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed"
    if tuple(map(int, version("triton").split(".")[:2])) < _OLDEST_TRITON:
        return f"Triton {version('triton')} is older than 3.6"
    if _interprets() or (torch.cuda.is_available() and torch.version.cuda is not None):
        return None
    return "there is no CUDA device (with TRITON_INTERPRET=1, Triton's own variable, the kernels run on CPU tensors, slowly)"


def _interprets() -> bool:
    """Whether Triton runs its kernels in its interpreter, on any tensors."""
    import triton

    return bool(triton.knobs.runtime.interpret)
