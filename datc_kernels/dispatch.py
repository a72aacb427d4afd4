"""Which backend runs an op: the only place that decides.

A backend asked for by name runs or raises with the reason. `backend=None` takes the fastest exact one of the device; no
environment variable changes the choice.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType

import torch

from . import native, native_cuda

KNOWN = ("reference", "chunked", "cpu", "triton", "cuda")

_OLDEST_TRITON = (3, 6)
_OLDEST_GPU = (8, 0)


def missing_backends() -> dict[str, str]:
    """Known backends that cannot run here, each with the reason."""
    reasons = {"cpu": native.WHY_MISSING, "triton": _why_no_triton(), "cuda": _why_no_cuda()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def choose(
    backend: str | None, device: torch.device, dtype: torch.dtype = torch.float32, *, compiled_takes_float64: bool = False
) -> str:
    """Name of the backend to run on tensors of `device` with results in `dtype`.

    None takes `cpu` for tensors on a CPU where the extension was built, `chunked` elsewhere and for float64, which `cpu` and
    `cuda` have only for the op that computes in it anyway.

    Raises ValueError for a name that no backend has, RuntimeError for a known backend that cannot run here.
    """
    compiled_dtype = dtype if not compiled_takes_float64 else torch.float32
    no_cpu = _why_not_cpu(device, compiled_dtype)
    if backend is None:
        return "chunked" if no_cpu else "cpu"
    if backend not in KNOWN:
        raise ValueError(f"backend: expected None or one of {', '.join(KNOWN)}, got {backend!r}")
    if backend == "cpu" and no_cpu:
        raise _cannot_run(backend, no_cpu)
    # What a GPU can do is not for a compiler to trace: then the op itself asks when it runs.
    if backend == "triton" and not torch.compiler.is_compiling():
        require_triton(device, dtype)
    if backend == "cuda" and not torch.compiler.is_compiling():
        require_cuda(device, compiled_dtype)
    return backend


def require_triton(device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    """RuntimeError with the reason where the Triton kernels cannot run."""
    reason = _why_no_triton() or _why_not_dtype(dtype)
    if reason is None and not _interprets():
        reason = _why_not_gpu(device)
    if reason is not None:
        raise _cannot_run("triton", reason)


def implementation(op: str, backend: str, device: torch.device) -> ModuleType:
    """The module of an op that runs a backend; Triton is imported only where it runs.

    Raises RuntimeError for a backend that cannot run on the device, or that the op does not have.
    """
    if backend == "triton":
        require_triton(device)
    if backend == "cuda":
        require_cuda(device)
    return _module(op, backend)


@cache
def _module(op: str, backend: str) -> ModuleType:
    name = f"{__package__}.{op}.{backend if backend in ('reference', 'chunked') else f'{backend}_backend'}"
    if find_spec(name) is None:
        raise RuntimeError(f"backend: {backend!r} has no {op}")
    return import_module(name)


def row_kernel_runs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `chunked` puts the Triton row kernel between its products: on GPUs that have it, for results in float32."""
    return device.type == "cuda" and (_why_no_triton() or _why_not_dtype(dtype) or _why_not_gpu(device)) is None


def require_cuda(device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    """RuntimeError with the reason where the kernels of csrc/cuda cannot run."""
    reason = _why_no_cuda() or _why_not_dtype(dtype) or _why_not_gpu(device)
    if reason is not None:
        raise _cannot_run("cuda", reason)


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
    if _interprets():
        return None
    if (reason := _why_no_nvidia_gpu()) is None:
        return None
    return f"{reason} (with TRITON_INTERPRET=1, Triton's own variable, the kernels run on CPU tensors, slowly)"


def _why_no_cuda() -> str | None:
    if (reason := native_cuda.why_not_built()) is not None:
        return reason
    return _why_no_nvidia_gpu()


def _why_no_nvidia_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    return None if torch.version.cuda is not None else "this PyTorch is built for ROCm, whose GPUs the kernels were not made for"


def _why_not_dtype(dtype: torch.dtype) -> str | None:
    return "its kernels compute in float32, and an input is float64" if dtype == torch.float64 else None


def _why_not_gpu(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"it needs tensors on a CUDA device, these are on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    return f"it needs compute capability 8.0, this GPU has {capability}" if capability < _OLDEST_GPU else None


def _interprets() -> bool:
    """Whether Triton runs its kernels in its interpreter, on any tensors."""
    import triton

    return bool(triton.knobs.runtime.interpret)
