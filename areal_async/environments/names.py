"""``SCHEME:NAME``, which stands where ``FILE.py`` does: the kinds of environments there are, by their names. Pure."""

import re
from pathlib import Path
from typing import NamedTuple

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


SCHEMES: dict[str, Scheme] = {
    "gym": Scheme("areal_async.environments.gym", package="gymnasium", extra="gym"),
    "openenv": Scheme("areal_async.environments.openenv", package="websockets", extra="openenv"),
    "verifiers": Scheme("areal_async.environments.verifiers", package="verifiers", extra="verifiers"),
    "harbor": Scheme("areal_async.environments.harbor", is_path=True),
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


def spellings() -> str:
    """Return how environments are named, as a sentence ends with it: ``gym:NAME, openenv:NAME``."""
    return ", ".join(f"{scheme}:{'PATH' if kind.is_path else 'NAME'}" for scheme, kind in sorted(SCHEMES.items()))
