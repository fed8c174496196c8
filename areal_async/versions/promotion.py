"""A tag is given to a version that was compared with the one that has it, and did not do worse; or in spite of that.

Where the run lives its controller does this, on an operator's order; else the command line.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.protocol.fields import MAX_REWARD
from areal_async.protocol.types import Record, Version
from areal_async.versions import tags
from areal_async.versions.comparison import FOLDER, RESULT, Comparison, read_result
from areal_async.versions.comparison_text import told_level
from areal_async.versions.resolve import kept
from areal_async.versions.tags import ShortText, Tag

CHAMPION = "champion"
"""The tag that is given where none is named."""

VersionName = Annotated[str, msgspec.Meta(min_length=1, max_length=70)]


class Promotion(Record, frozen=True, kw_only=True):
    """What is wanted."""

    version: VersionName | None = None
    """As a person types it; None takes the tag away."""
    tag: ShortText = CHAMPION
    by: ShortText = ""
    reason: ShortText = ""
    comparison: ShortText = ""
    """Id of the comparison to go by; empty for the newest with the version that has the tag."""
    at_least: Annotated[float, msgspec.Meta(ge=-MAX_REWARD, le=MAX_REWARD)] = 0.0
    """What the low end of the interval of the difference must come to."""
    force: bool = False
    """Whatever a comparison says."""


class Standing(NamedTuple):
    """What a comparison says of a version, against the other side."""

    comparison_id: str
    difference: float
    low: float
    high: float
    """Ends of its interval."""
    alpha: float
    """Chance that it does not hold the difference."""


def promote(run_directory: Path, settings: Settings, wanted: Promotion) -> Tag:
    """Give the tag to the version, or take it away; return what is written.

    Raises:
        UserError: the version has no checkpoint; no comparison speaks for it, and it is not forced; the tag cannot be
            written, or has just been moved.
    """
    tags.check_name(wanted.tag)
    holder = tags.read(run_directory).get(wanted.tag)
    has = holder.version if holder is not None else ""
    if wanted.version is None:
        if holder is None:
            raise UserError(f"tag {wanted.tag}: no version has it, so it cannot be taken away")
        return _write(run_directory, wanted, version="", comparison="", over=has)
    with kept(run_directory, settings, wanted.version, option="promote") as version:
        comparison = "" if wanted.force else _check(run_directory, wanted, version, has)
        return _write(run_directory, wanted, version=str(version), comparison=comparison or wanted.comparison, over=has)


def standing_in(comparison: Comparison, version: Version, run: str) -> Standing | None:
    """Return what a comparison says of a version of a run.

    None where it is no side, or both are it; where there is no interval; and where one side has other settings.
    """
    a, b, overall = comparison.a, comparison.b, comparison.overall
    if overall is None or overall.difference is None or overall.low is None or overall.high is None:
        return None
    if a.settings or b.settings or (a.run, a.version) == (b.run, b.version):
        return None
    name = str(version)
    if (b.run, b.version) == (run, name):
        return Standing(comparison.comparison_id, overall.difference, overall.low, overall.high, comparison.alpha)
    if (a.run, a.version) == (run, name):
        low, high = -overall.high, -overall.low
        return Standing(comparison.comparison_id, -overall.difference, low, high, comparison.alpha)
    return None


def _check(run_directory: Path, wanted: Promotion, version: Version, has: str) -> str:
    """Return the id of the comparison that speaks for a version.

    Raises:
        UserError: none does.
    """
    standing = _find(run_directory, wanted, version, has)
    if standing is None:
        against = f"{has}, which is {wanted.tag} now" if has else "any other"
        meant = f"comparison {wanted.comparison} has not compared" if wanted.comparison else "no comparison is there of"
        sides = f"{has},{version}" if has else f"OTHER,{version}"
        raise UserError(
            f"promote: {meant} {version} with {against}; compare --run {run_directory.name} --versions {sides} makes "
            "one, --force goes without"
        )
    if not standing.low >= wanted.at_least:  # as nothing is at least nan
        raise UserError(
            f"promote: in comparison {standing.comparison_id} {version} gets {standing.difference:+.3g} "
            f"({told_level(standing.alpha)} {standing.low:+.3g} to {standing.high:+.3g}), need at least "
            f"{wanted.at_least:+.3g} at its low end; compare more rows, give --at-least, or --force"
        )
    return standing.comparison_id


def _find(run_directory: Path, wanted: Promotion, version: Version, has: str) -> Standing | None:
    """Return what the newest comparison says, or the one that is named; None where there is none of these two."""
    for comparison in _newest_first(run_directory, wanted.comparison):
        standing = standing_in(comparison, version, run_directory.name)
        sides = {comparison.a.version, comparison.b.version}
        if standing is not None and (wanted.comparison or not has or sides == {has, str(version)}):
            return standing
    return None


def _newest_first(run_directory: Path, comparison_id: str) -> Iterator[Comparison]:
    """Yield a run's comparisons, or the one of that id; those that cannot be read say nothing."""
    if comparison_id:
        if Path(comparison_id).name == comparison_id:
            yield read_result(run_directory / FOLDER / comparison_id)
        return
    made = [(path.stat().st_mtime_ns, path.parent) for path in (run_directory / FOLDER).glob(f"*/{RESULT}")]
    for _, folder in sorted(made, reverse=True):
        with suppress(UserError):
            yield read_result(folder)


def _write(run_directory: Path, wanted: Promotion, *, version: str, comparison: str, over: str) -> Tag:
    tag = Tag(
        tag=wanted.tag,
        version=version,
        by=wanted.by,
        why=wanted.reason,
        comparison=comparison,
        is_forced=wanted.force and bool(version),
    )
    written = tags.write(run_directory, tag, over=over)
    if written is None:
        raise UserError(f"tag {wanted.tag}: somebody has just moved it; look who (models --audit), and try again")
    return written
