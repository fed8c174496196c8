"""How verbs write what they say: values as JSON, and the list of all settings, made from the settings' own types."""

import shutil
import textwrap
from typing import Any

import msgspec
from pydantic import BaseModel

from areal_async.config.tree import describe

INDENT = "    "


def json_text(value: Any) -> str:
    """Return a value as JSON on one line; a float that is no number, which JSON does not know, as null."""
    return msgspec.json.encode(value).decode()


def settings_help(kind: type[BaseModel]) -> str:
    """Return what ``--help-settings`` prints, wrapped to the terminal."""
    width = max(60, min(110, shutil.get_terminal_size().columns))
    lines = []
    for name, default, sentence in describe(kind):
        lines.append(f"--{name} ({default})")
        lines += textwrap.wrap(sentence, width, initial_indent=INDENT, subsequent_indent=INDENT)
    return "\n".join(lines)
