"""What ``top`` shows, as data: the newest answers of everybody, and what they have said since it was started.

Pure: fed with snapshots, asked for rows. A process that does not answer once is shown with its last answer, until that
is too old to tell of the present.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from areal_async.bus import Report
from areal_async.cli.status import OK, Member, Status, duration_text, seconds_since
from areal_async.cli.tail import Line
from areal_async.cli.view import event_text, number
from areal_async.waits import WaitRecord, WaitReport

PANES = ("processes", "servers", "waits", "leases", "events")
SORTS = {
    "processes": ("name", "lag", "starts"),
    "servers": ("name", "load", "version"),
    "waits": ("quiet", "age", "waiter"),
    "leases": ("age", "node", "quiet"),
    "events": ("newest first", "oldest first"),
}
KEPT_S = 2.5
"""How long an answer stands for a process that gives no newer one."""
MAX_STEPS = 500
RATE_OVER_S = 10.0


class Row(NamedTuple):
    """One line of a pane."""

    cells: tuple[str, ...]
    style: str = ""


@dataclass(slots=True)
class TopView:
    """One run, as it is now and was of late."""

    steps: deque[Line] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    """Lines of the newest steps, oldest first."""
    status: Status | None = None
    reports: dict[tuple[str, str], Report] = field(default_factory=dict)
    pane: int = 0
    sorts: dict[str, int] = field(default_factory=dict)
    offset: int = 0
    """Rows of the pane that are scrolled away."""
    shows_help: bool = False
    notice: str = ""
    """What became of the last order."""
    _heard_s: dict[tuple[str, str], float] = field(default_factory=dict)
    _scored: deque[tuple[float, float]] = field(default_factory=deque)

    # being fed

    def hear(self, reports: Mapping[tuple[str, str], Report], *, now_s: float) -> dict[tuple[str, str], Report]:
        """Take in what the processes have just answered; return that, and what those who were late said last."""
        for key, report in reports.items():
            self.reports[key], self._heard_s[key] = report, now_s
        for key in [key for key, heard_s in self._heard_s.items() if now_s - heard_s > KEPT_S]:
            del self.reports[key], self._heard_s[key]
        told = self.reports.get(("trainer", "0"), {}).get("last_step")
        if isinstance(told, dict):
            self.add_step(told)
        self._scored.append((now_s, sum(number(one, "num_scored") for one in self.nodes.values())))
        while now_s - self._scored[0][0] > RATE_OVER_S:
            self._scored.popleft()
        return self.reports

    def add_step(self, line: Line) -> None:
        """Take in a step's line; one that is trained again after a crash replaces the first."""
        while self.steps and number(self.steps[-1], "step") >= number(line, "step"):
            self.steps.pop()
        self.steps.append(line)

    # the keys

    @property
    def pane_name(self) -> str:
        return PANES[self.pane]

    @property
    def sort_name(self) -> str:
        return SORTS[self.pane_name][self.sorts.get(self.pane_name, 0)]

    def turn_to(self, pane: int) -> None:
        """Show another pane; past the last comes the first."""
        self.pane, self.offset = pane % len(PANES), 0

    def sort_next(self) -> None:
        """Sort the pane by its next column."""
        self.sorts[self.pane_name] = (self.sorts.get(self.pane_name, 0) + 1) % len(SORTS[self.pane_name])
        self.offset = 0

    def scroll(self, num_rows: int) -> None:
        """Move through the pane, within its rows."""
        self.offset = max(0, min(self.offset + num_rows, len(self.rows()) - 1))

    # what is to be seen

    @property
    def nodes(self) -> dict[str, Report]:
        """Every node's answer, by its id."""
        return {instance: one for (role, instance), one in self.reports.items() if role == "node"}

    @property
    def controller(self) -> Report:
        return self.reports.get(("controller", "0"), {})

    @property
    def trajectories_per_s(self) -> float:
        """Scored by all nodes, over the last seconds; a node that was started again counts from nothing."""
        if not self._scored:
            return 0.0
        (first_s, first), (last_s, last) = self._scored[0], self._scored[-1]
        return max(0.0, last - first) / (last_s - first_s) if last_s > first_s else 0.0

    @property
    def tokens_by_age(self) -> dict[int, float]:
        """Age -> trained tokens, of the newest step."""
        line = self.steps[-1] if self.steps else {}
        prefix = "staleness_tokens/"
        ages = [name.removeprefix(prefix) for name in line if name.startswith(prefix)]
        return {int(age): number(line, prefix + age) for age in ages if age.isdecimal()}

    @property
    def columns(self) -> tuple[str, ...]:
        """Headings of the pane's columns."""
        return {
            "processes": ("process", "", "up", "lag ms", "starts", "does", "waits for"),
            "servers": ("server", "version", "requests", "tokens due", "state"),
            "waits": ("quiet s", "age s", "who waits", "for what"),
            "leases": ("age s", "quiet s", "node", "group", "waits for"),
            "events": ("ago", "what"),
        }[self.pane_name]

    def rows(self) -> list[Row]:
        """Return the rows of the pane, sorted as is wanted."""
        if self.status is None:
            return []
        match self.pane_name:
            case "processes":
                return _process_rows(self.status.members, self.sort_name)
            case "servers":
                return _server_rows(self._servers(), self.sort_name)
            case "waits":
                return _wait_rows(self._waits(), self.sort_name)
            case "leases":
                return _lease_rows(self._waits(), self.sort_name)
        newest = event_rows(self.status.events)
        return newest if self.sort_name == "newest first" else newest[::-1]

    def _servers(self) -> list[dict[str, Any]]:
        assert self.status is not None
        of_nodes: dict[str, Any] = {}
        for node in self.nodes.values():
            servers = node.get("servers")
            of_nodes.update(servers if isinstance(servers, dict) else {})
        return [{**server, **of_nodes.get(server["id"], {})} for server in self.status.servers]

    def _waits(self) -> list[tuple[str, WaitRecord]]:
        """Return every wait that is told, with who tells it."""
        found = []
        for (role, instance), report in self.reports.items():
            name = f"{role} {instance}" if role == "node" else role
            found += [(name, record) for record in _records(report)]
        return found


def event_rows(events: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return a row for each event, the newest first."""
    rows = []
    for event in reversed(events):
        ago = duration_text(seconds_since(str(event.get("at", ""))))
        is_bad = str(event.get("event")) in (
            "role.lost",
            "server.fenced",
            "run.stalled",
            "alarm.raised",
            "group.dead",
            "message.buried",
        )
        rows.append(Row((ago, event_text(dict(event))), "red" if is_bad else ""))
    return rows


def _records(report: Report) -> list[WaitRecord]:
    try:
        return msgspec.convert(report.get("waits", {}), WaitReport).records
    except msgspec.ValidationError:
        return []


def _process_rows(members: Sequence[Member], sort: str) -> list[Row]:
    def shown(member: Member) -> Row:
        is_there = member.presence == OK
        lag = f"{1000 * member.loop_lag_s:.0f}" if member.loop_lag_s else ""
        cells = (
            f"{member.role} {member.instance}",
            member.presence,
            duration_text(member.up_s) if member.up_s else "",
            lag,
            str(member.num_starts or ""),
            member.state if is_there else member.why or member.state,
            member.waits_for,
        )
        return Row(cells, "" if is_there else "red")

    if sort == "lag":
        members = sorted(members, key=lambda one: -one.loop_lag_s)
    elif sort == "starts":
        members = sorted(members, key=lambda one: -one.num_starts)
    return [shown(one) for one in members]


def _server_rows(servers: list[dict[str, Any]], sort: str) -> list[Row]:
    if sort == "load":
        servers = sorted(servers, key=lambda one: -number(one, "num_requests"))
    elif sort == "version":
        servers = sorted(servers, key=lambda one: [int(part) for part in str(one["version"] or "0-0").split("-")])
    rows = []
    for one in servers:
        limit = int(number(one, "limit"))
        requests = f"{int(number(one, 'num_requests'))}" + (f"/{limit}" if 0 < limit < 1 << 30 else "")
        state = f"fenced: {one['reason']}" if one["is_fenced"] else str(one.get("fence") or "serves")
        after = f" (last failure: {one['failure']})" if one.get("failure") else ""
        tokens = str(int(number(one, "outstanding_tokens")))
        rows.append(Row((one["id"], one["version"] or "none", requests, tokens, state + after),
                        "red" if one["is_fenced"] else ""))  # fmt: skip
    return rows


def _wait_rows(waits: list[tuple[str, WaitRecord]], sort: str) -> list[Row]:
    def key(pair: tuple[str, WaitRecord]) -> tuple[float, str]:
        record = pair[1]
        return {"quiet": (-record.quiet_s, ""), "age": (-record.age_s, "")}.get(sort, (0.0, record.waiter))

    rows = []
    for teller, one in sorted(waits, key=key):
        more = f" and {one.num_more} more" if one.num_more else ""
        cells = (f"{one.quiet_s:.1f}", f"{one.age_s:.1f}", one.waiter or teller, f"{one.what} {one.on}{more}".strip())
        rows.append(Row(cells))
    return rows


def _lease_rows(waits: list[tuple[str, WaitRecord]], sort: str) -> list[Row]:
    """Return what each node's groups wait for: a group is leased by the node that tells of it."""
    leases = [(teller, one) for teller, one in waits if teller.startswith("node ") and one.waiter.startswith("group ")]

    def key(pair: tuple[str, WaitRecord]) -> tuple[str, float]:
        node, record = pair
        return (node if sort == "node" else "", -(record.quiet_s if sort == "quiet" else record.age_s))

    rows = []
    for node, one in sorted(leases, key=key):
        cells = (
            f"{one.age_s:.1f}",
            f"{one.quiet_s:.1f}",
            node.removeprefix("node "),
            one.waiter.removeprefix("group "),
        )
        rows.append(Row((*cells, f"{one.what} {one.on}".strip())))
    return rows
