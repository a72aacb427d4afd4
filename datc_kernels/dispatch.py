"""Which backend runs an op: the only place that decides.

A backend asked for by name runs or raises with the reason. `backend=None` takes the fastest exact one of the device; no
environment variable changes the choice.
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

import torch

from . import native

KNOWN = ("reference", "chunked", "cpu", "triton", "cuda")

_NO_CUDA = "the CUDA kernels are not part of this build"
_OLDEST_TRITON = (3, 6)
_OLDEST_GPU = (8, 0)


def missing_backends() -> dict[str, str]:
    """Known backends that cannot run here, each with the reason."""
    reasons = {"cpu": native.WHY_MISSING, "triton": _why_no_triton(), "cuda": _NO_CUDA}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def choose(
    backend: str | None, device: torch.device, dtype: torch.dtype = torch.float32, *, cpu_takes_float64: bool = False
) -> str:
    """Name of the backend to run on tensors of `device` with results in `dtype`.

    None takes `cpu` for tensors on a CPU where the extension was built, `chunked` elsewhere and for float64, which `cpu` has only
    for the op that computes in it anyway.

    Raises ValueError for a name that no backend has, RuntimeError for a known backend that cannot run here.
    """
    no_cpu = _why_not_cpu(device, dtype if not cpu_takes_float64 else torch.float32)
    if backend is None:
        return "chunked" if no_cpu else "cpu"
    if backend not in KNOWN:
        raise ValueError(f"backend: expected None or one of {', '.join(KNOWN)}, got {backend!r}")
    if backend == "cuda":
        raise _cannot_run(backend, _NO_CUDA)
    if backend == "cpu" and no_cpu:
        raise _cannot_run(backend, no_cpu)
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


def row_kernel_runs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `chunked` puts the Triton row kernel between its products: on GPUs that have it, for results in float32."""
    if device.type != "cuda" or dtype == torch.float64 or _why_no_triton() is not None:
        return False
    return torch.cuda.get_device_capability(device) >= _OLDEST_GPU


def _cannot_run(backend: str, reason: str) -> RuntimeError:
    return RuntimeError(f"backend: {backend!r} cannot run here: {reason}; reference and chunked run everywhere")


def _why_not_cpu(device: torch.device, dtype: torch.dtype) -> str | None:
    if native.WHY_MISSING is not None:
        return native.WHY_MISSING
    if device.type != "cpu":
        return f"it needs tensors on a CPU, these are on {device.type}"
    return "it computes in float32, and an input is float64" if dtype == torch.float64 else None


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
