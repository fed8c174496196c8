"""What each event loop of a process has one of, made when it is first asked for."""

from collections.abc import Callable
from typing import Generic, TypeVar

from anyio.lowlevel import RunVar

T = TypeVar("T")


class PerLoop(Generic[T]):
    """One value for each event loop, which ends with it."""

    def __init__(self, name: str, make: Callable[[], T]) -> None:
        self._value: RunVar[T] = RunVar(name)
        self._make = make

    def get(self) -> T:
        """Return the running loop's."""
        try:
            return self._value.get()
        except LookupError:
            self._value.set(value := self._make())
            return value
