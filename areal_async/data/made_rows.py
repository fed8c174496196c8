"""Rows that nobody has written down: those of a Python function, those of an environment, and numbers as seeds."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from areal_async.environments.environment import make_environment, tasks_of
from areal_async.errors import UserError
from areal_async.user_files import import_named, mistakes_in
from areal_async.vision.images import file_of
from areal_async.vision.parts import is_image_file, is_picture

MAX_ROWS = 1_000_000
"""Rows that a function may return: an endless generator is told, and does not fill the memory."""
FUNCTION = "rows"
"""Function that is taken of ``FILE.py`` without a name."""
SEED = "seed"
"""The column of rows that are numbers."""


def rows_of_function(spec: str) -> Any:
    """Call ``FILE.py[:name]`` once and return its rows as a ``datasets.Dataset``, with the columns of all of them.

    Raises:
        UserError: no such function, it raises, or what it returns are no rows of values that JSON has.
    """
    what = f"dataset: {spec}"
    module, name = import_named(spec, what=what, default=FUNCTION)
    function = getattr(module, name, None)
    if not inspect.isroutine(function) or inspect.iscoroutinefunction(function):
        raise UserError(
            f"{what}: got no plain function {name} in {module.__file__}, need def {name}() that returns rows"
        )
    with mistakes_in(what):
        rows = _read(function, what)
        return _as_dataset(rows, what)


def rows_of_environment(spec: str, options: Mapping[str, Any]) -> Any:
    """Return the tasks of ``SCHEME:NAME`` as a ``datasets.Dataset``, each with its id and the hash of what it is.

    Raises:
        UserError: there is no such environment here, an option does not fit, or its tasks cannot be read.
    """
    what = f"environment {spec}"
    with mistakes_in(what):
        return _as_dataset([*tasks_of(make_environment(spec, options), what=what)], what)


def rows_of_seeds(first: int, end: int) -> Any:
    """Return rows ``{"seed": n}`` for the numbers from ``first`` up to ``end``, without it."""
    import datasets
    import pyarrow

    return datasets.Dataset(pyarrow.table({SEED: pyarrow.array(range(first, end), type=pyarrow.int64())}))


def _read(function: Callable[[], Iterable[Any]], what: str) -> list[dict[str, Any]]:
    returned = function()
    if not isinstance(returned, Iterable) or isinstance(returned, str | bytes | Mapping):
        got = "None" if returned is None else f"a {type(returned).__name__}"
        raise UserError(f"{what}: returned {got}, need a list of rows like {{'question': ...}}")
    rows = []
    for place, row in enumerate(itertools.islice(returned, MAX_ROWS + 1)):
        if not isinstance(row, Mapping) or not all(isinstance(key, str) for key in row):
            raise UserError(f"{what}: row {place} is a {type(row).__name__} {row!r:.60}, need a dict of named values")
        rows.append(_with_files(row))
    if len(rows) > MAX_ROWS:
        raise UserError(f"{what}: returned more than {MAX_ROWS} rows, need at most so many; does it ever end?")
    return rows


def _as_dataset(rows: list[dict[str, Any]], what: str) -> Any:
    import datasets
    import pyarrow

    columns = dict.fromkeys(key for row in rows for key in row)
    try:
        made = datasets.Dataset.from_dict({name: [row.get(name) for row in rows] for name in columns})
        for name, feature in made.features.items():
            kind = _with_images(feature, (row.get(name) for row in rows))
            if kind != feature:
                made = made.cast_column(name, kind)
        return made
    except (pyarrow.ArrowException, TypeError, ValueError, OverflowError) as exc:
        reason = str(exc).strip().partition("\n")[0]
        raise UserError(f"{what}: its rows fit no table ({reason}); each column needs values of one kind") from exc


def _with_images(feature: Any, cells: Iterable[Any]) -> Any:
    """Return the kind of a column, or of a part of one, in which the bytes of files of images are images."""
    import datasets

    given = [cell for cell in cells if cell is not None]
    if isinstance(feature, Mapping):
        return {name: _with_images(one, (cell.get(name) for cell in given)) for name, one in feature.items()}
    if isinstance(feature, datasets.List):
        return datasets.List(_with_images(feature.feature, (one for cell in given for one in cell)))
    if feature == datasets.Value("binary") and is_image_file(next(filter(None, given), None)):
        return datasets.Image(decode=False)
    return feature


def _with_files(value: Any) -> Any:
    """Return a row, or a part of one, in which images of Pillow's are the bytes of files.

    The library that reads data sets would take the file that an image was opened from, whatever was drawn on it since,
    compress others as JPEG again, and write some as TIFF.
    """
    if isinstance(value, Mapping):
        return {name: _with_files(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_files(one) for one in value]
    return file_of(value) if is_picture(value) else value
