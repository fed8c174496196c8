"""The upload of a folder to the Hugging Face Hub, by its own client."""

from pathlib import Path

import areal_async
from areal_async.errors import PipelineError, UserError

REPLACED = ("*.safetensors", "*.safetensors.index.json", "data/*.parquet")
"""What of an earlier upload goes where this one has no such file: it would be loaded with the rest."""


def check_name(name: str) -> None:
    """Refuse what can be no repository of the hub, before there is something to upload.

    Raises:
        UserError: it is not ``NAME`` or ``OWNER/NAME``.
    """
    from huggingface_hub.errors import HFValidationError  # imported here: it takes a while
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as exc:
        raise UserError(f"--push: got {name!r:.80}, need OWNER/NAME of letters, digits, . _ and -") from exc


def push(folder: Path, name: str, kind: str) -> str:
    """Upload all of a folder as a repository, private if it is new; return its address.

    ``HF_ENDPOINT`` and ``HF_TOKEN`` are the client's own. What an interrupted upload has sent is not sent again.

    Args:
        kind: ``model`` or ``dataset``.

    Raises:
        PipelineError: there is no token, or the hub cannot be reached or refuses it.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of whichever library it sends by

    later = f"{folder} has it all: give the command again then"
    if get_token() is None:
        raise PipelineError(f"--push {name}: got no token of the hub, need one that may write, as HF_TOKEN; {later}")
    api = HfApi(library_name="areal_async", library_version=areal_async.__version__)
    try:
        repository = api.create_repo(name, repo_type=kind, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=repository.repo_id, repo_type=kind, folder_path=folder, commit_message="Upload by areal_async",
            delete_patterns=list(REPLACED),
        )  # fmt: skip
    except (HTTPError, OSError, ValueError, RuntimeError) as exc:
        reason = str(exc).strip().partition("\n")[0].rstrip(".")
        raise PipelineError(f"--push {name}: {api.endpoint} did not take it ({reason}); {later}") from exc
    return str(repository)
