"""Find what the Hugging Face hub holds, on disk or over the network, and say plainly when it is not to be had."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from areal_async.errors import UserError

REACH_DEADLINE_S = 10
"""The longest wait for a hub that does not answer."""
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
"""Suffixes of files of rows."""
MODEL_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")


def local_model(path: str) -> Path:
    """Return the folder that holds the model's files, fetched from the hub when ``path`` is a hub name.

    A folder is told from a hub name by being there. What the hub gave once is found again without a network.

    Raises:
        UserError: no such folder, and no such model on the hub or no way to reach it.
    """
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(
                f"model: got folder {path}, need one with a config.json; set model.path to a model's folder"
            )
        return folder
    if folder.exists() or not looks_like_hub_name(path):
        raise UserError(f"model: got {path}, which is no folder; set model.path to a model's folder or a hub name")
    return fetch("model", path, files=MODEL_FILES)


def looks_like_hub_name(path: str) -> bool:
    """Say whether this could be ``owner/name`` or ``name``, and not only a path."""
    return not path.startswith(("/", ".", "~")) and not path.endswith(("/", *DATA_SUFFIXES)) and path.count("/") <= 1


def is_local(name: str, folder: Path | None = None) -> bool:
    """Say whether this is a path, no hub name: it is there from a folder (None: this one), or can be nothing else."""
    return not looks_like_hub_name(name) or os.path.exists((folder or Path()) / name)


def fetch(kind: Literal["model", "dataset"], name: str, *, files: Sequence[str], setting: str | None = None) -> Path:
    """Return the folder with those files of a hub repository, from the cache when the hub cannot be reached.

    Args:
        setting: has the name; an error begins with it, else with the kind.

    Raises:
        UserError: the hub has no such repository for us, or cannot be reached and the cache has nothing.
    """
    # Imported here: most runs start from folders.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, repo_type=kind, allow_patterns=list(files), etag_timeout=REACH_DEADLINE_S))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError) as exc:
        reason = str(exc).strip().partition("\n")[0].rstrip(".")
        raise UserError(
            f"{setting or kind}: {name} is neither on this disk nor to be had from the Hugging Face hub ({reason}); "
            f"give a local path, or fetch it where there is a network"
        ) from exc
