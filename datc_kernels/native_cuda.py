"""The CUDA library of csrc/cuda, loaded by ctypes at its first call, or the reason why it is not there."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_FOLDER = Path(__file__).parent / "_native"
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ABSENT = -1

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class LogitsCall(ctypes.Structure):
    """As csrc/cuda/api.h has it."""

    _fields_ = (
        *((name, _P) for name in ("logits", "reward")),
        *((name, _I) for name in ("logits_row", "logits_column", "reward_row", "reward_column")),
        *((name, _P) for name in ("ids", "row_temperature")),
        *((name, _F) for name in ("temperature", "logit_scale", "softcap")),
        *((name, _I) for name in ("rows", "vocab_size", "rewarded")),
        ("sums", _P),
    )


class AllocateCall(ctypes.Structure):
    """As csrc/cuda/api.h has it."""

    _fields_ = (
        *((name, _P) for name in ("credit", "frozen", "advantage", "ends", "lengths")),
        *((name, _I) for name in ("tokens", "responses")),
        ("ceiling", _F),
        ("sign", _I),
        *((name, _P) for name in ("weight", "temperature")),
    )


def _find() -> Path | None:
    return next(iter(sorted(_FOLDER.glob("datc_cuda.*so"))), None)


def why_not_built() -> str | None:
    """None where the library is there, else why not."""
    if _find() is not None:
        return None
    note = _FOLDER / "missing_cuda.txt"
    return note.read_text(encoding="utf-8").strip() if note.exists() else "the package was built without DATC_CUDA=1"


@cache
def _library() -> ctypes.CDLL:
    path = _find()
    if path is None:
        raise RuntimeError(f"the CUDA library is not there: {why_not_built()}")
    return open_library(path)


def open_library(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for function, arguments in (
        (library.datc_logits_credit, (ctypes.POINTER(LogitsCall), _I, _I)),
        (library.datc_allocate_weights, (ctypes.POINTER(AllocateCall),)),
    ):
        function.argtypes = [*arguments, _I, _P]
        function.restype = ctypes.c_char_p
    return library


def launch(function: str, call: ctypes.Structure, *dtypes: int, device: torch.device) -> None:
    """On the device's current stream. RuntimeError with what CUDA says."""
    index, stream = -1, None
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        stream = torch.cuda.current_stream(device).cuda_stream
    error = getattr(_library(), function)(ctypes.byref(call), *dtypes, index, stream)
    if error is not None:
        raise RuntimeError(f"{function}: {error.decode()}")


def address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
