"""Where settings come from: a YAML file, then ``AREAL_ASYNC_*`` (``__`` nests), then ``--section.key value``.

Invariant: a later source wins leaf by leaf; a name that no setting has is refused in each of them, with the
nearest one that exists; and whatever is refused says which source it came from. Lists are replaced whole,
unless an index reaches into them (``tasks.0.workflow``). Paths of a file are relative to its folder
(``paths``).

pydantic checks the values and nothing of pydantic-settings is used: its sources merge before anybody can ask which of
them gave a value, and leave a wrong one without the sentence that names it.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from areal_async.config.effects import NAMES, idle
from areal_async.config.paths import placed, with_absolute_paths
from areal_async.config.settings import Settings
from areal_async.config.strict_yaml import read_yaml
from areal_async.config.tree import (
    Parts,
    annotation_at,
    has_place,
    is_composite,
    is_section,
    items_of,
    nearest,
    step_into,
    takes_none,
    without_none,
)
from areal_async.errors import UserError
from areal_async.protocol.fields import INT64

ENV_PREFIX = "AREAL_ASYNC_"

S = TypeVar("S", bound=BaseModel)


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """A value that one source gives to one place."""

    parts: Parts
    value: Any
    rank: int
    """Rank of its source: the higher wins. 0 for a resolved file, in which nobody has chosen anything."""
    origin: str
    """Its source, as a sentence ends with it: ``in configs/gsm8k.yaml``."""
    folder: Path = Path()
    """The folder that its paths are relative to."""

    @property
    def name(self) -> str:
        """The place, as people write it."""
        return ".".join(self.parts)

    def split(self) -> "Iterator[Assignment]":
        """Yield what it gives to each single setting, as far down as there are sections."""
        inner = items_of(self.value)
        if not inner:
            yield self
            return
        for key, value in inner.items():
            yield from replace(self, parts=(*self.parts, str(key)), value=value).split()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """What each source says, the later ones win."""

    file: tuple[Assignment, ...] = ()
    environment: tuple[Assignment, ...] = ()
    command_line: tuple[Assignment, ...] = ()

    @property
    def all(self) -> tuple[Assignment, ...]:
        """All assignments, in the order of the sources."""
        return self.file + self.environment + self.command_line


def read_sources(config: Path | None, overrides: Sequence[str], kind: type[BaseModel] = Settings) -> Sources:
    """Read the three sources, without merging or checking what they say.

    Raises:
        UserError: a file that cannot be read, or words that are no settings.
    """
    return Sources(
        file=tuple(_from_file(config, is_resolved=False)) if config is not None else (),
        environment=tuple(_from_environment(kind)),
        command_line=tuple(from_command_line(overrides, kind)),
    )


def absolute(assignment: Assignment, kind: type[BaseModel]) -> Assignment:
    """Return an assignment of which every path is absolute, wherever it is read."""
    annotation = annotation_at(kind, assignment.parts)
    value, _ = placed(assignment.value, annotation, parts=assignment.parts, folder=assignment.folder)
    return replace(assignment, value=with_absolute_paths(value, annotation), folder=Path())


def load_settings(config: Path | None, overrides: Sequence[str] = (), *, use_environment: bool = True) -> Settings:
    """Read, merge and check the settings of a run, as ``load_kind`` does."""
    return load_kind(Settings, config, overrides, use_environment=use_environment)


def load_kind(kind: type[S], config: Path | None, overrides: Sequence[str] = (), *, use_environment: bool = True) -> S:
    """Read, merge and check settings of a kind.

    Args:
        config: YAML file; ``None`` for defaults.
        overrides: ``--section.key value`` or ``--section.key=value``, as split by the shell.
        use_environment: off for a file that already holds resolved settings.

    Raises:
        UserError: a file that cannot be read, an unknown name or a wrong value.
    """
    if use_environment:
        return resolve({}, read_sources(config, overrides, kind).all, kind)
    resolved = _from_file(config, is_resolved=True) if config is not None else ()
    return resolve({}, [*resolved, *from_command_line(overrides, kind)], kind)


def override_settings(settings: S, overrides: Sequence[str]) -> S:
    """Return resolved settings with what the command line has otherwise, checked as a whole.

    Raises:
        UserError: an unknown name or a wrong value.
    """
    kind = type(settings)
    return resolve(settings.model_dump(mode="json"), from_command_line(overrides, kind), kind)


def resolve(base: Mapping[str, Any], assignments: Sequence[Assignment], kind: type[S]) -> S:
    """Put values into a tree, one after the other, and check what comes of it.

    Raises:
        UserError: an unknown name or a wrong value.
    """
    data: Any = base
    misplaced: dict[Parts, str] = {}
    for assignment in assignments:
        _refuse_unfit(assignment, assignment.value, assignment.parts, kind)
        annotation = annotation_at(kind, assignment.parts)
        value, found = placed(assignment.value, annotation, parts=assignment.parts, folder=assignment.folder)
        misplaced = {parts: one for parts, one in misplaced.items() if not _gives(assignment, parts)}
        misplaced |= {parts: f"{'.'.join(parts)}: {one} {assignment.origin}" for parts, one in found.items()}
        data = _put(data, replace(assignment, value=value), kind)
    if misplaced:
        raise UserError(next(iter(misplaced.values())))
    try:
        settings = kind.model_validate(data)
    except ValidationError as exc:
        raise UserError(_sentence(exc, assignments)) from exc
    if isinstance(settings, Settings):
        _refuse_idle(settings, assignments)
    return settings


def _refuse_idle(settings: Settings, assignments: Sequence[Assignment]) -> None:
    """Refuse what somebody has given and nothing looks at."""
    chosen = [given for given in assignments if given.rank]
    rank_of = {name: given.rank for given in chosen for name in NAMES if _gives(given, tuple(name.split(".")))}
    if found := idle(settings, rank_of):
        key, sentence = found
        raise UserError(f"{sentence} (set {_origin_of([tuple(key.split('.'))], assignments)})")


def dump_settings(settings: BaseModel) -> str:
    """Return the YAML, its paths absolute, from which ``load_settings`` makes the same settings again, resolved."""
    data = with_absolute_paths(settings.model_dump(mode="json"), type(settings))
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


# The three sources


def _from_file(path: Path, *, is_resolved: bool) -> Iterator[Assignment]:
    if not path.is_file():
        raise UserError(f"configuration: no file {path}; name one that exists with --config")
    try:
        with path.open(encoding="utf-8") as file:
            data = read_yaml(file)
    except (OSError, UnicodeDecodeError) as exc:
        raise UserError(f"{path}: cannot be read: {exc}") from exc
    except ValueError as exc:
        raise UserError(f"{path}: {exc}") from exc
    if not isinstance(data, dict | None):
        raise UserError(f"{path}: got a {type(data).__name__}, need sections like 'run:' at the top")
    # What a run recorded before it recorded absolute paths is relative to where the run was started.
    folder = Path() if is_resolved else path.parent
    for key, value in (data or {}).items():
        yield Assignment(parts=(key,), value=value, rank=0 if is_resolved else 1, origin=f"in {path}", folder=folder)


def _from_environment(kind: type[BaseModel]) -> Iterator[Assignment]:
    for name, text in os.environ.items():
        if name.upper().startswith(ENV_PREFIX):
            parts = tuple(name.lower()[len(ENV_PREFIX) :].split("__"))
            yield _parsed(parts, text, 2, f"in the environment ({name.upper()})", kind)


def from_command_line(overrides: Sequence[str], kind: type[BaseModel]) -> list[Assignment]:
    """Return what ``--section.key value`` or ``--section.key=value`` give, as split by the shell.

    Raises:
        UserError: words that are no settings.
    """
    found, words = [], iter(overrides)
    for word in words:
        name, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            raise UserError(f"command line: got {word!r}, need --section.key value")
        value = text if equals else next(words, None)
        if value is None or (not equals and value.startswith("--")):
            raise UserError(f"command line: --{name} has no value; write --{name}=VALUE")
        found.append(_parsed(tuple(name.split(".")), value, 3, f"on the command line (--{name})", kind))
    return found


def _parsed(parts: Parts, text: str, rank: int, origin: str, kind: type[BaseModel]) -> Assignment:
    """Keep the text of a scalar as it is, for pydantic to read; read lists, sections, null and anything as YAML."""
    annotation = annotation_at(kind, parts)
    value: Any = text
    if takes_none(annotation) and text.strip().lower() in ("null", "none", "~"):
        value = None
    elif annotation is Any or (annotation is not None and is_composite(without_none(annotation))):
        try:
            value = read_yaml(text)
        except ValueError as exc:
            raise UserError(f"{'.'.join(parts)} {origin}: {exc}") from exc
    return Assignment(parts=parts, value=value, rank=rank, origin=origin)


# Merging


def _put(old: Any, assignment: Assignment, annotation: Any, depth: int = 0) -> Any:
    """Return what a place holds, ``depth`` parts down, once the value is put there; a section is merged into it."""
    if depth == len(assignment.parts):
        return _merged(old, assignment.value, annotation)
    part, outer = assignment.parts[depth], without_none(annotation)
    inner = step_into(outer, part)
    if get_origin(outer) not in (tuple, list):
        kept = old if isinstance(old, dict) else {}
        return kept | {part: _put(kept.get(part), assignment, inner, depth + 1)}
    items, index = [*old] if isinstance(old, list) else [], int(part)
    if index > len(items):
        raise UserError(
            f"{assignment.name} {assignment.origin}: got index {index}, need at most {len(items)}: "
            f"there are {len(items)} before it"
        )
    before = items[index : index + 1] or [None]
    items[index : index + 1] = [_put(before[0], assignment, inner, depth + 1)]
    return items


def _merged(old: Any, new: Any, annotation: Any) -> Any:
    if new is None and is_section(annotation):
        return old or {}  # `rollout:` with nothing under it
    if not isinstance(new, dict):
        return [*new] if isinstance(new, list) else new
    kept = old if isinstance(old, dict) else {}
    return kept | {
        key: _merged(kept.get(key), value, step_into(without_none(annotation), key)) for key, value in new.items()
    }


def _refuse_unfit(assignment: Assignment, value: Any, parts: Parts, kind: type[BaseModel]) -> None:
    """Refuse a name that no setting has, and what stands in the place of a section or a list.

    A key of a later source would replace the latter unseen.
    """
    name, origin, annotation = ".".join(parts), assignment.origin, without_none(annotation_at(kind, parts))
    if annotation is None:
        near = nearest(parts, kind)
        remedy = f"did you mean {near}" if near else "see run --help-settings"
        place = origin.partition(" (--")[0]  # the sentence has said the name in brackets already
        raise UserError(f"unknown setting {name} {place}; {remedy}")
    if value is None or not is_composite(annotation):
        return
    is_list = get_origin(annotation) in (tuple, list)
    if not isinstance(value, list if is_list else dict):
        raise UserError(_misfit_text(name, value, _NEEDS["tuple_type" if is_list else "model_type"], origin))
    for part, inner in value.items() if isinstance(value, dict) else enumerate(value):
        _refuse_unfit(assignment, inner, (*parts, str(part)), kind)


# What is wrong with a value

_NEEDS_OF = {
    "a value": ("missing",),
    "a whole number": ("int_parsing", "int_type", "int_from_float"),
    f"a whole number from {INT64.start} to {INT64.stop - 1}": ("int_parsing_size",),
    "a number": ("float_parsing", "float_type"),
    "a finite number": ("finite_number",),
    "true or false": ("bool_parsing", "bool_type"),
    "a text": ("string_type",),
    "a path": ("path_type",),
    "a list like [a, b]": ("tuple_type",),
    "a section with keys": ("model_type", "dict_type"),
    "{expected}": ("literal_error",),
    "more than {gt}": ("greater_than",),
    "at least {ge}": ("greater_than_equal",),
    "less than {lt}": ("less_than",),
    "at most {le}": ("less_than_equal",),
}
"""What was needed -> pydantic's types of an error that say so."""
_NEEDS = {error: need for need, errors in _NEEDS_OF.items() for error in errors}


def _sentence(error: ValidationError, assignments: Sequence[Assignment]) -> str:
    first, *others = error.errors()
    text = _error_text(first, assignments)
    if others:
        names = ", ".join(dict.fromkeys(".".join(map(str, other["loc"])) for other in others))
        text += f" (also wrong: {names})"
    return text


def _error_text(error: ErrorDetails, assignments: Sequence[Assignment]) -> str:
    parts = tuple(map(str, error["loc"]))
    name, origin = ".".join(parts), _origin_of([parts], assignments) if parts else ""
    if error["type"] == "value_error":
        message = _one_line(error["msg"].removeprefix("Value error, "))
        origin = _origin_of(_places(message, parts), assignments) or origin
        return ": ".join(filter(None, [name, message])) + (f" (set {origin})" if origin else "")
    if error["type"] == "missing":
        return f"{name}: got nothing, need a value; set it in the configuration or with --{name}"
    need = _NEEDS.get(error["type"], error["msg"]).format(**error.get("ctx", {}))
    return _misfit_text(name, error["input"], need, origin)


def _misfit_text(name: str, value: Any, need: str, origin: str) -> str:
    return f"{name}: got {_one_line(repr(value))[:80]}, need {need}" + (f"; change it {origin}" if origin else "")


def _places(message: str, above: Parts) -> list[Parts]:
    """Return the settings that a sentence about a section names; one about all names them in full."""
    words = [word.strip(".") for word in re.findall(r"[a-z_][a-z0-9_.]*", message)]
    names = words if above else [*words[:1], *(word for word in words if "." in word)]
    return [(*above, *name.split(".")) for name in names]


def _origin_of(places: Sequence[Parts], assignments: Sequence[Assignment]) -> str:
    """Return the last source that gave one of these places, or anything in it, a value."""
    for assignment in reversed(assignments):
        if any(_gives(assignment, parts) for parts in places):
            return assignment.origin
    return ""


def _gives(assignment: Assignment, parts: Parts) -> bool:
    depth = min(len(parts), len(assignment.parts))
    return assignment.parts[:depth] == parts[:depth] and has_place(assignment.value, parts[len(assignment.parts) :])


def _one_line(text: str) -> str:
    return " ".join(text.split())
