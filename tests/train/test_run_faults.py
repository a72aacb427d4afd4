"""Disks that are full or read-only, whichever write is the first to fail.

Each is one line that says how to go on; nothing half is left, and `--resume auto` ends with the same bits. Processes that are
ended are in `test_run_ended.py`, damaged checkpoints and logs in `test_resume.py`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from test_resume import same_end
from test_train import TINY, lines

from datc_train import train
from datc_train.disk import written
from datc_train.export import export
from datc_train.quickstart import load_tiny_policy
from datc_train.rollout.versions import Versions

HERE = Path(__file__).parent
GO_ON = r"could not be written \({}\); once it can be, --resume auto goes on with the run$"
FULL = "No space left on device"
RUN = TINY | {
    "steps": 4,
    "save_every": 1,
    "learning_rate": 1e-3,
    "eval_prompts": "quickstart",
    "eval_limit": 1,
    "eval_every": 2,
    "report": True,
}


def half_files(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.suffix in (".tmp", ".part"))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(RUN | {"run_dir": str(tmp_path_factory.mktemp("straight") / "run")})


def same_whole(run: Path, straight: Path) -> bool:
    """Weights, metrics but for seconds, samples, evaluations, and the same files."""
    names = [{str(path.relative_to(r)) for path in r.rglob("*")} for r in (run, straight)]
    return same_end(run, straight) and lines(run, "eval.jsonl") == lines(straight, "eval.jsonl") and names[0] == names[1]


NAMESPACES = (
    shutil.which("unshare") is not None
    and not subprocess.run(["unshare", "--map-root-user", "--mount", "true"], capture_output=True, check=False).returncode
)
# KiB that are left: for an evaluation, a line of metrics, samples, each file of a checkpoint, the second checkpoint, figures.
ROOMS = ("0", "4", "8", "60", "80", "180", "220", "420+report")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("disk")
    command = ["unshare", "--map-root-user", "--mount", sys.executable, str(HERE / "small_disk.py"), str(folder)]
    done = subprocess.run([*command, "sealed", "ro", *ROOMS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(row.removeprefix("OUTCOME ")) for row in done.stdout.splitlines() if row.startswith("OUTCOME ")]
    return {one["what"]: one for one in found}


@pytest.mark.skipif(not NAMESPACES, reason="no mount namespaces here")
def test_a_real_disk_that_fills_up_or_turns_read_only(outcomes: dict[str, dict]) -> None:
    """Whichever write is the first to fail: one line, nothing half left, and with room the run ends as if it had had it."""
    assert set(outcomes) == {"sealed", "ro", *ROOMS}
    for what, one in outcomes.items():
        assert one["kind"] == "OSError", one
        assert "\n" not in one["error"], one
        assert not one["left"], one
        assert not one["left_at_the_end"], one
        assert one["end"], one
        why = FULL if what in ROOMS else "Read-only file system"
        assert why in one["error"], one
        how = "choose another folder" if what == "sealed" else "datc report" if "report" in one["error"] else "--resume auto"
        assert how in one["error"], one
    said = " ".join(outcomes[room]["error"] for room in ROOMS)
    for name in ("eval.jsonl", "metrics.jsonl", "samples.jsonl", "checkpoint of step 1", "checkpoint of step 2", "report.html"):
        assert name in said, name
    assert "os error 28" in said  # what is no OSError of Python's own


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, FULL)


@pytest.mark.parametrize("name", ["sources.json", "config.yaml", "sigma0.json"])
def test_no_room_as_a_run_starts(tmp_path: Path, name: str) -> None:
    """Where it would write stands /dev/full, which is full for everybody."""
    run = tmp_path / "r"
    run.mkdir()
    (run / f"{name}.tmp").symlink_to("/dev/full")
    if name == "sigma0.json":  # a folder that holds it is no fresh one
        (run / "config.yaml").write_text("{}")
    config = TINY | {"run_dir": str(run), "resume": "auto", "reward_shaping": True, "shaping_prompts": 2, "steps": 1}
    with pytest.raises(OSError, match=rf"^{'' if name == 'sigma0.json' else 'run_dir: '}.*" + GO_ON.format(FULL)):
        train(config)
    assert not half_files(run)
    train(config)


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "eval.jsonl"])
def test_no_room_for_a_line(tmp_path: Path, straight: Path, name: str) -> None:
    config = RUN | {"run_dir": str(tmp_path / "r"), "report": False, "steps": 2}
    run = train(config)
    kept = (run / name).read_bytes()
    (run / name).unlink()
    (run / name).symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"^{run / name} " + GO_ON.format(FULL)):
        train(config | {"resume": "auto", "steps": 4})
    (run / name).unlink()
    (run / name).write_bytes(kept)
    train(RUN | {"run_dir": str(run), "resume": "auto"})
    assert same_whole(run, straight)


def test_no_room_to_take_lines_back(tmp_path: Path) -> None:
    config = TINY | {"run_dir": str(tmp_path / "r"), "steps": 1}
    run = train(config)
    (run / "metrics.jsonl.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"^{run / 'metrics.jsonl'} " + GO_ON.format(FULL)):
        train(config | {"resume": "auto", "steps": 2})
    assert not half_files(run)
    train(config | {"resume": "auto", "steps": 2})
    assert [line["step"] for line in lines(run, "metrics.jsonl")] == [1, 2]


def test_no_room_for_the_report_loses_no_run(tmp_path: Path, straight: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from datc_train.report import write_report

    def stop_up(completions: Any, **_: Any) -> list[float]:
        target = run / "report.html.tmp"
        if not target.is_symlink():
            target.symlink_to("/dev/full")
        return [0.0 for _ in completions]

    run = tmp_path / "r"
    with pytest.raises(OSError, match=rf"report\.html could not be written \({FULL}\); once it can be, datc report makes it$"):
        train(TINY | {"run_dir": str(run), "report": True, "method": "grpo"}, reward=stop_up)
    assert "Adapter or weights:" in capsys.readouterr().out
    assert not half_files(run)
    assert write_report(run).stat().st_size > 10_000


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("model", SafetensorError(f"Error while serializing: I/O error: {FULL} (os error 28)")),
        ("tokenizer", Exception(f"{FULL} (os error 28)")),
        ("state", OSError(errno.EROFS, "Read-only file system")),
    ],
)
def test_what_each_library_raises_is_one_error(
    tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase

    owner, name = {
        "model": (PeftModel, "save_pretrained"),
        "tokenizer": (PreTrainedTokenizerBase, "save_pretrained"),
        "state": (torch, "save"),
    }[where]
    real, left = getattr(owner, name), [3]

    def third(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise error
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, third)
        words = r"^the checkpoint of step 3 .*\); the last whole one is .*000002, from which --resume auto goes on$"
        with pytest.raises(OSError, match=words):
            train(RUN | {"run_dir": str(tmp_path / "r")})
    assert not half_files(tmp_path / "r")
    assert same_whole(train(RUN | {"run_dir": str(tmp_path / "r"), "resume": "auto"}), straight)


def test_what_is_no_fault_of_the_disk_stays_what_it_is() -> None:
    for kind, text in ((RuntimeError, "shared tensors"), (KeyError, "weight"), (SafetensorError, "invalid header")):
        with pytest.raises(kind, match=text), written("x"):
            raise kind(text)


def test_no_room_for_the_engines_weights(tmp_path: Path) -> None:
    def save(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise SafetensorError(f"I/O error: {FULL} (os error 28)")

    versions = Versions(tmp_path / "engine")
    with pytest.raises(OSError, match=r"^sampler: the engine's weights in .*000003 could not .*--resume auto"):
        versions.write(3, save)
    assert not half_files(tmp_path)


def test_no_room_for_an_export(tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedModel

    def half(self: Any, folder: Path) -> None:
        folder.mkdir()
        raise SafetensorError(f"I/O error: {FULL} (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", half)
        with pytest.raises(OSError, match=r"^out: .*export\.tmp could not be written .*; once it can be, datc export makes it$"):
            export(straight, tmp_path / "export")
    assert not half_files(tmp_path)
    assert export(straight, tmp_path / "export")[0].is_dir()


def test_no_room_for_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datc_train.reward import spelling

    def half(path: Path, **_: Any) -> None:
        path.write_bytes(b"half")
        full()

    tokenizer = load_tiny_policy()[1]
    monkeypatch.setattr(spelling, "spell", lambda *_: spelling.Spelling(np.array([0]), np.array([0, 1])))
    for folder, patched in ((tmp_path / "file" / "below", np.savez), (tmp_path / "full", half)):
        (tmp_path / "file").touch()
        monkeypatch.setattr(spelling.np, "savez", patched)
        with pytest.raises(OSError, match=r"\.npz could not be written .* environment variable DATC_CACHE names another folder"):
            spelling.cached_spelling([b"a", None], tokenizer, [b"a"], folder)
    assert not list((tmp_path / "full").iterdir())


def test_no_room_for_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    config = TINY | {"run_dir": str(tmp_path / "r"), "trackers": ["tensorboard"], "save_every": 1}
    with monkeypatch.context() as patch:
        patch.setattr("accelerate.tracking.TensorBoardTracker.log", full)
        with pytest.raises(OSError, match="^trackers: tensorboard " + GO_ON.format(FULL)):
            train(config)
    train(config | {"resume": "auto"})


@pytest.mark.parametrize("how", ["full", "closed"])
def test_nobody_takes_what_a_run_prints(tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """`datc train > log` on a full disk, and `datc train | head`."""
    if how == "full":
        out = open("/dev/full", "w")  # noqa: SIM115
    else:
        read, write = os.pipe()
        os.close(read)
        out = os.fdopen(write, "w")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        why = FULL if how == "full" else "Broken pipe"
        with pytest.raises(OSError, match="^standard output " + GO_ON.format(why)):
            train(RUN | {"run_dir": str(tmp_path / "r")})
    with pytest.raises(OSError):
        out.close()
    assert same_whole(train(RUN | {"run_dir": str(tmp_path / "r"), "resume": "auto"}), straight)
