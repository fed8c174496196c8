"""``SCHEME:NAME``, which stands where ``FILE.py`` does: the kinds of environments there are, by their names. Pure."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from areal_async.process.interpreter import SHIPPED

MAX_TOKEN_CHARACTERS = 64
"""Of an environment's name as a run's subjects and keys have it."""


class Scheme(NamedTuple):
    """One kind of environments."""

    module: str
    """Module of ours that has ``environment(name, options)``."""
    package: str = ""
    """What it imports that is not installed with this library; empty for nothing."""
    extra: str = ""
    """The extra that brings it."""
    is_path: bool = False
    """Whether ``NAME`` is a file or a folder on this machine."""
    file_option: str = ""
    """The option that names ``FILE.py[:name]`` whose code takes part in the episodes; empty for none."""
    shipped_file: str = ""
    """What that option has where it is not given."""


SCHEMES: dict[str, Scheme] = {
    "gym": Scheme("areal_async.environments.gym", package="gymnasium", extra="gym", file_option="file"),
    "openenv": Scheme("areal_async.environments.openenv", package="websockets", extra="openenv"),
    "verifiers": Scheme("areal_async.environments.verifiers", package="verifiers", extra="verifiers"),
    "harbor": Scheme(
        "areal_async.environments.harbor",
        is_path=True,
        file_option="agent",
        shipped_file=str(SHIPPED / "workflows/terminal.py"),
    ),
}
"""Name of a scheme -> the kind. A new one is one line here and one module."""
SPELLED = re.compile(r"([a-z][a-z0-9_-]*):(.+)", re.DOTALL)


class EnvironmentName(NamedTuple):
    """What ``SCHEME:NAME`` means."""

    scheme: str
    name: str

    @property
    def kind(self) -> Scheme:
        """What is known about its scheme."""
        return SCHEMES[self.scheme]

    @property
    def token(self) -> str:
        """The environment's own name, for subjects, keys and metrics: of a path or a URL what stands out of it."""
        name = Path(self.name).name if self.kind.is_path else self.name.partition("://")[2] or self.name
        token = re.sub(r"[^A-Za-z0-9_-]+", "_", name).strip("_")[:MAX_TOKEN_CHARACTERS]
        return token or self.scheme


def environment_name(spec: str) -> EnvironmentName | None:
    """Return what ``SCHEME:NAME`` means; ``None`` for all else, as ``FILE.py:name``."""
    found = SPELLED.fullmatch(spec)
    return EnvironmentName(*found.groups()) if found and found[1] in SCHEMES else None


def is_moved(before: str, now: str) -> bool:
    """Say whether both may be one folder of an environment, in another place: what is in it is not looked at."""
    was, found = environment_name(before), environment_name(now)
    if was is None or found is None or not was.kind.is_path:
        return False
    return (was.scheme, was.token) == (found.scheme, found.token)


def code_of(spec: str, options: Mapping[str, Any]) -> str:
    """Return ``FILE.py[:name]`` that answers the rows of a workflow or environment; empty where that is of a package.

    Args:
        options: of the environment.
    """
    found = environment_name(spec)
    if found is None:
        return spec
    kind = found.kind
    return str(options.get(kind.file_option) or kind.shipped_file) if kind.file_option else ""


def spellings() -> str:
    """Return how environments are named, as a sentence ends with it: ``gym:NAME, openenv:NAME``."""
    return ", ".join(f"{scheme}:{'PATH' if kind.is_path else 'NAME'}" for scheme, kind in sorted(SCHEMES.items()))
