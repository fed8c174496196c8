"""A change on the command line is a setting and a number, or a mistake that is told in a sentence."""

import pytest

from areal_async.cli.orders import change_of
from areal_async.errors import UserError


def test_numbers_stay_what_they_are_written_as() -> None:
    assert change_of("trainer.lr=1e-6") == ("trainer.lr", 1e-6)
    setting, value = change_of("rollout.max_staleness=2")
    assert (setting, value, type(value)) == ("rollout.max_staleness", 2, int)


@pytest.mark.parametrize("text", ["trainer.lr", "trainer.lr=", "trainer.lr=fast"])
def test_what_is_no_change_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"need SETTING=NUMBER"):
        change_of(text)
