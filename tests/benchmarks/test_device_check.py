"""The script for the day a GPU is there, run without one: to its end, with a wrong kernel, and on from a file."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import device_check
from benchmarks.device import report as reports
from benchmarks.device import times, truth
from benchmarks.device.report import DeviceLostError, Part, Report
from benchmarks.device.setting import Setting
from datc_kernels.allocate_weights import triton_backend as allocate_backend
from datc_kernels.linear_credit import triton_backend as linear_backend
from datc_kernels.testing import truth as definitions
from datc_kernels.testing.budgets import field_names
from datc_kernels.testing.inputs import CASES, Sizes
from datc_kernels.testing.rounding import rounding
from datc_kernels.triton_operands import interpreting

PART_KEYS = {"status", "seconds", "budget_s", "checks", "rows", "skipped", "errors", "notes"}
QUICK = ("compile", "allocate_weights", "gradients", "ceilings", "times: small", "backward", "choice")
CPU = torch.device("cpu")
# Sums over V and D; logits near 30 that become probabilities, rewards of 100 beside a spread of 1, both programs' rounding.
EXACT = rounding(torch.float64, length=Sizes.V + Sizes.D, condition=30 * 100)


@pytest.fixture(autouse=True)
def _only_the_interpreter() -> None:
    if not interpreting():
        pytest.skip("Triton compiles in this process")


def run(path: Any, *parts: str, resume: bool = False, seconds: float = 1e4) -> tuple[int, dict[str, Any]]:
    """Exit status and report."""
    arguments = ["--json", str(path), "--dry", "--seconds", str(seconds), *(["--resume"] if resume else [])]
    status = device_check.main([*arguments, *(["--parts", *parts] if parts else [])])
    return status, json.loads(path.read_text())


def names() -> list[str]:
    setting = Setting(CPU, dry=True)
    return [step.name for step in device_check.steps(setting, Report(None, {}, True))]  # type: ignore[arg-type]


def assert_whole(report: dict[str, Any], parts: list[str]) -> None:
    assert report["schema"] == reports.SCHEMA
    assert report["ok"] is True
    assert report["failures"] == []
    assert {"processor", "gpu", "torch", "triton", "date"} <= set(report["machine"])
    assert list(report["parts"]) == parts
    for name, part in report["parts"].items():
        assert set(part) == PART_KEYS, name
        assert part["status"] == "done", (name, part)
        assert part["errors"] == part["skipped"] == [], name
        assert all(set(check) == {"name", "value", "bar", "at_least", "ok"} for check in part["checks"]), name


def test_parts_run_to_their_end(tmp_path: Any, capsys: Any) -> None:
    status, report = run(tmp_path / "check.json", *QUICK)
    assert status == 0
    assert_whole(report, list(QUICK))
    for row in report["parts"]["times: small"]["rows"]:
        assert {"shape", "N", "products ms", "triton ms", "chunked ms", "default ms", "over products", "over chunked"} <= set(row)
    for row in report["parts"]["choice"]["rows"]:
        assert {"V", "D", "K", "what", "N 4", "N 8", "mean", "take", "same for every N"} <= set(row)
        assert row["take"] == "chunked"  # the interpreter is no match for a matrix library
    assert "Nothing failed." in capsys.readouterr().out


@pytest.mark.slow
def test_every_part_runs_to_its_end(tmp_path: Any) -> None:
    status, report = run(tmp_path / "check.json")
    assert status == 0
    assert_whole(report, names())
    judged = {name for name, part in report["parts"].items() if part["checks"]}
    assert judged >= {"linear_credit", "logits_credit", "allocate_weights", "gradients", "invariance", "sanitizer", "placement"}


def test_it_takes_at_most_eight_minutes() -> None:
    dry = Setting(CPU, dry=True)
    on_a_gpu = Setting(CPU, dry=False)
    seconds = [sum(step.budget_s for step in device_check.steps(s, Report(None, {}, True))) for s in (dry, on_a_gpu)]  # type: ignore[arg-type]
    assert max(seconds) <= 470


def test_a_wrong_kernel_is_found_and_resuming_keeps_that(tmp_path: Any, monkeypatch: Any) -> None:
    path = tmp_path / "check.json"
    allocate = allocate_backend.allocate

    def wrong(*arguments: Any) -> Any:
        weight, temperature = allocate(*arguments)
        weight[-1] *= 1.001
        return weight, temperature

    with monkeypatch.context() as patched:
        patched.setattr(allocate_backend, "allocate", wrong)
        status, report = run(path, "allocate_weights", "ceilings")
    assert status == 1
    assert report["ok"] is False
    assert any(failure.startswith("allocate_weights: ceiling 4.0") for failure in report["failures"])
    assert report["parts"]["allocate_weights"]["status"] == report["parts"]["ceilings"]["status"] == "done"

    def untouchable(*_: Any) -> None:
        raise AssertionError("a part that is done ran again")

    monkeypatch.setattr(times, "ceilings", untouchable)
    status, again = run(path, "allocate_weights", "ceilings", "choice", resume=True)
    assert status == 1
    assert again["parts"]["ceilings"] == report["parts"]["ceilings"]
    assert again["parts"]["choice"]["status"] == "done"


def test_a_kernel_that_raises_or_gives_nan_is_a_failed_check(tmp_path: Any, monkeypatch: Any) -> None:
    def backward(*_: Any) -> None:
        raise RuntimeError("illegal access")

    forward = linear_backend.forward
    monkeypatch.setattr(linear_backend, "backward", backward)
    status, report = run(tmp_path / "raises.json", "gradients")
    assert status == 1
    assert report["parts"]["gradients"]["status"] == "done"
    assert "illegal access" in report["parts"]["gradients"]["errors"][0]

    def poisoned(inputs: Any) -> Any:
        return forward(inputs) * torch.nan

    from benchmarks.device import linear

    monkeypatch.setattr(linear_backend, "forward", poisoned)
    monkeypatch.setattr(linear, "_all", lambda setting: linear._real_shapes(setting))
    status, report = run(tmp_path / "nan.json", "linear_credit")
    assert status == 1
    checks = {check["name"]: check for check in report["parts"]["linear_credit"]["checks"]}
    assert checks["small, triton"]["ok"] is False
    assert checks["small, chunked"]["ok"] is True


def test_a_part_without_time_is_cut_and_runs_when_resumed(tmp_path: Any) -> None:
    path = tmp_path / "check.json"
    status, report = run(path, "ceilings", seconds=0.0)
    assert status == 0
    assert report["parts"]["ceilings"]["status"] == "cut"
    assert report["parts"]["ceilings"]["skipped"] == ["ceilings"]
    _, report = run(path, "ceilings", resume=True)
    assert report["parts"]["ceilings"]["status"] == "done"


def test_a_part_that_breaks_off_does_not_stop_the_others(tmp_path: Any, monkeypatch: Any) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("nothing there")

    monkeypatch.setattr(times, "ceilings", broken)
    status, report = run(tmp_path / "check.json", "ceilings", "choice")
    assert status == 1
    assert [part["status"] for part in report["parts"].values()] == ["error", "done"]


def test_what_a_lost_gpu_leaves_runs_in_a_new_process(tmp_path: Any, monkeypatch: Any) -> None:
    started: list[list[str]] = []

    def lost(*_: Any) -> None:
        raise DeviceLostError("an illegal memory access was encountered")

    def start(command: list[str], **_: Any) -> Any:
        started.append(command)
        return type("Done", (), {"returncode": 1})

    monkeypatch.setattr(times, "ceilings", lost)
    monkeypatch.setattr(device_check.subprocess, "run", start)
    status, report = run(tmp_path / "check.json", "ceilings", "choice", "placement")
    assert status == 1
    assert report["parts"]["ceilings"]["status"] == "error"
    (command,) = started
    assert {"--resume", "--dry"} <= set(command)
    assert command[-2:] == ["choice", "placement"]


def test_another_machines_file_is_not_resumed(tmp_path: Any, monkeypatch: Any) -> None:
    path = tmp_path / "check.json"
    run(path, "choice")
    monkeypatch.setattr(device_check, "_machine", lambda: {"gpu": "another", "processor": "", "torch": "2", "triton": "3"})
    with pytest.raises(SystemExit):
        run(path, "choice", resume=True)


def test_bars_count_where_times_do() -> None:
    part = Part("times", 1.0, CPU, judges_times=False)
    part.bar("slow", 2.0, 1.25)
    assert part.checks == []
    part = Part("times", 1.0, CPU)
    part.bar("slow", 2.0, 1.25)
    part.bar("fast", 0.9, 0.85, at_least=True)
    part.check("not a number", float("nan"), 1.0)
    assert [check["ok"] for check in part.checks] == [False, True, False]


@pytest.mark.parametrize("name", [name for name in CASES if name != "one token"])
def test_the_devices_truth_is_the_truth(name: str) -> None:
    case = CASES[name]()
    ours, theirs = truth.linear_credit(*case.args, **case.options), definitions.linear_credit(*case.args, **case.options)
    for field in field_names(theirs):
        torch.testing.assert_close(getattr(ours, field), getattr(theirs, field), rtol=EXACT, atol=0, msg=field)
