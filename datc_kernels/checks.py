"""Argument checks that every op shares: a `ValueError` that begins with the argument's name.

They look at shapes, dtypes and devices only, never at a tensor's values, so that they cost no synchronisation and trace under
`torch.compile`.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32)
SMALLEST, LARGEST = 1e-30, 1e30  # of scalars, whose quotients float32 must hold
ALL_COLUMNS = -1  # what an op takes for vocab_size=None under a process group: every column that some rank has


def fail(name: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{name}: expected {expected}, got {got}")


def check_tensor(name: str, value: object, ndim: int, shape: str) -> Tensor:
    if not isinstance(value, Tensor):
        fail(name, f"a tensor {shape}", type(value).__name__)
    if isinstance(value, DTensor):
        raise ValueError(
            f"{name}: expected a whole tensor {shape}, got a sharded DTensor; gather it first with `.full_tensor()`, "
            "or call inside the module's own forward, where FSDP has gathered it"
        )
    if value.layout is not torch.strided:
        fail(name, f"a dense tensor {shape}", value.layout)
    if value.ndim != ndim:
        fail(name, f"shape {shape}", f"{tuple(value.shape)} (flattened or sharded weights must be gathered first)")
    return value


def check_float(name: str, value: object, ndim: int, shape: str) -> Tensor:
    tensor = check_tensor(name, value, ndim, shape)
    if tensor.dtype not in FLOATS:
        fail(name, "float32, bfloat16, float16 or float64 (dequantise it first)", tensor.dtype)
    return tensor


def check_no_tangent(**tensors: Tensor | None) -> None:
    """The ops have no forward-mode derivative, and PyTorch would take a missing one for zero."""
    if torch.compiler.is_compiling():
        return
    for name, tensor in tensors.items():
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(f"{name}: expected a tensor without a forward-mode tangent; logprob has a backward only")


def check_size(name: str, tensor: Tensor, dim: int, expected: int, of: str) -> None:
    if tensor.shape[dim] != expected:
        fail(name, f"size {expected} in dimension {dim} ({of})", tuple(tensor.shape))


def check_not_empty(name: str, tensor: Tensor) -> None:
    if tensor.numel() == 0:
        fail(name, "a tensor with elements (a ZeRO-3 or FSDP shard must be gathered first)", tuple(tensor.shape))


def check_device(name: str, tensor: Tensor, like: str, device: torch.device) -> None:
    if tensor.device != device:
        fail(name, f"device {device} (that of {like})", tensor.device)


def check_token_ids(token_ids: object, rows: int, of: str, device: torch.device) -> Tensor:
    ids = check_tensor("token_ids", token_ids, 1, "[N]")
    if ids.dtype not in INTEGERS:
        fail("token_ids", "int64 or int32", ids.dtype)
    check_size("token_ids", ids, 0, rows, of)
    check_device("token_ids", ids, of, device)
    return ids


def check_positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not SMALLEST <= value <= LARGEST:
        fail(name, f"a number above 0, from {SMALLEST:g} to {LARGEST:g}", shown(value))
    return float(value)


def shown(value: object) -> str:
    """For a message: Python refuses to write integers of thousands of digits."""
    return f"an integer of {value.bit_length()} bits" if isinstance(value, int) and value.bit_length() > 128 else repr(value)


def check_temperature(temperature: object, rows: int, device: torch.device) -> tuple[float, Tensor | None]:
    """A scalar, or one value a row [N]: (scalar, None) or (1.0, [N])."""
    if not isinstance(temperature, Tensor):
        return check_positive("temperature", temperature), None
    if temperature.ndim == 0:
        fail("temperature", "a number or a tensor [N]", "a tensor without dimensions; pass `float(temperature)`")
    values = check_float("temperature", temperature, 1, "[N]")
    check_size("temperature", values, 0, rows, "N")
    check_device("temperature", values, "the other inputs", device)
    return 1.0, values


def check_vocab_size(vocab_size: object, columns: int, of: str) -> int:
    if vocab_size is None:
        return columns
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or not 1 <= vocab_size <= columns:
        fail("vocab_size", f"None or an integer from 1 to {columns} ({of})", repr(vocab_size))
    return vocab_size


def check_slice(process_group: object | None, vocab_start: object, vocab_size: object, columns: int, of: str) -> tuple[str, int]:
    """(name of the group, "" without one; vocab_size of all ranks, -1 for None under a group)."""
    if isinstance(vocab_start, bool) or not isinstance(vocab_start, int) or vocab_start < 0:
        fail("vocab_start", "an integer of at least 0", repr(vocab_start))
    if process_group is None:
        if vocab_start != 0:
            fail("vocab_start", "0 without a process_group", vocab_start)
        return "", check_vocab_size(vocab_size, columns, of)
    if not isinstance(process_group, ProcessGroup):
        fail("process_group", "a torch.distributed.ProcessGroup or None", type(process_group).__name__)
    if vocab_size is not None and (isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1):
        fail("vocab_size", "None or an integer of at least 1", repr(vocab_size))
    return process_group.group_name, ALL_COLUMNS if vocab_size is None else vocab_size


def check_ignore_index(ignore_index: object) -> int:
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int) or not -(2**63) <= ignore_index < 2**63:
        fail("ignore_index", "an integer of 64 bits", shown(ignore_index))
    return ignore_index


def check_ids_in_support(token_ids: Tensor, vocab_size: int, ignore_index: int) -> None:
    """On a CPU, raise for ids outside the support. On other devices nothing: reading back would wait for the device."""
    if token_ids.device.type != "cpu" or token_ids.numel() == 0:
        return
    outside = (token_ids != ignore_index) & ((token_ids < 0) | (token_ids >= vocab_size))
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        fail(
            "token_ids",
            f"ids from 0 to {vocab_size - 1} or ignore_index {ignore_index}",
            f"{int(token_ids[row])} in row {row}",
        )


def check_row_temperature(row_temperature: Tensor | None, token_ids: Tensor, ignore_index: int) -> None:
    """On a CPU, raise for a temperature outside [SMALLEST, LARGEST] in a row that counts; elsewhere nothing."""
    if row_temperature is None or row_temperature.device.type != "cpu":
        return
    wrong = ~((row_temperature >= SMALLEST) & (row_temperature <= LARGEST)) & (token_ids != ignore_index)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        fail("temperature", f"numbers above 0, from {SMALLEST:g} to {LARGEST:g}", f"{row_temperature[row].item()} in row {row}")
