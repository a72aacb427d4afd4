"""The console command `datc` (same as `python -m datc_train`)."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from datc_train.config import Config, Lora
from datc_train.ultrafeedback import SOURCE, SPLIT
from datc_train.usage_errors import plain, unknown_key

DESCRIPTION = "Train a language model with direction-aware token credit (DATC) or GRPO, and look at what it did."
TRAIN_HELP = """Train a policy against a reward model.

Keys come from the recipe given with --config (of several, a later one goes over an earlier one, of lora key by key), then
from the command line, wherever they stand there: --key value. A recipe is a YAML file with the keys below, or the name of one
that comes with the package: {recipes}.

Example: datc train --config quickstart --method grpo --steps 8 --run_dir runs/first
"""

DOCTOR_HELP = """Say which kernels run here and why others do not; with --config, whether the run would start: devices, prompts,
models, tokenizers id by id, stop ids, weights, context, memory. Configs and tokenizers are loaded, of weights their names
and shapes. Status 2 if something would stop the run.

Example: datc doctor --config quickstart --dry-run
"""
EXPORT_HELP = """Merge a run's adapter into its base in float32, write it as one folder, read it back and compare.

Example: datc export runs/first
"""
DATA_HELP = """Prepare UltraFeedback: rl.jsonl (2,000 prompts to train on), heldout.jsonl (256), sft.jsonl (2,500 with answers).

Which prompt goes where follows from a hash of seed and text, not from the order of rows.

Example: datc data ultrafeedback --out data/ultrafeedback
"""
BENCH_HELP = """Measure what DATC costs over GRPO in this trainer: the same tokens, in turn, medians by phase.

Without --config the recipe overhead_cpu: SmolLM2-135M-Instruct and a reward model of 0.58 of its parameters. Keys of the
recipe can be overridden as for `datc train`.

Example: datc bench overhead --json overhead.json
"""
PROBE_HELP = """Measure where the reward's gradient should be taken: how well each credit point forecasts what replacing a token
does to the score, on the recipe's own policy, reward model and prompts. Nothing is trained.

Responses are sampled, some of their tokens replaced by others that the policy might have sampled there, and scored anew.
Keys of the recipe can be overridden as for `datc train`.

Examples: datc probe --config quickstart --json probe.json
          datc probe --config my.yaml --json runs/first/probe.json      # `datc report runs/first` shows it too
"""
REPORT_HELP = """Show what a run did: one page, report.html, that asks for nothing from the network.

Curves with their moving averages, what every phase of a step cost, and responses token by token: weight by colour; credit,
probability and the best alternatives at the pointer. Several runs become one page: methods side by side, runs that differ by
their seed only as one curve with a band. Every figure is a PNG too: figures/ beside a run's own page, <page>_figures/ beside
another. A run that still goes on can be looked at. A probe.json that `datc probe` wrote into a run's folder is shown too.

Examples: datc report runs/first
          datc report runs/*-grpo runs/*-datc --out compare/report.html
"""


def main(argv: list[str] | None = None) -> None:
    """Exits with 0, with 2 after one line on standard error for a user's mistake, with 130 after Ctrl-C."""
    # Before torch is imported: OpenMP threads that spin for ever starve a busy neighbour, threads that sleep at once halve the
    # speed of small products.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    argv = sys.argv[1:] if argv is None else argv
    debug = "--debug" in argv
    try:
        _run([word for word in argv if word != "--debug"])
    except KeyboardInterrupt as stop:
        words = str(stop) or "stopped at once; --resume auto goes on from the run's last checkpoint, where there is one"
        print(f"datc: {words}", file=sys.stderr)
        sys.exit(128 + getattr(stop, "signal", 2))
    except ArgumentError as error:
        _fail(error, debug, plain(str(error), next((word for word in argv if word in COMMANDS), "")))
    except (ValueError, OSError) as error:
        _fail(error, debug)
    except RuntimeError as error:
        _fail(error, debug)


def _fail(error: Exception, debug: bool, message: str | None = None) -> None:
    if debug:
        traceback.print_exc()
    message = re.sub(r"\s+", " ", str(error) if message is None else message).strip()
    print(f"datc: {message}{'' if debug else ' (--debug shows where)'}", file=sys.stderr)
    sys.exit(2)


def _run(argv: list[str]) -> None:
    parser, commands = build_parser()
    words = [_recipe_path(argv, i) for i in range(len(argv))]
    if words[:1] == ["bench"] and not any(word.split("=")[0] in ("--config", "--help", "-h") for word in words):
        words += ["--config", _packaged("overhead_cpu")]
    arguments = parser.parse_args(_recipes_first(words) or ["--help"])
    name = arguments.subcommand
    COMMANDS[name](commands[name], arguments[name])


def _train(parser: ArgumentParser, arguments: Any) -> None:
    config = _config(parser, arguments)
    _quiet()
    from datc_train.loop import train

    train(config)


def _bench(parser: ArgumentParser, arguments: Any) -> None:
    config = _config(parser, arguments)
    _quiet()
    from datc_train.bench import overhead

    result = overhead.measure(config, equal_size=arguments.equal_size, minutes=arguments.minutes, say=print)
    print(overhead.table(result))
    if arguments.json is not None:
        overhead.save(result, Path(arguments.json))


def _probe(parser: ArgumentParser, arguments: Any) -> None:
    config = _config(parser, arguments)
    _quiet()
    from datc_train.probe import check_out, probe, table

    if arguments.json is not None:
        check_out(Path(arguments.json))
    sizes = {name: arguments[name] for name in ("responses", "positions", "alternatives")}
    found = probe(config, quiet=False, **sizes)
    print(table(found))
    if arguments.json is not None:
        found.save(Path(arguments.json))


def _doctor(parser: ArgumentParser, arguments: Any) -> None:
    config = _config(parser, arguments) if arguments.config else None
    _quiet()
    from datc_train import doctor

    if arguments.dry_run and config is None:
        raise ValueError("--dry-run: expected a recipe with it (--config), got none")
    wrong = sum(finding.state == "wrong" for finding in doctor.examine(config))
    if wrong:
        raise ValueError(f"{wrong} of these would stop the run")
    if arguments.dry_run:
        assert config is not None
        doctor.dry_run(config)


def _export(parser: ArgumentParser, arguments: Any) -> None:
    _quiet()
    from datc_train.export import export

    out = None if arguments.out is None else Path(arguments.out)
    folder, difference = export(Path(arguments.run), out, arguments.checkpoint)
    print(f"{folder}: loads with AutoModelForCausalLM; its log-probabilities differ by {difference:.1e} in the mean")


def _report(parser: ArgumentParser, arguments: Any) -> None:
    from datc_train.report import write_report

    print(write_report(arguments.runs, arguments.out))


def _data(parser: ArgumentParser, arguments: Any) -> None:
    from datc_train.ultrafeedback import prepare

    done = prepare(Path(arguments.out), source=arguments.source, split=arguments.split, seed=arguments.seed)
    print(f"{arguments.out}: " + ", ".join(f"{size} {name}" for name, size in done.items()))


COMMANDS: dict[str, Callable[[ArgumentParser, Any], None]] = {
    "train": _train,
    "report": _report,
    "doctor": _doctor,
    "export": _export,
    "bench": _bench,
    "probe": _probe,
    "data": _data,
}


def build_parser() -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
    """The parser of everything, and those of the commands by name."""
    # Commands take over the formatter of this one.
    parser = ArgumentParser(
        prog="datc", description=DESCRIPTION, exit_on_error=False, formatter_class=_Help, version=version("datc")
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subcommands(required=True)
    made: dict[str, ArgumentParser] = {}

    def command(name: str, description: str, short: str) -> ArgumentParser:
        made[name] = ArgumentParser(description=description, exit_on_error=False, formatter_class=_Help)
        commands.add_subcommand(name, made[name], help=short)
        return made[name]

    train = command("train", TRAIN_HELP.format(recipes=", ".join(recipes())), "train a policy against a reward model")
    _add_config(train)
    report = command("report", REPORT_HELP, "one page with what a run did, or several side by side")
    report.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder")
    report.add_argument(
        "--out", type=str, help="the page; default: report.html in the run's folder, for several runs in this one"
    )
    doctor = command("doctor", DOCTOR_HELP, "say what runs here, and whether a recipe would")
    doctor.add_argument("--dry-run", action="store_true", help="load everything and take one small step; nothing is written")
    _add_config(doctor)
    export = command("export", EXPORT_HELP, "merge a run's adapter into its base")
    export.add_argument("run", type=str, help="the run's folder")
    export.add_argument("--out", type=str, help="folder to make; default: export in the run's folder")
    export.add_argument("--checkpoint", type=str, default="last", help="last, best (by evaluation), or a step")
    data = command("data", DATA_HELP, "prepare a data set")
    data.add_argument("what", choices=["ultrafeedback"], help="ultrafeedback: the paper's splits of it")
    data.add_argument("--out", type=str, default="data/ultrafeedback", help="folder of the JSON lines")
    data.add_argument("--source", type=str, default=SOURCE, help="a dataset, a folder, Parquet or JSON lines with its columns")
    data.add_argument("--split", type=str, default=SPLIT, help="of the source")
    data.add_argument("--seed", type=int, default=0, help="another seed deals the prompts out differently")
    bench = command("bench", BENCH_HELP, "measure what DATC costs over GRPO")
    bench.add_argument("what", choices=["overhead"], help="overhead: steps of GRPO and DATC on the same tokens, in turn")
    bench.add_argument("--json", type=str, help="write the result to this file, and a figure beside it")
    bench.add_argument("--equal-size", action="store_true", help="a reward model as large as the policy")
    bench.add_argument("--minutes", type=float, default=8.0, help="rounds go on so long; at least three")
    _add_config(bench)
    probe = command("probe", PROBE_HELP, "measure which credit point forecasts real replacements")
    probe.add_argument("--json", type=str, help="write the result to this file, and a page of the same name beside it")
    probe.add_argument("--responses", type=int, default=48, help="that are sampled, each to a prompt of its own")
    probe.add_argument("--positions", type=int, default=4, help="free ones of each response; and half as many frozen ones")
    probe.add_argument("--alternatives", type=int, default=6, help="tokens that are tried at each position")
    _add_config(probe)
    return parser, made


def _add_config(parser: ArgumentParser) -> None:
    parser.add_argument("--config", action="config", help="a recipe: a YAML file, or the name of one in the package")
    parser.add_class_arguments(Config, fail_untyped=True)


def _config(parser: ArgumentParser, arguments: Any) -> Config:
    if not arguments.config:
        raise ValueError(f"--config: expected a recipe, got none; try {' or '.join(recipes())}")
    values = parser.instantiate(arguments)
    return Config(**{field.name: values[field.name] for field in fields(Config)})


def _quiet() -> None:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def config_of(words: list[str]) -> Config:
    """The Config that `datc train` would make of these words: --config and --key value.

    Raises ValueError, FileNotFoundError and jsonargparse's ArgumentError for words that make none.
    """
    _, commands = build_parser()
    parser = commands["train"]
    words = _recipes_first(["train", *(_recipe_path(words, i) for i in range(len(words)))])[1:]
    return _config(parser, parser.parse_args(words))


def recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(entry.name[: -len(".yaml")] for entry in files("datc_train.recipes").iterdir() if entry.name.endswith(".yaml"))


def _recipes_first(words: list[str]) -> list[str]:
    """The recipes, in their order, in front of the other keys: the command line has the last word, wherever --config stands."""
    given: list[str] = []
    others: list[str] = []
    rest = iter(words[1:])
    for word in rest:
        if word == "--config":
            given += [word, *([value] if (value := next(rest, None)) is not None else [])]
        else:
            (given if word.startswith("--config=") else others).append(word)
    return [*words[:1], *given, *others]


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
    return word.replace(name, _packaged(stem))


def _packaged(recipe: str) -> str:
    return str(files("datc_train.recipes") / f"{recipe}.yaml")


class _OnceEach(yaml.SafeLoader):
    """YAML whose keys stand once each; PyYAML takes the last of several."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} stands there twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return node


def _check_recipe(path: Path) -> None:
    """Raises ValueError with the file's name where it is no mapping of keys: jsonargparse names neither."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _OnceEach)
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config: expected YAML in {path}: {error}") from None
    if not isinstance(content, dict):
        came = "nothing" if content is None else f"{content!r:.60}"
        raise ValueError(f"--config: expected keys and values in {path}, got {came}")
    known = {field.name for field in fields(Config)} | {f"lora.{field.name}" for field in fields(Lora)}
    unknown = [key for key in content if key not in known]
    if unknown:
        raise ValueError(f"--config: in {path} {unknown_key(str(unknown[0]))}")
    dotted = next((key for key in content if key.startswith("lora.")), None)
    if "lora" in content and dotted is not None:
        raise ValueError(f"--config: expected lora once in {path}, got both lora and {dotted}")
    if isinstance(content.get("lora"), dict):
        try:
            Lora(**content["lora"])
        except TypeError:
            wrong = next(key for key in content["lora"] if key not in {field.name for field in fields(Lora)})
            raise ValueError(f"--config: in {path} {unknown_key(f'lora.{wrong}')}") from None


from jsonargparse import DefaultHelpFormatter  # noqa: E402


class _Help(DefaultHelpFormatter):
    """Keeps the description's line breaks."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "".join(indent + line for line in text.splitlines(keepends=True))
