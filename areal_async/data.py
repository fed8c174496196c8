"""Rows, from the hub by name or from local files, by one call."""

from pathlib import Path
from typing import Any

from areal_async.collector import importing
from areal_async.errors import UserError
from areal_async.hub import fetch, looks_like_hub_name
from areal_async.settings import DatasetSettings

BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
"""File suffix -> the builder that reads it."""


def load_rows(settings: DatasetSettings, *, shows_progress: bool = True) -> Any:
    """Return the rows as a ``datasets.Dataset``.

    A path to a file or folder that is there is read from disk; anything else is a hub name.

    Raises:
        UserError: nothing there, a format that is not read, or no such configuration or split.
    """
    # Imported here: it takes most of a second.
    with importing():
        import datasets

    if not shows_progress:
        datasets.disable_progress_bars()
    path = Path(settings.path)
    try:
        if path.is_file():
            return datasets.load_dataset(_builder(path), data_files=str(path), split=settings.split)
        if not path.is_dir():
            _check_hub_name(settings.path)
        return datasets.load_dataset(settings.path, settings.name, split=settings.split)
    except datasets.exceptions.DatasetGenerationError as exc:
        raise UserError(f"dataset: cannot read {settings.path}: {exc.__cause__ or exc}") from exc
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as exc:
        reason = str(exc).strip().partition("\n")[0]
        raise UserError(
            f"dataset: cannot read {settings.path} with name={settings.name}, split={settings.split}: {reason}"
        ) from exc


def check_columns(rows: Any, columns: tuple[str, ...], settings: DatasetSettings) -> None:
    """Make sure that the rows have these columns.

    Raises:
        UserError: one is missing.
    """
    missing = [column for column in columns if column not in rows.column_names]
    if missing:
        raise UserError(f"dataset: {settings.path} has columns {rows.column_names}, need {missing[0]!r}")


def _builder(path: Path) -> str:
    builder = BUILDERS.get(path.suffix)
    if builder is None:
        raise UserError(f"dataset: got file {path}, need one of {', '.join(BUILDERS)}")
    return builder


def _check_hub_name(name: str) -> None:
    if not looks_like_hub_name(name) or name.endswith(tuple(BUILDERS)):
        raise UserError(f"dataset: file {name} is not there; give a file, a folder or a hub name")
    # Asked first because the data set library retries for half a minute where there is no network.
    fetch("dataset", name, files=("README.md",))
