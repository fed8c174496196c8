"""Of the streams' account the others have what their role may do, and no circle through which a broker would refuse."""

from pathlib import Path

import pytest

from areal_async.bus.accounts import accounts, covers
from areal_async.bus.api import TRY_DEADLINE_S
from areal_async.bus.inbox import GRACE_S, MOST_PULL_S
from areal_async.bus.permissions import Role, permissions
from areal_async.protocol.subjects import Names

RUN = Names("test")


@pytest.mark.parametrize(
    ("pattern", "subject", "is_covered"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.*", "a.*", True),
        ("a.*", "a.>", False),
        ("a.b", "a.*", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a.b.>", True),
        ("a.>", "a.>", True),
        ("a.>", "a", False),
        ("a.*.>", "a.b.c", True),
        ("a.*.>", "a.>", False),
        (">", "a", True),
        ("a.b.>", "a.>", False),
    ],
)
def test_a_pattern_covers_what_matches_it_whatever_else_matches(pattern: str, subject: str, is_covered: bool) -> None:
    assert covers(pattern, subject) is is_covered


def test_every_account_but_the_streams_imports_what_its_role_may_publish_and_nothing_else(tmp_path: Path) -> None:
    made = accounts(RUN, tmp_path / "keys")
    owner = RUN.account(Role.OPERATOR)

    assert list(made) == [RUN.account(role) for role in Role]
    assert [name for name, account in made.items() if "jetstream" in account] == [owner]
    assert made[owner]["imports"] == []
    for role in set(Role) - {Role.OPERATOR}:
        asked = [one["service"] for one in made[RUN.account(role)]["imports"] if "service" in one]
        assert {one["account"] for one in asked} == {owner}
        assert sorted(one["subject"] for one in asked) == sorted(permissions(role, RUN).publish)


def test_no_two_exports_of_an_account_match_the_same_unless_one_is_named_by_who_imports_it(tmp_path: Path) -> None:
    """Of two that match, the broker takes any: it would answer once where it was to answer often."""
    made = accounts(RUN, tmp_path / "keys")

    for account in made.values():
        subjects = [one["service"] for one in account["exports"] if "service" in one]
        assert len(subjects) == len(set(subjects))
        assert [(a, b) for a in subjects for b in subjects if a != b and covers(a, b)] == []


def test_the_broker_remembers_whom_it_is_to_answer_for_longer_than_a_pull_or_a_read_lasts(tmp_path: Path) -> None:
    """A ticket that answers a pull whose asker is forgotten goes to nobody, and comes again when its lease is over."""
    exports = accounts(RUN, tmp_path / "keys")[RUN.account(Role.OPERATOR)]["exports"]
    kept_s = {
        one["service"]: float(one["response_threshold"].removesuffix("s"))
        for one in exports
        if "response_threshold" in one
    }

    pulls = [kept for service, kept in kept_s.items() if ".MSG.NEXT." in service]
    reads = [kept for service, kept in kept_s.items() if ".DIRECT.GET." in service]
    assert min(pulls) > MOST_PULL_S + GRACE_S
    assert min(reads) > TRY_DEADLINE_S
    assert max(reads) < min(pulls)
