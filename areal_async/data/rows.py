"""Rows, from the hub by name, from local files or from Python, by one call."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from areal_async.config.settings import DatasetSettings
from areal_async.data.images import row_at, undecoded
from areal_async.data.made_rows import rows_of_environment, rows_of_function, rows_of_seeds
from areal_async.data.recorded_rows import digest_of
from areal_async.errors import UserError
from areal_async.process.gc_pauses import importing
from areal_async.process.hub import fetch, is_local
from areal_async.protocol.types import Prompt

BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
"""File suffix -> the builder that reads it."""
SIGNS_OF_NO_ROWS = ("corresponds to no data", "No columns to parse", "BatchSize must be greater than 0")
"""What the library's readers say of a file without a row; that of JSON raises a bare ``StopIteration``."""


def load_rows(settings: DatasetSettings, *, shows_progress: bool = True) -> Any:
    """Return the rows as a ``datasets.Dataset``, whose images are not decoded (``images.row_at``).

    A path to a file or folder that is there is read from disk; any other is a hub name.

    Raises:
        UserError: nothing there, no row in it, a format that is not read, text that is not UTF-8, or no such
            configuration or split.
    """
    # Imported here: it takes most of a second.
    with importing():
        import datasets

    if not shows_progress:
        datasets.disable_progress_bars()
    try:
        rows = _load(settings)
        _check_text(rows, settings)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, StopIteration) as exc:
        raise _mistake(exc, settings) from exc
    if not len(rows):
        raise _no_rows(settings)
    return undecoded(rows)


class RowPrompts(Sequence[Prompt]):
    """Rows of a data set as prompts, each read when it is taken: those with images are large."""

    def __init__(self, rows: Any, indices: range) -> None:
        self._rows = rows
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def digest(self) -> str:
        """SHA-256 of these rows, in their order."""
        return digest_of(self._rows.select(self._indices))

    @overload
    def __getitem__(self, place: int) -> Prompt: ...

    @overload
    def __getitem__(self, place: slice) -> "RowPrompts": ...

    def __getitem__(self, place: int | slice) -> "Prompt | RowPrompts":
        if isinstance(place, slice):
            return RowPrompts(self._rows, self._indices[place])
        index = self._indices[place]
        return Prompt(epoch=0, index=index, row=row_at(self._rows, index))


def check_columns(rows: Any, columns: tuple[str, ...], settings: DatasetSettings) -> None:
    """Make sure that the rows have these columns.

    Raises:
        UserError: some are missing; it names the settings that say which column is meant.
    """
    missing = [column for column in columns if column not in rows.column_names]
    if missing:
        meant = [name for name in type(settings).model_fields if name not in DatasetSettings.model_fields]
        flags = [f"--dataset.{name}" for name in meant if getattr(settings, name) in missing]
        cure = f"; say which column is meant with {', '.join(flags)}" if flags else ""
        raise UserError(
            f"dataset: {settings.source} has columns {rows.column_names}, need {', '.join(map(repr, missing))}{cure}"
        )


def _load(settings: DatasetSettings) -> Any:
    import datasets

    if settings.python is not None:
        return rows_of_function(settings.python)
    if settings.environment is not None:
        return rows_of_environment(settings.environment, settings.env)
    if settings.seeds is not None:
        return rows_of_seeds(*settings.seeds)
    assert settings.path is not None
    path = Path(settings.path)
    if path.is_file():
        if path.suffix not in BUILDERS:
            raise UserError(f"dataset: got file {path}, need one of {', '.join(BUILDERS)}")
        return datasets.load_dataset(BUILDERS[path.suffix], data_files=str(path), split=settings.split)
    if not path.is_dir():
        if is_local(settings.path):
            raise UserError(f"dataset: file {path} is not there; give a file, a folder or a hub name")
        # Asked first because the data set library retries for half a minute where there is no network.
        fetch("dataset", settings.path, files=("README.md",))
    return datasets.load_dataset(settings.path, settings.name, split=settings.split)


def _check_text(rows: Any, settings: DatasetSettings) -> None:
    """Look at all text: the reader of JSON takes any bytes, and a row of them could not be read later, in mid run.

    Raises:
        UserError: a cell is not UTF-8.
        ValueError: the rows are broken otherwise.
    """
    try:
        rows.data.validate(full=True)
    except ValueError:
        for column in rows.column_names:
            _check_cells(rows.data.column(column), column, settings)
        raise


def _check_cells(cells: Any, column: str, settings: DatasetSettings) -> None:
    for number, cell in enumerate(cells):
        try:
            cell.as_py()
        except UnicodeDecodeError as exc:
            raise UserError(
                f"dataset: {settings.source} row {number}: {column} has byte {exc.object[exc.start]:#x}, need UTF-8; "
                "convert the file"
            ) from exc


def _mistake(error: Exception, settings: DatasetSettings) -> UserError:
    import datasets

    what, cause = f"{settings.source} with name={settings.name}, split={settings.split}", error
    if isinstance(error, datasets.exceptions.DatasetGenerationError):
        what, cause = settings.source, error.__cause__ or error
    reason = str(cause).strip().partition("\n")[0]
    if isinstance(cause, StopIteration) or any(sign in reason for sign in SIGNS_OF_NO_ROWS):
        return _no_rows(settings)
    return UserError(f"dataset: cannot read {what}: {reason}")


def _no_rows(settings: DatasetSettings) -> UserError:
    remedy = f"fill it, or name another split than {settings.split}" if settings.path else "return some"
    return UserError(f"dataset: {settings.source} has no rows, need at least one; {remedy}")
