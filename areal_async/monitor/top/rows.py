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
"""Of the newest, over which a task's groups are counted and its rewards averaged."""
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
    """Where the terminal is narrow: those with 1 first, then those with 2; 0 never."""


Told = tuple[str, WaitRecord]
"""A wait, after who tells it."""

PROCESS_COLUMNS = (
    Column("process"), Column(""), Column("up", True, 2), Column("lag ms", True), Column("starts", True, 1),
    Column("does"), Column("waits for"),
)  # fmt: skip
SERVER_COLUMNS = (
    Column("server"), Column("version"), Column("tokens/s", True), Column("requests", True),
    Column("first ms", True, 3), Column("tokens due", True, 2), Column("swaps", True, 1), Column("swap ms", True, 1),
    Column("state"),
)  # fmt: skip
WAIT_COLUMNS = (Column("quiet s", True), Column("age s", True), Column("who waits"), Column("for what"))
LEASE_COLUMNS = (
    Column("age s", True), Column("quiet s", True), Column("node"), Column("group"), Column("waits for"),
)  # fmt: skip
EVENT_COLUMNS = (Column("ago", True), Column("what"))
TASK_COLUMNS = (
    Column("share", True), Column("ratio now", True), Column("groups", True), Column("reward", True), Column("task"),
    Column("reward in each step"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One of a run's several."""

    name: str
    share: float | None
    """Of the prompts that are admitted now; None where nobody says."""
    ratio: float | None
    """As it was changed while the run went on; None where it was not."""
    num_groups: int
    """Trained in the newest ``NUM_TASK_STEPS``."""
    rewards: tuple[float, ...]
    """Of each step that had one, oldest first."""
    reward: float | None
    """Mean over those of the newest ``NUM_TASK_STEPS``."""


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


def process_rows(members: Sequence[Member], sort: str) -> PaneRows[Member]:
    """Return a row for each process; those that are missed first, unless sorted otherwise."""
    by_name = sorted(members, key=lambda one: (ROLE_ORDER.index(one.role), natural(one.instance)))
    keys: dict[str, Callable[[Member], Any]] = {
        "trouble": lambda one: one.presence == OK,
        "lag": lambda one: -one.loop_lag_s,
        "starts": lambda one: -one.num_starts,
    }
    return PaneRows(sorted(by_name, key=keys[sort]) if sort in keys else by_name, _process_row)


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


def server_rows(servers: Iterable[dict[str, Any]], sort: str) -> PaneRows[dict[str, Any]]:
    """Return a row for each server; those that are fenced first, unless sorted otherwise."""
    by_name = sorted(servers, key=lambda one: natural(str(one["id"])))
    keys: dict[str, Callable[[dict[str, Any]], Any]] = {
        "trouble": lambda one: not one["is_fenced"],
        "load": lambda one: -number(one, "num_requests"),
        "tokens/s": lambda one: -number(one, "tokens_per_s"),
        "version": lambda one: _version(str(one["version"])),
    }
    return PaneRows(sorted(by_name, key=keys[sort]) if sort in keys else by_name, _server_row)


def _server_row(server: dict[str, Any]) -> Row:
    limit, num_swaps = int(number(server, "limit")), int(number(server, "num_swaps"))
    requests = f"{int(number(server, 'num_requests'))}" + (f"/{limit}" if 0 < limit < UNBOUNDED else "")
    state = f"fenced: {server['reason']}" if server["is_fenced"] else str(server.get("fence") or "serves")
    after = f" (last failure: {server['failure']})" if server.get("failure") else ""
    first_s = server.get("first_token_mean_s")
    cells = (
        str(server["id"]),
        str(server["version"] or "none"),
        f"{number(server, 'tokens_per_s'):.0f}",
        requests,
        f"{1000 * first_s:.0f}" if isinstance(first_s, int | float) else "",
        str(int(number(server, "outstanding_tokens"))),
        str(num_swaps),
        f"{1000 * number(server, 'swap_total_s') / num_swaps:.0f}" if num_swaps else "",
        state + after,
    )
    return Row(cells, "red" if server["is_fenced"] else "")


def wait_rows(waits: Iterable[Told], sort: str) -> PaneRows[Told]:
    """Return a row for each wait, of which is known who tells it; the one that is stuck the longest first."""

    def key(told: Told) -> Any:
        teller, record = told
        waiter = record.waiter or teller
        if sort == "waiter":
            return natural(waiter)
        return -(record.age_s if sort == "age" else record.quiet_s), waiter

    return PaneRows(sorted(waits, key=key), _wait_row)


def _wait_row(told: Told) -> Row:
    teller, one = told
    more = f" and {one.num_more} more" if one.num_more else ""
    return Row((f"{one.quiet_s:.1f}", f"{one.age_s:.1f}", one.waiter or teller, f"{one.what} {one.on}{more}".strip()))


def lease_rows(waits: Iterable[Told], sort: str) -> PaneRows[Told]:
    """Return what each node's groups wait for: a group is leased by the node that tells of it."""
    leases = [(teller, one) for teller, one in waits if teller.startswith("node ") and one.waiter.startswith("group ")]

    def key(told: Told) -> Any:
        node, record = told
        if sort == "node":
            return natural(node), -record.age_s
        return -(record.quiet_s if sort == "quiet" else record.age_s), node

    return PaneRows(sorted(leases, key=key), _lease_row)


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


def task_rows(tasks: Sequence[Task], sort: str) -> PaneRows[Task]:
    """Return a row for each task, as the settings have them, unless sorted otherwise."""
    keys: dict[str, Callable[[Task], Any]] = {
        "share": lambda one: -(one.share or 0.0),
        "reward": lambda one: (one.reward is None, one.reward),
    }
    return PaneRows(sorted(tasks, key=keys[sort]) if sort in keys else tasks, _task_row)


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


def event_rows(events: Iterable[Mapping[str, Any]]) -> PaneRows[Mapping[str, Any]]:
    """Return a row for each event, in their order."""
    return PaneRows(list(events), _event_row)


def _event_row(event: Mapping[str, Any]) -> Row:
    return Row(
        (duration_text(seconds_since(str(event.get("at", "")))), event_text(dict(event))),
        "red" if str(event.get("event")) in BAD_EVENTS else "",
    )


@functools.lru_cache(MAX_KEYS)  # the same names come with every answer
def natural(text: str) -> tuple[tuple[int, str], ...]:
    """Return what sorts ``0-10`` after ``0-2``."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(text))


def _version(text: str) -> tuple[int, int]:
    try:
        version = Version.parse(text)
    except ValueError:
        return -1, -1
    return version.lineage, version.step
