"""The one rule of freshness, pure and alone.

Step n (from 1) starts from version n-1 and makes version n; a token of version v has in step n the age
``n - 1 - v``. Three guards use it under three names: *admit* prevents, *cut* guarantees, *assert* proves.
"""

from collections.abc import Mapping

from areal_async.protocol.types import Version

UNKNOWN_AGE = 1 << 30
"""Age of a token of unknown version: over any bound."""


def age_at(*, step: int, version: Version, lineage: int, branches: Mapping[int, int]) -> int:
    """Return the age, in versions, that a token of ``version`` has in ``step`` of ``lineage``.

    A step whose cut was replayed stands in for the lost one, so age is counted by step number. Where a
    lineage left its predecessor at step ``branches[lineage]`` and the version lies beyond that step, the
    steps since the common ancestor are added on both sides.

    Args:
        branches: lineage -> last step shared with the lineage before it; one that is absent shares all.

    Raises:
        ValueError: the version belongs to a newer lineage than ``lineage``.
    """
    if version.lineage > lineage:
        raise ValueError(f"age: got version {version} of a newer lineage, need at most lineage {lineage}")
    ancestor = last_shared_step(version, lineage=lineage, branches=branches)
    return (step - 1 - ancestor) + (version.step - ancestor)


def last_shared_step(version: Version, *, lineage: int, branches: Mapping[int, int]) -> int:
    """Return the last step that ``lineage`` has in common with ``version``: its own, where nothing parted them.

    Args:
        branches: as of ``age_at``.
    """
    parted = (step for mid, step in branches.items() if version.lineage < mid <= lineage)
    return min((version.step, *parted))


def oldest_age_at(*, step: int, first: Version, last: Version, lineage: int, branches: Mapping[int, int]) -> int:
    """Return the greatest age that a token sampled between two versions can have in ``step`` of ``lineage``.

    Ages fall from version to version, until a branch: beyond the shared steps they rise. Whatever was sampled over a
    change of lineage may hold tokens further beyond them than either end tells: its age is ``UNKNOWN_AGE``.
    """
    if first.lineage < last.lineage and any(mid > first.lineage for mid in branches):
        return UNKNOWN_AGE
    return max(age_at(step=step, version=one, lineage=lineage, branches=branches) for one in {first, last})


def max_groups_in_flight(*, max_staleness: int, batch_groups: int) -> int:
    """Return the credit: how many groups may be admitted and not settled."""
    return (max_staleness + 1) * batch_groups
