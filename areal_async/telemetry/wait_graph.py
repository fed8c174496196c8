"""What this process waits for at this moment, as edges between named things: who waits for what, and since when.

    with waits.doing(waits.slot(group_id, 3), "the workflow of"):         group -> slot
        with waits.on(waits.server("0-1"), "a stream on") as stream:      slot  -> server
            stream.moved()                                                something came

What runs inside ``doing`` waits in that thing's name, through tasks that it starts too. Invariant: an edge exists for
as long as its block runs, however it is left. An edge costs some microseconds and belongs around whole waits (a
completion, a fetch); ``moved`` stores a number and may be called for every event. Ages leave the process, never
times: clocks of two processes have nothing to say to each other.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import msgspec

from areal_async.protocol.events import Event

MAX_RECORDS = 200
"""Waits that a process tells of at once, some ten kilobytes: whole chains, those that began first before the others."""

TRAINER = "trainer"
CONTROLLER = "controller"
BROKER = "the broker"
ADMISSION = "admission"

STALLED = "run.stalled"
ENDED = "ended"
"""The state in which a node leaves in good order: nothing more is to be heard of it."""


def kind_of(entity: str) -> str:
    """Return the first word of a name: what kind of thing it is of."""
    return entity.partition(" ")[0]


def rank(number: int) -> str:
    """Name one process of the trainer; the first one speaks for it."""
    return f"rank {number}" if number else TRAINER


def node(node_id: str) -> str:
    return f"node {node_id}"


def room(node_id: str) -> str:
    """Name what a node has none of while it runs as many groups as it may."""
    return f"room on node {node_id}"


def server(server_id: str) -> str:
    return f"server {server_id}"


def group(group_id: str) -> str:
    return f"group {group_id}"


def slot(group_id: str, sibling: int) -> str:
    return f"slot {group_id}.{sibling}"


def evaluation(eval_id: str) -> str:
    return f"evaluation {eval_id}"


def cut(step: int) -> str:
    return f"cut {step}"


def step(number: int) -> str:
    return f"step {number}"


def checkpoint(step: int) -> str:
    return f"checkpoint {step}"


def weights(version: str) -> str:
    """Name a version that servers are to hold."""
    return f"weights {version}"


def files(version: str) -> str:
    """Name the copy on disk that servers load a version from."""
    return f"files of weights {version}"


def publication(version: str) -> str:
    """Name the making of a version: gathered, and sent or written."""
    return f"publication {version}"


def row(answer: str) -> str:
    return f"row {answer}"


class WaitRecord(msgspec.Struct, frozen=True, array_like=True):
    """One wait as it is told to others. An array on the wire: a node has many."""

    waiter: str
    on: str
    what: str
    """Goes before ``on``: ``a stream on``."""
    age_s: float
    """Since it began."""
    quiet_s: float
    """Since anything came of it, or of what is waited for below it."""
    num_more: int = 0
    """Other waits of the same waiter, which are livelier and not told."""


class WaitReport(msgspec.Struct, frozen=True):
    """What one process waits for."""

    records: list[WaitRecord] = []
    num_left_out: int = 0
    """Waits beyond what is told at once."""


class Stall(Event, frozen=True, kw_only=True, tag=STALLED):
    """The event that says that the run stands still, and why."""

    quiet_s: int
    sentence: str
    culprit: str
    """A name from this module; several that wait for each other are joined by commas."""
    chain: list[str]
    """From the one that the run waits for to the culprit."""
    is_starting: bool
    """The culprit has not begun to work; for that it has a deadline of its own, so nothing is done about it."""
    waits_for: dict[str, str]
    """What each process says that it waits for, or else does."""


class Wait:
    """One wait, while it lasts."""

    __slots__ = ("moved_s", "on", "parent", "since_s", "waiter", "what")

    def __init__(self, waiter: str, on: str, what: str, parent: "Wait | None") -> None:
        self.waiter = waiter
        self.on = on
        self.what = what
        self.parent = parent
        self.since_s = self.moved_s = time.monotonic()

    def moved(self) -> None:
        """Note that something came."""
        self.moved_s = time.monotonic()


class Ended(NamedTuple):
    """A wait that is over, by the monotonic clock of this process."""

    on: str
    since_s: float
    until_s: float


_waits: dict[Wait, None] = {}
_current: ContextVar[Wait | None] = ContextVar("areal_async_wait", default=None)
_kept: ContextVar[list[Ended] | None] = ContextVar("areal_async_kept_waits", default=None)


@contextmanager
def on(what_on: str, what: str = "", *, waiter: str | None = None) -> Iterator[Wait]:
    """Wait for something inside the block.

    Args:
        what_on: the thing that is waited for.
        what: of it; goes before its name.
        waiter: who waits; ``None`` for the thing in whose name this code runs.
    """
    parent = _current.get()
    wait = Wait(waiter or (parent.on if parent is not None else ""), what_on, what, parent)
    _waits[wait] = None
    if parent is not None:
        parent.moved_s = wait.since_s
    try:
        yield wait
    finally:
        del _waits[wait]
        if parent is not None:
            parent.moved()
        if (kept := _kept.get()) is not None:
            kept.append(Ended(what_on, wait.since_s, time.monotonic()))


@contextmanager
def doing(what_on: str, what: str = "", *, waiter: str | None = None) -> Iterator[Wait]:
    """As ``on``; what runs inside the block waits in the name of ``what_on``."""
    with on(what_on, what, waiter=waiter) as wait:
        token = _current.set(wait)
        try:
            yield wait
        finally:
            _current.reset(token)


@contextmanager
def keeping() -> Iterator[list[Ended]]:
    """Keep what ends inside the block, in tasks that it starts too: to say later where its time has gone."""
    kept: list[Ended] = []
    token = _kept.set(kept)
    try:
        yield kept
    finally:
        _kept.reset(token)


class PollingWaits:
    """The waits of somebody who looks again and again whether they are over: those that stay keep their age.

    They end with its ``with`` block at the latest.
    """

    def __init__(self) -> None:
        self._mine: dict[tuple[str, str], Wait] = {}

    def __enter__(self) -> "PollingWaits":
        return self

    def __exit__(self, *exc: object) -> None:
        self.replace("", ())

    def replace(self, waiter: str, ons: Iterable[str], what: str = "") -> None:
        """Wait for these things from now on, and for nothing else."""
        wanted = {(waiter, one) for one in ons}
        for gone in self._mine.keys() - wanted:
            del _waits[self._mine.pop(gone)]
        for new in wanted - self._mine.keys():
            wait = self._mine[new] = Wait(*new, what, None)
            _waits[wait] = None


def report(of: str, *, limit: int = MAX_RECORDS) -> WaitReport:
    """Return what the process ``of`` waits for now, and below each of these waits the quietest chain."""
    return tell(list(_waits), of=of, now_s=time.monotonic(), limit=limit)


def tell(waits: list[Wait], *, of: str, now_s: float, limit: int) -> WaitReport:
    """Return the report on these waits: chains, the one that began first before the others."""
    tree = _Tree(waits)
    firsts = sorted(tree.firsts(of), key=lambda wait: wait.since_s)
    records: list[WaitRecord] = []
    for number, first in enumerate(firsts):
        chain = tree.quietest_chain(first)
        if len(records) + len(chain) > limit:
            return WaitReport(records=records, num_left_out=len(firsts) - number)
        for wait in chain:
            records.append(
                WaitRecord(
                    waiter=wait.waiter,
                    on=wait.on,
                    what=wait.what,
                    age_s=round(now_s - wait.since_s, 1),
                    quiet_s=round(now_s - tree.moved_s(wait), 1),
                    num_more=0 if wait.waiter == of else tree.num_of(wait.waiter) - 1,
                )
            )
    return WaitReport(records=records)


class _Tree:
    """Waits by their waiter. Circles are possible, and no reason to hang."""

    def __init__(self, waits: list[Wait]) -> None:
        self._below: dict[str, list[Wait]] = {}
        for wait in waits:
            self._below.setdefault(wait.waiter, []).append(wait)
        self._waited_for = {wait.on for wait in waits}

    def num_of(self, waiter: str) -> int:
        return len(self._below[waiter])

    def firsts(self, of: str) -> list[Wait]:
        """Return all waits of the process itself, and one of each waiter for whom nobody here waits."""
        others = [waiter for waiter in self._below if waiter != of and waiter not in self._waited_for]
        return self._below.get(of, []) + [self._quietest(waiter) for waiter in others]

    def quietest_chain(self, wait: Wait) -> list[Wait]:
        chain = [wait]
        while wait.on in self._below:
            wait = self._quietest(wait.on)
            if wait in chain:
                break
            chain.append(wait)
        return chain

    def moved_s(self, wait: Wait, above: frozenset[str] = frozenset()) -> float:
        """Return when anything last came of a wait, or of those below it."""
        if wait.on in above:
            return wait.moved_s
        below = self._below.get(wait.on, [])
        return max([wait.moved_s, *(self.moved_s(one, above | {wait.on}) for one in below)])

    def _quietest(self, waiter: str) -> Wait:
        return min(self._below[waiter], key=self.moved_s)
