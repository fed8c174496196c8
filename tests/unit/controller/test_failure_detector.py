"""A node is gone for good when it alone has been silent for long; whoever cannot hear says nothing of others."""

import pytest

from areal_async.controller.processes.failure_detector import FailureDetector


def _pass(detector: FailureDetector, *, start_s: float, seconds: int, speaking: tuple[str, ...] = ()) -> float:
    """Let time pass as a controller sees it that hears itself, and these nodes, each second."""
    for second in range(1, seconds + 1):
        detector.tick(start_s + second)
        for node_id in speaking:
            detector.on_report(node_id)
    return start_s + seconds


@pytest.fixture
def detector() -> FailureDetector:
    detector = FailureDetector(lost_s=30, deaf_s=3)
    detector.tick(100.0)
    detector.on_server_state("server.a-0", "a", 1)
    detector.on_server_state("server.b-0", "b", 2)
    return detector


def test_a_node_that_is_silent_among_others_is_gone_after_the_whole_time(detector: FailureDetector) -> None:
    now_s = _pass(detector, start_s=100.0, seconds=30, speaking=("b",))
    assert detector.gone(["a", "b"]) == set()

    _pass(detector, start_s=now_s, seconds=1, speaking=("b",))

    assert detector.gone(["a", "b"]) == {"a"}
    assert detector.silent_s("a") == 31


def test_time_in_which_the_controller_does_not_hear_itself_makes_nobody_silent(detector: FailureDetector) -> None:
    now_s = _pass(detector, start_s=100.0, seconds=20)
    now_s = _pass(detector, start_s=now_s + 3600, seconds=10)

    assert detector.gone(["a", "b"]) == set()

    _pass(detector, start_s=now_s, seconds=2)
    assert detector.gone(["a", "b"]) == {"a", "b"}


def test_a_word_about_its_server_counts_as_heard_and_a_word_of_the_controller_does_not(
    detector: FailureDetector,
) -> None:
    now_s = _pass(detector, start_s=100.0, seconds=29)
    detector.on_server_state("server.a-0", "a", 7)
    detector.note_own("server.b-0", 8)
    detector.on_server_state("server.b-0", "b", 8)

    _pass(detector, start_s=now_s, seconds=5)

    assert detector.gone(["a", "b"]) == {"b"}


def test_a_node_that_this_controller_never_heard_gets_the_whole_time_from_first_sight(
    detector: FailureDetector,
) -> None:
    now_s = _pass(detector, start_s=100.0, seconds=300)
    detector.on_server_state("server.c-0", "c", 9)

    assert detector.gone(["c"]) == set()
    assert detector.gone(["d"]) == set()  # of which nothing at all is known
    _pass(detector, start_s=now_s, seconds=31)
    assert detector.gone(["c", "d"]) == {"c", "d"}
