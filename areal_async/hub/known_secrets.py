"""Secrets whose values are known here, and the look for them in all that is to be uploaded.

Known are: what the settings' redaction hides, keys of the run's broker and endpoint, the hub's token, passwords in
``~/.netrc``, and variables of the environment whose name or URL says that there is one. A value of fewer than
``MIN_CHARACTERS`` is none: it would be found everywhere.

Looked through is every file, byte by byte, each value as it is and as JSON and URLs write it; of Parquet, which
compresses, also each text. Of safetensors only the header: the rest are numbers.
"""

import json
import netrc
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.hub.redaction import Redaction

MIN_CHARACTERS = 8
MIN_KEY_CHARACTERS = 16
"""Of a word in a file of keys."""
MAX_KEY_FILE_BYTES = 1 << 20
CHUNK_BYTES = 16 << 20
ROWS_AT_ONCE = 64


class KnownSecrets:
    """Values that must not get out, and where each is from."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        """Take value -> where it is from. Nobody is ever told a value."""
        self._where = {
            form.encode(errors="surrogateescape"): where
            for value, where in secrets.items()
            if len(value) >= MIN_CHARACTERS
            for form in _forms(value)
        }
        self._overlap = max(map(len, self._where), default=1) - 1

    @classmethod
    def of_run(
        cls, settings: Settings, run_directory: Path, environment: Mapping[str, str] = os.environ
    ) -> "KnownSecrets":
        """Return those of a run and of whoever gives this command."""
        redaction = Redaction()
        redaction.tree(settings.model_dump(mode="json"))
        given = ((value, f"the setting {name}") for value, name in redaction.hidden.items())
        files = [
            *_files(run_directory / "credentials"),
            *_files(run_directory / "served" / "keys"),
            *_files(settings.bus.credentials),
            *_files(settings.serve.keys),
        ]
        keys = ((word, str(path)) for path in files for word in _words(path))
        return cls(dict(chain(given, keys, _of_machine(), _of_environment(environment))))

    def refuse_in(self, folder: Path) -> None:
        """Look through a folder.

        Raises:
            UserError: a secret's value is in a file, or in a file's name.
        """
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            self._refuse(bytes(name), "the name of a file")
            if path.is_file():
                for content in _content(path, self._overlap):
                    self._refuse(content, str(name))

    def _refuse(self, content: bytes, place: str) -> None:
        # One after the other: a pattern of them all is a hundred times slower.
        where = next((where for form, where in self._where.items() if form in content), None)
        if where is not None:
            raise UserError(
                f"export: {place} would have the value of {where}, need none of it; take it out of the data, the "
                "prompts or the file that has it, and if it was ever uploaded replace it"
            )


def _forms(value: str) -> set[str]:
    """Return a value as files may write it: as it is, in an address, in JSON, and in JSON within JSON."""
    forms = {value}
    for _ in range(2):
        forms |= {json.dumps(one, ensure_ascii=is_ascii)[1:-1] for one in forms for is_ascii in (True, False)}
    return forms | {quote(value, safe=""), quote(value)}


def _of_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in environment.items():
        redaction = Redaction()
        redaction.tree({name: value})
        for secret in redaction.hidden:
            if not os.path.exists(secret):  # the name of a file that has one
                yield secret, f"the variable {name}"


def _of_machine() -> Iterator[tuple[str, str]]:
    from huggingface_hub import get_token  # imported here: it takes a while

    if token := get_token():
        yield token, "the hub's token"
    with suppress(OSError, netrc.NetrcParseError):
        for host, (_, _, password) in netrc.netrc().hosts.items():
            yield password or "", f"the password of {host} in ~/.netrc"


def _files(place: Path | None) -> list[Path]:
    if place is None:
        return []
    return [place] if place.is_file() else sorted(path for path in place.glob("*") if path.is_file())


def _words(path: Path) -> Iterable[str]:
    """Return what may be keys in a file of them."""
    with suppress(OSError), path.open("rb") as file:
        words = file.read(MAX_KEY_FILE_BYTES).decode(errors="ignore").split()
        return [one for one in words if len(one) >= MIN_KEY_CHARACTERS and any(map(str.isalnum, one))]
    return []


def _content(path: Path, overlap: int) -> Iterator[bytes]:
    """Yield all that a file says, in parts of which each begins with the end of the one before."""
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            (num_bytes,) = struct.unpack("<Q", file.read(8))
            yield file.read(num_bytes)
            return
        part = b""
        while chunk := file.read(CHUNK_BYTES):
            part = part[max(0, len(part) - overlap) :] + chunk
            yield part
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=ROWS_AT_ONCE):
                for column in batch.columns:
                    yield from _texts(column)


def _texts(array: pa.Array) -> Iterator[bytes]:
    """Yield the texts, and the bytes, of a column at any depth."""
    if isinstance(array, pa.StructArray):
        for number in range(array.type.num_fields):
            yield from _texts(array.field(number))
    elif isinstance(array, pa.DictionaryArray):
        yield from _texts(array.dictionary)
    elif isinstance(array, pa.ListArray | pa.LargeListArray):
        yield from _texts(array.values)
    elif isinstance(array, pa.StringArray | pa.LargeStringArray | pa.BinaryArray | pa.LargeBinaryArray):
        content = array.buffers()[2]
        if content is not None:
            yield content.to_pybytes()
