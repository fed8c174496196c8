"""What ends a node reaches the command line as the one error that caused it."""

from areal_async.errors import BusError, UserError
from areal_async.rollout.main import first_cause


def test_error_raised_on_purpose_is_found_however_deep() -> None:
    cause = UserError("model: no such folder")
    group = BaseExceptionGroup("a", [ValueError("aside"), BaseExceptionGroup("b", [cause])])

    assert first_cause(group) is cause


def test_first_of_several_is_taken() -> None:
    cause = BusError("gone")

    assert first_cause(ExceptionGroup("a", [cause, UserError("later")])) is cause


def test_error_of_another_kind_is_not_lost() -> None:
    cause = ZeroDivisionError("a mistake of ours")

    assert first_cause(ExceptionGroup("a", [ExceptionGroup("b", [cause])])) is cause
