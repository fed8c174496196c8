"""A node is gone for good when it alone has been silent for long; whoever cannot hear says nothing of others."""

import pytest

from areal_async.controller.failure_detector import FailureDetector


def _pass(absence: FailureDetector, *, start_s: float, seconds: int, speaking: tuple[str, ...] = ()) -> float:
    """Let time pass as a controller sees it that hears itself, and these nodes, each second."""
    for second in range(1, seconds + 1):
        absence.tick(start_s + second)
        for node_id in speaking:
            absence.hear(node_id)
    return start_s + seconds


@pytest.fixture
def absence() -> FailureDetector:
    absence = FailureDetector(lost_s=30, deaf_s=3)
    absence.tick(100.0)
    absence.see("server.a-0", "a", 1)
    absence.see("server.b-0", "b", 2)
    return absence


def test_a_node_that_is_silent_among_others_is_gone_after_the_whole_time(absence: FailureDetector) -> None:
    now_s = _pass(absence, start_s=100.0, seconds=30, speaking=("b",))
    assert absence.gone(["a", "b"]) == set()

    _pass(absence, start_s=now_s, seconds=1, speaking=("b",))

    assert absence.gone(["a", "b"]) == {"a"}
    assert absence.silent_s("a") == 31


def test_time_in_which_the_controller_does_not_hear_itself_makes_nobody_silent(absence: FailureDetector) -> None:
    now_s = _pass(absence, start_s=100.0, seconds=20)
    now_s = _pass(absence, start_s=now_s + 3600, seconds=10)

    assert absence.gone(["a", "b"]) == set()

    _pass(absence, start_s=now_s, seconds=2)
    assert absence.gone(["a", "b"]) == {"a", "b"}


def test_a_word_about_its_server_counts_as_heard_and_a_word_of_the_controller_does_not(
    absence: FailureDetector,
) -> None:
    now_s = _pass(absence, start_s=100.0, seconds=29)
    absence.see("server.a-0", "a", 7)
    absence.note_own("server.b-0", 8)
    absence.see("server.b-0", "b", 8)

    _pass(absence, start_s=now_s, seconds=5)

    assert absence.gone(["a", "b"]) == {"b"}


def test_a_node_that_this_controller_never_heard_gets_the_whole_time_from_first_sight(absence: FailureDetector) -> None:
    now_s = _pass(absence, start_s=100.0, seconds=300)
    absence.see("server.c-0", "c", 9)

    assert absence.gone(["c"]) == set()
    assert absence.gone(["d"]) == set()  # of which nothing at all is known
    _pass(absence, start_s=now_s, seconds=31)
    assert absence.gone(["c", "d"]) == {"c", "d"}
