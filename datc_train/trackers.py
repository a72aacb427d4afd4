"""Live curves elsewhere: TensorBoard, Weights & Biases, trackio, through accelerate's trackers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from datc_train.config import Config
from datc_train.disk import written

PROJECT = "datc"


def check_trackers(config: Config) -> None:
    """Raises ValueError for a tracker whose package is not installed."""
    for name in config.trackers:
        if find_spec(name) is None:
            raise ValueError(f"trackers: {name!r} asked for, but its package is not installed: pip install {name}")


class Trackers:
    """The trackers of a run. They see each metric that is a number, under its name; nothing of them is read back."""

    def __init__(self, config: Config, folder: Path) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        self._trackers: list[Any] = []
        for name in config.trackers:
            kind = LOGGER_TYPE_TO_CLASS[name]
            with written(f"trackers: {name}"):
                if kind.requires_logging_directory:  # TensorBoard names its folder after the run
                    tracker = kind(run_name="", logging_dir=str(folder / name))
                else:
                    tracker = kind(run_name=PROJECT, name=folder.name)
                tracker.start()
                tracker.store_init_configuration({key: _flat(value) for key, value in config.to_dict().items()})
            self._trackers.append(tracker)

    def log(self, values: dict[str, Any], step: int, prefix: str = "") -> None:
        numbers = {prefix + key: value for key, value in values.items() if isinstance(value, int | float) and key != "step"}
        for tracker in self._trackers:
            with written(f"trackers: {tracker.name}"):
                tracker.log(numbers, step=step)

    def finish(self) -> None:
        for tracker in self._trackers:
            with written(f"trackers: {tracker.name}"):
                tracker.finish()


def _flat(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) else str(value)
