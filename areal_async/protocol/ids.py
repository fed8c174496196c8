"""The two ids that have parts: a weights version and an attempt at a prompt. Text outside, numbers here."""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from areal_async.protocol.fields import is_group_id, is_version


class Version(NamedTuple):
    """A weights version: the lineage of the trainer that made it, and the step that it ends.

    Ordered by lineage, then step. Written ``1-42``; packed into one int64 per token.
    """

    lineage: int
    step: int

    def __str__(self) -> str:
        return f"{self.lineage}-{self.step}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``1-42``.

        Raises:
            ValueError: not two non-negative integers of at most nine digits with a dash between.
        """
        if not is_version(text):
            raise ValueError(f"weights version: got {text!r}, need <lineage>-<step> like 1-42")
        return cls(*map(int, text.split("-")))

    def pack(self) -> int:
        """Return ``lineage * 2**32 + step``."""
        return (self.lineage << 32) | self.step

    @classmethod
    def unpack(cls, packed: int) -> Self:
        """Invert ``pack``."""
        return cls(packed >> 32, packed & 0xFFFFFFFF)


@dataclass(frozen=True, slots=True, order=True)
class GroupId:
    """One attempt at one prompt, written ``<epoch>-<index>-<attempt>``; attempts count from 0."""

    epoch: int
    index: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.index}-{self.attempt}"

    @property
    def next_attempt(self) -> Self:
        """The same prompt, once more."""
        return replace(self, attempt=self.attempt + 1)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``0-17-0``.

        Raises:
            ValueError: not three non-negative integers joined by dashes.
        """
        if not is_group_id(text):
            raise ValueError(f"group id: got {text!r}, need <epoch>-<index>-<attempt> like 0-17-0")
        return cls(*map(int, text.split("-")))
