"""What a look before a run finds: one line per thing looked at, with its cure where something is wrong."""

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

import anyio.to_thread
import msgspec

from areal_async.errors import UserError


class Level(StrEnum):
    """What a finding means for the run."""

    GOOD = "good"
    WARNING = "warning"
    """It may run, slower or less safely than it could."""
    ERROR = "error"
    """It will not start, or not last."""


class PreflightFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    check: str
    """``memory``, ``broker``, ...: what was looked at."""
    level: Level
    saw: str
    cure: str = ""
    """Cure, as a sentence; empty where nothing is to be done."""


def good(check: str, saw: str) -> PreflightFinding:
    """Return a finding that asks for nothing."""
    return PreflightFinding(check=check, level=Level.GOOD, saw=saw)


def warning(check: str, saw: str, cure: str) -> PreflightFinding:
    """Return one that should be looked at."""
    return PreflightFinding(check=check, level=Level.WARNING, saw=saw, cure=cure)


def error(check: str, saw: str, cure: str) -> PreflightFinding:
    """Return one that is to be cured first."""
    return PreflightFinding(check=check, level=Level.ERROR, saw=saw, cure=cure)


def good_if(
    is_good: bool, check: str, saw: str, cure: str, *, otherwise: Callable[[str, str, str], PreflightFinding]
) -> PreflightFinding:
    """Return what was seen as good, or as what it is ``otherwise``, with its cure."""
    return good(check, saw) if is_good else otherwise(check, saw, cure)


def guarded(check: str, look: Callable[..., Iterable[PreflightFinding]], *args: Any) -> list[PreflightFinding]:
    """Return what ``look`` finds; a user's mistake that it raises is a finding too."""
    try:
        return list(look(*args))
    except UserError as mistake:
        return [of_mistake(check, mistake)]


async def here(check: str, look: Callable[..., Iterable[PreflightFinding]], *args: Any) -> list[PreflightFinding]:
    """Look in the thread of the event loop: it is quick, or imports what users wrote."""
    return guarded(check, look, *args)


async def in_thread(check: str, look: Callable[..., Iterable[PreflightFinding]], *args: Any) -> list[PreflightFinding]:
    """Look in a thread of its own: it waits for a program, a network or a disk."""
    return await anyio.to_thread.run_sync(guarded, check, look, *args)


def of_mistake(check: str, mistake: UserError) -> PreflightFinding:
    """Part an error's sentence: what is wrong, and after the semicolon what to do."""
    saw, _, cure = " ".join(str(mistake).split()).partition("; ")
    return error(check, saw, cure or "change that")


def gigabytes(num_bytes: float) -> str:
    """Return a size for people."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
