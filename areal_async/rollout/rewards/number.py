"""What user code gives as a number: a reward, or a metric of its own. Pure; imports no library of arrays."""

import inspect
import math
import numbers
from typing import Any

from areal_async.errors import RolloutError
from areal_async.rollout.user_code.boundary import shown


def finite_number(value: Any, *, got: str, need: str, error: type[RolloutError]) -> float:
    """Return a number that user code gave; it may be in an array or a tensor without dimensions.

    Args:
        got: begins the sentence: who gave what.
        need: what would do, where it is no number at all.

    Raises:
        RolloutError: an ``error``: it is none, or not finite.
    """
    if type(value) is float and math.isfinite(value):  # what nearly every workflow returns
        return value
    check_awaited(value, got=got, error=error)
    number = value.item() if getattr(value, "ndim", None) == 0 else value
    if not isinstance(number, numbers.Real):  # bool and int are
        raise error(f"{got} {shown(value)}, need {need}")
    try:
        finite = float(number)
    except OverflowError:
        finite = math.inf
    if not math.isfinite(finite):
        raise error(f"{got} {shown(value)}, need a finite number")
    return finite


def check_awaited(value: object, *, got: str, error: type[RolloutError]) -> None:
    """Refuse what an ``async def`` gives before it is awaited, and close it: Python would warn of it much later.

    Raises:
        RolloutError: an ``error``: it is that.
    """
    if not inspect.isawaitable(value):
        return
    what = shown(value)
    if inspect.iscoroutine(value):
        what = f"{value.__name__}(...)"
        value.close()
    raise error(f"{got} {what}, which was not awaited; write await before the call")
