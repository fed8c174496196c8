"""A session has one arm, arms have their shares of many sessions, and a share that grows moves no more than it must."""

import pytest

from areal_async.errors import UserError
from areal_async.serving.split import Share, choose, read_split, session_id

SESSIONS = [session_id("ann", str(number)) for number in range(20_000)]


def test_split_is_read_as_it_is_written() -> None:
    assert read_split("champion=0.9,candidate=0.1") == [Share("champion", 0.9), Share("candidate", 0.1)]
    assert read_split(" 1-20=0.5 , best=0.5 ") == [Share("1-20", 0.5), Share("best", 0.5)]


@pytest.mark.parametrize(
    "text",
    ["", "champion", "champion=", "champion=x", "a=0.5,a=0.5", "a=0.9", "a=0.9,b=0.2", "a=1.5,b=-0.5", "a=nan", "a=inf",
     "a b=1", "=1", ",".join(f"a{number}=0.05" for number in range(20))],
)  # fmt: skip
def test_what_is_no_split_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError, match=r"--split: got .*champion=0\.9,candidate=0\.1"):
        read_split(text)


def test_each_arm_has_its_share_of_sessions() -> None:
    shares = read_split("a=0.7,b=0.2,c=0.1")

    arms = [choose(shares, session) for session in SESSIONS]

    for arm, share in shares:
        assert arms.count(arm) / len(arms) == pytest.approx(share, abs=0.015)
    assert [choose(shares, session) for session in SESSIONS] == arms


def test_only_those_sessions_move_that_a_share_grows_over() -> None:
    before, after = read_split("a=0.9,b=0.1"), read_split("a=0.8,b=0.2")

    moved = [(choose(before, one), choose(after, one)) for one in SESSIONS]

    assert {pair for pair in moved if pair[0] != pair[1]} == {("a", "b")}
    assert sum(one != other for one, other in moved) / len(moved) == pytest.approx(0.1, abs=0.01)


def test_the_last_place_is_the_last_arms() -> None:
    thirds = [Share(arm, 0.333333) for arm in "abc"]

    assert choose(thirds, "f" * 16) == "c"
    assert choose(thirds, "0" * 16) == "a"


def test_a_session_does_not_tell_what_its_client_calls_it_and_is_of_one_key() -> None:
    assert "ann@example.org" not in session_id("k", "ann@example.org")
    assert session_id("k", "1") != session_id("other", "1")
