"""The waits of this process at this moment: edges between named things, with the time that each began.

    with wait_graph.doing(wait_graph.slot(group_id, 3), "the workflow of"):         group -> slot
        with wait_graph.on(wait_graph.server("0-1"), "a stream on") as stream:      slot  -> server
            stream.moved()                                                something came

What runs inside ``doing`` waits in that thing's name, through tasks that it starts too. Invariant: an edge exists for
as long as its block runs, however it is left. An edge costs some microseconds and belongs around whole waits (a
completion, a fetch); ``moved`` stores a number and may be called for every event. Reports hold ages in seconds and no
times: the clocks of two processes cannot be compared.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import msgspec

from areal_async.protocol.events import Event

MAX_RECORDS = 200
"""Records in one report, some ten kilobytes: whole chains, the oldest first."""

TRAINER = "trainer"
CONTROLLER = "controller"
BROKER = "the broker"
ADMISSION = "admission"
ARMS = "arms"
"""The questions to arms, for whose answers nobody else waits."""

OfText = Callable[[str], str]
"""Names a thing by its id."""
OfNumber = Callable[[int], str]
"""Names a thing by its number."""

STALLED = "run.stalled"
ENDED = "ended"
"""State of a node that has left in good order and reports nothing more."""


def kind_of(entity: str) -> str:
    """Return the kind of a named thing: the first word of its name."""
    return entity.partition(" ")[0]


def rank(number: int) -> str:
    """Name one process of the trainer; the first one has the trainer's own name."""
    return f"rank {number}" if number else TRAINER


node: OfText = "node {}".format
room: OfText = "room on node {}".format
"""The free room on a node, which a node at its limit of groups waits for."""
server: OfText = "server {}".format
group: OfText = "group {}".format
slot: Callable[[str, int], str] = "slot {}.{}".format
"""Takes the group's id and the sibling."""
evaluation: OfText = "evaluation {}".format
arm: OfText = "arm {}".format
row: OfText = "row {}".format
cut: OfNumber = "cut {}".format
step: OfNumber = "step {}".format
checkpoint: OfNumber = "checkpoint {}".format
weights: OfText = "weights {}".format
"""A version that servers are to hold."""
files: OfText = "files of weights {}".format
"""The copy on disk that servers load a version from."""
publication: OfText = "publication {}".format
"""The publication of a version: its tensors are gathered, and sent or written."""


class WaitRecord(msgspec.Struct, frozen=True, array_like=True):
    """One wait in a report. An array on the wire: a node has many."""

    waiter: str
    on: str
    what: str
    """Words that go before ``on``, as ``a stream on``."""
    age_s: float
    """Time since the wait began."""
    quiet_s: float
    """Time since anything came of it, or of the waits below it."""
    num_more: int = 0
    """Number of other waits of the same waiter, which are livelier and left out."""


class WaitReport(msgspec.Struct, frozen=True):
    """The waits of one process."""

    records: list[WaitRecord] = []
    num_left_out: int = 0
    """Number of chains beyond the report's limit."""


class Stall(Event, frozen=True, kw_only=True, tag=STALLED):
    """The event of a run that makes no progress, and its cause."""

    quiet_s: int
    sentence: str
    culprit: str
    """Name of the thing at fault, from this module; several that wait for each other are joined by commas."""
    chain: list[str]
    """Names from the one that the run waits for to the culprit."""
    is_starting: bool
    """Whether the culprit has not begun to work; that has a deadline of its own, so nothing is done about it."""
    waits_for: dict[str, str]
    """Process -> what it waits for by its own report, or else does."""


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


class EndedWait(NamedTuple):
    """A wait that is over, by the monotonic clock of this process."""

    on: str
    since_s: float
    until_s: float


_waits: dict[Wait, None] = {}
_current: ContextVar[Wait | None] = ContextVar("areal_async_wait", default=None)
_ended: ContextVar[list[EndedWait] | None] = ContextVar("areal_async_ended_waits", default=None)


@contextmanager
def on(what_on: str, what: str = "", *, waiter: str | None = None) -> Iterator[Wait]:
    """Wait for something inside the block.

    Args:
        what_on: name of the thing that is waited for.
        what: words that go before the name.
        waiter: name of the thing that waits; ``None`` for the thing in whose name this code runs.
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
        if (ended := _ended.get()) is not None:
            ended.append(EndedWait(what_on, wait.since_s, time.monotonic()))


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
def recording_ended() -> Iterator[list[EndedWait]]:
    """Record the waits that end inside the block, in tasks that it starts too, to account for its time later."""
    ended: list[EndedWait] = []
    token = _ended.set(ended)
    try:
        yield ended
    finally:
        _ended.reset(token)


class PollingWaits:
    """The waits of a loop that polls whether they are over: one that stays keeps its age.

    All of them end with the ``with`` block.
    """

    def __init__(self) -> None:
        self._waits: dict[tuple[str, str], Wait] = {}

    def __enter__(self) -> "PollingWaits":
        return self

    def __exit__(self, *exc: object) -> None:
        self.replace("", ())

    def replace(self, waiter: str, ons: Iterable[str], what: str = "") -> None:
        """Have ``waiter`` wait for these things from now on, and end every other wait."""
        wanted = {(waiter, one) for one in ons}
        for gone in self._waits.keys() - wanted:
            del _waits[self._waits.pop(gone)]
        for new in wanted - self._waits.keys():
            wait = self._waits[new] = Wait(*new, what, None)
            _waits[wait] = None


def report(of: str, *, limit: int = MAX_RECORDS) -> WaitReport:
    """Return what the process ``of`` waits for now, and below each of these waits the quietest chain."""
    return report_on(list(_waits), of=of, now_s=time.monotonic(), limit=limit)


def report_on(waits: list[Wait], *, of: str, now_s: float, limit: int) -> WaitReport:
    """Return the report on these waits: whole chains, the oldest first."""
    tree = _Tree(waits)
    roots = sorted(tree.roots(of), key=lambda wait: wait.since_s)
    records: list[WaitRecord] = []
    for number, root in enumerate(roots):
        chain = tree.quietest_chain(root)
        if len(records) + len(chain) > limit:
            return WaitReport(records=records, num_left_out=len(roots) - number)
        for wait in chain:
            records.append(
                WaitRecord(
                    waiter=wait.waiter,
                    on=wait.on,
                    what=wait.what,
                    age_s=round(now_s - wait.since_s, 1),
                    quiet_s=round(now_s - tree.moved_s(wait), 1),
                    num_more=0 if wait.waiter == of else len(tree.below[wait.waiter]) - 1,
                )
            )
    return WaitReport(records=records)


class _Tree:
    """Waits by their waiter, with cycles where things wait for each other."""

    def __init__(self, waits: list[Wait]) -> None:
        self.below: dict[str, list[Wait]] = {}
        for wait in waits:
            self.below.setdefault(wait.waiter, []).append(wait)
        self._waited_for = {wait.on for wait in waits}

    def roots(self, of: str) -> list[Wait]:
        """Return all waits of the process itself, and the quietest of each waiter that no wait here is on."""
        others = [waiter for waiter in self.below if waiter != of and waiter not in self._waited_for]
        return self.below.get(of, []) + [self._quietest(waiter) for waiter in others]

    def quietest_chain(self, wait: Wait) -> list[Wait]:
        chain = [wait]
        while wait.on in self.below:
            wait = self._quietest(wait.on)
            if wait in chain:
                break
            chain.append(wait)
        return chain

    def moved_s(self, wait: Wait, above: frozenset[str] = frozenset()) -> float:
        """Return the monotonic time at which anything last came of a wait, or of those below it."""
        if wait.on in above:
            return wait.moved_s
        below = self.below.get(wait.on, [])
        return max([wait.moved_s, *(self.moved_s(one, above | {wait.on}) for one in below)])

    def _quietest(self, waiter: str) -> Wait:
        return min(self.below[waiter], key=self.moved_s)
