"""Rows of ``top``'s panes: which columns they have, what stands in them, and in what order. Pure."""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from areal_async.monitor.display import sparkline
from areal_async.monitor.durations import duration_text, seconds_since
from areal_async.monitor.snapshot import OK, Member
from areal_async.monitor.view import event_text, number
from areal_async.process.json_lines import Line
from areal_async.protocol.types import Version, mean
from areal_async.telemetry.wait_graph import WaitRecord

ROLE_ORDER = ("broker", "controller", "trainer", "node")
UNBOUNDED = 1 << 30
"""A limit of requests from which on it is none."""
BAD_EVENTS = (
    "role.lost", "server.fenced", "run.stalled", "alarm.raised", "group.dead", "message.buried", "checkpoint.damaged",
)  # fmt: skip
NUM_CURVE_STEPS = 20
NUM_TASK_STEPS = 10
"""Newest steps over which a task's groups are counted and its rewards averaged."""
MAX_KEYS = 1 << 15
_DIGITS = re.compile(r"(\d+)")

T = TypeVar("T")


class Row(NamedTuple):
    """One line of a pane."""

    cells: tuple[str, ...]
    style: str = ""


class PaneRows(Generic[T]):
    """Rows of a pane in their order, each laid out when it is looked at: of thousands a screen shows forty."""

    def __init__(self, items: Sequence[T], lay_out: Callable[[T], Row]) -> None:
        self._items = items
        self._lay_out = lay_out

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Row]:
        return map(self._lay_out, self._items)

    def __getitem__(self, part: slice) -> list[Row]:
        return [self._lay_out(item) for item in self._items[part]]

    def having(self, text: str) -> "PaneRows[T]":
        """Return those with a text in them, whether its letters are large or small; for that all are laid out."""
        wanted = text.casefold()
        pairs = zip(self._items, self, strict=True)
        return PaneRows([item for item, row in pairs if wanted in " ".join(row.cells).casefold()], self._lay_out)


class Column(NamedTuple):
    """A column of a pane."""

    name: str
    is_number: bool = False
    """Stands at the right."""
    is_left_out: int = 0
    """Rank in which columns are left out of a narrow terminal, 1 first; 0 never."""


@dataclass(frozen=True, slots=True)
class Pane(Generic[T]):
    """How one kind of thing is shown."""

    columns: tuple[Column, ...]
    lay_out: Callable[[T], Row]
    sorts: Mapping[str, Callable[[T], Any] | None]
    """Name -> what the rows are sorted by, the usual one first; None leaves them in the order in which they come."""

    def rows(self, items: Iterable[T], sort: str) -> PaneRows[T]:
        """Return a row for each of some things."""
        key = self.sorts[sort]
        return PaneRows(list(items) if key is None else sorted(items, key=key), self.lay_out)


Server = Mapping[str, Any]
"""A server of the status, with what its node tells of it."""
Told = tuple[str, WaitRecord]
"""A wait, after who tells it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One of a run's several."""

    name: str
    share: float | None
    """The task's share of the prompts that are admitted now; None where nobody says."""
    ratio: float | None
    """The ratio as it was changed while the run went on; None where it was not."""
    num_groups: int
    """Groups trained in the newest ``NUM_TASK_STEPS``."""
    rewards: tuple[float, ...]
    """Mean reward of each step that had one, oldest first."""
    reward: float | None
    """Mean over the rewards of the newest ``NUM_TASK_STEPS``."""


def task_names(steps: Sequence[Line], shares: Mapping[str, float]) -> list[str]:
    """Return a run's tasks in the order of its settings; none where it has a single one."""
    groups = "groups/"
    return list(shares) or [key.removeprefix(groups) for key in (steps[-1] if steps else {}) if key.startswith(groups)]


def tasks_of(steps: Sequence[Line], shares: Mapping[str, float], changes: Mapping[str, float]) -> list[Task]:
    """Return what is known of each."""
    return [
        _task(name, steps, share=shares.get(name), ratio=changes.get(f"tasks.{place}.ratio"))
        for place, name in enumerate(task_names(steps, shares))
    ]


def _task(name: str, steps: Sequence[Line], *, share: float | None, ratio: float | None) -> Task:
    key, newest = f"reward/{name}", list(steps)[-NUM_TASK_STEPS:]
    of_late = [number(line, key) for line in newest if key in line]
    return Task(
        name=name,
        share=share,
        ratio=ratio,
        num_groups=int(sum(number(line, f"groups/{name}") for line in newest)),
        rewards=tuple(number(line, key) for line in steps if key in line),
        reward=mean(of_late) if of_late else None,
    )


def _process_row(member: Member) -> Row:
    is_there = member.presence == OK
    cells = (
        f"{member.role} {member.instance}",
        member.presence,
        duration_text(member.up_s) if member.up_s else "",
        f"{1000 * member.loop_lag_s:.0f}" if member.loop_lag_s else "",
        str(member.num_starts or ""),
        member.state if is_there else member.why or member.state,
        member.waits_for,
    )
    return Row(cells, "" if is_there else "red")


def _server_row(server: Server) -> Row:
    limit, num_swaps = int(number(server, "limit")), int(number(server, "num_swaps"))
    requests = f"{int(number(server, 'num_requests'))}" + (f"/{limit}" if 0 < limit < UNBOUNDED else "")
    state = f"fenced: {server['reason']}" if server["is_fenced"] else str(server.get("fence") or "serves")
    state += f", waits for {server['waits_for']}" if server.get("waits_for") else ""
    after = f" (last failure: {server['failure']})" if server.get("failure") else ""
    has_first = isinstance(server.get("first_token_mean_s"), int | float)
    cells = (
        str(server["id"]),
        str(server["version"] or "none"),
        f"{number(server, 'tokens_per_s'):.0f}",
        requests,
        f"{1000 * number(server, 'first_token_mean_s'):.0f}" if has_first else "",
        str(int(number(server, "outstanding_tokens"))),
        str(num_swaps),
        f"{1000 * number(server, 'swap_total_s') / num_swaps:.0f}" if num_swaps else "",
        state + after,
    )
    return Row(cells, "red" if server["is_fenced"] else "")


def _wait_row(told: Told) -> Row:
    teller, one = told
    more = f" and {one.num_more} more" if one.num_more else ""
    return Row((f"{one.quiet_s:.1f}", f"{one.age_s:.1f}", one.waiter or teller, f"{one.what} {one.on}{more}".strip()))


def _lease_row(told: Told) -> Row:
    node, one = told
    cells = (
        f"{one.age_s:.1f}",
        f"{one.quiet_s:.1f}",
        node.removeprefix("node "),
        one.waiter.removeprefix("group "),
        f"{one.what} {one.on}".strip(),
    )
    return Row(cells)


def _task_row(task: Task) -> Row:
    cells = (
        "" if task.share is None else f"{task.share:.1%}",
        "" if task.ratio is None else f"{task.ratio:.6g}",
        str(task.num_groups),
        "" if task.reward is None else f"{task.reward:.3f}",
        task.name,
        sparkline(task.rewards[-NUM_CURVE_STEPS:]),
    )
    return Row(cells, "dim" if task.share == 0 else "")


def _event_row(event: Mapping[str, Any]) -> Row:
    return Row(
        (duration_text(seconds_since(str(event.get("at", "")))), event_text(event)),
        "red" if str(event.get("event")) in BAD_EVENTS else "",
    )


@functools.lru_cache(MAX_KEYS)  # the same names come with every answer
def natural(text: str) -> tuple[tuple[int, str], ...]:
    """Return what sorts ``0-10`` after ``0-2``, however many digits a number has."""
    parts = [(part.isdecimal(), part) for part in _DIGITS.split(text)]
    return tuple((len(part.lstrip("0")), part.lstrip("0")) if is_number else (-1, part) for is_number, part in parts)


def _version(text: str) -> tuple[int, int]:
    try:
        return Version.parse(text)
    except ValueError:
        return -1, -1


def _name_of(member: Member) -> tuple[Any, ...]:
    return ROLE_ORDER.index(member.role), natural(member.instance)


def _waiter_of(told: Told) -> str:
    teller, record = told
    return record.waiter or teller


def _id_of(server: Server) -> tuple[Any, ...]:
    return natural(str(server["id"]))


PANES: dict[str, Pane[Any]] = {
    "processes": Pane(
        (
            Column("process"), Column(""), Column("up", True, 2), Column("lag ms", True), Column("starts", True, 1),
            Column("does"), Column("waits for"),
        ),
        _process_row,
        {
            "trouble": lambda one: (one.presence == OK, _name_of(one)),
            "name": _name_of,
            "lag": lambda one: (-one.loop_lag_s, _name_of(one)),
            "starts": lambda one: (-one.num_starts, _name_of(one)),
        },
    ),
    "servers": Pane(
        (
            Column("server"), Column("version"), Column("tokens/s", True), Column("requests", True),
            Column("first ms", True, 3), Column("tokens due", True, 2), Column("swaps", True, 1),
            Column("swap ms", True, 1), Column("state"),
        ),
        _server_row,
        {
            "trouble": lambda one: (not one["is_fenced"], _id_of(one)),
            "name": _id_of,
            "load": lambda one: (-number(one, "num_requests"), _id_of(one)),
            "tokens/s": lambda one: (-number(one, "tokens_per_s"), _id_of(one)),
            "version": lambda one: (_version(str(one["version"])), _id_of(one)),
        },
    ),
    "waits": Pane(
        (Column("quiet s", True), Column("age s", True), Column("who waits"), Column("for what")),
        _wait_row,
        {
            "quiet": lambda told: (-told[1].quiet_s, _waiter_of(told)),
            "age": lambda told: (-told[1].age_s, _waiter_of(told)),
            "waiter": lambda told: natural(_waiter_of(told)),
        },
    ),
    "leases": Pane(
        (Column("age s", True), Column("quiet s", True), Column("node"), Column("group"), Column("waits for")),
        _lease_row,
        {
            "age": lambda told: (-told[1].age_s, told[0]),
            "node": lambda told: (natural(told[0]), -told[1].age_s),
            "quiet": lambda told: (-told[1].quiet_s, told[0]),
        },
    ),
    "events": Pane(
        (Column("ago", True), Column("what")),
        _event_row,
        {"newest": None, "oldest": None},
    ),
    "tasks": Pane(
        (
            Column("share", True), Column("ratio now", True), Column("groups", True), Column("reward", True),
            Column("task"), Column("reward in each step"),
        ),
        _task_row,
        {
            "order": None,
            "share": lambda one: -(one.share or 0.0),
            "reward": lambda one: (one.reward is None, one.reward),
        },
    ),
}  # fmt: skip
"""The panes by name; the last is there only in a run of several tasks."""
