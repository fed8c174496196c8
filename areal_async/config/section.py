"""What every section of the settings is."""

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, field_validator
from pydantic_core import PydanticKnownError

from areal_async.protocol.fields import INT64


class PathKind(Enum):
    """What a setting names on this machine, and how it is told from other things."""

    FILE = "file"
    """A file."""
    FUNCTION = "function"
    """``FILE.py[:name]``."""
    HUB = "hub"
    """A file or a folder, unless it is a hub name."""
    PROGRAM = "program"
    """A program; without a slash it is searched for."""
    OUTPUT = "output"
    """Where something is made: relative to the working directory, wherever it is given."""
    OPTION = "option"
    """A text among options of an environment that begins as a path, with ``./``, ``../`` or ``~/``; one that names a
    Python file is a ``FUNCTION``."""


LocalPath = Annotated[Path, PathKind.FILE]
FunctionPath = Annotated[str, PathKind.FUNCTION]
HubPath = Annotated[str, PathKind.HUB]
ProgramPath = Annotated[Path, PathKind.PROGRAM]
OutputPath = Annotated[Path, PathKind.OUTPUT]
"""Types of settings that hold paths (``paths``): every new one is one of these."""
OPTION_BEGINNINGS = ("./", "../", "~/")
MAX_OPTION_BYTES = 64 << 10


def checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of an environment, which decides what they mean, if they are values that JSON has.

    Raises:
        ValueError: they are not, or take more than ``MAX_OPTION_BYTES``.
    """
    try:
        num_bytes = len(json.dumps(options, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as exc:
        raise ValueError(
            f"got a value that JSON does not have ({exc}), need text, numbers, lists and mappings"
        ) from exc
    if num_bytes > MAX_OPTION_BYTES:
        raise ValueError(f"got {num_bytes} bytes, need at most {MAX_OPTION_BYTES}")
    return options


Options = Annotated[dict[str, Any], AfterValidator(checked_options)]
"""Settings whose names are an environment's own."""


class Section(BaseModel):
    """A frozen part of the settings in which unknown keys are refused, and numbers that nothing could hold.

    Those are floats that are not finite, and whole numbers beyond 64 bits, whatever else a field asks for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _within_64_bits(cls, value: Any) -> Any:
        if isinstance(value, int) and value not in INT64:
            bound = {"ge": INT64.start} if value < 0 else {"le": INT64.stop - 1}
            raise PydanticKnownError("greater_than_equal" if value < 0 else "less_than_equal", bound)
        return value
