"""Age is counted in versions, by step number, and on both sides of a fork."""

import pytest

from areal_async.protocol.staleness import UNKNOWN_AGE, age_at, last_shared_step, max_groups_in_flight, oldest_age_at
from areal_async.protocol.types import Version


def test_a_token_of_the_version_a_step_starts_from_has_age_zero() -> None:
    assert age_at(step=5, version=Version(1, 4), lineage=1, branches={}) == 0


def test_age_counts_versions_between() -> None:
    assert age_at(step=5, version=Version(1, 2), lineage=1, branches={}) == 2


def test_a_replayed_step_stands_in_for_the_lost_one() -> None:
    assert age_at(step=9, version=Version(1, 7), lineage=3, branches={}) == 1


def test_beyond_a_fork_the_steps_since_the_common_ancestor_count_on_both_sides() -> None:
    # lineage 2 left lineage 1 at step 4; the token is of 1-6, two beyond; step 8 starts three beyond (2-7).
    assert age_at(step=8, version=Version(1, 6), lineage=2, branches={2: 4}) == 3 + 2


def test_before_a_fork_age_is_plain() -> None:
    assert age_at(step=8, version=Version(1, 3), lineage=2, branches={2: 4}) == 4


def test_the_earliest_of_several_forks_decides() -> None:
    assert age_at(step=8, version=Version(1, 6), lineage=3, branches={2: 5, 3: 2}) == (7 - 2) + (6 - 2)


def test_a_lineage_shares_with_an_older_one_what_was_made_before_they_parted() -> None:
    shared = [last_shared_step(Version(2, step), lineage=4, branches={2: 1, 4: 5}) for step in (3, 5, 9)]

    assert shared == [3, 5, 5]
    assert last_shared_step(Version(4, 9), lineage=4, branches={2: 1, 4: 5}) == 9


def test_a_version_of_a_newer_lineage_is_refused() -> None:
    with pytest.raises(ValueError, match="newer lineage"):
        age_at(step=8, version=Version(4, 6), lineage=3, branches={})


def test_credit_is_one_batch_per_version_of_staleness_and_one() -> None:
    assert max_groups_in_flight(max_staleness=2, batch_groups=16) == 48


def test_a_span_beyond_a_fork_is_as_old_as_its_newest_token() -> None:
    # lineage 5 left at step 0: 2-0 is shared, 2-1 lies beyond.
    first, last = Version(2, 0), Version(2, 1)

    assert oldest_age_at(step=2, first=first, last=last, lineage=2, branches={}) == 1
    assert oldest_age_at(step=2, first=first, last=last, lineage=5, branches={5: 0}) == 2


def test_what_was_sampled_over_a_change_of_lineage_has_no_known_age_beyond_a_fork() -> None:
    first, last = Version(1, 2), Version(2, 3)

    assert oldest_age_at(step=5, first=first, last=last, lineage=2, branches={}) == 2
    assert oldest_age_at(step=5, first=first, last=last, lineage=2, branches={2: 3}) == UNKNOWN_AGE
