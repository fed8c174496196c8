"""``promote``: give a version a tag, or take it away. On a live run its controller does it, and tells of it."""

import argparse
from collections.abc import Sequence

import anyio
import msgspec

from areal_async.cli.orders import give, who
from areal_async.errors import UserError
from areal_async.launch.run import NotLiveError, visit_live
from areal_async.launch.run_directory import RunDirectory, find_run
from areal_async.process.stdio import say
from areal_async.telemetry import log
from areal_async.versions.promotion import CHAMPION, Promotion, promote


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Move the tag, and say from where to where.

    Raises:
        UserError: it is refused.
    """
    log.quieten()
    wanted = wanted_of(arguments)
    directory = find_run(arguments.run)
    version, was = _ordered(directory, wanted) or _done_here(directory, wanted)
    before = f", in place of {was}" if was else ""
    say(f"{directory.path.name}: {wanted.tag} is {version or 'no version'} now{before}")
    return 0


def _ordered(directory: RunDirectory, wanted: Promotion) -> tuple[str, str] | None:
    """Have a live run's controller do it; None where the run does not live, or ends just now."""
    answer: dict[str, object] | None = None
    try:
        answer = anyio.run(_order, directory, wanted, backend_options={"use_uvloop": True})
    except* NotLiveError:
        pass
    return None if answer is None else (str(answer.get("version", "")), str(answer.get("was", "")))


def _done_here(directory: RunDirectory, wanted: Promotion) -> tuple[str, str]:
    tag = promote(directory.path, directory.read_settings(), wanted)
    return tag.version, tag.was


def wanted_of(arguments: argparse.Namespace) -> Promotion:
    """Return what the command line asks for.

    Raises:
        UserError: it means nothing.
    """
    if (arguments.version is None) is not arguments.remove:
        got = "neither" if arguments.version is None else "both"
        raise UserError(f"promote: got {got} of VERSION and --remove, need one: what gets the tag, or that none has it")
    given = {
        "version": arguments.version,
        "tag": arguments.tag or CHAMPION,
        "by": arguments.by or who(),
        "reason": arguments.why or "",
        "comparison": arguments.comparison or "",
        "at_least": arguments.at_least,
        "force": arguments.force,
    }
    try:
        return msgspec.convert(given, Promotion)
    except msgspec.ValidationError as exc:
        raise UserError(f"promote: {exc}") from exc


async def _order(directory: RunDirectory, wanted: Promotion) -> dict[str, object]:
    async with visit_live(directory) as (_, bus):
        return await give(directory, bus, "promote", msgspec.structs.asdict(wanted))
