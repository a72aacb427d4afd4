"""What the compiler makes of every shipped Triton kernel, on a machine that needs no GPU: `python -m benchmarks.compile_report`.

    python -m benchmarks.compile_report [--json FILE] [--arch 80 89 90 100] [--quick]

For each architecture: registers, stack bytes (spills) and whether a spill lies in a product's loop, shared memory, matrix
instructions, bulk copies, exponentials, instructions an element of the epilogue; then estimates of where the time goes. Exits 1
unless no product's loop spills, the architecture's matrix instructions are there, shared memory fits the chip and operands are
loaded 16 bytes at a time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton

from datc_kernels.launch_table import GROUP, choose_tilings
from datc_kernels.triton_operands import interpreting

from . import launches, sass
from .launches import Launch


@dataclass(frozen=True)
class Chip:
    """Published figures of one GPU of an architecture."""

    capability: tuple[int, int]
    name: str
    matrix: str  # its matrix instruction
    shared_bytes: int  # that one program may use
    tflops: float  # dense bf16
    hbm_tb_s: float
    multiprocessors: int
    ghz: float


CHIPS = {
    80: Chip((8, 0), "A100", r"HMMA", 166_912, 312, 2.0, 108, 1.41),
    89: Chip((8, 9), "L40S", r"HMMA", 101_376, 362, 0.86, 142, 2.52),
    90: Chip((9, 0), "H200", r"HGMMA", 232_448, 989, 4.8, 132, 1.83),
    100: Chip((10, 0), "B200", r"UTC\w*MMA", 232_448, 2250, 8.0, 148, 1.85),
}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# (D, K) of the estimates; N = 32,768 and V = 151,936.
SHAPES = ((5120, 4096), (1024, 1024))
Record = Callable[[tuple[int, int]], list[Launch]]

QUICK: dict[str, Record] = {
    "linear, D=5120 K=4096": lambda c: launches.linear_credit(c, BF16, D=5120, K=4096),
    "linear, D=K=1024": lambda c: launches.linear_credit(c, BF16, D=1024, K=1024, V=131_072),
    "logits, u a product": lambda c: launches.logits_credit(c, BF16, K=1024),
    "logits alone, gradient": lambda c: launches.logits_credit(c, BF16),
    "weights": launches.allocate_weights,
}
ALL: dict[str, Record] = QUICK | {
    "linear, log-probs only": lambda c: launches.linear_credit(c, BF16, D=5120, K=None),
    "linear, float16, every option, V=50257": lambda c: launches.linear_credit(
        c, FP16, D=2048, K=2048, V=50_257, rows=50_000, bias=True, softcap=30.0, row_temperature=True
    ),
    "linear, unaligned": lambda c: launches.linear_credit(c, BF16, D=1023, K=1023),
    "linear, float32": lambda c: launches.linear_credit(c, FP32, D=1024, K=1024),
    "linear, float32 reward": lambda c: launches.linear_credit(c, BF16, D=1024, K=1024, table_dtype=FP32),
    "logits and u given": lambda c: launches.logits_credit(c, BF16, given=True),
    "logits, V=50257": lambda c: launches.logits_credit(c, BF16, V=50_257, given=True),
}


@dataclass(frozen=True)
class Compiled:
    arch: int
    call: str
    kernel: str
    tile: str
    registers: int
    stack_bytes: int
    spills: int
    spills_in_product_loops: int
    shared_bytes: int
    matrix: dict[str, int]
    bulk_copies: int
    exponentials: int
    epilogue_per_element: float | None  # instructions, everything counted
    problems: list[str]


def compile_launch(chip: Chip, call: str, launch: Launch) -> Compiled:
    compiled = launch.compile(chip.capability)
    code = sass.read(compiled.asm["cubin"])
    values = launch.values
    tile = [values[name] for name in ("ROWS", "COLUMNS", "DEPTH") if values.get(name)]
    elements = values["ROWS"] * values["COLUMNS"] / (32 * launch.options["num_warps"]) if len(tile) == 3 else 0
    modes = [name.lower() for name in ("REWARD", "PRODUCT", "RAGGED", "HAS_BIAS", "SOFTCAP") if values.get(name) is True]
    return Compiled(
        10 * chip.capability[0] + chip.capability[1],
        call,
        " ".join([launch.kernel.__name__.removesuffix("_kernel"), *modes]),
        "x".join(map(str, tile)) or str(values.get("BLOCK")),
        code.registers,
        code.stack_bytes,
        code.spills,
        code.spills_in_product_loops,
        compiled.metadata.shared,
        code.matrix_instructions,
        code.count("UTMALDG"),
        code.count(r"MUFU\.EX2"),
        round(len(code.epilogue) / elements, 1) if elements and code.epilogue else None,
        list(_problems(chip, launch, code, compiled.metadata.shared)),
    )


def _problems(chip: Chip, launch: Launch, code: sass.Sass, shared: int) -> Iterator[str]:
    values = launch.values
    multiplies = launch.kernel.__name__ == "linear_credit_kernel" or values.get("PRODUCT") is True
    upcast = any(values.get(name) for name in ("UPCAST", "UPCAST_K", "UPCAST_D"))
    if code.spills_in_product_loops:
        yield f"{code.spills_in_product_loops} spills in a product's loop"
    if shared > chip.shared_bytes:
        yield f"{shared} bytes of shared memory, {chip.shared_bytes} on {chip.name}"
    if multiplies and not code.product_loops:
        yield "no loop of a product was found"
    if multiplies and not upcast and not any(code.count(chip.matrix, loop) for loop in code.product_loops):
        yield f"no {chip.matrix} in a product's loop"
    if _aligned(launch) and not _loads_16_bytes(launch, code, multiplies):
        yield "operands are not loaded 16 bytes at a time"


def _aligned(launch: Launch) -> bool:
    """Whether the operands' rows are 16-byte aligned, so that they can be read 16 bytes at a time."""
    tensors = [value for value in launch.values.values() if isinstance(value, torch.Tensor) and value.ndim == 2]
    return all(t.stride(0) * t.element_size() % 16 == 0 for t in tensors) and launch.kernel.__name__ != "merge_partials_kernel"


def _loads_16_bytes(launch: Launch, code: sass.Sass, multiplies: bool) -> bool:
    if launch.kernel.__name__ == "allocate_kernel":
        return True  # responses begin anywhere
    if launch.values.get("DESCRIPTORS"):
        return code.count("UTMALDG") > 0
    if multiplies:
        return all(
            code.count(r"LDG(STS)?\b", loop) == code.count(r"LDG(STS)?\b\S*\.128", loop) > 0 for loop in code.product_loops
        )
    return code.count(r"LDG\S*\.128") > 0


def estimates(arch: int, report: list[Compiled]) -> list[dict[str, object]]:
    """For N = 32,768 and V = 151,936: milliseconds of the tensor cores, the epilogue and HBM, and the traffic through L2."""
    chip, N, V = CHIPS[arch], 32_768, 151_936
    rows: list[dict[str, object]] = []
    for D, K in SHAPES:
        tiling = choose_tilings(D + K, half=True, descriptors=arch in (90, 100))[0]
        name = f"{tiling.rows}x{tiling.columns}x{tiling.depth}"
        found = [c for c in report if c.call.startswith("linear, D=") and c.tile == name and c.epilogue_per_element is not None]
        per_element = found[0].epilogue_per_element if found else None
        tensor_ms = 2 * N * V * (D + K) / chip.tflops / 1e9
        l2_bytes = N / tiling.rows * (V / tiling.columns) * (tiling.rows + tiling.columns) * (D + K) * 2
        hbm_bytes = (V * N / (GROUP * tiling.rows) + N) * (D + K) * 2
        issue = chip.multiprocessors * 4 * 32 * chip.ghz * 1e6  # instructions of one thread, a millisecond
        rows.append(
            {
                "arch": arch,
                "chip": chip.name,
                "D": D,
                "K": K,
                "tile": name,
                "tensor_ms": round(tensor_ms, 1),
                "epilogue_ms": round(N * V * (per_element or 0) / issue, 1),
                "hbm_ms": round(hbm_bytes / chip.hbm_tb_s / 1e9, 1),
                "hbm_gb": round(hbm_bytes / 1e9, 1),
                "l2_gb": round(l2_bytes / 1e9),
                "l2_tb_s_at_tensor_rate": round(l2_bytes / tensor_ms / 1e9, 1),
            }
        )
    return rows


def _print(rows: list[dict[str, object]]) -> None:
    columns = list(rows[0])
    cells = [[str(row[c]) if row[c] not in (None, {}, []) else "-" for c in columns] for row in rows]
    widths = [max(len(c), *(len(row[i]) for row in cells)) for i, c in enumerate(columns)]
    for row in [columns, *cells]:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    print()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_report", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the report here, too")
    parser.add_argument("--arch", type=int, nargs="+", choices=CHIPS, default=list(CHIPS), help="compute capabilities, times ten")
    parser.add_argument("--quick", action="store_true", help="only the main configurations")
    options = parser.parse_args()
    if interpreting():
        parser.error("Triton interprets kernels in this process: unset TRITON_INTERPRET")
    report: list[Compiled] = []
    estimate: list[dict[str, object]] = []
    for arch in options.arch:
        mine = []
        for call, record in (QUICK if options.quick else ALL).items():
            mine += [compile_launch(CHIPS[arch], call, launch) for launch in record(CHIPS[arch].capability)]
        _print([asdict(c) for c in mine])
        estimate += estimates(arch, mine)
        report += mine
    _print(estimate)
    if options.json:
        content = {"triton": triton.__version__, "kernels": [asdict(c) for c in report], "estimates": estimate}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    wrong = [f"sm_{c.arch}, {c.call}, {c.kernel}: {problem}" for c in report for problem in c.problems]
    print("\n".join(wrong) if wrong else f"{len(report)} kernels, Triton {triton.__version__}: nothing to object to.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
