"""A purge takes settled messages and nothing else, whatever else the stream holds; little is ever held back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.bus.sweep import FEW, MAX_HELD, StoredSequences, must_ack, settled_prefix


def stored_of(sequences: set[int], *, last: int) -> StoredSequences:
    """What a broker says of a stream that has given out the sequences up to ``last`` and still stores these."""
    first = min(sequences, default=last + 1)
    return StoredSequences(first, last, frozenset(range(first, last + 1)) - sequences)


@given(st.sets(st.integers(1, 30)), st.sets(st.integers(1, 30)))
def test_a_purge_takes_every_settled_message_before_the_first_other_one(stored: set[int], settled: set[int]) -> None:
    newest = settled_prefix(stored_of(stored, last=30), settled)

    taken = {sequence for sequence in stored if sequence <= newest}
    rest = stored - taken
    assert taken <= settled
    assert not rest or min(rest) not in settled
    assert newest == max(taken, default=0)


def test_what_is_not_stored_any_more_is_not_purged_again() -> None:
    assert settled_prefix(stored_of({3, 4, 7}, last=9), {1, 3, 4, 5, 9}) == 4
    assert settled_prefix(stored_of(set(), last=4), {1, 4}) == 0


@pytest.mark.parametrize(
    ("num_held", "has_room", "must"),
    [
        (FEW, True, True),
        (FEW + 1, True, False),
        (FEW + 1, False, True),
        (MAX_HELD, True, False),
        (MAX_HELD + 1, True, True),
    ],
)
def test_settled_messages_wait_for_older_ones_unless_they_are_few_or_many_or_in_the_way(
    num_held: int, has_room: bool, must: bool
) -> None:
    assert must_ack(num_held, has_room=has_room) is must
