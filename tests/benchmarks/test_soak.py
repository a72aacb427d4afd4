"""The soak sees what grows, and what a run has not left; that a long run is flat is `make test-soak`'s to say."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import soak
from datc_train.cli import main

# A process that writes a line a step and keeps what it is told to keep.
KEEPS = """
import sys, threading, time
kept, forever = [], threading.Event()
for step in range(120):
    if sys.argv[1] == "memory":
        kept.append(bytearray(b"x" * 200_000))
    if sys.argv[1] == "descriptors":
        kept.append(open("/dev/null"))
    if sys.argv[1] == "threads":
        threading.Thread(target=forever.wait, daemon=True).start()
    time.sleep(0.01)
    with open(sys.argv[2], "a") as file:
        file.write("{}\\n")
"""

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the soak is for Linux")


@pytest.mark.parametrize("kept", ["nothing", "memory", "descriptors", "threads"])
def test_what_a_process_keeps_is_seen(tmp_path: Path, kept: str) -> None:
    metrics = tmp_path / "metrics.jsonl"
    status, looks = soak.watch([sys.executable, "-c", KEEPS, kept, str(metrics)], metrics, tmp_path / "log")
    assert status == 0
    flat = {one.name: one.flat for one in soak.trends(looks)}
    growing = {name for name in ("memory", "descriptors", "threads") if not flat[name]}
    beside = {"memory"} if kept == "threads" else set()  # a thread's stack is memory
    assert growing - beside == {kept} - {"nothing"}


def looks(seconds: Any) -> list[soak.Look]:
    """A process whose step i takes `seconds(i)`."""
    found, processor = [], 0.0
    for step in range(1, 201):
        processor += seconds(step)
        found.append(soak.Look(step, 400.0, 4, 1, processor, processor))
    return found


def test_a_step_that_takes_longer_and_longer_is_seen() -> None:
    for seconds, flat in ((lambda i: 0.08, True), (lambda i: 0.08 + 0.01 * (i % 7), True), (lambda i: 0.001 * i, False)):
        (step,) = (one for one in soak.trends(looks(seconds)) if one.name == "step")
        assert step.flat == flat, step
    (step,) = (one for one in soak.trends(looks(lambda i: 0.001 * i)) if one.name == "step")
    assert step.slope == pytest.approx(0.001)
    assert step.growth == pytest.approx(0.1)
    assert "NOT FLAT" in soak.table([step])
    assert "NOT FLAT" not in soak.table([replace(step, bound=0.11)])


def test_too_few_looks_are_no_verdict() -> None:
    with pytest.raises(ValueError, match="^steps: expected at least 80, got 60"):
        soak.trends(looks(lambda i: 0.1)[:60])
    with pytest.raises(ValueError, match="^looks: expected one in every 10 steps"):
        soak.trends([look for look in looks(lambda i: 0.1) if not 150 <= look.step <= 165])
    with pytest.raises(SystemExit):
        soak.main(["--steps", "70"])


def test_what_a_run_has_not_left_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    main([*soak.command(run, 20)[3:], "--max_new_tokens", "4"])
    assert soak.missing(run, 20) == []
    metrics = (run / "metrics.jsonl").read_text()
    for wrong in (metrics.split("\n", 1)[1], metrics.replace('"entropy": ', '"entropy": null, "was": ', 1)):
        (run / "metrics.jsonl").write_text(wrong)
        assert len(soak.missing(run, 20)) == 1
    (run / "metrics.jsonl").write_text(metrics)
    (run / "half.tmp").touch()
    (run / "report.html").unlink()
    (run / "checkpoints" / "000020").rename(run / "checkpoints" / "000019")
    (run / "samples.jsonl").unlink()
    assert [what.split(" ")[0] for what in soak.missing(run, 20)] == ["four", "the", "a", "no"]
