"""What only a GPU can tell of the kernels, in at most eight minutes: `python -m benchmarks.device_check --json FILE`.

    python -m benchmarks.device_check --json FILE [--resume] [--parts NAME ...] [--seconds 470] [--dry]

First correctness of every path on real bfloat16 against float64, bitwise batch invariance and compute-sanitizer; then times
against bare matrix products, the chunked backend, eager PyTorch and torch.compile; then candidates for the launch table, which
of triton and chunked backend=None should take, and devices, CUDA graphs and torch.compile. Every part has its seconds, survives
its own failures and is in FILE when it ends; --resume goes on after the last one that ran to its end. Exits 1 when a check or a
bar fails. --dry runs all of it on CPU tensors in Triton's interpreter, at tiny sizes, to see that the script itself works.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.device.report import Part, Report
    from benchmarks.device.setting import Setting


@dataclass(frozen=True)
class Step:
    name: str
    budget_s: float
    run: Callable[[Part], None]
    keeps: bool = True  # what it found before still holds when other parts have run again


def steps(setting: Setting, report: Report) -> list[Step]:
    """All parts in order; their seconds add up to less than eight minutes."""
    from benchmarks.device import choice, cuda_kernels, invariance, linear, others, placement, rows, sanitizer, sweep, times, warm

    def gemm() -> float | None:
        found = report.parts.get("ceilings", {}).get("rows", [])
        return next((row["value"] for row in found if row["ceiling"].startswith("bf16")), None)

    timed = [
        Step(f"times: {shape.name}", seconds, lambda part, shape=shape: times.run(part, setting, shape, gemm()))  # type: ignore[misc]
        for shape, seconds in zip(setting.shapes, (50, 38, 32), strict=False)
    ]
    return [
        Step("compile", 55, lambda part: warm.run(part, setting)),
        Step("linear_credit", 45, lambda part: linear.run(part, setting)),
        Step("logits_credit", 20, lambda part: others.logits(part, setting)),
        Step("allocate_weights", 8, lambda part: others.weights(part, setting)),
        Step("gradients", 20, lambda part: others.gradients(part, setting)),
        Step("invariance", 40, lambda part: invariance.run(part, setting)),
        Step("sanitizer", 45, lambda part: sanitizer.run(part, setting)),
        Step("ceilings", 5, lambda part: times.ceilings(part, setting)),
        *timed,
        Step("stored logits", 14, lambda part: rows.stored_logits(part, setting)),
        Step("backward", 20, lambda part: rows.backward(part, setting)),
        Step("candidates", 35, lambda part: sweep.run(part, setting)),
        Step("choice", 1, lambda part: choice.run(part, report.parts), keeps=False),
        Step("placement", 25, lambda part: placement.run(part, setting)),
        Step("cuda kernels", 15, lambda part: cuda_kernels.run(part, setting)),
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device_check", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="the report, written after every part")
    parser.add_argument("--resume", action="store_true", help="keep FILE's parts that ran to their end")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--seconds", type=float, default=470, help="of all parts together")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on CPU tensors in Triton's interpreter")
    options = parser.parse_args(arguments)
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

    import torch

    from benchmarks.device.report import Report
    from benchmarks.device.setting import Setting

    if not options.dry and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --dry runs the script without one")
    if not options.dry and os.environ.get("TRITON_INTERPRET", "0") != "0":
        parser.error("Triton interprets kernels in this process: unset TRITON_INTERPRET")
    setting = Setting(torch.device("cpu") if options.dry else torch.device("cuda", 0), options.dry)
    report = Report(options.json, _machine(), options.dry)
    if options.resume:
        try:
            report = Report.resume(options.json, _machine(), options.dry)
        except (ValueError, KeyError) as error:
            parser.error(str(error))
    chosen = steps(setting, report)
    unknown = set(options.parts or []) - {step.name for step in chosen}
    if unknown:
        parser.error(f"--parts: {', '.join(sorted(unknown))}; there are {', '.join(step.name for step in chosen)}")
    chosen = [step for step in chosen if options.parts is None or step.name in options.parts]
    return _run(chosen, setting, report, options)


def _run(chosen: list[Step], setting: Setting, report: Report, options: argparse.Namespace) -> int:
    from benchmarks.device.report import DeviceLostError, Part

    end = time.monotonic() + options.seconds
    for position, step in enumerate(chosen):
        if step.keeps and report.parts.get(step.name, {}).get("status") == "done":
            print(f"{step.name}: done before", flush=True)
            continue
        left = max(0.0, end - time.monotonic())
        budget = min(step.budget_s * (10 if setting.dry else 1), left)  # the interpreter is slow
        part = Part(step.name, budget, setting.device, judges_times=not setting.dry)
        lost = False
        try:
            step.run(part)
            part.finish()
        except DeviceLostError as error:
            lost = True
            part.errors.append(f"the GPU takes no more work: {error}")
            part.finish("error")
        except Exception as error:
            part.errors.append(f"{type(error).__name__}: {error}")
            part.finish("error")
            lost = _lost(part)
        report.add(part)
        _print(part)
        rest = [later.name for later in chosen[position + 1 :]]
        if lost and rest:
            print("The GPU takes no more work in this process: the rest runs in a new one.", flush=True)
            return _new_process(rest, options, end - time.monotonic())
    failures = report.failures()
    print("\n".join(["", f"{len(failures)} failures", *failures]) if failures else "\nNothing failed.")
    unfinished = [name for name, part in report.parts.items() if part["status"] == "cut"]
    if unfinished:
        print(f"Not to the end, for want of time (--resume goes on): {', '.join(unfinished)}")
    return 1 if failures else 0


def _lost(part: Part) -> bool:
    try:
        part.require_device()
    except RuntimeError:
        return True
    return False


def _new_process(rest: list[str], options: argparse.Namespace, seconds: float) -> int:
    """The exit status of a process that runs the parts that are left."""
    command = [sys.executable, "-m", "benchmarks.device_check", "--json", str(options.json), "--resume"]
    command += ["--dry"] if options.dry else []
    return subprocess.run([*command, "--seconds", str(max(1.0, seconds)), "--parts", *rest], check=False).returncode


def _machine() -> dict[str, Any]:
    import torch

    from datc_train.bench.machine import machine

    found = machine()
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "cuda": torch.version.cuda,
            "gpus": torch.cuda.device_count(),
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "l2_mib": round(properties.L2_cache_size / 2**20, 1),
        }
    return found


def _print(part: Part) -> None:
    """A line for the part, its table, and what went wrong in it."""
    from benchmarks.device.report import print_rows

    failed = [check["name"] for check in part.checks if not check["ok"]]
    met = f"{len(part.checks) - len(failed)} of {len(part.checks)} checks"
    print(f"\n{part.name}: {part.status}, {part.seconds:.1f} of {part.budget_s:.0f} s, {met}", flush=True)
    if part.rows and part.name not in ("linear_credit", "logits_credit"):
        print_rows(part.rows)
    elif part.rows:
        print_rows(sorted(part.rows, key=lambda row: -row["of budget"])[:5])
    for line in [*(f"FAILED {name}" for name in failed), *part.errors, *part.notes]:
        print(f"  {line.strip()}")
    if part.skipped:
        print(f"  left out: {', '.join(part.skipped)}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
