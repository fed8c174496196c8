"""The names that settings have: which exist, what each takes, which one was meant, and what it says about itself.

Read from the settings' own types, so that no list of names can disagree with them. A place is a tuple of
section, key and, in a list of sections, index.
"""

import ast
import difflib
import functools
import inspect
import itertools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel

from areal_async.config.section import PathKind

Parts = tuple[str, ...]
"""A setting's place."""
ANY_INDEX = "0"
ANY_NAME = "NAME"
"""Stands for the keys of a mapping whose names are the user's."""
STAND_INS = (ANY_INDEX, ANY_NAME)


class SettingInfo(NamedTuple):
    """What ``--help-settings`` says about one setting."""

    name: str
    default: str
    sentence: str


def describe(kind: type[BaseModel]) -> list[SettingInfo]:
    """Return name, default and sentence of every setting, in the order of the file."""
    described = []
    for parts, owner in leaves(kind):
        field = owner.model_fields[parts[-1]]
        default = "required" if field.is_required() else text_of(field.default)
        sentence = _sentences(owner).get(parts[-1], field.description or "")
        described.append(SettingInfo(".".join(parts), default, sentence))
    return described


@functools.cache
def _sentences(kind: type[BaseModel]) -> dict[str, str]:
    """Return what stands below each field of a section, in the sources of its class and of those that it is made from.

    Read when asked for: pydantic's ``use_attribute_docstrings`` reads all of them at each start.
    """
    said: dict[str, str] = {}
    for one in reversed(kind.__mro__[: kind.__mro__.index(BaseModel)]):
        try:
            sources = ast.parse(textwrap.dedent(inspect.getsource(one)))
        except (OSError, TypeError, SyntaxError):  # installed without them, or with others than were imported
            continue
        body = itertools.chain(*(getattr(definition, "body", ()) for definition in sources.body))
        for field, below in itertools.pairwise(body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    said[name] = " ".join(text.split())
    return said


def annotation_at(kind: Any, parts: Sequence[str]) -> Any:
    """Return the type of a place, ``None`` when there is no such place."""
    annotation = kind
    for part in parts:
        annotation = step_into(without_none(annotation), part)
    return annotation


def step_into(annotation: Any, part: Any) -> Any:
    """Return the type of one key or index inside, ``None`` when there is no such."""
    if annotation is Any:
        return Any
    if is_section(annotation):
        field = annotation.model_fields.get(part)
        if field is None:
            return None
        kind = next((one for one in field.metadata if isinstance(one, PathKind)), None)
        return field.annotation if kind is None else Annotated[field.annotation, kind]
    if get_origin(annotation) is dict:
        return get_args(annotation)[1]
    if get_origin(annotation) in (tuple, list) and str(part).isdecimal():
        return get_args(annotation)[0]
    return None


def value_at(values: Any, parts: Sequence[str]) -> Any:
    """Return what a tree of values, or sections themselves, hold at a place.

    Raises:
        KeyError: there is no such place. An item of a list has one name: ``01`` is not ``1``.
    """
    for part in parts:
        if isinstance(values, BaseModel):
            values = vars(values)
        elif isinstance(values, list | tuple):
            values = dict(zip(map(str, range(len(values))), values, strict=True))
        if not isinstance(values, Mapping):
            raise KeyError(part)
        values = values[part]
    return values


def has_place(values: Any, parts: Sequence[str]) -> bool:
    """Whether a tree of values, or sections themselves, hold something at a place."""
    try:
        value_at(values, parts)
    except KeyError:
        return False
    return True


def items_of(value: Any) -> Mapping[Any, Any] | None:
    """Return what a section, or a list of sections, holds; None for a value."""
    if isinstance(value, list) and all(isinstance(item, dict) for item in value) and value:
        return dict(enumerate(value))
    return value if isinstance(value, dict) else None


def is_section(annotation: Any) -> bool:
    """Whether it is a mapping of named settings."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def is_composite(annotation: Any) -> bool:
    """Whether its text is YAML rather than the value itself."""
    return is_section(annotation) or get_origin(annotation) in (tuple, list, dict)


def path_kind(annotation: Any) -> PathKind | None:
    """Return which kind of path it holds; ``None`` for other values."""
    metadata = getattr(annotation, "__metadata__", ())
    return next((one for one in metadata if isinstance(one, PathKind)), None)


def takes_none(annotation: Any) -> bool:
    """Whether ``null`` is a value of it."""
    return get_origin(annotation) in (Union, UnionType) and NoneType in get_args(annotation)


def without_none(annotation: Any) -> Any:
    """Return ``T`` for ``T | None``."""
    if not takes_none(annotation):
        return annotation
    others = [item for item in get_args(annotation) if item is not NoneType]
    return others[0] if len(others) == 1 else annotation


def leaves(kind: type[BaseModel], above: Parts = ()) -> Iterator[tuple[Parts, type[BaseModel]]]:
    """Yield every setting with the section that owns it; a list of sections shows its element 0."""
    for name, field in kind.model_fields.items():
        inner, place = without_none(field.annotation), (*above, name)
        if get_origin(inner) in (tuple, list) and is_section(get_args(inner)[0]):
            inner, place = get_args(inner)[0], (*place, ANY_INDEX)
        elif get_origin(inner) is dict and is_section(get_args(inner)[1]):
            inner, place = get_args(inner)[1], (*place, ANY_NAME)
        if is_section(inner):
            yield from leaves(inner, place)
        else:
            yield place, kind


def nearest(parts: Parts, kind: type[BaseModel]) -> str | None:
    """Find the name that was meant: a sibling, else the same word in another section, else the whole name."""
    shape = tuple(_shape_of(part, annotation_at(kind, parts[:depth])) for depth, part in enumerate(parts))
    full = [leaf for leaf, _ in leaves(kind)]
    names = list(dict.fromkeys(leaf[:depth] for leaf in full for depth in range(1, len(leaf) + 1)))
    siblings = {name[-1]: name for name in names if name[:-1] == shape[:-1]}
    in_sections_first = sorted(full, key=lambda leaf: "0" in leaf)  # a run's setting before a task's
    anywhere = {leaf[-1]: leaf for leaf in in_sections_first[::-1]}
    dotted = {".".join(name): name for name in names}
    for word, choices, cutoff in (
        (shape[-1], siblings, 0.6),
        (shape[-1], anywhere, 0.8),
        (".".join(shape), dotted, 0.8),
    ):
        for match in difflib.get_close_matches(word, choices, n=1, cutoff=cutoff):
            found = choices[match]
            own = iter([part for part, stand_in in zip(parts, shape, strict=True) if stand_in in STAND_INS])
            return ".".join(next(own, part) if part in STAND_INS else part for part in found)
    return None


def _shape_of(part: str, above: Any) -> str:
    """Return what stands for an index, or for a name of the user's own, in the names of ``leaves``."""
    if get_origin(without_none(above)) is dict:
        return ANY_NAME
    return ANY_INDEX if part.isdecimal() else part


def text_of(value: Any) -> str:
    """Return a value as it is written in a settings file."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value)) if isinstance(value, tuple) else str(value)
