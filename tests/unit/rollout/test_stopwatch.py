"""Time that several calls share is counted once."""

from hypothesis import given
from hypothesis import strategies as st

from areal_async.rollout.stopwatch import Times, covered_s
from areal_async.telemetry.wait_graph import EndedWait

SECONDS = st.integers(0, 30)


@given(st.lists(st.tuples(SECONDS, SECONDS).map(sorted), max_size=8))
def test_covered_time_is_the_number_of_seconds_in_which_anything_ran(intervals: list[list[int]]) -> None:
    seconds = {second for since_s, until_s in intervals for second in range(since_s, until_s)}

    assert covered_s((float(since_s), float(until_s)) for since_s, until_s in intervals) == len(seconds)


def test_time_is_told_by_what_was_waited_for() -> None:
    times = Times.of(
        total_s=9.0,
        calls=[(1.0, 3.0), (2.0, 4.0)],
        waits=[EndedWait("tool add", 4.0, 6.0), EndedWait("reward right", 6.0, 7.0), EndedWait("server own", 1.0, 3.0)],
    )

    assert times == Times(total_s=9.0, model_s=3.0, tools_s=2.0, rewards_s=1.0)
