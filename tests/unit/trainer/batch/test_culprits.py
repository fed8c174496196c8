"""What a step fails with is found by halves, and nobody is blamed for what is not a group's fault."""

from collections.abc import Sequence

import pytest

from areal_async.trainer.batch.culprits import find_culprits, said_by

pytestmark = pytest.mark.anyio

GROUPS = [f"0-{number}-0" for number in range(64)]


class Step:
    """Fails with some groups, or with any at all."""

    def __init__(self, *bad: str, always: bool = False) -> None:
        self._bad = set(bad)
        self._always = always
        self.num_attempts = 0

    async def attempt(self, groups: Sequence[str]) -> str:
        self.num_attempts += 1
        bad = sorted(self._bad & set(groups))
        return f"fails with {bad[0]}" if bad else "broken" if self._always else ""


@pytest.mark.parametrize("bad", [GROUPS[:1], GROUPS[-1:], [GROUPS[3], GROUPS[4], GROUPS[40]]])
async def test_the_groups_that_fail_are_found_each_with_its_reason(bad: list[str]) -> None:
    step = Step(*bad)

    assert await find_culprits(GROUPS, "it failed", step.attempt) == {name: f"fails with {name}" for name in bad}
    assert step.num_attempts <= 1 + 12 * len(bad)


async def test_one_group_alone_is_to_blame_where_nothing_without_it_fails() -> None:
    assert await find_culprits(GROUPS[:1], "it failed", Step(GROUPS[0]).attempt) == {GROUPS[0]: "it failed"}


@pytest.mark.parametrize("step", [Step(), Step(*GROUPS[:4]), Step(always=True)])
async def test_nobody_is_blamed_for_what_fails_without_them_or_once_or_with_everyone(step: Step) -> None:
    assert await find_culprits(GROUPS[:4], "it failed", step.attempt) == {}


async def test_one_group_alone_is_not_to_blame_where_nothing_at_all_fails_too() -> None:
    assert await find_culprits(GROUPS[:1], "it failed", Step(always=True).attempt) == {}


def test_an_error_is_told_with_its_kind() -> None:
    assert said_by(ExceptionGroup("calls", [ValueError("a row"), KeyError("x")])) == "ValueError: a row"
    assert said_by(AssertionError()) == "AssertionError: "
