"""The console command `datc` (same as `python -m datc_train`)."""

from __future__ import annotations

import os
import re
import sys
import traceback
import warnings
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from datc_train.config import Config

DESCRIPTION = "Train a language model with direction-aware token credit (DATC) or GRPO."
TRAIN_HELP = """Train a policy against a reward model.

Keys come from the recipe given with --config, then from the command line: --key value. A recipe is a YAML file with the
keys below, or the name of one that comes with the package: {recipes}.

Example: datc train --config quickstart --method grpo --steps 8 --run_dir runs/first
"""


def main(argv: list[str] | None = None) -> None:
    """Exits with 0, with 2 after one line on standard error for a user's mistake, with 130 after Ctrl-C."""
    # Before torch is imported: spinning OpenMP threads make small operations many times slower beside another busy process.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    argv = sys.argv[1:] if argv is None else argv
    debug = "--debug" in argv
    try:
        _run([word for word in argv if word != "--debug"])
    except KeyboardInterrupt as stop:
        print(f"datc: {stop or 'stopped'}", file=sys.stderr)
        sys.exit(128 + getattr(stop, "signal", 2))
    except (ValueError, OSError, ArgumentError) as error:
        _fail(error, debug)
    except RuntimeError as error:
        _fail(error, debug)


def _fail(error: Exception, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    message = re.sub(r"\s+", " ", str(error)).strip()
    print(f"datc: {message}{'' if debug else ' (--debug shows where)'}", file=sys.stderr)
    sys.exit(2)


def _run(argv: list[str]) -> None:
    parser, train_parser = build_parser()
    words = _recipe_first([_recipe_path(argv, i) for i in range(len(argv))])
    arguments = parser.parse_args(words or ["--help"])
    if arguments.subcommand == "train":
        values = train_parser.instantiate(arguments.train)
        given = values.pop("config", None)
        if not given:
            raise ValueError(f"--config: expected a recipe, got none; try {' or '.join(recipes())}")
        from transformers.utils.logging import disable_progress_bar

        from datc_train.loop import train

        disable_progress_bar()
        # PEFT asks transformers for an attribute that it has renamed; nothing that a user can act on.
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers.modeling_utils")
        train(Config(**vars(values)))


def build_parser() -> tuple[ArgumentParser, ArgumentParser]:
    parser = ArgumentParser(prog="datc", description=DESCRIPTION, exit_on_error=False)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    train_parser = ArgumentParser(
        description=TRAIN_HELP.format(recipes=", ".join(recipes())), exit_on_error=False, formatter_class=_Help
    )
    train_parser.add_argument("--config", action="config", help="a recipe: a YAML file, or the name of one in the package")
    train_parser.add_class_arguments(Config, fail_untyped=True)
    commands = parser.add_subcommands(required=True)
    commands.add_subcommand("train", train_parser, help="train a policy against a reward model")
    return parser, train_parser


def recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(entry.name[: -len(".yaml")] for entry in files("datc_train.recipes").iterdir() if entry.name.endswith(".yaml"))


def _recipe_first(words: list[str]) -> list[str]:
    """The recipe in front of the other keys: the command line has the last word, wherever --config stands."""
    for i, word in enumerate(words[1:], start=1):
        size = 2 if word == "--config" else 1 if word.startswith("--config=") else 0
        if size:
            return [words[0], *words[i : i + size], *words[1:i], *words[i + size :]]
    return words


def _recipe_path(argv: list[str], index: int) -> str:
    """A word of the command line; the name of a recipe in the package becomes its path, where no such file is here."""
    word = argv[index]
    name = word.removeprefix("--config=") if word.startswith("--config=") else word
    is_config = name != word or (index > 0 and argv[index - 1] == "--config")
    if not is_config:
        return word
    if Path(name).is_file():
        _check_recipe(Path(name))
        return word
    stem = name.removesuffix(".yaml")
    if stem not in recipes():
        raise FileNotFoundError(f"--config: no file {name} and no recipe of that name; recipes are {', '.join(recipes())}")
    path: Any = files("datc_train.recipes") / f"{stem}.yaml"
    return word.replace(name, str(path))


def _check_recipe(path: Path) -> None:
    """Raises ValueError with the file's name where it is no mapping of keys: jsonargparse names neither."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config: expected YAML in {path}: {error}") from None
    if not isinstance(content, dict):
        came = "nothing" if content is None else f"{content!r:.60}"
        raise ValueError(f"--config: expected keys and values in {path}, got {came}")


from jsonargparse import DefaultHelpFormatter  # noqa: E402


class _Help(DefaultHelpFormatter):
    """Keeps the description's line breaks."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "".join(indent + line for line in text.splitlines(keepends=True))
