"""The parser's errors in the words of the config: key, what was expected, what came."""

from __future__ import annotations

import difflib
import re
from dataclasses import fields
from typing import get_type_hints

from datc_train.config import Config, Lora, type_in_words

_NESTED = re.compile(r"NestedArg\(key='(?P<key>[\w.]+)', val=(?P<value>.*?)\)")


def plain(message: str, command: str = "train") -> str:
    """`message` of jsonargparse translated where it is about a key; as it came where it is not, or is another command's."""
    named = re.match(r'Parser key "(?P<key>\w+)"', message)
    if named is not None:
        return _wrong_value(named["key"], message)
    unknown = re.match(r"unrecognized arguments: (?P<word>--\S+)", message) if command == "train" else None
    option = re.match(r"Subcommand '(?P<command>\w+)' does not accept option '(?P<key>[^']+)'", message)
    if unknown is not None:
        return unknown_key(unknown["word"].split("=")[0], "--")
    return message if option is None else unknown_key(option["key"])


def unknown_key(key: str, dashes: str = "") -> str:
    """A key that is none, and the one that was perhaps meant."""
    name = key.lstrip("-")
    keys = [field.name for field in fields(Config)] + [f"lora.{field.name}" for field in fields(Lora)]
    keys = [known for known in keys if known != name]
    close = difflib.get_close_matches(name, keys, n=1)
    hint = f"did you mean {dashes}{close[0]}?" if close else "keys are listed by datc train --help"
    return f"{dashes}{name}: no such key; {hint}"


def _wrong_value(key: str, message: str) -> str:
    hints, nested = get_type_hints(Config), _NESTED.search(message)
    value = re.search(r"(?:Given|Got) value: (?P<value>(?:(?!(?:Given|Got) value).)*?)\s*$", message, re.DOTALL)
    if nested is not None and key == "lora":
        inner = get_type_hints(Lora)
        if nested["key"] not in inner:
            return unknown_key(f"lora.{nested['key']}")
        return f"lora.{nested['key']}: expected {type_in_words(inner[nested['key']])}, got {nested['value']}"
    if key not in hints or value is None:
        return message
    if key == "lora":  # a mapping on the command line comes without the place of its fault
        strange = [name for name in re.findall(r"'(\w+)':", value["value"]) if name not in get_type_hints(Lora)]
        if strange:
            return unknown_key(f"lora.{strange[0]}")
    return f"{key}: expected {type_in_words(hints[key])}, got {value['value']}"
