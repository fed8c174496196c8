"""The trained ids, inside the same atomic folder as the weights that they made.

In memory they stand as in the file, ten bytes per group: it is written with every checkpoint, and read at a
restart alone.
"""

from collections.abc import Iterator, Sequence

import msgspec

from areal_async.protocol.fields import StepText, VersionText
from areal_async.protocol.types import Version
from areal_async.protocol.wire import decode_json


class LedgerFile(msgspec.Struct):
    """Content of the ledger's file."""

    version: VersionText
    """Version of the weights beside the file."""
    trained: dict[StepText, list[str]]
    """step -> group ids, for every step in the lineage of these weights."""


class Ledger:
    """Groups that the weights were trained on, step by step."""

    def __init__(self, version: Version) -> None:
        """Begin with weights that were trained on nothing."""
        self.version = version
        self.newest: Sequence[str] = ()
        """Group ids of the newest step."""
        self._members = bytearray()
        """Encoded members of the file's ``trained``, as they stand between its braces."""

    @classmethod
    def decode(cls, payload: bytes, *, what: str) -> "Ledger":
        """Read a file.

        Raises:
            WireError: it is damaged; ``what`` names it.
        """
        file = decode_json(payload, LedgerFile, what=what)
        ledger = cls(Version.parse(file.version))
        ledger._members += msgspec.json.encode(file.trained)[1:-1]
        return ledger

    def encode(self) -> bytes:
        """Return the file."""
        version = msgspec.json.encode(str(self.version))
        return b"".join((b'{"version":', version, b',"trained":{', self._members, b"}}"))

    def add(self, version: Version, group_ids: Sequence[str]) -> None:
        """Note that the step which makes ``version``, the next one, is trained on these groups."""
        if self._members:
            self._members += b","
        self._members += b'"%d":%b' % (version.step, msgspec.json.encode(group_ids))
        self.version, self.newest = version, group_ids

    def steps(self) -> Iterator[tuple[int, list[str]]]:
        """Yield every step with its group ids."""
        trained = msgspec.json.decode(b"{" + self._members + b"}", type=dict[str, list[str]])
        return ((int(step), group_ids) for step, group_ids in trained.items())
