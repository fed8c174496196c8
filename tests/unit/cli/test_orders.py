"""A change on the command line is a setting and a number, or a mistake that is told in a sentence."""

import pytest

from areal_async.cli.orders import change_of
from areal_async.errors import UserError


def test_numbers_stay_what_they_are_written_as() -> None:
    assert change_of("trainer.lr=1e-6") == ("trainer.lr", 1e-6)
    setting, value = change_of("rollout.max_staleness=2")
    assert (setting, value, type(value)) == ("rollout.max_staleness", 2, int)


@pytest.mark.parametrize("text", ["trainer.lr", "trainer.lr=", "trainer.lr=fast", "trainer.lr=" + "9" * 5000])
def test_what_is_no_change_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"need SETTING=NUMBER"):
        change_of(text)


@pytest.mark.parametrize("number", ["inf", "-inf", "nan", "1e999", "1e16", "9" * 310, "-" + "9" * 20])
def test_a_number_that_could_not_be_kept_exactly_is_refused(number: str) -> None:
    with pytest.raises(UserError, match=r"--set: got .*, need a finite number of at most 9007199254740992"):
        change_of(f"trainer.lr={number}")
