"""Who waits for a place on a server, and who gets the next one."""

import asyncio
import itertools
from bisect import insort
from typing import Generic, NamedTuple, TypeVar

Place = TypeVar("Place")
Wanted = TypeVar("Wanted")


class Waiter(NamedTuple, Generic[Place, Wanted]):
    """One request."""

    number: int
    """Of its group; 0 where it has none."""
    nth: int
    """Which arrival it was."""
    place: asyncio.Future[Place]
    wanted: Wanted


class Line(Generic[Place, Wanted]):
    """First come, first served, but that of all groups the one that was admitted first goes first.

    The trainer waits for that group first. Where it is a group's turn, the oldest one takes it, whichever group's
    request has come so early; one without a group, of an evaluation or from outside, keeps its own turn.
    """

    def __init__(self) -> None:
        self._arrivals = itertools.count()
        self._alone: list[Waiter[Place, Wanted]] = []
        self._of_groups: list[Waiter[Place, Wanted]] = []
        """In the order in which they go."""
        self._turns: list[int] = []
        """Arrivals of groups' requests, the first one first: as many as wait."""

    def __len__(self) -> int:
        return len(self._alone) + len(self._of_groups)

    @property
    def first(self) -> Waiter[Place, Wanted]:
        """Who is next; there has to be one."""
        return self._next()[0]

    def join(self, place: asyncio.Future[Place], wanted: Wanted, *, number: int | None) -> Waiter[Place, Wanted]:
        """Take in a request.

        Args:
            number: its group's, as ``Ticket.number``; None where it has none.
        """
        waiter = Waiter(number or 0, next(self._arrivals), place, wanted)
        if number is None:
            self._alone.append(waiter)
        else:
            insort(self._of_groups, waiter)
            self._turns.append(waiter.nth)
        return waiter

    def leave(self, waiter: Waiter[Place, Wanted]) -> None:
        """Forget one that waits no longer."""
        if waiter in self._alone:
            self._alone.remove(waiter)
        else:
            self._of_groups.remove(waiter)
            self._turns.pop()

    def pop(self) -> Waiter[Place, Wanted]:
        """Take out who is next."""
        line = self._next()
        if line is self._of_groups:
            self._turns.pop(0)
        return line.pop(0)

    def _next(self) -> list[Waiter[Place, Wanted]]:
        is_alone_first = self._alone and (not self._turns or self._alone[0].nth < self._turns[0])
        return self._alone if is_alone_first else self._of_groups
